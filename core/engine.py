"""The fine-tuning loop: batches in, events out; the same on every device.

No files, no threads and no clock of its own: what differs is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional

from core.config import RunConfig
from core.data.augment import Mix
from core.data.loader import PADDING_LABEL, Batch
from core.devices.base import Device
from core.errors import ConfigError, TrainingError
from core.events import EpochEnded, Event, PhaseChanged, Phases, StepLogged
from core.metrics import Figures, Sums, Totals
from core.optim import set_lr
from core.schedule import lr_at
from core.timing import PhaseTimer

SETTLING_STEPS = 2
"""Steps at the start of a run that throughput leaves out."""


class Loader(Protocol):
    """Batches of one epoch, all of one shape."""

    @property
    def num_batches(self) -> int: ...

    def epoch(self, epoch: int) -> Generator[Batch, None, None]: ...


class Control(Protocol):
    """What people ask of the run, read between steps."""

    def should_stop(self) -> bool: ...


@dataclass
class Task:
    """All that `fit` trains: built once in set-up, on its device.

    `save(which, epoch)` writes a checkpoint; `set_train_mode` keeps frozen parts in eval mode; `class_weights`,
    (classes,) float32, count in the training loss alone.
    """

    config: RunConfig
    device: Device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Loader
    val: Loader
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int
    save: Callable[[str, int], None]
    set_train_mode: Callable[[nn.Module], None]
    class_weights: Tensor | None = None

    def __post_init__(self) -> None:
        shape, place = (1, 3, 1, 1), self.device.torch_device
        self.shift = torch.tensor(self.mean).reshape(shape).to(place)
        self.scale = torch.tensor(self.std).reshape(shape).to(place)
        if self.class_weights is not None:
            self.class_weights = self.class_weights.to(place)
        self.scaler = GradScaler(place.type, enabled=self.config.precision == "fp16")

    def logits(self, images: Tensor, mix: Mix | None = None) -> Tensor:
        """Normalise uint8 images on the device, blend and classify them, as float32 (batch, classes)."""
        inputs = (images.float() / 255 - self.shift) / self.scale
        if mix is not None:
            inputs = mix_images(inputs, mix)
        if self.device.torch_device.type in ("cpu", "cuda"):
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with self.device.autocast(self.config.precision):
            output = self.model(inputs)
        return output.float()  # type: ignore[no-any-return]


@dataclass
class _Stretch:
    """Some steps: their images, their seconds, and what of those was data wait."""

    images: int = 0
    seconds: float = 0.0
    data_wait_s: float = 0.0

    def add(self, images: int, seconds: float, data_wait_s: float) -> None:
        self.images += images
        self.seconds += seconds
        self.data_wait_s += data_wait_s

    def per_s(self) -> float | None:
        return self.images / self.seconds if self.seconds > 0 else None


def fit(
    task: Task, *, emit: Callable[[Event], None], control: Control, clock: Callable[[], float]
) -> tuple[str, Phases]:
    """Train for the config's epochs, or until asked to stop.

    Returns:
        `finished` or `stopped`, and the phases of the time spent here.

    Raises:
        TrainingError: the loss is not finite; the step is named.
    """
    spent, best, step = Phases(), -1.0, 0
    for epoch in range(1, task.config.epochs + 1):
        timer = PhaseTimer(clock)
        compiles = task.device.compile_count()
        train, images_per_s, step, stopped = train_epoch(task, epoch, step, timer, emit, control)
        if stopped:
            emit(PhaseChanged("saving", epoch))
            task.save("last", epoch - 1)
            timer.lap("checkpoint")
            return "stopped", spent + timer.phases()
        emit(PhaseChanged("validating", epoch))
        val = evaluate(task, timer)
        emit(PhaseChanged("saving", epoch))
        if val.top1 > best:
            best = val.top1
            task.save("best", epoch)
        task.save("last", epoch)
        timer.lap("checkpoint")
        emit(
            EpochEnded(
                epoch=epoch,
                step=step,
                train_loss=train.loss,
                train_top1=train.top1,
                val_loss=val.loss,
                val_top1=val.top1,
                val_top5=val.top5 if task.num_classes > 5 else None,
                seconds=timer.total_s(),
                images_per_s=images_per_s,
                phases=timer.phases(),
                compile_count=task.device.compile_count() - compiles,
                lr=lr_at(task.config, step, task.train.num_batches),
            )
        )
        timer.lap("other")
        spent = spent + timer.phases()
        if control.should_stop() and epoch < task.config.epochs:
            return "stopped", spent
    return "finished", spent


def train_epoch(
    task: Task, epoch: int, step: int, timer: PhaseTimer, emit: Callable[[Event], None], control: Control
) -> tuple[Figures, float | None, int, bool]:
    """One pass over the training images.

    Returns:
        The epoch's means, its throughput over settled steps (images/s), the number of the last step, and
        whether it was asked to stop before the end.
    """
    device, config, steps = task.device, task.config, task.train.num_batches
    task.set_train_mode(task.model)
    sums, totals, stretch, settled = Sums(device.torch_device), Totals(), _Stretch(), _Stretch()
    compiles, compile_s = device.compile_count(), device.compile_seconds()
    stop = False
    emit(PhaseChanged("compiling" if step == 0 and device.kind == "xla" else "training", epoch))
    with closing(task.train.epoch(epoch)) as batches:
        timer.lap("other")
        for index, batch in enumerate(batches, start=1):
            step += 1
            data_wait_s = timer.lap("data_wait")
            images, labels = device.place_batch(batch.images, batch.labels)
            mix = batch.mix.to(device.torch_device) if batch.mix is not None else None
            transfer_s = timer.lap("transfer")
            lr = lr_at(config, step, steps)
            train_step(task, images, labels, mix, lr, sums)
            device.flush()
            stop = index < steps and control.should_stop()
            # wait only on log steps: waiting on each would stop XLA from tracing the next step meanwhile
            taken = None
            if step == 1 or step % config.log_every == 0 or index == steps or stop:
                device.wait()
                taken = sums.take()
            new_compile_s = device.compile_seconds() - compile_s
            compile_s += new_compile_s
            compute_s = timer.lap("compute", compile_s=new_compile_s)
            stretch.add(batch.num_real, data_wait_s + transfer_s + compute_s, data_wait_s)
            if taken is None:
                continue
            totals += taken
            new_compiles = device.compile_count() - compiles
            compiles += new_compiles
            is_settled = step > SETTLING_STEPS and not new_compiles
            if is_settled:
                settled.add(stretch.images, stretch.seconds, stretch.data_wait_s)
            emit(_step_logged(step, epoch, lr, taken.figures(), stretch, new_compiles, is_settled))
            if step == 1 and device.kind == "xla":
                emit(PhaseChanged("training", epoch))
            stretch = _Stretch()
            timer.lap("other")
            if stop:
                break
    timer.lap("other")
    return totals.figures(), settled.per_s(), step, stop


def _step_logged(
    step: int, epoch: int, lr: float, means: Figures, stretch: _Stretch, compiles: int, is_settled: bool
) -> StepLogged:
    if not math.isfinite(means.loss):
        raise TrainingError(
            f"The training loss is {means.loss} at step {step} (epoch {epoch}).",
            fix="Lower the learning rate, add warm-up epochs, or train in fp32.",
        )
    return StepLogged(
        step=step,
        epoch=epoch,
        loss=means.loss,
        top1=means.top1,
        lr=lr,
        images=means.images,
        seconds=stretch.seconds,
        data_wait_s=stretch.data_wait_s,
        images_per_s=stretch.per_s() if is_settled else None,
        compiles=compiles,
    )


def train_step(task: Task, images: Tensor, labels: Tensor, mix: Mix | None, lr: float, sums: Sums) -> None:
    """One optimizer update; its loss and hits are added to `sums`, and nothing is fetched.

    A hit of an image that is mixed counts against its own label, so training top-1 is low where images are mixed.
    """
    set_lr(task.optimizer, lr)
    task.optimizer.zero_grad(set_to_none=True)
    logits = _training_logits(task, images, mix)
    loss = mixed_loss(logits, labels, mix, weight=task.class_weights, label_smoothing=task.config.label_smoothing)
    if task.scaler.is_enabled():
        task.scaler.scale(loss).backward()
        task.scaler.step(task.optimizer)
        task.scaler.update()
    else:
        loss.backward()
        task.device.optimizer_step(task.optimizer)
    sums.add(loss * labels.shape[0], logits.detach(), labels, labels.shape[0])


def _training_logits(task: Task, images: Tensor, mix: Mix | None) -> Tensor:
    try:
        return task.logits(images, mix)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ConfigError(
            f"A batch of {len(images)} at this image size leaves BatchNorm a single value for each channel.",
            fix="Choose a larger batch size or image size.",
        ) from error


def mix_images(images: Tensor, mix: Mix) -> Tensor:
    """Blend float images (batch, 3, height, width), each with the one before it."""
    weight = mix.pixel_weight
    return images * weight + images.roll(1, 0) * (1 - weight)


def mixed_loss(
    logits: Tensor, labels: Tensor, mix: Mix | None, *, weight: Tensor | None, label_smoothing: float
) -> Tensor:
    """Mean cross-entropy against the labels, or against the blend of each label with the one before it.

    Args:
        logits: (batch, classes) float32.
        labels: (batch,) class indices.
        weight: (classes,), what each class counts; the mean is over weights, and None counts all alike.

    Returns:
        A 0-d tensor on the logits' device.
    """
    own = functional.cross_entropy(logits, labels, weight=weight, label_smoothing=label_smoothing)
    if mix is None:
        return own
    other = functional.cross_entropy(logits, labels.roll(1, 0), weight=weight, label_smoothing=label_smoothing)
    return (own * mix.label_weight + other * (1 - mix.label_weight)).squeeze(0)


def evaluate(task: Task, timer: PhaseTimer) -> Figures:
    """Loss and accuracy over the validation images, each counted once; back in training mode after."""
    device = task.device
    task.model.eval()
    sums, compile_s = Sums(device.torch_device), device.compile_seconds()
    with torch.no_grad(), closing(task.val.epoch(0)) as batches:
        for batch in batches:
            images, labels = device.place_batch(batch.images, batch.labels)
            logits = task.logits(images)
            loss_sum = functional.cross_entropy(logits, labels, ignore_index=PADDING_LABEL, reduction="sum")
            sums.add(loss_sum, logits, labels, batch.num_real)
            device.flush()
        device.wait()
        figures = sums.take().figures()
    task.set_train_mode(task.model)
    timer.lap("evaluation", compile_s=device.compile_seconds() - compile_s)
    return figures
