"""What is trained in which epoch: the list of stages, and runs that freeze and free layers on their way."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from core.analysis.forecast import forecast_for
from core.analysis.summary import summarise
from core.config import make_config
from core.errors import ConfigError
from core.events import ProgramCompiled, StageBegan
from core.groups import plan_group
from core.models.parts import set_train_mode
from core.running.trainer import train_run
from core.schedule import changes_at
from core.series import RunSeries
from core.stages import Stage, parse_stages, stages_in_text, trainable_at, widest
from core.store import Store
from core.training.state import read_state
from core.training.task import Task
from tests.test_diagnosis import a_run, compiled, find, program
from tests.test_groups import tiny
from tests.test_resume import BASE, assert_equal, go_on, train
from tests.tiny import losses, make_task, run

CONV, NORM, HEAD = "0.weight", "1.weight", "5.weight"
MEAN = "1.running_mean"
OPTIMIZERS = [
    {"optimizer": "adam", "weight_decay": 0.1},
    {"optimizer": "adamw", "layer_decay": 0.5},
    {"optimizer": "sgd"},
]


# The list


def test_stages_are_read_with_commas_semicolons_and_spaces_and_written_in_one_way():
    stages = [Stage(2, "last"), Stage(4, "all")]
    for text in ("2:last,4:all", " 2 : LAST ; 4:all ", "2:last 4:all,", "02:last\t4:all"):
        assert parse_stages(text) == stages
        assert make_config(trainable="head", trainable_from=text).trainable_from == "2:last,4:all"
    assert parse_stages("") == [] and stages_in_text(stages) == "2:last,4:all"


def test_what_is_trained_is_a_function_of_the_epoch():
    assert [trainable_at("head", "2:last,4:all", epoch) for epoch in range(1, 6)] == [
        "head", "last", "last", "all", "all"
    ]  # fmt: skip
    assert [trainable_at("all", "3:head", epoch) for epoch in (1, 2, 3, 9)] == ["all", "all", "head", "head"]
    assert (widest("head", "2:last"), widest("all", "3:head"), widest("last", "")) == ("last", "all", "last")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainable_from": "4"}, "'4' is not an epoch, a colon and what is trained"),
        ({"trainable_from": "4:all:2"}, "'4:all:2' is not an epoch"),
        ({"trainable_from": "-4:all"}, "'-4:all' is not an epoch"),
        ({"trainable_from": "²:all"}, "'²:all' is not an epoch"),
        ({"trainable_from": "4:body"}, "'4:body' names none of head, last, all"),
        ({"trainable_from": "1:last"}, "'1:last' begins before epoch 2"),
        ({"trainable_from": "4:last,4:all"}, "'4:all' does not come after epoch 4"),
        ({"trainable_from": "4:last,3:all"}, "'3:all' does not come after epoch 4"),
        ({"trainable_from": "6:all"}, "names epoch 6, and the run has 5"),
        ({"trainable_from": "2:last,3:last"}, "3:last changes nothing: last was trained before"),
        ({"trainable": "all", "trainable_from": "2:all"}, "2:all changes nothing: all was trained before"),
    ],
)
def test_a_wrong_stage_is_named_with_its_fault(changes: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        make_config(**{"trainable": "head", "epochs": 5, **changes})


def test_an_epoch_says_what_is_new_in_it():
    config = make_config(trainable="head", trainable_from="2:last,3:all", epochs=6, first_image_size=160)
    told = {epoch: changes_at(config, 224, epoch) for epoch in range(1, 7)}
    assert told == {
        1: [],
        2: ["what is trained changed to the last stages"],
        3: ["what is trained changed to all layers", "the size of images changed to 192 px"],
        4: [],
        5: ["the size of images changed to 224 px"],
        6: [],
    }


# Training


def staged(kind: str = "cpu", width: int = 4, **changes) -> tuple[Task, list[dict[str, torch.Tensor]]]:
    """A task with frozen parts, and the model as it was at first and after each epoch."""
    task = make_task(kind, width=width, **{"lr": 0.05, "trainable": "head", **changes})
    task.set_train_mode = lambda: set_train_mode(task.module)
    seen: list[dict[str, torch.Tensor]] = []

    def look(which: str, epoch: int) -> None:
        if which == "last":
            with task.device.turn():
                seen.append(task.device.to_host(dict(task.module.state_dict())))

    look("last", 0)
    task.save = look
    return task, seen


def moved(seen: list[dict[str, torch.Tensor]]) -> list[set[str]]:
    """What differs by a single bit, epoch by epoch."""
    return [
        {name for name in (CONV, NORM, HEAD, MEAN) if not torch.equal(after[name], before[name])}
        for before, after in pairwise(seen)
    ]


ON_CPU = [("cpu", changes) for changes in (*OPTIMIZERS, {"accumulate": 2}, {"clip_grad_norm": 0.1})]
ON_XLA = [pytest.param("xla", changes, marks=pytest.mark.xla) for changes in (*OPTIMIZERS[1:], {"accumulate": 2})]


@pytest.mark.parametrize(("kind", "changes"), [*ON_CPU, *ON_XLA])
def test_frozen_weights_and_statistics_stay_bit_by_bit_and_others_move(kind: str, changes: dict):
    task, seen = staged(kind, 80, epochs=5, trainable_from="2:last,3:all,4:head,5:all", **changes)
    run(task)
    head, everything = {HEAD}, {HEAD, NORM, CONV, MEAN}
    assert moved(seen) == [head, {HEAD, NORM, MEAN}, everything, head, everything]


def test_a_stage_trains_as_a_run_that_was_frozen_so_from_the_start():
    changes = {"epochs": 1, "optimizer": "sgd"}
    plain = make_task(lr=0.05, trainable="head", **changes)
    for name, parameter in plain.module.named_parameters():
        parameter.requires_grad_(name.startswith("5."))
    plain.set_train_mode = lambda: set_train_mode(plain.module)
    task, _ = staged(**{**changes, "epochs": 2}, trainable_from="2:all")
    first_epoch = losses(run(task)[2])[:3]
    assert first_epoch == losses(run(plain)[2])


def test_without_stages_nothing_is_touched():
    task = make_task()
    task.module[0].weight.requires_grad_(False)
    task.begin_epoch(1)
    assert [parameter.requires_grad for parameter in task.module.parameters()] == [False, True, True, True, True, True]


def test_an_average_of_the_weights_follows_what_is_trained():
    task, _ = staged(epochs=3, ema_decay=0.5, trainable_from="2:all")
    before = {name: tensor.clone() for name, tensor in task.ema.module.state_dict().items()}
    averages = []
    look = task.save
    task.save = lambda which, epoch: (look(which, epoch), averages.append(task.ema.module[0].weight.clone()))
    run(task)
    assert torch.equal(averages[0], before[CONV]) and not torch.equal(averages[-1], before[CONV])
    assert task.ema.module[0].weight.requires_grad is False


def test_gradients_for_accumulation_are_there_for_what_is_trained_alone():
    task, _ = staged(accumulate=2, epochs=2, trainable_from="2:all")
    task.begin_epoch(1)
    assert [parameter.grad is not None for parameter in task.module.parameters()] == [False] * 4 + [True] * 2
    assert len(task.trained()) == 2
    task.begin_epoch(2)
    assert all(parameter.grad is not None for parameter in task.module.parameters())
    assert len(task.trained()) == 6


def test_a_run_that_begins_in_a_later_epoch_trains_what_that_one_trains():
    task, seen = staged(epochs=4, trainable_from="2:all,3:head")
    task.position.epoch, task.position.step = 3, 6
    _, _, events = run(task)
    assert moved(seen) == [{HEAD}, {HEAD}]
    # its beginning is told, and that of an epoch that is taken up in its midst is not
    assert [event.step for event in events if isinstance(event, StageBegan)] == [7]
    task, seen = staged(epochs=3, trainable_from="2:all,3:head")
    task.position.epoch, task.position.step, task.position.place = 3, 7, 1
    _, _, events = run(task)
    assert moved(seen) == [{HEAD}] and not any(isinstance(event, StageBegan) for event in events)


def told_programs(events) -> list[tuple[str, int, int, str]]:
    return [
        (event.phase, event.step, event.count, event.cause) for event in events if isinstance(event, ProgramCompiled)
    ]


@pytest.mark.xla
def test_a_stage_compiles_one_program_whose_cause_is_named_and_a_known_one_none():
    task, _ = staged("xla", 81, epochs=4, ema_decay=0.9, trainable_from="2:last,3:all,4:head")
    assert told_programs(run(task)[2]) == [
        ("training", 1, 1, ""),
        ("evaluation", 3, 1, ""),
        ("training", 4, 1, "what is trained changed to the last stages"),
        ("training", 7, 1, "what is trained changed to all layers"),
    ]


@pytest.mark.xla
def test_stages_on_xla_train_as_on_the_cpu():
    found = []
    for kind in ("cpu", "xla"):
        task, seen = staged(kind, 82, epochs=3, optimizer="sgd", lr=0.01, trainable_from="2:last,3:all")
        found.append((losses(run(task)[2]), seen[-1]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    for name, tensor in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.xla
def test_stages_with_accumulation_compile_their_parts_once_each():
    task, _ = staged("xla", 83, epochs=3, accumulate=2, trainable_from="2:all,3:head")
    programs = told_programs(run(task)[2])
    assert [(phase, step) for phase, step, _, _ in programs] == [("training", 1), ("evaluation", 3), ("training", 4)]
    assert programs[2][2] == programs[0][2] and programs[2][3] == "what is trained changed to all layers"


class Whole(nn.Module):
    """A model whose own forward torch.compile translates, which it leaves out of a bare Sequential."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images) * 1.0


