"""The trainer thread: takes queued runs from the store, trains them, and outlives their failures."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from core.analysis.forecast import forecast_for
from core.child import train_in_child
from core.config import RunConfig
from core.control import Control, Wish
from core.devices import Device, check_precision, open_device, resolve_kind
from core.devices.ranks import count_processes
from core.devices.xla import XLA_LOCK, initialise, xla_info
from core.engine import fit
from core.errors import AppError, DeviceError, StoreError
from core.events import (
    EndedEarly,
    Event,
    HostFallback,
    Paused,
    PhaseChanged,
    ProgramCompiled,
    ProgressMade,
    Resumed,
    RunEnded,
    RunPrepared,
    StepLogged,
    Tweaked,
    progress_in_words,
    recompile_in_words,
)
from core.launch import Job, train_in_processes
from core.memory import memory_full
from core.probe import probe
from core.records import RunRecord
from core.setup import Prepared, StoppedInSetupError, check_batch, prepare
from core.store import Store
from core.task import Task
from core.telemetry import Telemetry
from core.timing import PhaseTimer
from core.words import time_in_words

_log = logging.getLogger(__name__)

PULSE_S = 0.25
"""Seconds between two writes of a run's events and heartbeat, and between two looks for requests."""
PAUSE_LOOK_S = 0.05
"""Seconds between two looks whether a run that stands still may go on."""


class Work(Protocol):
    """What is done with a task; see `engine.fit`."""

    def __call__(self, task: Task, *, emit: Callable[[Event], None], control: Control, timer: PhaseTimer) -> str: ...


