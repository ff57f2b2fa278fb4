"""The learning rate of every step, held against torch's own schedulers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as torch_schedules

from core.config import make_config
from core.schedule import lr_at


def torch_rates(build: Callable[[Optimizer], torch_schedules.LRScheduler], steps: int, lr: float) -> list[float]:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = build(optimizer)
        rates = []
        for index in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if index + 1 < steps:
                scheduler.step()
    return rates


def our_rates(steps_per_epoch: int, **changes: object) -> list[float]:
    config = make_config(**changes)
    return [lr_at(config, step, steps_per_epoch) for step in range(1, config.epochs * steps_per_epoch + 1)]


def test_constant_stays_at_the_peak():
    assert our_rates(4, schedule="constant", epochs=2, lr=0.1) == [0.1] * 8


@pytest.mark.parametrize(("epochs", "steps_per_epoch"), [(1, 1), (3, 7), (5, 250)])
def test_cosine_equals_torch_and_never_reaches_zero(epochs, steps_per_epoch):
    total = epochs * steps_per_epoch
    expected = torch_rates(lambda o: torch_schedules.CosineAnnealingLR(o, T_max=total), total, 0.1)
    ours = our_rates(steps_per_epoch, schedule="cosine", epochs=epochs, lr=0.1)
    assert ours == pytest.approx(expected, rel=1e-6)
    assert min(ours) > 0


def test_step_equals_torch():
    expected = torch_rates(lambda o: torch_schedules.StepLR(o, step_size=2 * 5, gamma=0.5), 35, 0.1)
    assert our_rates(5, schedule="step", step_epochs=2, step_factor=0.5, epochs=7, lr=0.1) == pytest.approx(expected)


@pytest.mark.parametrize("total", [1, 2, 3, 4, 10, 37, 1000])
def test_onecycle_equals_torch(total):
    expected = torch_rates(lambda o: torch_schedules.OneCycleLR(o, max_lr=0.1, total_steps=total), total, 0.1)
    assert our_rates(total, schedule="onecycle", epochs=1, lr=0.1) == pytest.approx(expected)


def test_warm_up_then_cosine_equals_torch():
    def build(optimizer: Optimizer) -> torch_schedules.LRScheduler:
        rise = torch_schedules.LinearLR(optimizer, start_factor=1 / 10, total_iters=9)
        fall = torch_schedules.CosineAnnealingLR(optimizer, T_max=20)
        return torch_schedules.SequentialLR(optimizer, [rise, fall], milestones=[10])

    ours = our_rates(10, schedule="cosine", warmup_epochs=1, epochs=3, lr=0.1)
    assert ours == pytest.approx(torch_rates(build, 30, 0.1))


def test_fractions_of_a_warm_up_epoch_count():
    assert our_rates(4, schedule="constant", warmup_epochs=0.5, epochs=1, lr=0.1) == [0.05, 0.1, 0.1, 0.1]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step", "onecycle"])
def test_warm_up_meets_the_schedule_without_a_jump(schedule):
    config = make_config(schedule=schedule, warmup_epochs=1, epochs=3, lr=0.1)
    assert lr_at(config, 10, 10) == pytest.approx(lr_at(config, 11, 10))


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step", "onecycle"])
def test_steps_past_the_end_keep_the_last_rate(schedule):
    config = make_config(schedule=schedule, epochs=2)
    assert lr_at(config, 21, 10) == lr_at(config, 20, 10) > 0
