"""The worker: goes through the queue, trains runs on different devices side by side, and outlives their failures."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from core.devices import resolve_kind
from core.devices.xla import XLA_LOCK, initialise, xla_info
from core.errors import AppError, DeviceError, StoreError
from core.events import Event
from core.running.child import train_in_child
from core.running.guard import Guard
from core.running.pulse import Pulse
from core.running.trainer import train_run
from core.running.waiting import ActiveRun, Verdict, held_here, judge, look_at
from core.store import Store

PROCESS_VARIABLE = "FINETUNE_PROCESS"
LOOK_S = 0.5
"""Seconds between two looks at the queue, where nobody wakes the worker."""

_log = logging.getLogger(__name__)


def train_queued(
    store: Store,
    run_id: str,
    *,
    process: str = "",
    on_event: Callable[[Event], None] = lambda event: None,
    on_pulse: Callable[[Pulse], None] = lambda pulse: None,
    should_stop: Callable[[], bool] = lambda: False,
    should_leave: Callable[[], bool] = lambda: False,
) -> str | None:
    """Train a queued run, here or in a process of its own, and wait for it.

    Args:
        process: shared or own; as its config says where "".
        on_event, on_pulse: see `train_run`; a process of its own tells the store alone.
        should_stop: asked again and again; the run is then stopped and saved.
        should_leave: a run in a process of its own is no longer waited for.

    Returns:
        The state in which it ended, or None where another run holds its device.
    """
    config = store.get_run(run_id).config
    if (process or config.process) != "own":
        return train_run(store, run_id, on_event=on_event, on_pulse=on_pulse, should_stop=should_stop)
    # a device that can't be had is told by the run itself
    with contextlib.suppress(DeviceError):
        if store.is_held(resolve_kind(config.device)):
            return None
    return train_in_child(store, run_id, should_stop=should_stop, should_leave=should_leave)


def _wants_own() -> bool:
    wanted = os.environ.get(PROCESS_VARIABLE, "").strip()
    if wanted not in ("", "own", "shared"):
        _log.warning("%s is %r, which says nothing: runs share this process. Set it to own.", PROCESS_VARIABLE, wanted)
    return wanted == "own"


@dataclass
class _Begun:
    """A run that this worker has begun; `stays` when the worker is shut down, since it was to have its own process."""

    run: ActiveRun
    process: str
    stays: bool
    thread: threading.Thread | None = None


class Worker:
    """Trains the store's waiting runs, as `core.running.waiting` judges.

    One daemon thread looks through the queue, one trains in this process, and each run in a process of its own has one
    that waits for it; a `Guard` looks after the runs of all processes.

    Args:
        own: every run has a process of its own; as the environment variable says where None.
    """

    def __init__(self, store: Store, *, own: bool | None = None) -> None:
        self._store = store
        self._own = _wants_own() if own is None else own
        self._wake, self._closing, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._begun: dict[str, _Begun] = {}
        self._here: SimpleQueue[_Begun | None] = SimpleQueue()
        self._is_ready = False
        self._guard = Guard(store, self._watched)
        self._threads = [
            threading.Thread(target=self._go_through, name="queue", daemon=True),
            threading.Thread(target=self._train_here, name="trainer", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        self._guard.start()

    def wake(self) -> None:
        """Look for waiting runs now."""
        self._wake.set()

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Ask the active runs to stop and save, and wait for them; those that were to have a process of their own stay.

        Returns after `timeout_s` at the latest; a run that is not through by then goes on stopping.
        """
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._wake.set()
        self._here.put(None)
        self._guard.shutdown(timeout_s)
        with self._lock:
            waiting = [begun.thread for begun in self._begun.values() if begun.thread]
        for thread in (*self._threads, *waiting):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _watched(self) -> list[str]:
        with self._lock:
            return [run_id for run_id, begun in self._begun.items() if begun.process == "own"]

    def _go_through(self) -> None:
        if not self._own:
            self._ready()
        is_troubled = False
        while not self._closing.is_set():
            try:
                self._begin_what_may()
                is_troubled = False
            except Exception:  # whatever it was, later runs must find a living worker
                if not is_troubled:
                    _log.exception("The queue can't be gone through now.")
                is_troubled = True
            self._wake.wait(LOOK_S)
            self._wake.clear()

    def _ready(self) -> None:
        """Start XLA before the first run in this process: a backward on the CPU would spoil it."""
        if not self._is_ready and xla_info().available:
            with contextlib.suppress(AppError), XLA_LOCK:
                initialise(self._store.home)
        self._is_ready = True

    def _begin_what_may(self) -> None:
        with self._lock:
            begun = [one.run for one in self._begun.values()]
        for verdict in judge(look_at(self._store, begun), only_here=held_here(), own=self._own):
            if not verdict.words and not self._closing.is_set():
                self._begin(verdict)

    def _begin(self, verdict: Verdict) -> None:
        run, process = verdict.run, verdict.process
        active = ActiveRun(run.run_id, run.name, run.kind, run.timed, process == "shared", run.needs_gib)
        begun = _Begun(active, process, stays=self._own or run.process == "own")
        if process == "shared":
            self._ready()
        else:
            begun.thread = threading.Thread(
                target=self._train, args=(begun,), name=f"child-{run.run_id}", daemon=True
            )  # fmt: skip
        with self._lock:
            self._begun[run.run_id] = begun
        if begun.thread:
            begun.thread.start()
        else:
            self._here.put(begun)

    def _train_here(self) -> None:
        while (begun := self._here.get()) is not None:
            self._train(begun)

    def _train(self, begun: _Begun) -> None:
        run_id, has_trained = begun.run.run_id, False
        try:
            if not self._closing.is_set():
                state = train_queued(
                    self._store,
                    run_id,
                    process=begun.process,
                    should_stop=lambda: self._closing.is_set() and not begun.stays,
                    should_leave=lambda: self._closing.is_set() and begun.stays,
                )
                has_trained = state is not None
        except StoreError:
            pass  # stopped or deleted between our look and our claim
        except Exception as error:  # whatever it was, the next run must find a living worker
            _log.exception("Run %s broke off.", run_id)
            # where it still stands in the queue, it would be begun again and again
            with contextlib.suppress(StoreError):
                self._store.bury(run_id, f"could not be used ({type(error).__name__}: {error})", log="")
        with self._lock:
            del self._begun[run_id]
        # one whose device is held by another process is looked at again in a while
        if has_trained:
            self._wake.set()
