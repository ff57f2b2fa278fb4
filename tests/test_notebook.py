"""The notebook and what it calls: a real kernel, the real launcher and server, a real run.

Colab, Drive and Cloudflare can't be had here: the notebook is run without them, and cloudflared is fetched from a
server of the test's own.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from core import fetch_tunnel, notebook, notebook_view
from core.config import make_config
from core.errors import AppError, ServeError
from core.events import Tweaked
from core.fetch_tunnel import fetch_cloudflared
from core.notebook import NotebookError
from core.series import RunSeries
from core.serve.status import Status, read_status, write_status
from core.store import Store
from tests.browser import status_of
from tests.test_pages import add_run

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "colab.ipynb"
PLOTLY = "application/vnd.plotly.v1+json"


def cells() -> dict[str, Any]:
    return {cell["id"]: cell for cell in nbformat.read(NOTEBOOK, 4).cells}


def with_fields(source: str, **fields: str) -> str:
    """A cell as a person has filled in its form."""
    for name, value in fields.items():
        source, count = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", source, flags=re.MULTILINE)
        assert count == 1, name
    return source


class Kernel:
    """A notebook's kernel, in which cells are run one by one."""

    def __init__(self, client: NotebookClient) -> None:
        self._client = client

    def run(self, source: str) -> list[Any]:
        cell = nbformat.v4.new_code_cell(source)
        self._client.nb.cells.append(cell)
        done = self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        return list(done.outputs)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FINETUNE_TOKEN", raising=False)
    client = NotebookClient(
        nbformat.v4.new_notebook(), timeout=240, allow_errors=True, resources={"metadata": {"path": str(ROOT)}}
    )
    with client.setup_kernel():
        yield Kernel(client)


def errors(outputs: list[Any]) -> list[list[str]]:
    return [output["traceback"] for output in outputs if output["output_type"] == "error"]


def shown(outputs: list[Any], kind: str) -> list[Any]:
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


def printed(outputs: list[Any]) -> str:
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


# -- the whole notebook ---------------------------------------------------------------------------------------------


def test_the_notebook_starts_the_dashboard_shows_its_link_trains_with_live_charts_and_stops(
    kernel: Kernel, tmp_path: Path, pictures: Path
):
    home, cell = tmp_path / "home", {name: value["source"] for name, value in cells().items()}
    try:
        outputs = kernel.run(with_fields(cell["start"], TUNNEL="none"))
        assert errors(outputs) == [] and "Everything that is needed is here and fits." in printed(outputs)

        outputs = kernel.run(cell["address"])
        assert errors(outputs) == []
        [markup] = shown(outputs, "text/html")
        [link] = re.findall(r'href="(http://127[^"]+)"', markup)
        assert f"Open the dashboard: {link}" in shown(outputs, "text/plain")[0]
        assert status_of(link)[0] == 303
        assert status_of(link.partition("?")[0])[0] == 401

        backup = tmp_path / "backup"
        kernel.run(f"BACKUP = {str(backup)!r}")
        options = (
            f"--preset quick --data {pictures} --model timm/test_resnet --weights none --image-size 32 --epochs 3 "
            "--batch-size 4 --log-every 1 --threads 1 --device cpu --trainable head"
        )
        outputs = kernel.run(with_fields(cell["train"], OPTIONS=options))
        assert errors(outputs) == []
        store = Store(home)
        [record] = store.list_runs()
        series = RunSeries(store, record.run_id)
        series.update()
        assert record.state == "finished" and record.run_id in shown(outputs, "text/html")[0]
        assert "Finished" in shown(outputs, "text/html")[0]
        [figure] = shown(outputs, PLOTLY)
        assert figure["data"][0]["name"] == "Training" and len(series.steps["loss"]) == 15
        assert list(figure["data"][0]["x"]) == series.steps["step"]
        store.close()

        outputs = kernel.run(cell["doctor"])
        assert f"ago, 1 run, in {backup}." in printed(outputs) and any(path.is_file() for path in backup.rglob("*"))
        assert "ok       device cpu: " in printed(outputs)
        outputs = kernel.run(cell["runs"])
        assert record.run_id in printed(outputs)
        pid = read_status(home).pid
        outputs = kernel.run(cell["stop"])
        assert errors(outputs) == [] and "have ended" in printed(outputs)
        assert notebook_view.has_ended(pid) and read_status(home).state == "ended"
        with pytest.raises(OSError, match="refused"):
            status_of(link)
        token = link.partition("token=")[2]
        assert len(token) > 20 and token not in (home / "serve.log").read_text()
        assert (home / "serve.log").stat().st_mode & 0o777 == 0o600
        [words] = errors(kernel.run(cell["address"]))
        assert len(words) == 1 and words[0].startswith("The dashboard is not on.")
    finally:
        notebook.stop(home)


