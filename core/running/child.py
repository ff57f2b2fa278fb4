"""A run in a process of its own: the same trainer, started fresh, that speaks through the store alone.

It goes on when the process that started it ends.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.errors import StoreError
from core.running.guard import end_overdue
from core.storage.burial import CRASHED, LOG_NAME, LOG_TAIL, log_head, oom_kills
from core.store import Store

POLL_S = 0.1
BUSY, GONE = 3, 4
"""Exit statuses: another run holds the device; the run is no longer queued."""
CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")
ROOT = Path(__file__).parents[2]


def train_in_child(
    store: Store,
    run_id: str,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    should_leave: Callable[[], bool] = lambda: False,
) -> str | None:
    """Train a queued run in a new process, and wait until it ended.

    Args:
        should_stop: it is to stop and save.
        should_leave: wait no longer; the run goes on.

    Returns:
        The run's state, or None where another run holds its device.
    """
    folder = store.run_folder(run_id)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / LOG_NAME
    kills, is_asked = oom_kills(), False
    process = _start(store, run_id, log)
    while True:
        try:
            status = process.wait(POLL_S)
            break
        except subprocess.TimeoutExpired:
            if should_leave():
                return store.get_run(run_id).state
            if should_stop():
                record = store.get_run(run_id)
                if not record.is_active:
                    # it is saved; how long its process takes to end is nobody's concern
                    return record.state
                if not is_asked:
                    store.request(run_id, "stop")
                is_asked = True
            end_overdue(store, run_id)
    if status == BUSY:
        return None
    if status != GONE:
        ran_out = status == -signal.SIGKILL and kills is not None and (oom_kills() or 0) > kills
        store.bury(run_id, _how(status), ran_out=ran_out, log=log.read_text(errors="replace")[-LOG_TAIL:])
    return store.get_run(run_id).state


def _start(store: Store, run_id: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "core.running.child", run_id, str(store.home)],
            # the working folder stays, since a data set may be named from there
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # an interrupt from the keyboard is for this process, which then asks that one to stop
            start_new_session=True,
        )


def _how(status: int) -> str:
    """In words, how a process ended with this status."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"{CRASHED} ({name})" if name in CRASHES else f"was ended by {name}"


def main(run_id: str, home: str) -> int:
    """Train the run in this process; SIGTERM stops and saves it."""
    print(log_head(os.getpid()), end="", flush=True)
    # where it crashes in native code, the log says in which line of ours
    faulthandler.enable()
    from core.running.trainer import train_run

    def heed(pulse: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: pulse.ask_stop())

    store = Store(Path(home))
    try:
        return BUSY if train_run(store, run_id, on_pulse=heed) is None else 0
    except StoreError as error:
        # it was stopped or taken by another before this process was ready
        if store.get_run(run_id).pid == os.getpid():
            raise
        print(error)
        return GONE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
