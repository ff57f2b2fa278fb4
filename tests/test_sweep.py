"""The sweep over model families: what a trial compares, and that nothing a model does ends the sweep."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import core.trials.sweep
from core.devices import open_device
from core.models.build import build_model
from core.models.catalogue import families
from core.trials.sweep import Children, read_trials, summary, sweep, table
from core.trials.trial import Trial, take_steps, try_on_device, zero_dropout

ROOT = Path(__file__).parents[1]

# answers as core.trials.trial does, and does what the family's name says
CHILD = """
import json, os, sys, time
for line in sys.stdin:
    family = line.strip()
    trial = {"family": family, "model": "timm/x", "image_size": 64}
    def answer(done, **more):
        print(json.dumps({"done": done, "trial": {**trial, **more}}), flush=True)
    if family == "dies on the CPU": sys.exit("no memory")
    answer(False)
    if family == "dies on the device": os.kill(os.getpid(), 9)
    if family == "hangs": time.sleep(60)
    answer(True, compiles=os.getpid())
"""


@pytest.fixture
def children():
    with Children("cpu", 5.0, [sys.executable, "-c", CHILD]) as opened:
        yield opened


def test_what_kills_a_child_is_the_trials_error_and_the_next_family_gets_a_new_one(children: Children):
    assert children.ask("dies on the CPU").cpu_error == "the process died: status 1, no memory"
    died = children.ask("dies on the device")
    assert (died.cpu_error, died.device_error) == ("", "the process died: status -9, no message")
    good, same = children.ask("good"), children.ask("good")
    assert good.trains and good.compiles == same.compiles > 0


def test_a_hang_ends_at_the_limit():
    with Children("cpu", 0.5, [sys.executable, "-c", CHILD]) as children:
        hung = children.ask("hangs")
        assert (hung.model, hung.device_error) == ("timm/x", "no answer within 0.5 s")


def test_a_child_is_replaced_before_programs_fill_the_memory(children: Children, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(core.trials.sweep, "TRIALS_A_CHILD", 2)
    first, second, third = (children.ask("good").compiles for _ in range(3))
    assert first == second != third


TRIALS = [
    Trial("timm/a", "timm/a_tiny", 64, compiles=1, cpu_losses=[2.0, 1.0], device_losses=[2.002, 1.0], seconds=3.2),
    Trial(
        "timm/b",
        "timm/b_tiny",
        96,
        compiles=4,
        foreseen=["im2col", "upsample_nearest2d_backward"],
        mended=["im2col"],
        fallbacks={"upsample_nearest2d_backward": 2, "sort": 1},
        cpu_losses=[1.0, 1.0],
        device_losses=[1.0, 1.0],
        cpu_norm=3.0,
        device_norm=3.3,
        exact_norm=2.5,
    ),
    Trial("timm/c", "timm/c_tiny", 64, cpu_error="ValueError: a | b"),
    Trial("timm/d", "timm/d_tiny", 64, device_error="the process died"),
]


def test_a_table_has_a_row_for_each_family():
    assert table(TRIALS)[2:] == [
        "| timm/a | a_tiny | 64 | 1 |  |  | 1e-03 | 0e+00 |  | 3 |  |",
        "| timm/b | b_tiny | 96 | 4 | im2col | sort, upsample_nearest2d_backward* | 0e+00 | 1e-01 | 2e-01 | 0 |  |",
        "| timm/c | c_tiny | 64 |  |  |  |  |  |  | 0 | on the CPU: ValueError: a / b |",
        "| timm/d | d_tiny | 64 |  |  |  |  |  |  | 0 | the process died |",
    ]


def test_a_summary_names_what_fails_differs_or_was_not_foreseen():
    assert summary(TRIALS) == [
        "4 families; 3 train on the CPU, 2 of these on the device.",
        "1 do so without falling back to the host, 0 of them mended.",
        "The largest relative difference of the first loss is 1.0e-03 (timm/a).",
        "Fall back: timm/b.",
        "Fail on the device: timm/d.",
        "Differ by more than 1e-04: timm/a.",
        "Fell back unforeseen: timm/b.",
        "Don't train on the CPU either: timm/c.",
    ]


def test_a_broken_off_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    class Answers:
        def __init__(self, *_): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def ask(self, family: str) -> Trial:
            if len(asked) == 2:
                raise KeyboardInterrupt
            asked.append(family)
            return Trial(family, cpu_losses=[1.0], device_losses=[1.0])

    monkeypatch.setattr(core.trials.sweep, "Children", Answers)
    report = tmp_path / "models.md"
    with pytest.raises(KeyboardInterrupt):
        sweep("cpu", search="torchvision/m", report=report)
    subject = json.loads(report.with_suffix(".json").read_text())["subject"]
    assert "timm" in subject and read_trials(report, "another version") == {}
    assert list(read_trials(report, subject)) == asked == ["torchvision/maxvit", "torchvision/mnasnet"]
    asked.clear()
    trials = sweep("cpu", search="torchvision/m", report=report, resume=True)
    assert asked == ["torchvision/mobilenetv2", "torchvision/mobilenetv3"]
    assert [trial.family for trial in trials] == [name for name in families() if "torchvision/m" in name]
    assert all(f"| {trial.family} |" in report.read_text() for trial in trials)


def test_families_hold_every_model_once_and_none_of_timms_own_tests():
    names = [name for models in families().values() for name in models]
    assert len(names) == len(set(names)) > 1000 and not any("/test_" in name for name in names)
    assert "timm/resnet18" in families()["timm/resnet"] and "torchvision/resnet18" in families()["torchvision/resnet"]


@pytest.mark.parametrize("name", ["timm/vit_tiny_patch16_224", "torchvision/swin_t", "torchvision/mobilenet_v3_small"])
def test_without_dropout_two_forwards_are_equal(name: str):
    module = build_model(name, num_classes=5, weights="none", image_size=64, trainable="all", seed=0).module.train()
    module.apply(drop_much)
    images = torch.randn(2, 3, 64, 64)
    assert not torch.equal(module(images), module(images))
    zero_dropout(module)
    assert torch.equal(module(images), module(images))


def drop_much(part: nn.Module) -> None:
    if isinstance(part, nn.Dropout):
        part.p = 0.5


@pytest.mark.xla
def test_on_xla_the_losses_are_the_cpus_with_one_program_and_the_fall_back_is_mended():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(5), nn.Flatten(), nn.Linear(100, 5))
    images = torch.randn(4, 3, 16, 16)
    xla, cpu = open_device("xla"), open_device("cpu")
    trial = Trial("mine", "mine", 16)
    steps = take_steps(copy.deepcopy(net), images, torch.arange(4), cpu)
    trial.cpu_losses, trial.cpu_norm = [loss for loss, _ in steps], steps[0][1]
    try_on_device(trial, net, xla, images, torch.arange(4))
    assert (trial.device_error, trial.compiles, trial.fallbacks) == ("", 1, {})
    assert trial.mended == trial.foreseen == ["_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward"]
    assert trial.device_losses == pytest.approx(trial.cpu_losses, rel=1e-5)
    assert trial.norm_difference < 1e-5


def test_the_command_tries_the_smallest_model_in_a_child_and_tells_progress_and_result_apart():
    command = ["sweep-models", "--device", "cpu", "--search", "torchvision/squeezenet", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "core", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr.startswith("1/1 torchvision/squeezenet")
    trial = Trial(**json.loads(done.stdout)["trials"][0])
    assert (trial.model, trial.image_size) == ("torchvision/squeezenet1_1", 64)
    assert trial.trains and not trial.draws and trial.seconds > 0 and trial.cpu_losses[1] < trial.cpu_losses[0]
    # channels_last adds up in another order
    assert trial.loss_difference < 1e-6 and trial.norm_difference < 1e-5 and 0 < trial.rounding < 1e-5


def test_a_search_without_hits_is_refused(capsys: pytest.CaptureFixture[str]):
    from core.__main__ import main

    assert main(["sweep-models", "--device", "cpu", "--search", "torchvision/nope"]) == 2
    assert "torchvision/nope" in capsys.readouterr().err
