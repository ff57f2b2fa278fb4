"""Training one run of the store in this thread, whatever may go wrong."""

from __future__ import annotations

import errno
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from core.analysis.forecast import forecast_for
from core.checkpoint import drop_halves
from core.config import RunConfig
from core.control import Control, Wish
from core.devices import Device, check_precision, open_device, resolve_kind
from core.devices.ranks import count_processes
from core.engine import fit
from core.errors import AppError
from core.events import Event, RunContinued, RunEnded, kind_of
from core.machine.telemetry import Telemetry
from core.running.launch import Job, train_in_processes
from core.running.pulse import Pulse
from core.running.script import Scripted
from core.setup import Prepared, StoppedInSetupError, check_batch, prepare
from core.storage.records import RunRecord
from core.store import Store
from core.timing import PhaseTimer
from core.training.state import SavedState, drop_after, read_state
from core.training.task import Task
from core.training.tweak import make_changes
from core.trials.lr_finder import WORK, range_test
from core.trials.memory import memory_full
from core.trials.probe import probe

_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your share of the disk is used up",
    errno.EROFS: "the disk is read-only",
}


class Work(Protocol):
    """What is done with a task; see `engine.fit`."""

    def __call__(self, task: Task, *, emit: Callable[[Event], None], control: Control, timer: PhaseTimer) -> str: ...


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
        check_batch(config, count, count)
        # one that kept something that can't be read any more must not begin anew
        kept = read_state(store.run_folder(run_id)) if record.purpose != "probe" else None
    except AppError as error:
        failed = _ended("failed", PhaseTimer(time.perf_counter), error)
        store.append_events(run_id, [(time.time(), failed)])
        store.end_run(run_id, "failed")
        return "failed"
    if not store.claim(run_id, kind):
        return None
    threads = torch.get_num_threads()
    drop_halves(store.run_folder(run_id))
    epochs = kept.config["epochs"] if kept else config.epochs
    state = "failed"
    pulse = Pulse(store, run_id, epochs, on_event, should_stop, 60 * config.time_limit_min)
    try:
        with pulse:
            on_pulse(pulse)
            ended = _told(_train(store, record, kind, count, pulse, started, kept), on_event)
            pulse.record(ended)
            state = ended.state
    finally:
        torch.set_num_threads(threads)
        wishes = pulse.wishes() if state == "paused" else []
        pulse.insist(
            lambda: _park(store, run_id, wishes) if state == "paused" else store.end_run(run_id, state, at=pulse.now())
        )
    return state


def _park(store: Store, run_id: str, wishes: list[Wish]) -> None:
    """Leave the run saved; what was asked for and holds from its next step on waits for it there."""
    while wishes:
        store.request(run_id, "change", {"what": wishes[0].what, "value": wishes[0].value})
        wishes.pop(0)
    store.park(run_id)


def _told(ended: RunEnded, on_event: Callable[[Event], None]) -> RunEnded:
    """The run's last event, after it was told to who listens; a listener that fails makes the run fail."""
    try:
        on_event(ended)
    except Exception as error:  # as at any other event
        return replace(ended, state="failed", **_reason(error))
    return ended


def _tell_again(store: Store, record: RunRecord, kept: SavedState, emit: Callable[[Event], None]) -> None:
    """Tell what died with the process that had kept the state, and that the run goes on from it."""
    drop_after(store.run_folder(record.run_id), kept.position.step)
    told = store.events(record.run_id, kinds=("EpochEnded", "Tweaked"))
    known = {_mark(event.kind, event.payload) for event in told}
    for event in kept.position.told:
        if _mark(kind_of(event), asdict(event)) not in known:
            emit(event)
    at = kept.position
    emit(RunContinued(at.step, at.epoch, record.phase.get("rules", [])))


def _mark(kind: str, payload: dict[str, Any]) -> tuple[Any, ...]:
    return (kind, *(payload.get(name) for name in ("step", "epoch", "what")))


