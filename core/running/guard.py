"""Looks for runs whose process died, and ends those that were aborted and don't end by themselves."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection

import psutil

from core.errors import StoreError
from core.storage.burial import oom_kills
from core.storage.records import process_lives
from core.store import Store

LOOK_S = 1.0
ABORT_S = 5.0
"""How long a run that was aborted may take to end by itself."""
DEATH_S = 3.0
"""How long a killed process's end is waited for."""

_log = logging.getLogger(__name__)


class Guard:
    """A thread that sees to it that a run whose process dies is told of within seconds, whoever started it.

    Args:
        watched: runs that somebody here waits for, who knows better how they died.
    """

    def __init__(self, store: Store, watched: Callable[[], Collection[str]] = tuple) -> None:
        self._store, self._watched = store, watched
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="guard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def shutdown(self, timeout_s: float = DEATH_S) -> None:
        self._closing.set()
        self._thread.join(timeout_s)

    def _look_on(self) -> None:
        kills, is_troubled = oom_kills() or 0, False
        while not self._closing.wait(LOOK_S):
            before, kills = kills, oom_kills() or 0
            try:
                end_overdue(self._store)
                self._store.recover(but=self._watched(), ran_out=kills > before)
                is_troubled = False
            except (StoreError, sqlite3.Error, psutil.Error):
                if not is_troubled:
                    _log.warning("The runs can't be looked after now.", exc_info=True)
                is_troubled = True


def end_overdue(store: Store, run_id: str = "") -> list[str]:
    """Kill the own processes of runs that were aborted and didn't end, and end these runs; their ids.

    A run in a process that is not its own can't be killed, since that would end more than the run.

    Args:
        run_id: that one alone; all where "".
    """
    ended = []
    for found, pid, started in store.overdue_aborts(ABORT_S):
        if run_id in ("", found) and _kill(found, pid, started):
            store.bury(found)
            ended.append(found)
    return ended


def _kill(run_id: str, pid: int, started: float) -> bool:
    """Kill a run's own process and what it started; whether it is dead."""
    if not process_lives(pid, started):
        return True
    try:
        process = psutil.Process(pid)
        if not {"core.running.child", run_id} <= set(process.cmdline()):
            return False
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    except psutil.NoSuchProcess:
        return True
    deadline = time.monotonic() + DEATH_S
    while process_lives(pid, started) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not process_lives(pid, started)
