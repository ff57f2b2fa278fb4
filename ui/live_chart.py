"""The live charts: a component that polls the run's series and hands them to plotly.js.

`st.plotly_chart` mounts anew at each change and so loses zoom and hover; `Plotly.react` keeps them.
"""

from __future__ import annotations

from dataclasses import asdict

import streamlit as st

from core.charts import chart_specs

CSS = """
.run-charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem; width: 100%; }
.run-chart { border: 1px solid var(--st-border-color); border-radius: var(--st-base-radius); padding: 0.5rem;
  min-width: 0; height: 300px; box-sizing: border-box; }
.run-charts-note { color: var(--st-text-color); opacity: 0.7; font-size: 0.875rem; min-height: 1.25rem; }
@media (max-width: 700px) { .run-charts { grid-template-columns: minmax(0, 1fr); } }
"""
HTML = """<div class="run-charts-note" role="status">Waiting for the first step</div><div class="run-charts"></div>"""
JS = """
let loading = null;
function loadPlotly() {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  loading = loading || new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/api/plotly.min.js";
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => { loading = null; script.remove(); reject(new Error("plotly.js")); };
    document.head.appendChild(script);
  });
  return loading;
}

function splice(held, sent) {
  for (const [name, values] of Object.entries(sent.values)) {
    const list = held[name] || (held[name] = []);
    list.length = Math.min(list.length, sent.from);
    for (const value of values) list.push(value);
  }
}

function isEnded(state) { return !["queued", "running", "paused"].includes(state); }

function begin(root, run, specs) {
  const grid = root.querySelector(".run-charts");
  const note = root.querySelector(".run-charts-note");
  const held = { steps: {}, epochs: {}, marks: {} };
  let cursor = "", timer = null, isOver = false, wait = 1000, state = "", isStale = true, drawnText = "";

  function draw(Plotly) {
    const style = getComputedStyle(root);
    const read = (name) => style.getPropertyValue(name).trim();
    drawnText = read("--st-text-color");
    const text = drawnText || "#333", line = read("--st-border-color") || "#ddd";
    const hasTop5 = (held.epochs.val_top5 || []).some((value) => value !== null);
    for (const spec of specs) {
      let box = grid.querySelector(`[data-chart="${spec.id}"]`);
      if (spec.needs_top5 && !hasTop5) { if (box) { Plotly.purge(box.firstChild); box.remove(); } continue; }
      if (!box) {
        box = document.createElement("div");
        box.className = "run-chart";
        box.dataset.chart = spec.id;
        const plot = document.createElement("div");
        plot.style.height = "100%";
        box.appendChild(plot);
        const after = specs.slice(specs.indexOf(spec) + 1)
          .map((next) => grid.querySelector(`[data-chart="${next.id}"]`)).find((next) => next);
        grid.insertBefore(box, after || null);
      }
      const traces = spec.traces.map((trace) => ({
        ...trace.style, name: trace.name,
        x: (held[trace.source][trace.x] || []).slice(), y: (held[trace.source][trace.y] || []).slice(),
      }));
      const axis = { gridcolor: line, linecolor: line, zerolinecolor: line };
      const layout = {
        ...spec.layout, uirevision: run, autosize: true,
        font: { color: text, family: read("--st-font") || "sans-serif", size: 12 },
        xaxis: { ...spec.layout.xaxis, ...axis }, yaxis: { ...spec.layout.yaxis, ...axis },
        ...structuredClone(held.marks[spec.traces[0].x]),
        hoverlabel: { bgcolor: read("--st-secondary-background-color"), font: { color: text }, bordercolor: line },
      };
      Plotly.react(box.firstChild, traces, layout, { displaylogo: false, responsive: true, displayModeBar: false });
    }
  }

  async function poll() {
    timer = null;
    if (isOver) return;
    if (document.hidden) { plan(1000); return; }
    try {
      const answer = await fetch(`/api/runs/${encodeURIComponent(run)}/series?after=${encodeURIComponent(cursor)}`);
      if (isOver) return;
      if (answer.status === 401) { window.location.reload(); return; }
      if (answer.status === 404) { note.textContent = "This run was deleted."; return; }
      if (!answer.ok) throw new Error(answer.status);
      const sent = await answer.json();
      const Plotly = await loadPlotly();
      if (isOver) return;
      if (sent.whole) { held.steps = {}; held.epochs = {}; }
      splice(held.steps, sent.steps);
      splice(held.epochs, sent.epochs);
      isStale = isStale || JSON.stringify(sent.marks) !== JSON.stringify(held.marks);
      held.marks = sent.marks;
      const hasData = (held.steps.step || []).length > 0 || (held.epochs.epoch || []).length > 0;
      if (hasData && (isStale || sent.cursor !== cursor || sent.whole || state !== sent.state)) draw(Plotly);
      isStale = false;
      cursor = sent.cursor;
      state = sent.state;
      note.textContent = hasData ? "" : isEnded(state) ? "This run logged no step." : "Waiting for the first step";
      wait = 1000;
      if (isEnded(state)) return;
    } catch (error) {
      wait = Math.min(wait * 2, 30000);
      note.textContent = "No answer from the dashboard; trying again.";
    }
    plan(wait);
  }

  function plan(delay) { if (!isOver && timer === null) timer = setTimeout(poll, delay); }
  // the page's colours change somewhere above, without a sign here
  const themed = setInterval(() => {
    const isOther = getComputedStyle(root).getPropertyValue("--st-text-color").trim() !== drawnText;
    if (window.Plotly && grid.childElementCount && isOther) draw(window.Plotly);
  }, 1000);
  // fetched beside the first figures, not after them; poll() tells of a failure
  loadPlotly().catch(() => {});
  poll();
  return () => {
    isOver = true;
    clearTimeout(timer);
    clearInterval(themed);
    for (const box of grid.children) if (window.Plotly) window.Plotly.purge(box.firstChild);
    grid.replaceChildren();
  };
}

export default function (component) {
  const { data, parentElement } = component;
  const root = parentElement;
  if (root._run && root._run.id === data.run) return root._run.end;
  if (root._run) root._run.end();
  const end = begin(root, data.run, data.charts);
  root._run = { id: data.run, end: () => { end(); root._run = null; } };
  return root._run.end;
}
"""

_mount = st.components.v2.component("finetune_live_chart", html=HTML, css=CSS, js=JS, isolate_styles=False)


def live_chart(run_id: str) -> None:
    """Draw the run's charts and keep them fresh until it ends."""
    charts = [asdict(spec) for spec in chart_specs(has_top5=True)]
    _mount(key=f"live-chart-{run_id}", data={"run": run_id, "charts": charts})
