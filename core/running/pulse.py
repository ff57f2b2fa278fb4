"""A run's pulse: its events and heartbeat on their way into the store, and what is asked of it on the way back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from core.control import Wish
from core.errors import StoreError
from core.events import (
    EndedEarly,
    Event,
    HostFallback,
    Paused,
    PhaseChanged,
    ProgramCompiled,
    ProgressMade,
    Resumed,
    RunContinued,
    RunEnded,
    RunPrepared,
    StepLogged,
    Tweaked,
    progress_in_words,
    recompile_in_words,
)
from core.insist import pause_after
from core.running.outbox import Outbox
from core.running.stuck import StuckWatch
from core.store import Store
from core.words import time_in_words

_log = logging.getLogger(__name__)

PULSE_S = 0.25
"""Seconds between two writes of a run's events and heartbeat, and between two looks for requests."""
PAUSE_LOOK_S = 0.05
"""Seconds between two looks whether a run that stands still may go on."""


class Pulse:
    """Writes a run's events and heartbeat, and reads its requests, beside the trainer.

    A thread of its own, since the trainer may sit in a compile for minutes. It also notices when the trainer hangs.
    Where the store can't be written the run goes on, and its events wait in memory.

    Args:
        epochs: how many there are to be.
        on_event: called with each event, in the thread that emits it.
        asked_here: whether the process is asked to end: the run stops, and its end can't wait for long to be written.
        limit_s: seconds after which the run is to stop; 0: none.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        epochs: int,
        on_event: Callable[[Event], None],
        asked_here: Callable[[], bool] = lambda: False,
        limit_s: float = 0.0,
    ) -> None:
        self._store, self._run_id, self._epochs, self._on_event = store, run_id, epochs, on_event
        self._asked_here, self._limit_s, self._began = asked_here, limit_s, time.monotonic()
        # the clock of the wall may be put back while the run goes on
        self._wall = time.time() - self._began
        self._outbox, self._stuck = Outbox(store, run_id, asked_here), StuckWatch()
        self._phase: dict[str, Any] = {"phase": "starting_device", "epochs": epochs, "progress": 0.0}
        self._steps = self._first = 0
        self._trained_since: float | None = None
        self._wishes: list[Wish] = []
        self._state = "running"
        self._lock, self._stop, self._done = threading.Lock(), threading.Event(), threading.Event()
        self._pause, self._abort, self._free = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name=f"pulse-{run_id}", daemon=True)

    def __enter__(self) -> Pulse:
        # what is to be changed before the first step
        self._try_to_write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread.

        Raises:
            GivenUpError: see `insist`.
        """
        self._done.set()
        self._thread.join()
        self.insist(self._write)

    def insist(self, write: Callable[[], None]) -> None:
        """Have the run's end written, see `Outbox.insist`."""
        self._outbox.insist(write)

    def now(self) -> float:
        """Unix time by a clock that only grows; where that of the wall is changed, this one goes on as before."""
        return self._wall + time.monotonic()

    def emit(self, event: Event) -> None:
        """Record an event and tell it to who listens; any thread may."""
        self.record(event)
        self._on_event(event)

    def record(self, event: Event) -> None:
        """Have an event written as soon as can be."""
        now = self.now()
        with self._lock:
            if not isinstance(event, ProgressMade):
                self._outbox.add(now, event)
            self._stuck.follow(event)
            self._follow(event, now)

    def should_stop(self) -> bool:
        if self._limit_s and not self._stop.is_set() and time.monotonic() - self._began >= self._limit_s:
            self._stop.set()
            self.emit(EndedEarly(f"The time limit of {time_in_words(self._limit_s)} was reached."))
        return self._stop.is_set() or self._asked_here()

    def is_aborted(self) -> bool:
        return self._abort.is_set()

    def should_free(self) -> bool:
        return self._free.is_set()

    def ask_stop(self) -> None:
        self._stop.set()

    def wishes(self) -> list[Wish]:
        with self._lock:
            wishes, self._wishes = self._wishes, []
        return wishes

    def should_pause(self) -> bool:
        return self._pause.is_set()

    def wait_while_paused(self) -> None:
        while self._pause.is_set() and not self._free.is_set() and not self.should_stop():
            time.sleep(PAUSE_LOOK_S)

    def _follow(self, event: Event, now: float) -> None:
        if isinstance(event, PhaseChanged):
            self._phase |= {"phase": event.phase, "epoch": event.epoch, "detail": event.detail}
            if not self._steps:
                self._phase["progress"] = 0.0
        elif isinstance(event, ProgressMade):
            is_done = 0 < event.total <= event.done
            self._phase["detail"] = "" if is_done else progress_in_words(event.what, event.done, event.total)
            # the bar is the training's as soon as there is one
            if event.total and not self._steps:
                self._phase["progress"] = event.done / event.total
        elif isinstance(event, RunPrepared):
            self._steps = event.steps_per_epoch
            self._trained_since = now
        elif isinstance(event, ProgramCompiled):
            self._phase["compile_count"] = self._phase.get("compile_count", 0) + event.count
            self._phase["compile_s"] = self._phase.get("compile_s", 0.0) + event.seconds
            if event.cause and not event.is_planned:
                self._phase["recompiled"] = recompile_in_words(event)
        elif isinstance(event, HostFallback):
            self._phase["fallbacks"] = event.ops
        elif isinstance(event, StepLogged):
            steps = self._steps * self._epochs
            done, here = event.step / steps, (event.step - self._first) / steps
            elapsed = now - (self._trained_since or now)
            self._phase |= {
                "step": event.step - (event.epoch - 1) * self._steps,
                "steps": self._steps,
                "epoch": event.epoch,
                "progress": done,
                "eta_s": elapsed / here * (1 - done) if here > 0 else None,
            }
        elif isinstance(event, Paused):
            self._phase |= {"phase": "paused", "detail": ""}
            self._state = "paused"
        elif isinstance(event, Resumed):
            self._phase |= {"phase": "training", "detail": ""}
            self._state = "running"
            # what is left takes as long as before
            self._trained_since = (self._trained_since or now) + event.seconds
        elif isinstance(event, Tweaked) and event.what == "epochs":
            self._epochs = int(event.after)
            self._phase["epochs"] = self._epochs
        elif isinstance(event, RunContinued):
            self._first = event.step
        elif isinstance(event, RunEnded) and event.state != "paused":
            self._phase |= {"phase": "ended", "detail": event.state}

    def _write(self) -> None:
        with self._lock:
            phase = {**self._phase, "elapsed_s": time.monotonic() - self._began}
        self._outbox.send()
        self._store.beat(self._run_id, phase, self._state)
        for kind, payload in self._store.take_requests(self._run_id):
            self._heed(kind, payload)

    def _heed(self, kind: str, payload: dict[str, Any]) -> None:
        if kind == "stop":
            self._stop.set()
        elif kind == "abort":
            self._abort.set()
            self._stop.set()
        elif kind == "pause":
            self._free.set() if payload.get("free") else self._free.clear()
            self._pause.set()
        elif kind == "resume":
            self._pause.clear()
        elif kind == "change":
            with self._lock:
                self._wishes.append(Wish(payload["what"], float(payload["value"])))

    def _try_to_write(self) -> bool:
        try:
            self._write()
        except Exception as error:  # whatever it is, the run goes on, and what waits is tried again
            if not isinstance(error, StoreError):
                _log.exception("Run %s could not be written.", self._run_id)
            self._outbox.tried(error)
            return False
        self._outbox.tried(None)
        return True

    def _beat_on(self) -> None:
        failures = 0
        while not self._done.wait(pause_after(failures) if failures else PULSE_S):
            failures = 0 if self._try_to_write() else failures + 1
            with self._lock:
                stuck = self._stuck.look(self.now())
            if stuck:
                self.emit(stuck)
