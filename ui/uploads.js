const BASE = "/api/uploads";
const SUFFIX = /\.(zip|tar|tgz|tbz2?|txz|tar\.(gz|bz2|xz))$/i;
const LEAST_SLICE = 256 * 1024;
const STALL_MS = 60000;
const GIVE_UP_MS = 15 * 60000;
// one for all pages: an upload goes on while another page is looked at
const shared = (window._finetuneUpload = window._finetuneUpload || { job: null, view: null });

class Refused extends Error {
  constructor(problem, fix) { super([problem, fix].filter(Boolean).join(" ")); }
}

function sizeInWords(bytes) {
  if (bytes >= 2 ** 29) return `${(bytes / 2 ** 30).toFixed(1)} GiB`;
  return bytes >= 2 ** 19 ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : `${Math.ceil(bytes / 1024)} KiB`;
}

function timeInWords(seconds) {
  if (!isFinite(seconds)) return "";
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s left`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min left` : `${(seconds / 3600).toFixed(1)} h left`;
}

// XMLHttpRequest, since fetch does not tell how much of a body has gone out
function ask(job, method, url, body, type, onProgress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    let stall = null;
    const alive = () => { clearTimeout(stall); stall = setTimeout(() => request.abort(), STALL_MS); };
    job.request = request;
    request.open(method, url);
    request.setRequestHeader("x-finetune", "upload");
    if (type) request.setRequestHeader("content-type", type);
    request.upload.onprogress = (event) => { alive(); if (onProgress) onProgress(event.loaded); };
    request.onloadend = () => {
      clearTimeout(stall);
      job.request = null;
      let told = {};
      try { told = JSON.parse(request.responseText); } catch (error) { /* a proxy's own page */ }
      if (request.status === 0) reject(new Error("cut")); else resolve({ status: request.status, told });
    };
    alive();
    request.send(body || null);
  });
}

// what is worth another try passes by; what is not is said
function refuse(answer) {
  const { status, told } = answer;
  if (status < 400) return;
  if (status === 401) throw new Refused("The dashboard wants its token.", "Open its link again.");
  if (told.problem && status !== 503) throw new Refused(told.problem, told.fix);
  if (status >= 500 || status === 408 || status === 429) throw new Error(String(status));
  throw new Refused(`The server answers ${status}.`, "Reload the page and try again.");
}

async function begin(job) {
  const told = { name: job.file.name, size: job.file.size, modified: job.file.lastModified };
  const answer = await ask(job, "POST", BASE, JSON.stringify(told), "application/json");
  refuse(answer);
  job.id = answer.told.id;
  job.mostSlice = answer.told.slice;
  job.slice = Math.min(job.slice || job.mostSlice, job.mostSlice);
  return answer.told;
}

async function sendSlice(job) {
  const end = Math.min(job.offset + job.slice, job.file.size);
  const url = `${BASE}/${job.id}?offset=${job.offset}`;
  const answer = await ask(job, "PUT", url, job.file.slice(job.offset, end), "application/octet-stream", (sent) => {
    show(job, job.offset + sent);
  });
  if (answer.status === 409 && answer.told.offset !== undefined) { job.offset = answer.told.offset; return null; }
  refuse(answer);
  job.slice = Math.min(job.slice * 2, job.mostSlice);
  return answer.told;
}

function show(job, sent) {
  const now = performance.now();
  job.marks = [...(job.marks || []).filter(([at]) => now - at < 8000), [now, sent]];
  const [[then, before]] = job.marks;
  const pace = now - then > 500 ? (sent - before) / ((now - then) / 1000) : 0;
  const parts = [`${sizeInWords(sent)} of ${sizeInWords(job.file.size)}`];
  if (pace > 0) parts.push(`${sizeInWords(pace)}/s`, timeInWords((job.file.size - sent) / pace));
  tell(job, "sending", parts.join(" · "), sent / job.file.size);
}

