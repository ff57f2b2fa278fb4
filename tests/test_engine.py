"""The loop by the book, on real tensors and with a hand-cranked clock."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from core.config import make_config
from core.data.loader import PADDING_LABEL
from core.devices import open_device
from core.engine import Task, evaluate, fit
from core.errors import TrainingError
from core.events import EpochEnded, StepLogged
from core.metrics import top_k_correct
from core.optim import build_optimizer
from core.timing import PhaseTimer


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

    def epoch(self, number: int):
        yield from self.batches


class NoWishes:
    def should_stop(self) -> bool:
        return False


class StopAfter:
    def __init__(self, looks: int):
        self.looks = looks

    def should_stop(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def make_task(device_kind: str = "cpu", saved: list | None = None, num_val: int = 9, **changes) -> Task:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.arange(12) % 6
    config = make_config(epochs=2, batch_size=4, log_every=1, schedule="constant", **changes)
    torch.manual_seed(0)
    device = open_device(device_kind)
    model = device.place_model(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6))
    )
    return Task(
        config=config,
        device=device,
        model=model,
        optimizer=build_optimizer(config, model.parameters(), on_xla=device_kind == "xla"),
        train=FixedLoader(images, labels, 4),
        val=FixedLoader(images[:num_val], labels[:num_val], 4),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        num_classes=6,
        save=lambda which, epoch: (saved if saved is not None else []).append((which, epoch)),
        set_train_mode=lambda module: module.train(),
    )


def run(task: Task, control=None, clock=None):
    events = []
    state, phases = fit(task, emit=events.append, control=control or NoWishes(), clock=clock or TickClock())
    return state, phases, events


def losses(events) -> list[float]:
    return [event.loss for event in events if isinstance(event, StepLogged)]


def test_the_same_seed_gives_the_same_losses():
    assert losses(run(make_task())[2]) == losses(run(make_task())[2])


def test_every_second_of_an_epoch_belongs_to_a_phase():
    _, phases, events = run(make_task())
    for epoch in (event for event in events if isinstance(event, EpochEnded)):
        assert epoch.phases.total_s() == pytest.approx(epoch.seconds)
        assert epoch.phases.data_wait_s == 3.0 and epoch.phases.transfer_s == 3.0
    assert phases.total_s() > 0


def test_validation_counts_each_image_once_and_pads_count_for_nothing():
    task = make_task(num_val=9)
    figures = evaluate(task, PhaseTimer(TickClock()))
    task.model.eval()
    images = torch.cat([batch.images[: batch.num_real] for batch in task.val.batches])
    labels = torch.cat([batch.labels[: batch.num_real] for batch in task.val.batches])
    with torch.no_grad():
        logits = task.logits(images)
    assert figures.images == 9
    assert figures.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert figures.top1 == pytest.approx(100 * (logits.argmax(1) == labels).sum().item() / 9)


def test_the_model_is_in_training_mode_again_after_validation():
    task = make_task()
    evaluate(task, PhaseTimer(TickClock()))
    assert task.model.training


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step():
    task = make_task()
    with torch.no_grad():
        task.model[4].bias.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"nan at step 1 \(epoch 1\)"):
        run(task)


def test_a_stop_ends_after_the_current_step_and_saves():
    saved: list = []
    state, _, events = run(make_task(saved=saved), control=StopAfter(1))
    assert state == "stopped" and len(losses(events)) == 2
    assert saved == [("last", 0)]


def test_best_and_last_are_saved_each_epoch():
    saved: list = []
    run(make_task(saved=saved))
    assert [which for which, _ in saved].count("last") == 2 and ("best", 1) in saved


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.xla
def test_xla_trains_to_the_losses_of_the_cpu(optimizer: str):
    on_cpu, on_xla = (losses(run(make_task(kind, optimizer=optimizer))[2]) for kind in ("cpu", "xla"))
    assert on_xla == pytest.approx(on_cpu, rel=1e-4)


@pytest.mark.xla
def test_xla_compiles_one_training_and_one_evaluation_program():
    task = make_task("xla", optimizer="adamw")
    _, _, events = run(task)
    epochs = [event for event in events if isinstance(event, EpochEnded)]
    assert epochs[1].compile_count == 0


def test_top_k_is_capped_and_a_pad_label_never_counts():
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    assert top_k_correct(logits, torch.tensor([0, PADDING_LABEL]), k=5).item() == 1
    assert top_k_correct(logits, torch.tensor([1, 1]), k=1).item() == 1
