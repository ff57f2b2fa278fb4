"""For notebooks: start and stop the dashboard, show its address, and follow a run inline, with no web page but this.

What goes wrong through a person's mistake is one line in the cell, not a traceback.
"""

from __future__ import annotations

import contextlib
import html
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil

from core.errors import AppError, ServeError, StoreError
from core.fetch_tunnel import fetch_cloudflared
from core.notebook_view import RunView, has_ended, notebook_display
from core.serve.status import Status, read_status, write_status
from core.store import Store, default_home

ROOT = Path(__file__).resolve().parents[1]
SERVE_LOG, TRAIN_LOG, STORE = "serve.log", "train.log", "runs.sqlite"
STOP_S = 40.0
"""The dashboard has twenty seconds to save its runs, and the tunnel five."""
POLL_S = 0.2

_P = ParamSpec("_P")
_R = TypeVar("_R")


class NotebookError(AppError):
    """A mistake or a lack, which a notebook shows as one line."""

    def _render_traceback_(self) -> list[str]:
        # IPython asks for this in place of a traceback
        return [str(self)]


def in_one_line(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have what a person can mend shown as one line."""

    @wraps(function)
    def called(*args: _P.args, **options: _P.kwargs) -> _R:
        try:
            return function(*args, **options)
        except AppError as error:
            raise NotebookError(error.problem, fix=error.fix) from None

    return called


# -- the dashboard --------------------------------------------------------------------------------------------------


@in_one_line
def start(
    *,
    tunnel: str = "cloudflared",
    home: Path | str | None = None,
    backup: Path | str | None = None,
    roots: Sequence[Path | str] = (),
    port: int = 0,
    token: str = "",
    runner: Sequence[str] = ("-m", "core"),
) -> None:
    """Start the dashboard in the background, as `python -m core serve`; one of this home that is on is ended first.

    What it prints lies in `<home>/serve.log`, without the link and its token. It outlives the notebook's kernel; end
    it with `stop`.

    Args:
        tunnel: cloudflared (fetched where it is missing), ngrok, or none.
        home: the folder of runs; by default $FINETUNE_HOME, else ./runs.
        backup: a folder to keep runs in too.
        roots: further folders that data may be taken from in the browser.
        port: 0 for any free one.
        token: what visitors must know; made at random where it is empty.
        runner: what Python runs as the command line.

    Raises:
        NotebookError: the tunnel's program can't be fetched, the home can't be used, or an earlier one can't be ended.
    """
    folder = _home(home)
    environment = dict(os.environ)
    if tunnel == "cloudflared":
        program = fetch_cloudflared(folder / "bin")
        environment["PATH"] = os.pathsep.join([environment.get("PATH", ""), str(program.parent)])
    if token:
        # other users of the machine can read a command line
        environment["FINETUNE_TOKEN"] = token
    command = [*runner, "--home", str(folder), "serve", "--tunnel", tunnel, "--port", str(port)]
    command += ["--backup", str(backup)] if backup else []
    for root in roots:
        command += ["--root", str(root)]
    _end(folder)
    child = _in_background(command, folder, SERVE_LOG, environment)
    # whoever asks for the address before the launcher has said anything waits for this very process
    write_status(folder, Status("starting", pid=child))
    print(f"The dashboard is starting; its runs lie in {folder}.")


@in_one_line
def stop(home: Path | str | None = None) -> None:
    """End the dashboard and its tunnel; runs that train are saved first.

    Raises:
        NotebookError: it can't be ended.
    """
    print("The dashboard and its tunnel have ended." if _end(_home(home)) else "No dashboard was on.")


@in_one_line
def address(home: Path | str | None = None, wait_s: float = 180.0) -> None:
    """Show the link that opens the dashboard, as soon as it can be opened.

    Whoever has the link gets in, and a notebook keeps what its cells have shown.

    Raises:
        NotebookError: none is being started, it has ended, or there is no address after `wait_s`.
    """
    folder = _home(home)
    deadline, told = time.monotonic() + wait_s, ""
    while True:
        status = read_status(folder)
        if status is None:
            raise ServeError(f"No dashboard was started for {folder}.", fix="Run the cell that starts it first.")
        if not _lives(status):
            # a launcher that was killed, or refused its options, leaves its last words in the log
            said = status.problem or _last_line(folder / SERVE_LOG) or "It said nothing."
            ended = f"The dashboard is not on. {said}"
            raise ServeError(ended, fix=status.fix or "Start it again; serve.log and server.log in its home say more.")
        if status.state == "ready" and (link := status.link or status.local):
            return _show_link(link, is_public=bool(status.link))
        if status.problem and status.problem != told:
            told = status.problem
            print(f"{status.problem} {status.fix} It is tried again.".replace("  ", " "), flush=True)
        if time.monotonic() > deadline:
            problem = told or f"The dashboard has no address after {wait_s:.0f} s."
            raise ServeError(problem, fix=status.fix or "Run this cell again to go on waiting, or start it again.")
        time.sleep(POLL_S)


def _show_link(link: str, *, is_public: bool) -> None:
    where = "" if is_public else " On this machine alone; a public address needs a tunnel."
    text = f"Open the dashboard: {link}\nWhoever has this link gets in: clear this output before you share it.{where}"
    shown = html.escape(link, quote=True)
    markup = (
        f'<p><a href="{shown}" target="_blank" rel="noopener noreferrer" style="font-size:1.2em">Open the dashboard</a>'
        f"</p><p><code>{shown}</code></p><p>Whoever has this link gets in: clear this output before you share the "
        f"notebook.{where}</p>"
    )
    display = notebook_display()
    if display is None:
        print(text)
    else:
        display({"text/html": markup, "text/plain": text}, raw=True)


def _end(home: Path) -> bool:
    """End the launcher of this home, with what it has started; False where none is on.

    Raises:
        ServeError: it lives on.
    """
    status = read_status(home)
    if status is None or not _lives(status):
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(status.pid).terminate()
    deadline = time.monotonic() + STOP_S
    # a child of another kernel stays as a zombie until that one looks
    while not has_ended(status.pid):
        if time.monotonic() > deadline:
            raise ServeError(f"The dashboard (process {status.pid}) does not end.", fix="Restart the runtime.")
        time.sleep(POLL_S)
    return True


def _lives(status: Status) -> bool:
    """Whether the launcher that wrote this lives; its number may be another process's by now."""
    try:
        process = psutil.Process(status.pid)
        is_same = process.create_time() <= status.at + 1.0 and "serve" in process.cmdline()
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


# -- a run ----------------------------------------------------------------------------------------------------------


@in_one_line
def train(
    *options: str, home: Path | str | None = None, backup: Path | str | None = None, wait_s: float = 300.0
) -> str:
    """Start `python -m core train` with these options in the background, and return the run's id.

    It goes on when the kernel ends. What it prints lies in `<home>/train.log`.

    Args:
        backup: a folder to keep runs in too; a home without runs is restored from it first.

    Raises:
        NotebookError: the options are wrong, or there is no run after `wait_s`.
    """
    folder = _home(home)
    command = ["-m", "core", "--home", str(folder), "train", *options]
    command += ["--backup", str(backup)] if backup else []
    began = time.time()
    pid = _in_background(command, folder, TRAIN_LOG, dict(os.environ))
    deadline = time.monotonic() + wait_s
    while True:
        is_over = has_ended(pid)
        if run_id := _run_of(folder, began, 0 if is_over else pid):
            return run_id
        if is_over:
            problem = _last_line(folder / TRAIN_LOG) or "The run ended without a word."
            raise StoreError(problem, fix="See python -m core train --help for all options.")
        if time.monotonic() > deadline:
            raise StoreError(f"There is no run after {wait_s:.0f} s.", fix=f"See {folder / TRAIN_LOG}.")
        time.sleep(POLL_S)


def _run_of(home: Path, since: float, pid: int) -> str:
    """The id of the run that was made since then by this process (0: by any); "" where there is none yet.

    The store isn't opened for it: that would make one, while the process may be restoring it from a backup.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"{(home / STORE).as_uri()}?mode=ro", uri=True)) as database:
            row = database.execute(
                "SELECT run_id FROM runs WHERE created >= ? AND ? IN (0, pid) ORDER BY created DESC", (since, pid)
            ).fetchone()
    except sqlite3.Error:
        return ""
    return str(row[0]) if row else ""


@in_one_line
def watch(run_id: str, home: Path | str | None = None, every_s: float = 2.0) -> None:
    """Show a run's charts under the cell, anew whenever there is more, until it ends or the cell is interrupted.

    The run is only looked at: interrupting the cell leaves it as it is, and the last figure stays.

    Args:
        every_s: seconds between two looks.

    Raises:
        NotebookError: this is no notebook, or there is no such run.
    """
    folder = _home(home)
    if not (folder / STORE).exists():
        raise StoreError(
            f"There are no runs in {folder}.", fix="Give the folder that the run was started with as home."
        )
    with contextlib.closing(Store(folder)) as store:
        view = RunView(store, run_id)
        try:
            while view.draw():
                time.sleep(every_s)
        except KeyboardInterrupt:
            view.leave()


# -- small parts ----------------------------------------------------------------------------------------------------


def _home(given: Path | str | None) -> Path:
    return Path(given).expanduser().resolve() if given else default_home()


def _in_background(command: Sequence[str], home: Path, log: str, environment: dict[str, str]) -> int:
    """Start a Python that outlives this one; returns its process id.

    Raises:
        ServeError: the home folder can't be written.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(home / log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    except OSError as error:
        problem = f"The home folder '{home}' can't be used: {error.strerror or error}."
        raise ServeError(problem, fix="Choose another home.") from error
    with os.fdopen(descriptor, "wb") as file:
        # results, with the link and its token, go to standard output, and are not kept
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
        ).pid


def _last_line(log: Path) -> str:
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line), "")