function tell(job, state, words, done) {
  Object.assign(job, { state, words, done });
  if (shared.view && shared.job === job) shared.view.draw();
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function follow(job) {
  for (;;) {
    const told = await look(job);
    if (told.state === "failed") throw new Refused(told.problem, told.fix);
    if (told.state === "ready") return told.kept;
    if (told.state === "receiving") return null;
    const entries = told.total ? `${told.done} of ${told.total} entries` : told.done ? `${told.done} entries` : "";
    tell(job, "unpacking", ["Unpacking", entries].filter(Boolean).join(": "), told.total ? told.done / told.total : null);
    await sleep(500);
    if (job.isOver) throw new Refused("");
  }
}

async function look(job) {
  const answer = await ask(job, "GET", `${BASE}/${job.id}`);
  refuse(answer);
  return answer.told;
}

async function carry(job) {
  let told = job.id ? await look(job) : await begin(job);
  job.offset = told.offset;
  job.lostAt = 0;
  job.wait = 1000;
  while (told === null || told.state === "receiving") {
    if (job.isOver) throw new Refused("");
    told = (await sendSlice(job)) || (await look(job));
    job.offset = told.offset;
    show(job, job.offset);
  }
  return follow(job);
}

async function work(job) {
  tell(job, "sending", "Starting", 0);
  while (!job.isOver) {
    try {
      const kept = await carry(job);
      if (kept === null) continue;
      tell(job, "done", "Ready", 1);
      job.kept = kept;
      if (shared.view) shared.view.hand(job);
      return;
    } catch (error) {
      if (job.isOver) return;
      if (error instanceof Refused) {
        // another try asks for a place anew, and gets this one while it is there
        job.last = job.id || job.last;
        job.id = null;
        tell(job, "failed", error.message, 0);
        return;
      }
      const now = performance.now();
      job.lostAt = job.lostAt || now;
      job.slice = Math.max(LEAST_SLICE, (job.slice || 0) / 2);
      job.marks = [];
      if (now - job.lostAt > GIVE_UP_MS) {
        tell(job, "failed", "The connection is lost. Try again goes on where it was cut.", job.done);
        return;
      }
      job.wait = Math.min((job.wait || 500) * 2, 30000);
      tell(job, "waiting", "Connection lost; it goes on by itself when the dashboard answers.", job.done);
      await Promise.race([sleep(job.wait), new Promise((resolve) => { job.hurry = resolve; })]);
    }
  }
}

function start(file, limit) {
  const job = { file, id: null, offset: 0, isOver: false };
  shared.job = job;
  if (!SUFFIX.test(file.name)) {
    tell(job, "refused", "This is no .zip or .tar. Pack the folder with the class folders into one.", 0);
  } else if (file.size > limit) {
    const words = `It has ${sizeInWords(file.size)}, and an upload may have ${sizeInWords(limit)}.`;
    tell(job, "refused", `${words} Put it where the server can reach it and give its path or web address.`, 0);
  } else if (file.size === 0) {
    tell(job, "refused", "It is empty.", 0);
  } else {
    work(job);
  }
}

function cancel(job) {
  job.isOver = true;
  if (job.request) job.request.abort();
  if (job.hurry) job.hurry();
  const id = job.id || job.last;
  if (id && job.state !== "done") ask({}, "DELETE", `${BASE}/${id}`).catch(() => {});
  if (shared.job === job) shared.job = null;
  if (shared.view) shared.view.draw();
}

function mount(root, data, setTriggerValue) {
  const find = (name) => root.querySelector(`.upload-${name}`);
  const [drop, input, choose] = [find("drop"), find("input"), find("choose")];
  const isBusy = () => shared.job && ["sending", "waiting", "unpacking"].includes(shared.job.state);
  const view = {
    data,
    hand(job) {
      if (!job.kept || job.isTold) return;
      job.isTold = true;
      setTriggerValue("uploaded", job.kept);
      view.draw();
    },
    draw() {
      const job = shared.job;
      find("hint").textContent = view.data.hint;
      find("job").hidden = !job;
      drop.hidden = Boolean(isBusy());
      if (!job) return;
      find("name").textContent = job.file.name;
      const bar = find("bar");
      bar.hidden = !isBusy();
      if (job.done === null) bar.removeAttribute("value"); else bar.value = job.done || 0;
      const isProblem = ["failed", "refused"].includes(job.state);
      const words = find("words");
      if (words.textContent !== job.words) words.textContent = job.words;
      words.classList.toggle("is-problem", isProblem);
      find("again").hidden = job.state !== "failed" && job.state !== "waiting";
      find("cancel").hidden = job.state === "done";
      find("cancel").textContent = isProblem ? "Close" : "Cancel";
    },
  };
  function take(files) {
    if (isBusy() || !files.length) return;
    if (files.length > 1) {
      shared.job = { file: { name: `${files.length} files` }, isOver: true };
      tell(shared.job, "refused", "One archive at a time, please.", 0);
      return;
    }
    start(files[0], view.data.limit);
  }
  choose.onclick = () => input.click();
  input.onchange = () => { const files = [...input.files]; input.value = ""; take(files); };
  find("again").onclick = () => {
    const job = shared.job;
    if (job.state === "waiting") { if (job.hurry) job.hurry(); } else { job.isOver = false; job.lostAt = 0; work(job); }
  };
  find("cancel").onclick = () => { if (shared.job) cancel(shared.job); choose.focus(); };
  drop.ondragover = (event) => { event.preventDefault(); drop.classList.add("is-over"); };
  drop.ondragleave = () => drop.classList.remove("is-over");
  drop.ondrop = (event) => {
    event.preventDefault();
    drop.classList.remove("is-over");
    take([...event.dataTransfer.files]);
  };
  const online = () => { if (shared.job && shared.job.hurry) shared.job.hurry(); };
  window.addEventListener("online", online);
  shared.view = view;
  view.draw();
  if (shared.job) view.hand(shared.job);
  return {
    view,
    end: () => {
      window.removeEventListener("online", online);
      if (shared.view === view) shared.view = null;
    },
  };
}

export default function (component) {
  const { data, parentElement: root, setTriggerValue } = component;
  if (!root._upload) root._upload = mount(root, data, setTriggerValue);
  else { root._upload.view.data = data; root._upload.view.draw(); }
  return () => { if (root._upload) { root._upload.end(); root._upload = null; } };
}
