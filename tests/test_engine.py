"""The loop by the book, on real tensors and with a hand-cranked clock."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from core.data.augment import Mix, Recipe
from core.data.loader import PADDING_LABEL
from core.data.sampling import class_weights
from core.errors import TrainingError
from core.events import EndedEarly, EpochEnded, StepLogged
from core.metrics import Figures, top_k_correct
from core.training.task import Task, mix_images, mixed_loss
from tests.tiny import AugmentedLoader, StopAfter, losses, make_task, run, validate


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
    figures = validate(task)
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
    validate(task)
    assert task.model.training


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step():
    task = make_task()
    with torch.no_grad():
        task.model[5].bias.fill_(float("nan"))
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


def a_mix(pixel_weight: float, label_weight: float) -> Mix:
    return Mix(torch.tensor([pixel_weight]), torch.tensor([label_weight]))


def test_images_are_blended_with_the_one_before_them():
    images = torch.tensor([0.0, 4.0, 8.0]).reshape(3, 1, 1, 1).expand(3, 3, 2, 2)
    blended = mix_images(images, a_mix(0.75, 0.5))
    assert blended[:, 0, 0, 0].tolist() == [0.25 * 8, 0.75 * 4, 0.75 * 8 + 0.25 * 4]
    assert torch.equal(mix_images(images, a_mix(1.0, 0.5)), images)


def test_the_gradient_of_a_mixed_loss_is_that_of_blended_targets():
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([0, 1, 2, 1])
    mixed_loss(logits, labels, a_mix(1.0, 0.7), weight=None, label_smoothing=0.0).backward()
    one_hot = torch.eye(3)[labels]
    targets = 0.7 * one_hot + 0.3 * torch.stack([one_hot[3], one_hot[0], one_hot[1], one_hot[2]])
    torch.testing.assert_close(logits.grad, (logits.detach().softmax(1) - targets) / 4)


def test_a_mixed_loss_without_a_mix_is_smoothed_weighted_cross_entropy():
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    labels, weight = torch.tensor([0, 1, 2, 1]), torch.tensor([1.0, 2.0, 0.5])
    targets = 0.9 * torch.eye(3)[labels] + 0.1 / 3
    by_hand = -(targets * weight * logits.log_softmax(1)).sum() / weight[labels].sum()
    assert mixed_loss(logits, labels, None, weight=weight, label_smoothing=0.1).item() == pytest.approx(by_hand.item())


def test_class_weights_count_in_training_alone():
    plain, weighted = make_task(), make_task()
    weighted.class_weights = torch.tensor([9.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert validate(plain) == validate(weighted)
    assert losses(run(plain)[2])[0] != losses(run(weighted)[2])[0]


def test_a_mix_changes_what_is_learned():
    recipe = Recipe(mixup=1.0)
    plain, mixed = make_task(), make_task()
    mixed.train = AugmentedLoader(mixed.train, recipe)
    assert losses(run(plain)[2])[0] != losses(run(mixed)[2])[0]


ALL_AT_ONCE = Recipe(random_erasing=0.5, color_jitter=0.3, auto_augment="trivialaugment", mixup=0.4, cutmix=1.0)


def augmented_task(device_kind: str, **changes) -> Task:
    task = make_task(device_kind, label_smoothing=0.1, **changes)
    task.class_weights = task.device.place(class_weights(np.array([0, 0, 1, 2, 3, 4, 5, 5]), 6))
    task.train = AugmentedLoader(task.train, ALL_AT_ONCE)
    return task


@pytest.mark.xla
def test_xla_trains_augmented_to_the_losses_of_the_cpu():
    on_cpu, on_xla = (losses(run(augmented_task(kind))[2]) for kind in ("cpu", "xla"))
    assert on_xla == pytest.approx(on_cpu, rel=1e-4)


@pytest.mark.xla
def test_xla_compiles_one_training_program_for_all_augmentation():
    # an optimizer that no other augmented test has: XLA keeps the programs of this process
    task = augmented_task("xla", optimizer="adam")
    is_cutmix = {batch.mix.pixel_weight.item() == 1 for epoch in (1, 2) for batch in task.train.epoch(epoch)}
    assert is_cutmix == {True, False}
    _, _, events = run(task)
    compiles = [event.compiles for event in events if isinstance(event, StepLogged)]
    epochs = [event for event in events if isinstance(event, EpochEnded)]
    assert compiles == [1, 0, 0, 0, 0, 0]
    assert epochs[1].compile_count == 0


@pytest.mark.parametrize(("patience", "ended_at"), [(0, 8), (1, 4), (2, 5), (3, 8), (7, 8)])
def test_patience_ends_a_run_after_exactly_so_many_epochs_without_a_better_one(
    patience: int, ended_at: int, monkeypatch: pytest.MonkeyPatch
):
    top1 = iter([10.0, 20.0, 30.0, 30.0, 25.0, 31.0, 31.0, 30.0])
    task, saved = make_task(epochs=8, patience=patience), []
    task.save = lambda which, epoch: saved.append((which, epoch))
    monkeypatch.setattr("core.engine.evaluate", lambda *_, **__: Figures(1.0, next(top1), 0.0, 9))
    state, _, events = run(task)
    epochs = [event.epoch for event in events if isinstance(event, EpochEnded)]
    assert (state, epochs[-1]) == ("finished", ended_at)
    assert [isinstance(event, EndedEarly) for event in events].count(True) == (ended_at < 8)
    assert ("last", ended_at) in saved and ("best", 3) in saved