def _train(
    store: Store, record: RunRecord, kind: str, count: int, pulse: Pulse, started: float, kept: SavedState | None
) -> RunEnded:
    """Train in this process, or in `count` processes where there are several, whatever may go wrong."""
    try:
        if kept:
            _tell_again(store, record, kept, pulse.emit)
        if forecast := forecast_for(store, record.config, kind):
            pulse.emit(forecast)
        with Telemetry(pulse.emit, device_kind=kind):
            return _train_in(store, record, kind, count, pulse, started, kept)
    except Exception as error:  # what went wrong before or beside the training itself
        timer = PhaseTimer(time.perf_counter, started)
        timer.lap("setup")
        return _ended("failed", timer, error)


def _train_in(
    store: Store, record: RunRecord, kind: str, count: int, pulse: Pulse, started: float, kept: SavedState | None
) -> RunEnded:
    config, folder = record.config, store.run_folder(record.run_id)
    is_probe = record.purpose == "probe"
    # what was asked while it stood still holds from its next step on
    changes = pulse.wishes() if kept else []
    if count > 1 and not is_probe:
        threads = config.threads or torch.get_num_threads()
        job = Job(config, kind, store.home, folder, threads, record.script, kept is not None, changes)
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
        work=_work_of(record),
        script=record.script,
        kept=kept,
        changes=changes,
    )


def _work_of(record: RunRecord) -> Work:
    if record.purpose != "probe":
        return fit
    return range_test if record.work == WORK else probe


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
    script: Sequence[dict[str, Any]] = (),
    kept: SavedState | None = None,
    changes: Sequence[Wish] = (),
) -> RunEnded:
    """Train in this thread, whatever may go wrong.

    Args:
        open_it, home, folder, should_stop, one_by_one: see `prepare`.
        control: asked between steps.
        started: when the run began, as `time.perf_counter` tells.
        work: what is done with the task.
        script: changes that are made of themselves, see `core.running.script`.
        kept: where the run is taken up again.
        changes: that are made before its next step then.

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
                state=kept,
            )
            timer.lap("setup")
            make_changes(prepared.task, changes, emit, step=prepared.task.position.step + 1)
            control = Scripted(control, script, prepared.task.position.step + 1) if script else control
            compiled.since(prepared.task.device)
            try:
                state = _do(work, prepared, emit, control, timer)
            finally:
                compiled.until(prepared.task.device)
            if not control.is_aborted():
                timer.lap("other")
                prepared.insist(should_stop)
                timer.lap("checkpoint")
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
    if prepared.kept_size:
        # the next run is to look again
        prepared.kept_size.unlink(missing_ok=True)
    # out here, since the error's traceback kept the step's memory
    raise memory_full(task, prepared.batch_size, prepared.image_size)


def _ended(state: str, timer: PhaseTimer, error: Exception, compiled: _Compiled | None = None) -> RunEnded:
    count, seconds = (compiled.count, compiled.seconds) if compiled else (0, 0.0)
    return RunEnded(state, timer.total_s(), timer.phases(), count, seconds, **_reason(error))


def _reason(error: Exception) -> dict[str, Any]:
    """What `RunEnded` says of an error."""
    if isinstance(error, AppError):
        reason, fix, text = error.problem, error.fix, ""
    elif isinstance(error, OSError) and error.errno in _NO_ROOM:
        reason, fix, text = f"A file can't be written: {_NO_ROOM[error.errno]}.", "Make room, then resume the run.", ""
    else:
        line = (str(error).strip().splitlines() or [""])[0]
        reason, fix = f"{type(error).__name__}: {line}", "The traceback says where it happened."
        text = "".join(traceback.format_exception(error))
    # a kept traceback would keep the device's memory
    error.__traceback__ = None
    return {"reason": reason, "fix": fix, "error": type(error).__name__, "traceback": text}