def test_a_run_is_watched_as_it_grows_and_interrupting_the_cell_leaves_run_and_figure(kernel: Kernel, tmp_path: Path):
    """The run is one that this test claims, and that nobody trains."""
    from tests.test_browser import _steps

    store = Store(tmp_path / "home")
    run_id = store.create_run(make_config("quick"), own=True)
    assert store.claim(run_id, "cpu")
    store.append_events(run_id, _steps(1, 11))
    store.beat(run_id, {"phase": "training", "epoch": 2, "epochs": 5, "step": 10, "steps": 313, "eta_s": 65})
    grow = threading.Timer(3.0, lambda: store.append_events(run_id, _steps(11, 31)))
    grow.start()
    interrupt = "import os, signal, threading; threading.Timer(8, os.kill, (os.getpid(), signal.SIGINT)).start()"
    outputs = kernel.run(f"{interrupt}\nfrom core import notebook\nnotebook.watch('{run_id}', every_s=0.2)")
    grow.join()
    assert errors(outputs) == []
    [figure] = shown(outputs, PLOTLY)
    assert list(figure["data"][0]["x"]) == list(range(1, 31))
    [line] = shown(outputs, "text/html")
    assert "No longer watched, and not touched." in line and "Training, epoch 2 of 5, step 10 of 313" in line
    assert store.get_run(run_id).state == "running"
    [words] = errors(kernel.run("notebook.watch('no-such-run')"))
    assert len(words) == 1 and "no-such-run" in words[0]
    [words] = errors(kernel.run("notebook.train('--preset', 'quick', '--epochs', '0')"))
    assert len(words) == 1 and "epochs" in words[0]
    store.close()


def test_the_notebook_is_whole_and_in_two_languages():
    nbformat.validate(nbformat.read(NOTEBOOK, 4))
    found = cells()
    texts = "\n".join(cell["source"] for cell in found.values() if cell["cell_type"] == "markdown")
    assert "https://research.google.com/colaboratory/faq.html" in texts and "notebook.watch(run_id)" in texts
    for cell in found.values():
        assert not cell.get("outputs") and not cell.get("execution_count")
        if cell["cell_type"] == "markdown":
            assert re.search("[ぁ-ん]", cell["source"]) and re.search("[a-z]{4}", cell["source"])
        else:
            assert re.match(r"# @title .*[ぁ-ん]", cell["source"])
    ast.parse(found["start"]["source"])


# -- where the project's files come from ----------------------------------------------------------------------------


def small_project(folder: Path) -> Path:
    """Stands for the project's files: its own would take the network to install."""
    (folder / "core").mkdir(parents=True)
    (folder / "app.py").write_text("")
    (folder / "core" / "__init__.py").write_text("")
    (folder / "core" / "runtime.py").write_text("import sys; print('asked', *sys.argv[1:])")
    (folder / "core" / "notebook.py").write_text("def start(**options): print('started', options)")
    return folder


def first_cell(folder: Path, **fields: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    source = with_fields(cells()["start"]["source"], **fields)
    return subprocess.run([sys.executable, "-c", source], cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("kind", ["git", "zip", "here"])
def test_the_files_come_from_git_or_a_zip_unless_they_are_here_already(tmp_path: Path, kind: str):
    project = small_project(tmp_path / "origin" / "anything")
    work, source = tmp_path / "work", ""
    if kind == "git":
        for command in (
            ["init", "-q"],
            ["add", "."],
            ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"],
        ):
            subprocess.run(["git", *command], cwd=project, check=True)
        source = project.as_uri()
    elif kind == "zip":
        source = str(tmp_path / "it.zip")
        with zipfile.ZipFile(source, "w") as archive:
            for path in project.rglob("*.py"):
                archive.write(path, path.relative_to(project.parent))
    else:
        work = project / "notebooks"
    done = first_cell(work, SOURCE=source, BACKUP="/backup")
    assert done.stdout.splitlines() == ["asked --install", "started {'tunnel': 'cloudflared', 'backup': '/backup'}"]
    assert done.returncode == 0, done.stderr
    if kind != "here":
        again = first_cell(work, SOURCE="nowhere")
        assert again.returncode == 0, "what was fetched is used again"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "This project's files are not here."),
        ({"SOURCE": "file:///no/such/repository"}, "SOURCE 'file:///no/such/repository' can't be fetched:"),
        ({"SOURCE": "/no/such.zip"}, "SOURCE '/no/such.zip' can't be fetched:"),
        ({"SOURCE": "/content/drive/MyDrive/it.zip"}, "Only Colab has Drive under /content/drive."),
    ],
)
def test_where_there_are_no_files_one_line_says_what_to_do(tmp_path: Path, fields: dict[str, str], words: str):
    done = first_cell(tmp_path / "empty", **fields)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(f"Stopped: {words}")