def test_what_torch_compile_translated_is_made_anew_for_a_stage():
    on_its_own, translated = (staged(epochs=4, optimizer="sgd", trainable_from="2:last,3:all,4:head") for _ in range(2))
    for task, _ in (on_its_own, translated):
        task.module = task.model = Whole(task.module)
    # what is asked here is torch.compile's front; a compiler behind it would take minutes
    translated[0].module.compile(backend="aot_eager")
    translated[0].device._compiles = True
    programs = told_programs(run(translated[0])[2])
    assert [(step, cause) for phase, step, _, cause in programs if phase == "training"] == [
        (1, ""),
        (4, "what is trained changed to the last stages"),
        (7, "what is trained changed to all layers"),
        (10, "what is trained changed to the head alone"),
    ]
    run(on_its_own[0])
    for mine, theirs in zip(translated[0].module.parameters(), on_its_own[0].module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


# Whole runs


def test_a_run_of_stages_tells_when_each_begins_and_all_that_is_ever_trained(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, epochs=3, trainable_from="2:last,3:all", lr=1e-3))
    assert train_run(store, run_id) == "finished", summarise(store, run_id)["reason"]
    told = [event.payload for event in store.events(run_id, kinds=("StageBegan",))]
    assert [(event["step"], event["epoch"]) for event in told] == [(4, 2), (7, 3)]
    assert told[1]["changes"] == ["what is trained changed to all layers"]
    series = RunSeries(store, run_id)
    series.update()
    assert series.marks == [{"step": 4, "text": "the last stages"}, {"step": 7, "text": "all layers"}]
    summary = summarise(store, run_id)
    assert summary["num_trainable"] == summary["num_params"]


