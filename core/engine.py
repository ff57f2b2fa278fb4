"""The fine-tuning loop: batches in, events out; the same on every device.

No files, no threads and no clock of its own: what differs is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from core.control import Control
from core.events import EndedEarly, EpochEnded, Event, Paused, PhaseChanged, Phases, Resumed, StageBegan
from core.metrics import Figures, Sums
from core.schedule import changes_at, lr_at
from core.timing import PhaseTimer
from core.training.compiles import CompileWatch
from core.training.keeper import Keeper
from core.training.state import Position
from core.training.step_log import StepLog
from core.training.task import Task, evaluation_step, place_parts, shapes_of, train_step
from core.training.tweak import make_changes


def fit(task: Task, *, emit: Callable[[Event], None], control: Control, timer: PhaseTimer) -> str:
    """Train from where the task stands for the config's epochs, until its patience ends, or until asked to stop.

    Args:
        timer: is given all time spent here, also of an epoch that fails.

    Returns:
        `finished` or `stopped`; `paused` where it was kept to be taken up again, and its device is to be free.

    Raises:
        TrainingError: the loss is not finite; the step is named.
    """
    at, watch, keeper = task.position, CompileWatch(task.device, emit), Keeper(task, timer)
    while at.epoch <= task.config.epochs:
        epoch = at.epoch
        trained, left_as = train_epoch(task, timer, emit, control, watch, keeper)
        if left_as:
            if left_as == "stopped" and not control.is_aborted():
                task.save("last", epoch - 1)
                timer.lap("checkpoint")
            return left_as
        emit(PhaseChanged("validating", epoch))
        val = evaluate(task, timer, watch, step=at.step, epoch=epoch, should_stop=control.should_stop)
        emit(PhaseChanged("saving", epoch))
        if val is None:
            if not control.is_aborted():
                # what is left of the epoch is its validation
                keeper.keep_within(task.train.num_batches, trained.state())
                task.save("last", epoch - 1)
                timer.lap("checkpoint")
            return _stopped(control, emit)
        if val.top1 > at.best:
            at.best, at.best_epoch = val.top1, epoch
            task.save("best", epoch)
        task.save("last", epoch)
        timer.lap("checkpoint")
        # as far as it is known by now: this very checkpoint takes time too
        keeper.keep_after(_ended(task, keeper, epoch, trained, val))
        at.told[-1] = ended = _ended(task, keeper, epoch, trained, val)
        emit(ended)
        at.earlier, at.earlier_compiles = Phases(), 0
        timer.lap("other")
        if epoch >= task.config.epochs:
            break
        if task.config.patience and epoch - at.best_epoch >= task.config.patience:
            emit(EndedEarly(f"No epoch after epoch {at.best_epoch} had a better validation top-1."))
            break
        if control.should_stop():
            return _stopped(control, emit)
    return "finished"


def _ended(task: Task, keeper: Keeper, epoch: int, trained: StepLog, val: Figures) -> EpochEnded:
    at, train = task.position, trained.totals.figures()
    phases, compiles = keeper.epoch_so_far()
    return EpochEnded(
        epoch=epoch,
        step=at.step,
        train_loss=train.loss,
        train_top1=train.top1,
        val_loss=val.loss,
        val_top1=val.top1,
        val_top5=val.top5 if task.num_classes > 5 else None,
        seconds=phases.total_s(),
        images_per_s=trained.images_per_s(),
        phases=phases,
        compile_count=compiles,
        lr=task.lr_factor * lr_at(task.config, at.step, task.train.num_batches),
        step_times=trained.step_times.counts(),
        left_out=dict(trained.left_out),
        device_idle_s=trained.idle_s,
        earlier=at.earlier,
    )


def _stopped(control: Control, emit: Callable[[Event], None]) -> str:
    if control.is_aborted():
        emit(EndedEarly("It was aborted: nothing after the last checkpoint is kept."))
    return "stopped"


def train_epoch(
    task: Task,
    timer: PhaseTimer,
    emit: Callable[[Event], None],
    control: Control,
    watch: CompileWatch,
    keeper: Keeper,
) -> tuple[StepLog, str]:
    """One pass over the training images, or what is left of it where the task stands in its midst.

    Returns:
        What was logged of the epoch, and `stopped` or `paused` where it was left, and kept, before its end, else "".
    """
    device, steps, at = task.device, task.train.num_batches, task.position
    keeper.epoch_begins()
    is_new = _begin(task, emit, watch)
    may_compile = device.kind == "xla" and (is_new or at.step < keeper.first_step)
    emit(PhaseChanged("compiling" if may_compile else "training", at.epoch))
    left_as = ""
    log = StepLog(task, at.epoch, timer, emit, first_step=keeper.first_step)
    if at.log:
        with device.turn():
            log.go_on_from(at.log)
    with closing(task.train.epoch(at.epoch, at.place)) as batches:
        for index, batch in enumerate(batches, start=at.place + 1):
            at.step += 1
            log.has_batch(timer.lap("data_wait"))
            make_changes(task, control.wishes(), emit, step=at.step)
            lr = task.lr_factor * lr_at(task.config, at.step, steps)
            with device.turn():
                timer.lap("other")
                parts = place_parts(task, batch)
                timer.lap("transfer")
                train_step(task, parts, lr, at.step, log.sums)
                compiles, compile_s = watch.look("training", at.step, at.epoch, shapes_of(batch))
                timer.lap("compute", compile_s=compile_s)
                log.sent(batch.num_real, compiles)
                is_end = index == steps
                is_logged = at.step == 1 or at.step % task.config.log_every == 0 or is_end
                stops = not is_end and control.should_stop()
                pauses = not (is_end or stops) and control.should_pause()
                left_as = "stopped" if stops else "paused" if pauses and control.should_free() else ""
                if is_logged:
                    log.cut(at.step, lr)
                is_kept = not control.is_aborted() if left_as else is_logged and not is_end and keeper.is_due()
                # before what is logged for a stop alone: a run that is taken up again logs what one in one piece does
                state = log.state() if is_kept or pauses else {}
                if not is_logged and (stops or pauses):
                    log.cut(at.step, lr)
                if at.step == 1 or is_end or stops or pauses:
                    log.finish(is_all=is_end or stops or pauses)
            if is_kept:
                _keep(keeper, timer, emit, at, index, state)
            if pauses and not left_as:
                _pause(log, timer, emit, control, at)
                # asked for while it stood still; all processes of a run ask alike
                if control.should_stop():
                    left_as = "stopped"
                elif control.should_pause() and control.should_free():
                    left_as = "paused"
                if left_as and not control.is_aborted():
                    _keep(keeper, timer, emit, at, index, state)
            if left_as:
                break
            if may_compile or is_kept:
                may_compile = False
                emit(PhaseChanged("training", at.epoch))
    timer.lap("other")
    if left_as == "paused":
        emit(Paused(at.step, at.epoch, is_freed=True))
    return log, _stopped(control, emit) if left_as == "stopped" else left_as


def _begin(task: Task, emit: Callable[[Event], None], watch: CompileWatch) -> bool:
    """Train what the epoch trains; whether that is something else than the epoch before did."""
    at = task.position
    # an epoch that is taken up in its midst began before
    changes = [] if at.place else changes_at(task.config, task.image_size, at.epoch)
    task.begin_epoch(at.epoch)
    task.set_train_mode()
    watch.announce(changes)
    if changes:
        emit(StageBegan(at.step + 1, at.epoch, changes))
    return bool(changes)


def _keep(
    keeper: Keeper, timer: PhaseTimer, emit: Callable[[Event], None], at: Position, place: int, state: dict[str, Any]
) -> None:
    """Keep the run in mid-epoch, see `Keeper.keep_within`."""
    emit(PhaseChanged("saving", at.epoch))
    timer.lap("other")
    keeper.keep_within(place, state)


def _pause(log: StepLog, timer: PhaseTimer, emit: Callable[[Event], None], control: Control, at: Position) -> None:
    """Stand still until asked to go on, or to free the device; the time doesn't count."""
    emit(Paused(at.step, at.epoch))
    timer.lap("other")
    control.wait_while_paused()
    emit(Resumed(at.step, at.epoch, timer.skip()))
    log.go_on()


def evaluate(
    task: Task,
    timer: PhaseTimer,
    watch: CompileWatch,
    *,
    step: int = 0,
    epoch: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> Figures | None:
    """Loss and accuracy over the validation images, each counted once; back in training mode after.

    Args:
        step, epoch: after which this is, for what `watch` tells.
        should_stop: asked between batches; it is broken off then, and None is returned.
    """
    device, compile_s, figures = task.device, 0.0, None
    task.model.eval()
    with device.turn():
        sums = Sums(device)
    with torch.no_grad(), closing(task.val.epoch(0)) as batches:
        for batch in batches:
            with device.turn():
                evaluation_step(task, batch, sums)
                compile_s += watch.look("evaluation", step, epoch, shapes_of(batch))[1]
            if should_stop():
                break
        else:
            with device.turn():
                figures = sums.cut().totals().figures()
    task.set_train_mode()
    timer.lap("evaluation", compile_s=compile_s)
    return figures