def test_an_installation_that_fails_stops_the_notebook(tmp_path: Path):
    project = small_project(tmp_path / "project")
    (project / "core" / "runtime.py").write_text("import sys; print('pip failed: no network'); sys.exit(1)")
    done = first_cell(project)
    assert done.stdout == "pip failed: no network\n" and "The installation did not succeed." in done.stderr


# -- start, address, stop, with a stand-in for the launcher ---------------------------------------------------------

STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
from core.serve.status import Status, write_status
home = Path(sys.argv[sys.argv.index("--home") + 1])
(home / "argv.json").write_text(json.dumps(sys.argv[1:] + [os.environ.get("FINETUNE_TOKEN", "")]))
def end(*_):
    write_status(home, Status("ended"))
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
for state in json.loads(os.environ["STATES"]):
    if "exit" in state:
        print(state["exit"], file=sys.stderr)
        sys.exit(2)
    write_status(home, Status(**state))
    time.sleep(0.6)
time.sleep(60)
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts a launcher that goes through these states; the real one takes part in the whole notebook's test."""
    home = tmp_path / "home"

    def start(*states: dict[str, str], **options: Any) -> Path:
        monkeypatch.setenv("STATES", json.dumps(states))
        notebook.start(home=home, tunnel="none", runner=("-c", STAND_IN), **options)
        return home

    yield start
    notebook.stop(home)


READY = {"state": "ready", "link": "https://a-b.example/?token=<secret>&x", "address": "https://a-b.example"}


def test_the_link_is_shown_once_it_is_there_in_plain_text_where_this_is_no_notebook(launcher, capsys):
    home = launcher({"state": "starting"}, {"state": "trouble", "problem": "No edge.", "fix": "Wait."}, READY)
    notebook.address(home)
    out = capsys.readouterr().out
    assert "No edge. Wait. It is tried again." in out
    assert f"Open the dashboard: {READY['link']}" in out


def test_the_launcher_gets_what_was_asked_and_the_token_is_not_among_its_arguments(launcher):
    home = launcher(READY, token="a-long-secret", backup="/backup", roots=["/data", "/more"], port=8777)
    notebook.address(home)
    *words, token = json.loads((home / "argv.json").read_text())
    assert words == [
        "--home", str(home), "serve", "--tunnel", "none", "--port", "8777", "--backup", "/backup", "--root", "/data",
        "--root", "/more",
    ]  # fmt: skip
    assert token == "a-long-secret"


def test_starting_again_ends_the_earlier_one_first(launcher):
    home = launcher(READY)
    notebook.address(home)
    first = read_status(home).pid
    launcher(READY)
    assert notebook_view.has_ended(first)
    notebook.address(home)
    assert read_status(home).pid != first


def test_a_launcher_that_refuses_is_told_in_its_own_words(launcher):
    home = launcher({"exit": "ngrok is not installed. Get it."})
    with pytest.raises(NotebookError, match=r"^The dashboard is not on. ngrok is not installed. Get it."):
        notebook.address(home, wait_s=20)


def test_waiting_for_an_address_ends_with_what_is_wrong(launcher):
    home = launcher({"state": "trouble", "problem": "No edge answers.", "fix": "Check the network."})
    with pytest.raises(NotebookError) as error:
        notebook.address(home, wait_s=2.0)
    assert (error.value.problem, error.value.fix) == ("No edge answers.", "Check the network.")
    assert error.value._render_traceback_() == ["No edge answers. Check the network."]


def test_without_a_start_address_and_stop_say_so(tmp_path: Path, capsys):
    with pytest.raises(NotebookError, match="No dashboard was started for"):
        notebook.address(tmp_path)
    notebook.stop(tmp_path)
    assert capsys.readouterr().out == "No dashboard was on.\n"


def test_a_process_that_only_has_an_old_launchers_number_is_left_alone(tmp_path: Path):
    write_status(tmp_path, Status("ready", local="http://127.0.0.1:1/", at=time.time() - 1e6))
    notebook.stop(tmp_path)
    with pytest.raises(NotebookError, match="The dashboard is not on"):
        notebook.address(tmp_path)


# -- cloudflared ----------------------------------------------------------------------------------------------------


@pytest.fixture
def web() -> Iterator[dict[str, bytes]]:
    """A server of files: name to bytes; `address` is where."""
    files: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = files.get(self.path.strip("/"))
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    files["address"] = f"http://127.0.0.1:{server.server_port}/".encode()
    yield files
    server.shutdown()
    thread.join()
    server.server_close()


