"""XLA on its real CPU runtime: how much is compiled, the same numbers as the CPU, several chips, one lock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from core.__main__ import main
from core.analysis.summary import summarise
from core.config import make_config
from core.data.augment import Recipe
from core.devices import open_device
from core.devices.scalars import apart
from core.engine import evaluate
from core.events import ProgramCompiled
from core.metrics import Sums
from core.predict import Predictor
from core.running.trainer import train_run
from core.store import Store
from core.training.compiles import CompileWatch
from core.training.task import place_parts, train_step
from tests.tiny import AugmentedLoader, losses, make_task, run, validate

pytestmark = pytest.mark.xla
ROOT = Path(__file__).parents[1]


def programs(task) -> list[tuple[str, int, int]]:
    """Phase, step and number of every compile of a run."""
    _, _, events = run(task)
    return [(event.phase, event.step, event.count) for event in events if isinstance(event, ProgramCompiled)]


ONE_AND_ONE = [("training", 1, 1), ("evaluation", 3, 1)]
CASES = {
    "adam": (5, {"optimizer": "adam"}),
    "adamw": (6, {"optimizer": "adamw"}),
    "sgd": (7, {"optimizer": "sgd"}),
    "sgd without momentum": (8, {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}),
    "clipping": (9, {"clip_grad_norm": 1.0}),
    "EMA": (10, {"ema_decay": 0.99}),
    "bf16": (11, {"precision": "bf16"}),
    "dropout": (12, {"dropout": 0.5}),
    "warm-up and cosine": (13, {"schedule": "cosine", "warmup_epochs": 1.0}),
    "one cycle": (14, {"schedule": "onecycle", "lr": 1.0}),
    "tiny rates": (15, {"lr": 1e-6, "weight_decay": 0.01, "schedule": "cosine"}),
    "all at once": (16, {"clip_grad_norm": 1.0, "ema_decay": 0.9, "precision": "bf16", "label_smoothing": 0.1}),
}


@pytest.mark.parametrize(("width", "changes"), CASES.values(), ids=CASES)
def test_a_run_compiles_one_training_and_one_evaluation_program_and_the_next_run_none(width: int, changes: dict):
    assert programs(make_task("xla", width=width, **changes)) == ONE_AND_ONE
    assert programs(make_task("xla", width=width, **changes)) == []


def test_mixing_is_one_program_too():
    task = make_task("xla", width=17)
    task.train = AugmentedLoader(task.train, Recipe(mixup=0.4, cutmix=1.0))
    assert programs(task) == ONE_AND_ONE


def test_accumulation_adds_one_program_and_changes_no_number():
    assert programs(make_task("xla", width=18, accumulate=2)) == [("training", 1, 2), ("evaluation", 3, 1)]
    on_xla = losses(run(make_task("xla", width=18, accumulate=2))[2])
    assert on_xla == pytest.approx(losses(run(make_task(width=18, accumulate=2))[2]), rel=1e-4)


def step_with(task, batch, lr: float, step: int) -> int:
    """One step at a learning rate; the programs that it compiled."""
    before = task.device.compile_count()
    with task.device.turn():
        train_step(task, place_parts(task, batch), lr, step, Sums(task.device))
        task.device.wait()
    return task.device.compile_count() - before


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_no_rate_compiles_anew(optimizer: str):
    task = make_task("xla", width={"adam": 19, "adamw": 20, "sgd": 21}[optimizer], optimizer=optimizer)
    batch = task.train.batches[0]
    # 0.1 is BatchNorm's momentum and 0.01 the weight decay: XLA feeds equal numbers as one
    rates = [1e-3, 0.0, 1.0, 1e-3, 1e-9, 1e-30, 0.0, 1.0, 0.5, 0.1, 0.01, 0.9]
    assert [step_with(task, batch, lr, 1) for lr in rates] == [1] + [0] * 11


def test_an_average_whose_decay_meets_another_number_compiles_nothing():
    task = make_task("xla", width=28, ema_decay=0.999)
    # at step 80 the new weights count one tenth, as in BatchNorm
    assert [step_with(task, task.train.batches[0], 1e-3, step) for step in (1, 2, 80, 81)] == [1, 0, 0, 0]


def test_a_rate_of_zero_changes_no_weight_and_a_rate_of_one_is_one():
    task = make_task("xla", width=22, optimizer="sgd", momentum=0.0, weight_decay=0.0)
    reference = make_task(width=22, optimizer="sgd", momentum=0.0, weight_decay=0.0)
    before = task.model[0].weight.detach().cpu().clone()
    step_with(task, task.train.batches[0], 0.0, 1)
    assert torch.equal(task.model[0].weight.detach().cpu(), before)
    for each in (task, reference):
        step_with(each, each.train.batches[0], 1.0, 1)
    torch.testing.assert_close(task.model[0].weight.detach().cpu(), reference.model[0].weight.detach())
    assert task.optimizer.param_groups[0]["lr"] == 1.0 and task.optimizer.param_groups[0]["weight_decay"] == 0.0
    assert 0 < apart(0.0, 1) < 1e-37 and 0 < apart(1.0, 1) - 1 < 1e-6 and apart(0.1, 1) != apart(0.1, 2)


def test_nothing_compiles_at_the_step_at_which_adams_correction_rounds_to_one():
    task = make_task("xla", width=23, optimizer="adam")
    with task.device.turn():
        for state in task.optimizer.state.values():
            state["step"] = task.device.place(torch.tensor(16_625.0))
        task.device.wait()
    compiled = [step_with(task, task.train.batches[0], 1e-3, 1) for _ in range(6)]
    assert compiled == [1, 0, 0, 0, 0, 0]


def test_a_batch_of_another_shape_is_told_with_step_phase_and_cause():
    task = make_task("xla", width=24, epochs=1)
    task.train.batches[1].images = torch.zeros(4, 3, 9, 9, dtype=torch.uint8)
    task.model[4] = torch.nn.AdaptiveAvgPool1d(24 * 36).to(task.device.torch_device)
    _, _, events = run(task)
    told = [event for event in events if isinstance(event, ProgramCompiled)]
    assert [(event.phase, event.step) for event in told] == [("training", 1), ("training", 2), ("evaluation", 3)]
    assert told[0].cause == "" and told[2].cause == ""
    assert told[1].cause == "the shape of images changed from 4 x 3 x 8 x 8 to 4 x 3 x 9 x 9"


def test_weights_and_statistics_after_two_epochs_are_those_of_the_cpu():
    changes = {"optimizer": "sgd", "lr": 0.01}
    on_cpu, on_xla = (make_task(kind, width=25, **changes) for kind in ("cpu", "xla"))
    for task in (on_cpu, on_xla):
        run(task)
    for (name, mine), theirs in zip(on_xla.model.state_dict().items(), on_cpu.model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-6, msg=f"{name} differs")
    assert validate(on_xla).top1 == validate(on_cpu).top1


def test_an_average_of_the_weights_is_that_of_the_cpu_and_is_what_is_validated():
    on_cpu, on_xla = (make_task(kind, width=26, ema_decay=0.9, optimizer="sgd", lr=0.01) for kind in ("cpu", "xla"))
    for task in (on_cpu, on_xla):
        run(task)
    for mine, theirs in zip(on_xla.ema.module.parameters(), on_cpu.ema.module.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5)
    averaged = validate(on_cpu)
    on_cpu.ema = None
    assert averaged != validate(on_cpu)


def test_evaluation_in_the_middle_of_nothing_leaves_training_programs_as_they_are():
    task = make_task("xla", width=27)
    batch = task.train.batches[0]
    assert step_with(task, batch, 1e-3, 1) == 1
    evaluate(task, *_watch(task))
    assert step_with(task, batch, 1e-3, 2) == 0


def _watch(task):
    from core.timing import PhaseTimer

    return PhaseTimer(lambda: 0.0), CompileWatch(task.device, lambda event: None)


def test_what_a_failed_step_has_collected_is_dropped_when_the_device_closes():
    task = make_task("xla", width=30)
    with pytest.raises(RuntimeError), task.device.turn():
        task.model(task.device.place(torch.rand(2, 3, 9, 9)))
    before = task.device.compile_count()
    task.device.close()
    assert task.device.compile_count() == before


def tiny_config(pictures: Path, **changes):
    """A run of three short epochs; 32 px, so that a compile takes seconds."""
    fixed = {"model": "timm/test_resnet", "weights": "none", "image_size": 64, "batch_size": 8, "threads": 1}
    return make_config(**{**fixed, "data": str(pictures), "epochs": 3, **changes})


def test_cpu_and_xla_runs_take_turns_in_one_process_with_equal_numbers(store: Store, pictures: Path):
    told = []
    # a batch size of its own, since XLA keeps the programs of a process, and another file may have been before
    changes = {"optimizer": "sgd", "lr": 0.01, "batch_size": 7}
    for kind in ("xla", "cpu", "xla", "cpu"):
        run_id = store.create_run(tiny_config(pictures, device=kind, **changes))
        assert train_run(store, run_id) == "finished", summarise(store, run_id)["reason"]
        told.append(summarise(store, run_id))
    first, second = told[0], told[2]
    assert [epoch["train_loss"] for epoch in first["epochs"]] == [epoch["train_loss"] for epoch in second["epochs"]]
    assert (first["compile"]["count"], second["compile"]["count"]) == (2, 0)
    assert (first["is_warm"], second["is_warm"]) == (False, True)
    for on_xla, on_cpu in ((told[0], told[1]), (told[2], told[3])):
        # rounding grows from epoch to epoch in a net of random weights
        mine, theirs = on_xla["epochs"][0], on_cpu["epochs"][0]
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert mine["val_top1"] == theirs["val_top1"]


def test_a_prediction_during_an_xla_run_is_right_and_leaves_the_run_as_it_is(store: Store, pictures: Path):
    config = tiny_config(pictures, device="xla", optimizer="sgd", lr=0.01, epochs=12)
    alone = store.create_run(config)
    train_run(store, alone)
    checkpoint = store.run_folder(alone) / "best.safetensors"
    on_cpu = Predictor(checkpoint, open_device("cpu"))
    files = sorted(pictures.glob("val/*/*.png"))
    wanted = on_cpu.predict(files)

    watched = store.create_run(config)
    thread = threading.Thread(target=train_run, args=(store, watched))
    thread.start()
    while not store.events(watched, kinds=("StepLogged",)):
        assert thread.is_alive()
    predictor = Predictor(checkpoint, open_device("xla"))
    predicted_while_training = 0
    while thread.is_alive():
        for mine, theirs in zip(predictor.predict(files), wanted, strict=True):
            assert mine.classes[0][0] == theirs.classes[0][0]
            assert mine.classes[0][1] == pytest.approx(theirs.classes[0][1], abs=0.01)
        predicted_while_training += thread.is_alive()
    assert predicted_while_training > 0
    both = [[epoch["train_loss"] for epoch in summarise(store, each)["epochs"]] for each in (alone, watched)]
    assert both[0] == both[1]


def test_each_precision_of_products_has_programs_of_its_own():
    compiled = []
    for name in ("default", "highest", "high", "highest", "default"):
        task = make_task("xla", width=29)
        task.device.set_matmul_precision(name)
        compiled.append(step_with(task, task.train.batches[0], 1e-3, 1))
        task.device.set_matmul_precision("default")
    assert compiled == [1, 1, 1, 0, 0]


SEVERAL = """
import json, sys, torch
from tests.tiny import losses, make_task, run
task = make_task("xla", width=6, optimizer="sgd", lr=0.01, **json.loads(sys.argv[1]))
_, _, events = run(task)
from core.events import EpochEnded, ProgramCompiled
epochs = [event for event in events if isinstance(event, EpochEnded)]
print(json.dumps({
    "devices": task.device.count,
    "name": task.device.name,
    "losses": losses(events),
    "val": [[epoch.val_loss, epoch.val_top1] for epoch in epochs],
    "variance": task.model[1].running_var.cpu().tolist(),
    "programs": [[event.phase, event.step, event.count] for event in events if isinstance(event, ProgramCompiled)],
    "is_split": "devices=[4" in torch_xla._XLAC._get_xla_sharding_spec(
        task.device.place_batch(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.long))[0])
    if (torch_xla := sys.modules.get("torch_xla")) else None,
}))
"""


def with_virtual_chips(chips: int, **changes) -> dict:
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(chips)}
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, json.dumps(changes)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_four_chips_train_to_the_numbers_of_one_at_the_same_batch():
    one, four = with_virtual_chips(1), with_virtual_chips(4)
    assert (one["devices"], four["devices"]) == (1, 4)
    assert four["is_split"] and "4 devices" in four["name"]
    assert four["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert four["variance"] == pytest.approx(one["variance"], rel=1e-5)
    for mine, theirs in zip(four["val"], one["val"], strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-5) and mine[1] == theirs[1]
    assert four["programs"] == one["programs"] == [["training", 1, 1], ["evaluation", 3, 1]]


def test_a_batch_that_four_chips_cannot_share_is_one_line_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    words = ["--home", str(tmp_path), "train", "--preset", "quick", "--device", "xla", "--batch-size", "30"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told == "A batch of 30 can't be shared evenly by 4 devices. Choose a batch size that 4 divides.\n"
    assert not list(tmp_path.iterdir())


def test_what_the_model_leaves_to_the_host_is_counted_by_name():
    device = open_device("xla")
    before = device.host_fallbacks()
    with device.turn():
        values = device.place(torch.rand(1, 1, 4, 4))
        torch.nn.functional.interpolate(values, size=(7, 7), mode="bicubic")
        device.wait()
    new = {name for name, count in device.host_fallbacks().items() if count > before.get(name, 0)}
    device.close()
    assert "upsample_bicubic2d" in new
