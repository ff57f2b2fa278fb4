"""The learning rate of every step and the image size of every epoch, as pure functions of the config."""

from __future__ import annotations

import math

from core.config import RunConfig
from core.stages import TRAINABLE_WORDS, trainable_at

ONECYCLE_RISE = 0.3
ONECYCLE_START = 1 / 25
ONECYCLE_END = 1e-4
FULL_SIZE_SHARE = 3
"""One of so many epochs, the last ones, sees images of the full size."""
LARGE_SIZE, LARGE_RISE, SMALL_RISE = 128, 32, 16
"""Images grow by 32 px, where they are to become 128 px or larger, else by 16 px: most models halve them five times,
and each size is a program of its own on XLA."""


def lr_at(config: RunConfig, step: int, steps_per_epoch: int) -> float:
    """The learning rate of a step.

    The warm-up rises in a line to the schedule's first value, which is `config.lr` for all but onecycle
    (it starts at 1/25 of it); its last step has that value. The schedule then covers the steps that are left.

    Args:
        step: 1 or more; steps past the run's end keep the last step's rate.
        steps_per_epoch: 1 or more.

    Returns:
        Above 0 for every step: cosine reaches 0 one step after the last.
    """
    total = config.epochs * steps_per_epoch
    warmup = round(config.warmup_epochs * steps_per_epoch)
    left = max(1, total - warmup)
    if step <= warmup:
        return _scheduled(config, 0, left, steps_per_epoch) * step / warmup
    return _scheduled(config, min(step - warmup - 1, left - 1), left, steps_per_epoch)


def image_size_at(config: RunConfig, full: int, epoch: int) -> int:
    """The side of the training images in an epoch, in pixels.

    From the first image size it grows evenly in steps of `LARGE_RISE` or `SMALL_RISE`, rounded down, and is full in
    the last third of the epochs, which is at least one.

    Args:
        full: the run's image size.
        epoch: from 1; those past the run's end are at full size.
    """
    growing = config.epochs - -(-config.epochs // FULL_SIZE_SHARE)
    if config.first_image_size is None or epoch > growing:
        return full
    rise, missing = _rise(full), full - config.first_image_size
    return config.first_image_size + missing * (epoch - 1) // (growing * rise) * rise


def changes_at(config: RunConfig, full: int, epoch: int) -> list[str]:
    """What is new in an epoch, in words: what is trained, and how large its images are; empty for the first one.

    Args:
        full: the run's image size, in pixels.
    """
    if epoch < 2:
        return []
    trained = [trainable_at(config.trainable, config.trainable_from, at) for at in (epoch - 1, epoch)]
    sizes = [image_size_at(config, full, at) for at in (epoch - 1, epoch)]
    return [
        *([f"what is trained changed to {TRAINABLE_WORDS[trained[1]]}"] if trained[0] != trained[1] else []),
        *([f"the size of images changed to {sizes[1]} px"] if sizes[0] != sizes[1] else []),
    ]


def changes_between_epochs(config: RunConfig) -> bool:
    """Whether epochs differ in what they do, and so in how long they take and which programs they compile."""
    return bool(config.trainable_from or config.first_image_size)


def smaller_sizes(config: RunConfig, full: int) -> list[int]:
    """All sizes below the full one that training images can have in a run, whatever its number of epochs becomes."""
    return list(range(config.first_image_size, full, _rise(full))) if config.first_image_size else []


def _rise(full: int) -> int:
    return LARGE_RISE if full >= LARGE_SIZE else SMALL_RISE


def _scheduled(config: RunConfig, index: int, total: int, steps_per_epoch: int) -> float:
    if config.schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * index / total)) / 2
    if config.schedule == "step":
        return float(config.lr * config.step_factor ** (index // (config.step_epochs * steps_per_epoch)))
    if config.schedule == "onecycle":
        return _onecycle(config.lr, index, total)
    return config.lr


def _onecycle(peak: float, index: int, total: int) -> float:
    start = peak * ONECYCLE_START
    top = ONECYCLE_RISE * total - 1
    if index <= top:
        return _anneal(start, peak, index / top)
    return _anneal(peak, start * ONECYCLE_END, (index - top) / (total - 1 - top))


def _anneal(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))
