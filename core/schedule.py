"""The learning rate of every step, as a pure function of the config."""

from __future__ import annotations

import math

from core.config import RunConfig

ONECYCLE_RISE = 0.3
ONECYCLE_START = 1 / 25
ONECYCLE_END = 1e-4


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
