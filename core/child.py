"""A run in a process of its own: the same trainer, started fresh, that speaks through the store alone.

It goes on when the process that started it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.events import Phases, RunEnded
from core.store import Store

POLL_S = 0.1
LOG_TAIL = 6000
"""Characters of the process's own output that are kept with a run that died."""
BUSY = 3
"""Exit status: another run holds the device."""
ROOT = Path(__file__).parents[1]


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
    log = folder / "process.log"
    started, is_asked = time.time(), False
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "core.child", run_id, str(store.home)],
            # the working folder stays, since a data set may be named from there
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # an interrupt from the keyboard is for this process, which then asks that one to stop
            start_new_session=True,
        )
    while True:
        try:
            status = process.wait(POLL_S)
            break
        except subprocess.TimeoutExpired:
            if should_leave():
                return store.get_run(run_id).state
            if should_stop() and not is_asked and store.get_run(run_id).is_active:
                is_asked = True
                store.request(run_id, "stop")
    if status == BUSY:
        return None
    if store.get_run(run_id).is_active:
        _bury(store, run_id, status, time.time() - started, log)
    return store.get_run(run_id).state


def _bury(store: Store, run_id: str, status: int, seconds: float, log: Path) -> None:
    """Say in the record of a run whose process died how it died."""
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    epochs = [event.payload for event in store.events(run_id, kinds=("EpochEnded",))]
    told = sum((Phases(**epoch["phases"]) for epoch in epochs), Phases())
    ended = RunEnded(
        "interrupted",
        seconds,
        told + Phases(other_s=max(0.0, seconds - told.total_s())),
        sum(epoch["compile_count"] for epoch in epochs),
        told.compile_s,
        reason=f"The run's own process {how}.",
        fix="If memory ran out, choose a smaller batch size; what the process wrote last is kept with the run.",
        error="TrainingError",
        traceback=log.read_text(errors="replace")[-LOG_TAIL:],
    )
    store.append_events(run_id, [(time.time(), ended)])
    store.end_run(run_id, "interrupted")


def main(run_id: str, home: str) -> int:
    """Train the run in this process; SIGTERM stops and saves it."""
    from core.worker import train_run

    def heed(pulse: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: pulse.ask_stop())

    return BUSY if train_run(Store(Path(home)), run_id, on_pulse=heed) is None else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
