"""What is trained, and one step of it: the same on every device."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from core.config import RunConfig
from core.data.augment import Mix
from core.data.loader import PADDING_LABEL, Batch
from core.devices.base import Device
from core.errors import ConfigError
from core.metrics import Sums
from core.models.parts import choose_trainable
from core.optim import make_momentum, set_lr
from core.schedule import image_size_at
from core.stages import trainable_at
from core.training.compiles import Shapes
from core.training.ema import Ema
from core.training.state import Position


class Loader(Protocol):
    """Batches of one epoch, all of one shape."""

    @property
    def num_batches(self) -> int: ...

    def epoch(self, epoch: int, first: int = 0) -> Generator[Batch, None, None]:
        """From the place `first` on."""


@dataclass
class Task:
    """All that `fit` trains: built once in set-up, on its device.

    `save(which, epoch)` writes a checkpoint, and `keep(position)` all that is needed to go on from there; `position` is
    where the run stands: not at its beginning where it is taken up again; `set_train_mode()` puts the model into
    training mode, save for frozen parts; `class_weights`, (classes,) float32, count in the training loss alone;
    `precision` is fp32, bf16 or fp16;
    `ema`, where there is one, is what is validated; `is_packing` says whether pictures are still being decoded and
    packed beside the training; `lr_factor` multiplies the schedule's learning rates; `image_size` is the side of
    images at their full size in pixels, and `resize(side)` has epochs that begin from then on train on another one.

    Attributes:
        module: the model that was given; `model` is what is called, which wraps it where processes share a batch.
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
    set_train_mode: Callable[[], None]
    class_weights: Tensor | None = None
    precision: str = "fp32"
    ema: Ema | None = None
    is_packing: Callable[[], bool] = lambda: False
    lr_factor: float = 1.0
    position: Position = field(default_factory=Position)
    keep: Callable[[Position], None] = lambda position: None
    image_size: int = 0
    resize: Callable[[int], None] = lambda side: None
    module: nn.Module = field(init=False)
    _trainable: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.module = self.model
        with self.device.turn():
            self.model = self.device.share_model(self.module)
            self._place()
        self.scaler = GradScaler(self.device.torch_device.type, enabled=self.precision == "fp16")

    def _place(self) -> None:
        shape, place = (1, 3, 1, 1), self.device.place
        self.shift, self.scale = (place(torch.tensor(three).reshape(shape)) for three in (self.mean, self.std))
        if self.class_weights is not None:
            self.class_weights = place(self.class_weights)
        self._make_gradients()

    def _make_gradients(self) -> None:
        if self.config.accumulate > 1:
            # gradients that are there before the first part, so that all parts are one program of XLA
            for parameter in self.trained():
                # laid out in memory as the weights are, which torch's fused optimizers rely upon
                parameter.grad = self.device.place(torch.zeros_like(parameter, device="cpu"))

    def begin_epoch(self, epoch: int) -> None:
        """Train what this epoch trains, on images of its size; also where an epoch is taken up in its midst.

        What is not trained any more has no gradient, so that optimizers pass it over. Call it before `set_train_mode`.
        """
        config = self.config
        if config.first_image_size:
            self.resize(image_size_at(config, self.image_size, epoch))
        trainable = trainable_at(config.trainable, config.trainable_from, epoch)
        if not config.trainable_from or trainable == self._trainable:
            return
        self._trainable = trainable
        with self.device.turn():
            choose_trainable(self.module, trainable)
            for parameter in self.module.parameters():
                parameter.grad = None
            self._make_gradients()
            make_momentum(self.optimizer)
            # what exchanges gradients must know which there are
            self.model = self.device.share_model(self.module)

    def trained(self) -> list[nn.Parameter]:
        """The parameters that are trained at present."""
        groups = self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]

    def logits(self, images: Tensor, mix: Mix | None = None, *, model: nn.Module | None = None) -> Tensor:
        """Normalise uint8 images on the device, blend and classify them, as float32 (batch, classes)."""
        inputs = (images.float() / 255 - self.shift) / self.scale
        if mix is not None:
            inputs = mix_images(inputs, mix)
        if self.device.torch_device.type in ("cpu", "cuda"):
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with self.device.autocast(self.precision):
            output = (model or self.model)(inputs)
        return output.float()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Part:
    """A batch on the device, or one of the parts in which it goes through the model.

    Attributes:
        images, labels: as the device holds them; the share of this process where several share a batch.
        weight: its share of the batch.
        num_images: that count in it, of all processes.
    """

    images: Tensor
    labels: Tensor
    mix: Mix | None
    weight: float
    num_images: int


