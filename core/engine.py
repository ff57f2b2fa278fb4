"""The fine-tuning loop: batches in, events out; the same on every device.

No files, no threads and no clock of its own: what differs is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import count

import torch

from core.compiles import CompileWatch
from core.control import Control
from core.events import EndedEarly, EpochEnded, Event, Paused, PhaseChanged, Resumed
from core.metrics import Figures, Sums
from core.schedule import lr_at
from core.step_log import StepLog
from core.task import Task, evaluation_step, place_parts, shapes_of, train_step
from core.timing import PhaseTimer
from core.tweak import fulfil


def fit(task: Task, *, emit: Callable[[Event], None], control: Control, timer: PhaseTimer) -> str:
    """Train for the config's epochs, until its patience is at an end, or until asked to stop.

    Args:
        timer: is given all time spent here, also of an epoch that fails.

    Returns:
        `finished` or `stopped`.

    Raises:
        TrainingError: the loss is not finite; the step is named.
    """
    best, best_epoch, step = -1.0, 0, 0
    watch = CompileWatch(task.device, emit)
    for epoch in count(1):
        spent, began_s = timer.phases(), timer.total_s()
        compiles = task.device.compile_count()
        trained, step, is_whole = train_epoch(task, epoch, step, timer, emit, control, watch)
        if not is_whole:
            emit(PhaseChanged("saving", epoch))
            task.save("last", epoch - 1)
            timer.lap("checkpoint")
            return "stopped"
        emit(PhaseChanged("validating", epoch))
        val = evaluate(task, timer, watch, step=step, epoch=epoch)
        emit(PhaseChanged("saving", epoch))
        if val.top1 > best:
            best, best_epoch = val.top1, epoch
            task.save("best", epoch)
        task.save("last", epoch)
        timer.lap("checkpoint")
        train = trained.totals.figures()
        emit(
            EpochEnded(
                epoch=epoch,
                step=step,
                train_loss=train.loss,
                train_top1=train.top1,
                val_loss=val.loss,
                val_top1=val.top1,
                val_top5=val.top5 if task.num_classes > 5 else None,
                seconds=timer.total_s() - began_s,
                images_per_s=trained.images_per_s(),
                phases=timer.phases() - spent,
                compile_count=task.device.compile_count() - compiles,
                lr=task.lr_factor * lr_at(task.config, step, task.train.num_batches),
                step_times=trained.step_times.counts(),
                left_out=dict(trained.left_out),
                device_idle_s=trained.idle_s,
            )
        )
        timer.lap("other")
        if epoch >= task.config.epochs:
            break
        if task.config.patience and epoch - best_epoch >= task.config.patience:
            emit(EndedEarly(f"No epoch after epoch {best_epoch} had a better validation top-1."))
            break
        if control.should_stop():
            return "stopped"
    return "finished"


def train_epoch(
    task: Task,
    epoch: int,
    step: int,
    timer: PhaseTimer,
    emit: Callable[[Event], None],
    control: Control,
    watch: CompileWatch,
) -> tuple[StepLog, int, bool]:
    """One pass over the training images.

    Returns:
        What was logged of the epoch, the number of the last step, and whether it came to its end, unasked to stop.
    """
    device, steps = task.device, task.train.num_batches
    task.set_train_mode()
    may_compile = step == 0 and device.kind == "xla"
    emit(PhaseChanged("compiling" if may_compile else "training", epoch))
    stop = False
    log = StepLog(task, epoch, timer, emit)
    with closing(task.train.epoch(epoch)) as batches:
        for index, batch in enumerate(batches, start=1):
            step += 1
            log.has_batch(timer.lap("data_wait"))
            for wish in control.wishes():
                emit(fulfil(task, wish, step=step, epoch=epoch))
            lr = task.lr_factor * lr_at(task.config, step, steps)
            with device.turn():
                timer.lap("other")
                parts = place_parts(task, batch)
                timer.lap("transfer")
                train_step(task, parts, lr, step, log.sums)
                compiles, compile_s = watch.look("training", step, epoch, shapes_of(batch))
                timer.lap("compute", compile_s=compile_s)
                log.sent(batch.num_real, compiles)
                stop = index < steps and control.should_stop()
                is_last = index == steps or stop
                pauses = not is_last and control.should_pause()
                if step == 1 or step % task.config.log_every == 0 or is_last or pauses:
                    log.cut(step, lr)
                if step == 1 or is_last or pauses:
                    log.finish(is_all=is_last or pauses)
            if pauses:
                _pause(log, timer, emit, control, step, epoch)
                stop = control.should_stop()
            if may_compile:
                may_compile = False
                emit(PhaseChanged("training", epoch))
            if stop:
                break
    timer.lap("other")
    return log, step, not stop


def _pause(
    log: StepLog, timer: PhaseTimer, emit: Callable[[Event], None], control: Control, step: int, epoch: int
) -> None:
    """Stand still until asked to go on; the time doesn't count."""
    emit(Paused(step, epoch))
    timer.lap("other")
    control.wait_while_paused()
    emit(Resumed(step, epoch, timer.skip()))
    log.go_on()


def evaluate(task: Task, timer: PhaseTimer, watch: CompileWatch, *, step: int = 0, epoch: int = 0) -> Figures:
    """Loss and accuracy over the validation images, each counted once; back in training mode after.

    Args:
        step, epoch: after which this is, for what `watch` tells.
    """
    device, compile_s = task.device, 0.0
    task.model.eval()
    with device.turn():
        sums = Sums(device)
    with torch.no_grad(), closing(task.val.epoch(0)) as batches:
        for batch in batches:
            with device.turn():
                evaluation_step(task, batch, sums)
                compile_s += watch.look("evaluation", step, epoch, shapes_of(batch))[1]
        with device.turn():
            figures = sums.cut().totals().figures()
    task.set_train_mode()
    timer.lap("evaluation", compile_s=compile_s)
    return figures
