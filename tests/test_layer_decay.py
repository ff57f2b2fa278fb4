"""Learning rates that fall from the head down: which layer a parameter is in, and what it does to a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from core.analysis.summary import summarise
from core.config import make_config
from core.control import Wish
from core.devices import open_device
from core.events import ProgramCompiled
from core.models.build import build_model
from core.models.parts import layer_numbers
from core.optim import build_optimizer, set_lr
from core.running.trainer import train_run
from core.store import Store
from core.training.task import Task
from core.training.tweak import fulfil
from tests.test_groups import tiny
from tests.tiny import losses, make_task, run


def built(name: str, trainable: str = "all") -> nn.Module:
    return build_model(name, num_classes=5, weights="none", image_size=64, trainable=trainable, seed=0).module


@pytest.mark.parametrize(
    ("name", "first", "head", "count"),
    [
        ("timm/test_resnet", "conv1.0.weight", "fc.weight", 6),
        ("timm/test_vit", "patch_embed.proj.weight", "head.weight", 8),
        ("tf_efficientnet_lite0", "conv_stem.weight", "classifier.weight", 18),
        ("torchvision/resnet18", "bn1.weight", "fc.bias", 10),
        ("torchvision/densenet121", "features.norm0.weight", "classifier.weight", 9),
        ("torchvision/vit_b_16", "class_token", "heads.head.weight", 14),
    ],
)
def test_layers_go_from_the_first_one_up_to_the_head(name: str, first: str, head: str, count: int):
    module = built(name)
    numbers = layer_numbers(module)
    assert numbers.keys() == dict(module.named_parameters()).keys()
    assert (numbers[first], numbers[head]) == (0, count - 1)
    assert sorted(set(numbers.values())) == list(range(count))


@pytest.mark.parametrize("name", ["timm/test_resnet", "torchvision/resnet18"])
def test_each_layer_has_a_share_of_the_rate_of_the_one_above_it_and_all_the_same_weight_decay(name: str):
    module, device = built(name), open_device("cpu")
    config = make_config(layer_decay=0.5, weight_decay=0.03)
    optimizer = build_optimizer(config, device.place_model(module), device)
    set_lr(optimizer, 0.8)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates[-1] == 0.8 and rates == [0.8 * 0.5**place for place in reversed(range(len(rates)))]
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.03}
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(map(id, module.parameters()))


def test_layers_that_are_not_trained_count_all_the_same():
    device = open_device("cpu")
    whole, last = (
        build_optimizer(make_config(layer_decay=0.5), built("torchvision/resnet18", part), device)
        for part in ("all", "last")
    )
    scales = [group["lr_scale"] for group in whole.param_groups]
    assert [group["lr_scale"] for group in last.param_groups] == scales[-4:] == [0.125, 0.25, 0.5, 1.0]


def test_without_it_there_is_one_group_as_ever():
    [group] = make_task(layer_decay=1.0).optimizer.param_groups
    assert "lr_scale" not in group and len(group["params"]) == 6


@pytest.mark.parametrize("kind", ["cpu", pytest.param("xla", marks=pytest.mark.xla)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_moves_each_layer_by_its_share(kind: str, optimizer: str):
    def after_a_step(layer_decay: float) -> tuple[Task, list[torch.Tensor]]:
        task = make_task(
            kind, width=84, epochs=1, optimizer=optimizer, momentum=0.0, weight_decay=0.0, layer_decay=layer_decay,
            lr=1e-3,
        )  # fmt: skip
        before = [parameter.detach().cpu().clone() for parameter in task.module.parameters()]
        task.train.batches = task.train.batches[:1]
        run(task)
        return task, [
            parameter.detach().cpu() - old for parameter, old in zip(task.module.parameters(), before, strict=True)
        ]

    task, shared = after_a_step(0.5)
    numbers, (_, whole) = layer_numbers(task.module), after_a_step(1.0)
    assert list(numbers.values()) == [0, 0, 0, 0, 1, 1]
    for number, mine, full in zip(numbers.values(), shared, whole, strict=True):
        # differences of weights near 1 keep four digits
        torch.testing.assert_close(mine, full * 0.5 ** (1 - number), rtol=1e-3, atol=2e-7)


def test_a_change_of_the_weight_decay_reaches_all_layers_and_one_of_the_rate_keeps_their_shares():
    task = make_task(layer_decay=0.5, lr=0.1)
    fulfil(task, Wish("weight_decay", 0.2), step=1, epoch=1)
    fulfil(task, Wish("lr", 0.05), step=1, epoch=1)
    set_lr(task.optimizer, task.lr_factor * 0.1)
    assert [group["weight_decay"] for group in task.optimizer.param_groups] == [0.2] * 2
    assert [group["lr"] for group in task.optimizer.param_groups] == pytest.approx([0.025, 0.05])


@pytest.mark.xla
@pytest.mark.parametrize(("optimizer", "width"), [("adamw", 85), ("sgd", 86)])
def test_on_xla_warm_up_and_cosine_over_all_layers_compile_one_program_each(optimizer: str, width: int):
    changes = {"epochs": 4, "schedule": "cosine", "warmup_epochs": 1.0, "layer_decay": 0.75, "optimizer": optimizer}
    # the rate of one layer or another meets the weight decay, BatchNorm's momentum and 1 on its way
    task = make_task("xla", width=width, lr=1.5, weight_decay=0.01, **changes)
    _, _, events = run(task)
    programs = [(event.phase, event.step, event.count) for event in events if isinstance(event, ProgramCompiled)]
    assert programs == [("training", 1, 1), ("evaluation", 3, 1)]


@pytest.mark.xla
def test_a_model_of_six_layers_compiles_no_more_on_xla_than_without(store: Store, pictures: Path):
    changes = {"epochs": 3, "schedule": "cosine", "warmup_epochs": 1.0, "lr": 0.02, "layer_decay": 0.7}
    # a size of image of its own, since XLA keeps a process's programs
    run_id = store.create_run(tiny(pictures, device="xla", trainable="all", image_size=41, **changes))
    assert train_run(store, run_id) == "finished", summarise(store, run_id)["reason"]
    assert summarise(store, run_id)["compile"]["count"] == 2


@pytest.mark.xla
def test_on_xla_losses_are_those_of_the_cpu():
    changes = {"layer_decay": 0.5, "optimizer": "sgd", "lr": 0.01, "schedule": "cosine"}
    on_cpu, on_xla = (losses(run(make_task(kind, width=87, **changes))[2]) for kind in ("cpu", "xla"))
    assert on_xla == pytest.approx(on_cpu, rel=1e-4)


def test_losses_of_a_seed_differ_with_it_and_are_as_ever_without():
    plain, on = (losses(run(make_task(lr=0.05, **changes))[2]) for changes in ({}, {"layer_decay": 0.5}))
    assert plain == losses(run(make_task(lr=0.05, layer_decay=1.0))[2])
    assert plain[:1] == on[:1] and plain[1:] != on[1:]