class Pulse:
    """Writes a run's events and heartbeat, and reads its requests, beside the trainer.

    A thread of its own, since the trainer may sit in a compile for minutes.
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
        self._pending: list[tuple[float, Event]] = []
        self._phase: dict[str, Any] = {"phase": "starting_device", "epochs": epochs, "progress": 0.0}
        self._steps = 0
        self._trained_since: float | None = None
        self._wishes: list[Wish] = []
        self._state = "running"
        self._lock, self._stop, self._done = threading.Lock(), threading.Event(), threading.Event()
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name=f"pulse-{run_id}", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._write()

    def emit(self, event: Event) -> None:
        now = time.time()
        with self._lock:
            if not isinstance(event, ProgressMade):
                self._pending.append((now, event))
            self._follow(event, now)
        self._on_event(event)

    def should_stop(self) -> bool:
        if self._limit_s and not self._stop.is_set() and time.monotonic() - self._began >= self._limit_s:
            self._stop.set()
            self.emit(EndedEarly(f"The time limit of {time_in_words(self._limit_s)} was reached."))
        return self._stop.is_set() or self._asked_here()

    def ask_stop(self) -> None:
        self._stop.set()

    def wishes(self) -> list[Wish]:
        with self._lock:
            wishes, self._wishes = self._wishes, []
        return wishes

    def should_pause(self) -> bool:
        return self._pause.is_set()

    def wait_while_paused(self) -> None:
        while self._pause.is_set() and not self.should_stop():
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
            if event.cause:
                self._phase["recompiled"] = recompile_in_words(event)
        elif isinstance(event, HostFallback):
            self._phase["fallbacks"] = event.ops
        elif isinstance(event, StepLogged):
            done = event.step / (self._steps * self._epochs)
            elapsed = now - (self._trained_since or now)
            self._phase |= {
                "step": event.step - (event.epoch - 1) * self._steps,
                "steps": self._steps,
                "epoch": event.epoch,
                "progress": done,
                "eta_s": elapsed / done * (1 - done) if done else None,
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
        elif isinstance(event, RunEnded):
            self._phase |= {"phase": "ended", "detail": event.state}

    def _write(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
            phase = dict(self._phase)
        try:
            if pending:
                self._store.append_events(self._run_id, pending)
        except Exception:
            with self._lock:
                self._pending = pending + self._pending
            raise
        self._store.beat(self._run_id, phase, self._state)
        for kind, payload in self._store.take_requests(self._run_id):
            self._heed(kind, payload)

    def _heed(self, kind: str, payload: dict[str, Any]) -> None:
        if kind == "stop":
            self._stop.set()
        elif kind == "pause":
            self._pause.set()
        elif kind == "resume":
            self._pause.clear()
        elif kind == "change":
            with self._lock:
                self._wishes.append(Wish(payload["what"], float(payload["value"])))

    def _beat_on(self) -> None:
        while not self._done.wait(PULSE_S):
            try:
                self._write()
            except (StoreError, sqlite3.Error):
                _log.warning("Run %s can't be written now; its events are kept.", self._run_id, exc_info=True)


def train_queued(
    store: Store,
    run_id: str,
    *,
    on_event: Callable[[Event], None] = lambda event: None,
    on_pulse: Callable[[Pulse], None] = lambda pulse: None,
    should_stop: Callable[[], bool] = lambda: False,
    should_leave: Callable[[], bool] = lambda: False,
) -> str | None:
    """Train a queued run, here or in a process of its own as its config says, and wait for it.

    Args:
        on_event, on_pulse: see `train_run`; a process of its own tells the store alone.
        should_stop: asked again and again; the run is then stopped and saved.
        should_leave: a run in a process of its own is no longer waited for.

    Returns:
        The state in which it ended, or None where another run holds its device.
    """
    config = store.get_run(run_id).config
    # a device that can't be had is told by the run itself
    with contextlib.suppress(DeviceError):
        if config.process == "own" and store.is_held(resolve_kind(config.device)):
            return None
    if config.process == "own":
        return train_in_child(store, run_id, should_stop=should_stop, should_leave=should_leave)
    return train_run(store, run_id, on_event=on_event, on_pulse=on_pulse, should_stop=should_stop)


def train_run(
    store: Store,
    run_id: str,
    *,
    on_event: Callable[[Event], None] = lambda event: None,
    on_pulse: Callable[[Pulse], None] = lambda pulse: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> str | None:
    """Train a queued run in this thread.

    Args:
        on_event: called with each event, in this thread.
        on_pulse: handed the run's pulse at the start, through which it can be asked to stop.
        should_stop: asked between steps, beside what is asked through the store.

    Returns:
        The state in which it ended, or None where another run holds its device.

    Raises:
        StoreError: there is no such run, or it is not queued.
    """
    record = store.get_run(run_id)
    config = record.config
    started = time.perf_counter()
    try:
        kind = resolve_kind(config.device)
        check_precision(kind, config.precision)
        count = count_processes(kind, config.num_devices)
        check_batch(config, count)
    except AppError as error:
        failed = _ended("failed", PhaseTimer(time.perf_counter), error)
        store.append_events(run_id, [(time.time(), failed)])
        store.end_run(run_id, "failed")
        return "failed"
    if not store.claim(run_id, kind):
        return None
    threads = torch.get_num_threads()
    state = "failed"
    try:
        with Pulse(store, run_id, config.epochs, on_event, should_stop, 60 * config.time_limit_min) as pulse:
            on_pulse(pulse)
            if forecast := forecast_for(store, config, kind):
                pulse.emit(forecast)
            with Telemetry(pulse.emit, device_kind=kind):
                ended = _train(store, record, kind, count, pulse, started)
            state = ended.state
            pulse.emit(ended)
    finally:
        torch.set_num_threads(threads)
        store.end_run(run_id, state)
    return state


def _train(store: Store, record: RunRecord, kind: str, count: int, pulse: Pulse, started: float) -> RunEnded:
    """Train in this process, or in `count` processes where there are several."""
    config, folder = record.config, store.run_folder(record.run_id)
    is_probe = record.purpose == "probe"
    if count > 1 and not is_probe:
        job = Job(config, kind, store.home, folder, config.threads or torch.get_num_threads())
        return train_in_processes(
            job, count, emit=pulse.emit, should_stop=pulse.should_stop, started=started, control=pulse
        )
    return train_here(
        config,
        # without a home the device keeps no programs, and finds none
        open_it=lambda: open_device(kind, store.home if config.caches == "use" else None),
        home=store.home,
        folder=None if is_probe else folder,
        emit=pulse.emit,
        should_stop=pulse.should_stop,
        control=pulse,
        started=started,
        work=probe if is_probe else fit,
    )


def train_here(
    config: RunConfig,
    *,
    open_it: Callable[[], Device],
    home: Path,
    folder: Path | None,
    emit: Callable[[Event], None],
    should_stop: Callable[[], bool],
    control: Control,
    started: float,
    one_by_one: Callable[[], AbstractContextManager[object]] = nullcontext,
    work: Work = fit,
) -> RunEnded:
    """Train in this thread, whatever may go wrong.

    Args:
        open_it, home, folder, should_stop, one_by_one: see `prepare`.
        control: asked between steps.
        started: when the run began, as `time.perf_counter` tells.
        work: what is done with the task.

    Returns:
        The run's last event, which is not emitted yet.
    """
    timer, compiled = PhaseTimer(time.perf_counter, started), _Compiled()
    try:
        with ExitStack() as resources:
            prepared = prepare(
                config,
                open_it=open_it,
                home=home,
                folder=folder,
                emit=emit,
                resources=resources,
                should_stop=should_stop,
                one_by_one=one_by_one,
            )
            timer.lap("setup")
            compiled.since(prepared.task.device)
            try:
                state = _do(work, prepared, emit, control, timer)
            finally:
                compiled.until(prepared.task.device)
    except StoppedInSetupError:
        timer.lap("setup")
        return RunEnded("stopped", timer.total_s(), timer.phases(), 0, 0.0)
    except Exception as error:  # the worker must outlive any failure of a run; the traceback stays with the run
        timer.lap("other")
        return _ended("failed", timer, error, compiled)
    timer.lap("other")
    is_warm = not compiled.count and not prepared.was_packed
    return RunEnded(state, timer.total_s(), timer.phases(), compiled.count, compiled.seconds, is_warm=is_warm)


@dataclass
class _Compiled:
    """What a device compiled between two moments."""

    count: int = 0
    seconds: float = 0.0

    def since(self, device: Device) -> None:
        self.count, self.seconds = -device.compile_count(), -device.compile_seconds()

    def until(self, device: Device) -> None:
        self.count += device.compile_count()
        self.seconds += device.compile_seconds()


def _do(work: Work, prepared: Prepared, emit: Callable[[Event], None], control: Control, timer: PhaseTimer) -> str:
    task = prepared.task
    try:
        return work(task, emit=emit, control=control, timer=timer)
    except (RuntimeError, MemoryError) as error:
        if not task.device.out_of_memory(error):
            raise
    # out here, since the error's traceback kept the step's memory
    raise memory_full(task, prepared.batch_size, prepared.image_size)


def _ended(state: str, timer: PhaseTimer, error: Exception, compiled: _Compiled | None = None) -> RunEnded:
    if isinstance(error, AppError):
        reason, fix, text = error.problem, error.fix, ""
    else:
        line = (str(error).strip().splitlines() or [""])[0]
        reason, fix = f"{type(error).__name__}: {line}", "The traceback says where it happened."
        text = "".join(traceback.format_exception(error))
    # a kept traceback would keep the device's memory
    error.__traceback__ = None
    count, seconds = (compiled.count, compiled.seconds) if compiled else (0, 0.0)
    return RunEnded(
        state, timer.total_s(), timer.phases(), count, seconds, reason, fix, type(error).__name__, text
    )  # fmt: skip


class Worker:
    """Trains the store's waiting runs one after another, in a daemon thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._wake, self._closing = threading.Event(), threading.Event()
        self._pulse: Pulse | None = None
        self._thread = threading.Thread(target=self._work, name="trainer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look for waiting runs now."""
        self._wake.set()

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Ask the active run to stop and save, and wait for the thread."""
        self._closing.set()
        if self._pulse:
            self._pulse.ask_stop()
        self._wake.set()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        if xla_info().available:
            with contextlib.suppress(AppError), XLA_LOCK:
                initialise(self._store.home)
        while not self._closing.is_set():
            trained = False
            for record in self._store.waiting_runs():
                if self._closing.is_set():
                    return
                try:
                    trained = (
                        train_queued(
                            self._store, record.run_id, on_pulse=self._follow, should_leave=self._closing.is_set
                        )
                        is not None
                        or trained
                    )
                except StoreError:
                    pass  # stopped or deleted between our look and our claim
                except Exception:  # whatever it was, the next run must find a living worker
                    _log.exception("Run %s broke off.", record.run_id)
                self._pulse = None
            if not trained:
                self._wake.wait(0.5)
                self._wake.clear()

    def _follow(self, pulse: Pulse) -> None:
        self._pulse = pulse
        if self._closing.is_set():
            pulse.ask_stop()