def test_a_warm_up_run_compiles_what_its_repeats_will_need():
    staged_config = make_config(trainable="head", trainable_from="2:all", epochs=3)
    configs = {"plain": make_config(epochs=3), "staged": staged_config}
    warm_ups = {run.label: run.config.epochs for run in plan_group(configs, repeats=2, start="warm") if not run.repeat}
    assert warm_ups == {"plain": 1, "staged": 3}


def test_a_forecast_of_stages_is_from_runs_of_as_many_epochs_or_says_that_it_is_the_most(store: Store, pictures: Path):
    config = tiny(pictures, epochs=3, trainable_from="3:all", first_image_size=16)
    probe_id = store.create_run(config, purpose="probe")
    assert train_run(store, probe_id) == "finished", summarise(store, probe_id)["reason"]
    # as the dearest epoch has them, so nothing of it changes
    assert store.events(probe_id, kinds=("StageBegan",)) == []
    told = forecast_for(store, config, "cpu")
    assert told.basis.endswith("as the dearest epoch has them, so at most") and told.total_low_s is None
    run_id = store.create_run(config)
    train_run(store, run_id)
    told = forecast_for(store, config, "cpu")
    assert (told.basis, told.total_s) == ("1 run like this one", pytest.approx(summarise(store, run_id)["total_s"]))
    for others in (tiny(pictures, epochs=3, trainable_from="2:all"), tiny(pictures, epochs=3)):
        assert forecast_for(store, others, "cpu") is None
    longer = forecast_for(store, config.model_copy(update={"epochs": 6}), "cpu")
    assert longer is not None and "at most" in longer.basis