def test_cloudflared_is_fetched_once_and_can_be_run(tmp_path: Path, web: dict[str, bytes]):
    for build in fetch_tunnel._BUILDS.values():
        web[build] = b"#!/bin/sh\necho cloudflared version 1.2.3\n"
    source = web["address"].decode()
    program = fetch_cloudflared(tmp_path, {"PATH": ""}, source=source, magic=b"#!")
    assert subprocess.check_output([program]) == b"cloudflared version 1.2.3\n"
    web.clear()
    assert fetch_cloudflared(tmp_path, {"PATH": ""}, source=source) == program
    assert fetch_cloudflared(tmp_path / "other", {"PATH": str(tmp_path)}, source=source) == program


def test_what_is_no_program_or_not_there_is_not_kept_and_told_in_a_line(tmp_path: Path, web: dict[str, bytes]):
    source = web["address"].decode()
    with pytest.raises(ServeError, match="Not Found"):
        fetch_cloudflared(tmp_path, {"PATH": ""}, source=source)
    for build in fetch_tunnel._BUILDS.values():
        web[build] = b"<html>You are offline</html>"
    with pytest.raises(ServeError, match="what came is no program"):
        fetch_cloudflared(tmp_path, {"PATH": ""}, source=source)
    with pytest.raises(ServeError, match="refused"):
        fetch_cloudflared(tmp_path, {"PATH": ""}, source="http://127.0.0.1:9/")
    assert list(tmp_path.iterdir()) == []


def test_start_fetches_it_where_it_is_missing_and_says_in_a_line_where_that_fails(tmp_path: Path, monkeypatch):
    def failed(folder: Path) -> Path:
        raise ServeError(f"It can't be fetched to {folder}.", fix="Try again.")

    monkeypatch.setattr(notebook, "fetch_cloudflared", failed)
    with pytest.raises(NotebookError, match=f"It can't be fetched to {tmp_path / 'bin'}. Try again."):
        notebook.start(home=tmp_path)


# -- watching -------------------------------------------------------------------------------------------------------


def test_a_run_that_ended_is_one_figure_with_every_chart(store: Store):
    run_id = add_run(store)
    series = RunSeries(store, run_id)
    series.update()
    figure = notebook_view.together(series)
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert titles == ["Loss", "Top-1 accuracy", "Learning rate", "Epoch time", "Throughput"]
    told = [trace.name for trace in figure.data if trace.showlegend]
    assert told == ["Training", "Validation"]
    bundle = notebook_view.mime_bundle(figure)
    assert json.loads(json.dumps(bundle[PLOTLY]))["data"]
    line = notebook_view.line_of(store.get_run(run_id), series)
    assert "Finished" in line and "best validation top-1 75.0 %, epoch 1" in line and run_id in line


def test_what_was_changed_while_the_run_went_on_stands_in_each_chart_of_the_figure(store: Store):
    run_id = add_run(store)
    store.append_events(run_id, [(time.time(), Tweaked(1, 1, "lr", 1e-3, 5e-4, 0.5))])
    series = RunSeries(store, run_id)
    series.update()
    figure = notebook_view.together(series)
    words = [one for one in figure.layout.annotations if "Step 1:" in (one.hovertext or "")]
    # beside the line of its own chart, as high as that chart
    places = {(one.xref, one.yref) for one in words}
    assert places == {("x", "y domain"), *((f"x{nth}", f"y{nth} domain") for nth in range(2, 6))}
    assert len(words) == len(figure.layout.shapes) == 5
    assert {one.text for one in words} == {"learning rate 0.0005"}


def test_outside_a_notebook_watching_says_that_it_cannot(store: Store):
    run_id = add_run(store)
    with pytest.raises(NotebookError, match="This is no notebook"):
        notebook.watch(run_id, store.home)


def test_a_home_without_runs_is_told_and_not_made(tmp_path: Path):
    with pytest.raises(NotebookError, match="There are no runs in"):
        notebook.watch("any", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_run_whose_process_died_is_watched_no_longer(store: Store, monkeypatch: pytest.MonkeyPatch):
    run_id = store.create_run(make_config("quick"), own=True)
    assert store.claim(run_id, "cpu")
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    store._set(run_id, pid=child.pid)
    lines: list[dict[str, str]] = []
    # pytest is no notebook: what would be displayed is kept
    monkeypatch.setattr(notebook_view, "notebook_display", lambda: lambda bundle, **options: lines.append(bundle))
    assert not notebook_view.RunView(store, run_id).draw()
    assert lines[0]["text/plain"].startswith(f"Its process has died; python -m core resume {run_id} takes it up.")


def test_the_one_line_is_for_what_a_person_can_mend_alone():
    @notebook.in_one_line
    def fails(error: Exception) -> None:
        raise error

    with pytest.raises(NotebookError):
        fails(AppError("A.", fix="B."))
    with pytest.raises(KeyError):
        fails(KeyError("ours"))
