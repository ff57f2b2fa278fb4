"""A tiny task on real tensors: its parts are what the tests of the loop turn."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from core.config import make_config
from core.data.augment import Mix, Recipe, augment_pixels
from core.data.loader import PADDING_LABEL
from core.devices import open_device
from core.engine import evaluate, fit
from core.events import StepLogged
from core.optim import build_optimizer
from core.running.trainer import train_run
from core.store import Store
from core.timing import PhaseTimer
from core.training.compiles import CompileWatch
from core.training.ema import Ema
from core.training.task import Task


class TickClock:
    """Each look at the clock moves it by one second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@dataclass
class FixedBatch:
    images: torch.Tensor
    labels: torch.Tensor
    num_real: int
    mix: Mix | None = None


class FixedLoader:
    def __init__(self, images: torch.Tensor, labels: torch.Tensor, size: int):
        self.batches = []
        for start in range(0, len(images), size):
            part, names = images[start : start + size], labels[start : start + size]
            pad = size - len(part)
            self.batches.append(
                FixedBatch(
                    torch.cat([part, part[:1].expand(pad, -1, -1, -1)]),
                    torch.cat([names, torch.full((pad,), PADDING_LABEL)]),
                    len(part),
                )
            )

    @property
    def num_batches(self) -> int:
        return len(self.batches)

    def epoch(self, number: int, first: int = 0):
        yield from self.batches[first:]


class AugmentedLoader(FixedLoader):
    """The same batches, put through a recipe that draws anew in each epoch."""

    def __init__(self, loader: FixedLoader, recipe: Recipe):
        self.batches, self.recipe = loader.batches, recipe

    def epoch(self, number: int, first: int = 0):
        generator = np.random.default_rng(number)
        for place, batch in enumerate(self.batches):
            images, mix = augment_pixels(batch.images, self.recipe, generator, (128, 128, 128))
            if place >= first:
                yield FixedBatch(images, batch.labels, batch.num_real, mix)


class NoWishes:
    def should_stop(self) -> bool:
        return False

    def wishes(self) -> list:
        return []

    def should_pause(self) -> bool:
        return False

    def should_free(self) -> bool:
        return False

    def is_aborted(self) -> bool:
        return False

    def wait_while_paused(self) -> None:
        raise AssertionError("nobody asked for a pause")


class StopAfter(NoWishes):
    def __init__(self, looks: int):
        self.looks = looks

    def should_stop(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def make_task(
    device_kind: str = "cpu", saved: list | None = None, num_val: int = 9, width: int = 4, dropout: float = 0, **changes
) -> Task:
    """12 training images of 8 px in 6 classes, batches of 4, a model with BatchNorm; as `RunConfig` with `changes`.

    Args:
        width: channels; XLA keeps the programs of a process, so a test that counts them has a width of its own.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.arange(12) % 6
    config = make_config(**{"epochs": 2, "batch_size": 4, "log_every": 1, "schedule": "constant", **changes})
    torch.manual_seed(0)
    device = open_device(device_kind)

    def layers() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(3, width, 3),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(width * 36, 6),
        )

    with device.turn():
        module = layers()
        averaged = layers()
        averaged.load_state_dict(module.state_dict())
        model = device.place_model(module)
        ema = Ema(model, device.place_model(averaged), config.ema_decay) if config.ema_decay else None
        optimizer = build_optimizer(config, model, device)
    return Task(
        config=config,
        device=device,
        model=model,
        optimizer=optimizer,
        train=FixedLoader(images, labels, 4),
        val=FixedLoader(images[:num_val], labels[:num_val], 4),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        num_classes=6,
        save=lambda which, epoch: (saved if saved is not None else []).append((which, epoch)),
        set_train_mode=lambda: model.train(),
        precision=config.precision,
        ema=ema,
    )


def run(task: Task, control=None, clock=None):
    events = []
    timer = PhaseTimer(clock or TickClock())
    state = fit(task, emit=events.append, control=control or NoWishes(), timer=timer)
    return state, timer.phases(), events


def validate(task: Task):
    return evaluate(task, PhaseTimer(TickClock()), CompileWatch(task.device, lambda event: None))


def losses(events) -> list[float]:
    return [event.loss for event in events if isinstance(event, StepLogged)]


def stop_once_it_trains(store: Store, run_id: str) -> None:
    """Train a run in a thread, and ask through the store that it stop after its first logged step."""
    thread = threading.Thread(target=train_run, args=(store, run_id))
    thread.start()
    while not store.events(run_id, kinds=["StepLogged"]):
        assert thread.is_alive()
        time.sleep(0.05)
    store.request(run_id, "stop")
    thread.join(30)


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.function(features)