def place_parts(task: Task, batch: Batch) -> list[Part]:
    """Send a training batch, in as many parts as the config accumulates."""
    size, device = batch.labels.shape[0], task.device
    mix = batch.mix.placed(device.place) if batch.mix is not None else None
    parts = []
    for images, labels in zip(
        batch.images.chunk(task.config.accumulate), batch.labels.chunk(task.config.accumulate), strict=True
    ):
        placed_images, placed_labels = device.place_batch(images, labels)
        parts.append(Part(placed_images, placed_labels, mix, len(labels) / size, len(labels)))
    return parts


def shapes_of(batch: Batch) -> Shapes:
    """The shape of all that a step is fed with, by name."""
    shapes = {"images": tuple(batch.images.shape), "labels": tuple(batch.labels.shape)}
    if batch.mix is not None:
        shapes["mix"] = tuple(batch.mix.pixel_weight.shape)
    return shapes


def train_step(task: Task, parts: list[Part], lr: float, step: int, sums: Sums) -> None:
    """One optimizer update, sent to the device; its loss and hits are added to `sums`, and nothing is fetched.

    A hit of an image that is mixed counts against its own label, so training top-1 is low where images are mixed.
    """
    optimizer, is_whole = task.optimizer, len(parts) == 1
    set_lr(optimizer, lr)
    if is_whole:
        optimizer.zero_grad(set_to_none=True)
    for part in parts:
        with _exchange(task.model, is_due=part is parts[-1]):
            logits = _training_logits(task, part)
            loss = _training_loss(task, part, logits)
            task.scaler.scale(loss if is_whole else loss * part.weight).backward()
        sums.add(loss * part.labels.shape[0], logits.detach(), part.labels, part.num_images)
        if not is_whole:
            task.device.flush()
    _update(task)
    if task.ema is not None:
        task.ema.update(step)
    if not is_whole:
        optimizer.zero_grad(set_to_none=False)
    task.device.flush()


def _update(task: Task) -> None:
    scaler, optimizer = task.scaler, task.optimizer
    if task.config.clip_grad_norm:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(task.trained(), task.config.clip_grad_norm)
    if scaler.is_enabled():
        scaler.step(optimizer)
        scaler.update()
    else:
        task.device.optimizer_step(optimizer)


def _exchange(model: nn.Module, *, is_due: bool) -> AbstractContextManager[None]:
    """A forward and backward after which processes that share a batch have exchanged gradients, or not yet."""
    if is_due or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    unsynced: AbstractContextManager[None] = model.no_sync()
    return unsynced


def _training_loss(task: Task, part: Part, logits: Tensor) -> Tensor:
    """The loss of this process's rows, such that its mean over processes is the loss of the whole part."""
    weights, device = task.class_weights, task.device
    loss = mixed_loss(logits, part.labels, part.mix, weight=weights, label_smoothing=task.config.label_smoothing)
    if weights is None or device.num_processes == 1:
        return loss
    # it is a mean over the weights of these rows, which differ from process to process
    own = weights[part.labels].sum()
    return loss * (own * device.num_processes / device.add_up(own))


def _training_logits(task: Task, part: Part) -> Tensor:
    try:
        return task.logits(part.images, part.mix)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ConfigError(
            f"A batch of {len(part.images)} at this image size leaves BatchNorm a single value for each channel.",
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


def evaluation_step(task: Task, batch: Batch, sums: Sums) -> None:
    """Loss and hits of a validation batch are added to `sums`; padding counts for nothing. Call it under `no_grad`."""
    images, labels = task.device.place_batch(batch.images, batch.labels)
    logits = task.logits(images, model=task.ema.module if task.ema else None)
    loss_sum = functional.cross_entropy(logits, labels, ignore_index=PADDING_LABEL, reduction="sum")
    sums.add(loss_sum, logits, labels, batch.num_real)
    task.device.flush()