def test_epochs_that_were_meant_to_differ_are_no_finding():
    uneven = ({"compute": 5.0}, {"compute": 5.0}, {"compute": 5.0}, {"compute": 40.0})
    plain, grown = (a_run(*uneven, num_epochs=4, config={"trainable_from": text}) for text in ("", "4:all"))
    assert find(plain, "uneven_epochs") is not None and find(grown, "uneven_epochs") is None
    steps = {"step_times": {"median_s": 0.1, "p95_s": 0.5, "steps": 100}}
    assert find(a_run(**steps), "uneven_steps") is not None
    assert find(a_run(config={"first_image_size": 96}, **steps), "uneven_steps") is None


def test_programs_of_later_stages_are_told_apart_from_those_that_should_not_be():
    planned = {**program(3, 1, "what is trained changed to all layers"), "is_planned": True}
    found = find(a_run({"compile": 34.0}, **compiled(program(1, 2), planned)), "compile")
    assert found is not None and found.figures["recompiles"] == 0
    assert "compiling 3 programs, 1 of them for what later epochs do otherwise." in found.sentence


RESUMED = {
    "adamw": {"trainable": "head", "trainable_from": "2:last,3:all", "layer_decay": 0.5},
    "sgd": {"trainable": "head", "trainable_from": "2:all,3:head", "optimizer": "sgd", "lr": 0.05},
    "all": {"trainable_from": "2:head,3:all", "ema_decay": 0.9, "accumulate": 2, "optimizer": "sgd", "lr": 0.05},
    "growing images": {"image_size": 48, "first_image_size": 16, "trainable_from": "3:last", "cutmix": 1.0},
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_of_stages_that_is_taken_up_again_equals_one_in_one_piece(store: Store, pictures: Path, name: str):
    config = tiny(pictures, **{**BASE, **RESUMED[name]})
    whole, broken = store.create_run(config), store.create_run(config)
    assert train(store, whole) == "finished", summarise(store, whole)["reason"]
    assert train(store, broken, stop_at=7) == "stopped"
    # in the midst of the second epoch, and then right at its end
    assert read_state(store.run_folder(broken)).position.step == 7
    assert go_on(store, broken, stop_at=3) == "stopped"
    assert read_state(store.run_folder(broken)).position.step == 10
    assert go_on(store, broken) == "finished", summarise(store, broken)["reason"]
    assert_equal(store, whole, broken)
    began, again = (
        [event.payload for event in store.events(run_id, kinds=("StageBegan",))] for run_id in (whole, broken)
    )
    assert began == again
