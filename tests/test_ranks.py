"""Several processes that train as one: their figures, and how a run of them begins and ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from core.analysis.summary import summarise
from core.config import make_config
from core.data.loader import num_workers
from core.devices import DeviceInfo, open_device
from core.devices.ranks import count_processes
from core.errors import DeviceError
from core.events import EpochEnded, PhaseChanged, RunPrepared
from core.machine.facts import cpu_name
from core.running.launch import LOG_TAIL, Job, Launch, train_in_processes
from core.running.trainer import train_run
from core.store import Store
from core.trials.memory import memory_full
from tests.rank_cases import results
from tests.tiny import make_task, stop_once_it_trains

ROOT = Path(__file__).parents[1]
ROUNDING = 1e-6
"""float32 sums, taken in another order: relative."""


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The cases in one process, and in two as each of them saw it."""
    folder = tmp_path_factory.mktemp("ranks")
    line = [sys.executable, "-m", "tests.rank_cases", str(folder)]
    shared = {**os.environ, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    children = [
        subprocess.Popen(line, cwd=ROOT, env={**shared, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results(open_device("cpu"))
        for child in children:
            errors = child.communicate(timeout=120)[1]
            assert child.returncode == 0, errors
    finally:
        torch.set_num_threads(threads)
        for child in children:
            child.kill()
            child.wait()
    return [alone, *(json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))]


EXACT = (
    "plain", "head", "vit", "sgd", "accumulate", "clip", "ema", "weights", "weights_accumulate", "unused",
    "stages", "stages_accumulate",
)  # fmt: skip


@pytest.mark.parametrize("case", EXACT)
def test_two_processes_train_to_the_losses_of_one(figures: list[dict], case: str):
    alone, shared = figures[0][case], figures[1][case]
    assert shared["losses"] == pytest.approx(alone["losses"], rel=ROUNDING)
    assert shared["weights"] == pytest.approx(alone["weights"], rel=ROUNDING)
    for ours, theirs in zip(shared["epochs"], alone["epochs"], strict=True):
        assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=ROUNDING)
        assert (ours["val_top1"], ours["train_top1"]) == (theirs["val_top1"], theirs["train_top1"])


def test_the_precision_that_is_faster_is_found_by_one_process_for_all(figures: list[dict]):
    alone, shared = figures[0]["auto"], figures[1]["auto"]
    assert figures[2]["auto"] == shared
    # where two ways are about as fast, another time may find another one, which rounds otherwise
    assert shared["losses"] == pytest.approx(alone["losses"], rel=2e-2)


@pytest.mark.parametrize("case", EXACT)
def test_validation_counts_each_of_11_images_once(figures: list[dict], case: str):
    hits = [epoch["val_top1"] * 11 / 100 for epoch in figures[1][case]["epochs"]]
    assert hits == pytest.approx([round(number) for number in hits], abs=1e-6)


def test_all_processes_hold_the_same_model_and_see_the_same_figures(figures: list[dict]):
    assert figures[1] == figures[2]


def test_running_statistics_are_the_mean_over_the_processes(figures: list[dict]):
    alone, shared = (found["batchnorm_one_step"]["buffers"] for found in figures[:2])
    # the zero in front, 4 running means, and as many variances, which are those of a process's own rows
    assert shared[1:5] == pytest.approx(alone[1:5], rel=1e-5)
    assert shared[5:9] == pytest.approx(alone[5:9], rel=1e-2) and shared[5:9] != alone[5:9]


def test_frozen_batchnorm_stays_as_it_was(figures: list[dict]):
    assert figures[1]["head"]["moved"] == []
    moved = figures[1]["last"]["moved"]
    assert moved == figures[0]["last"]["moved"]
    assert moved and all(name.startswith(("blocks.6", "blocks.5", "bn2")) for name in moved)


def test_a_wish_of_the_first_process_stops_all_at_the_same_step(figures: list[dict]):
    # the third look comes in the first epoch's validation
    assert [(found["stop"]["state"], len(found["stop"]["losses"])) for found in figures[1:]] == [("stopped", 2)] * 2


def test_the_device_says_how_many_it_is(figures: list[dict]):
    assert figures[1]["device"] == {"name": f"2 x {cpu_name()}", "count": 2, "num_processes": 2}


def test_batchnorm_that_sees_the_whole_batch_is_the_same_model():
    from timm.layers.norm_act import convert_sync_batchnorm

    from tests.rank_cases import built

    module, images = built("tf_efficientnet_lite0", "all").eval(), torch.randn(2, 3, 32, 32)
    before, tensors = module(images), [*module.parameters(), *module.buffers()]
    converted = convert_sync_batchnorm(module)
    after = [*module.parameters(), *module.buffers()]
    # the average of the weights refers to these very tensors
    assert converted is module and all(one is two for one, two in zip(tensors, after, strict=True))
    assert any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules())
    torch.testing.assert_close(module(images), before)


# How many


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    info = DeviceInfo("cuda", "GPU", True, count=count)
    monkeypatch.setattr("core.devices.ranks.cuda_info", lambda: info)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)


def test_0_takes_all_gpus_and_one_process_elsewhere(monkeypatch: pytest.MonkeyPatch):
    gpus(monkeypatch, 4)
    counts = [count_processes(kind, 0) for kind in ("cuda", "cpu", "mps", "xla", "tpu")]
    assert counts == [4, 1, 1, 1, 1]
    assert (count_processes("cuda", 3), count_processes("cpu", 3), count_processes("xla", 1)) == (3, 3, 1)


def test_more_gpus_than_there_are_is_told_with_their_number(monkeypatch: pytest.MonkeyPatch):
    gpus(monkeypatch, 2)
    with pytest.raises(DeviceError, match="3 GPUs are asked for, and 2 can be used"):
        count_processes("cuda", 3)


@pytest.mark.parametrize("kind", ["mps", "xla", "tpu"])
def test_a_kind_that_trains_in_one_process_takes_no_more(kind: str):
    with pytest.raises(DeviceError, match=f"2 devices of kind {kind}"):
        count_processes(kind, 2)


def test_a_batch_that_cannot_be_shared_starts_no_process(store: Store):
    run_id = store.create_run(make_config(device="cpu", num_devices=3, batch_size=32))
    started = time.monotonic()
    assert train_run(store, run_id) == "failed"
    summary = summarise(store, run_id)
    assert summary["error"] == "ConfigError" and "32 can't be shared evenly by 3 devices" in summary["reason"]
    assert time.monotonic() - started < 2


def test_processes_share_the_cores_among_their_loaders(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 32)
    assert [num_workers(0, "cuda", processes) for processes in (1, 4, 8, 64)] == [8, 7, 3, 1]
    assert num_workers(5, "cuda", 8) == 5


def test_no_batch_size_is_tried_where_other_processes_would_have_to_take_the_step_along(
    monkeypatch: pytest.MonkeyPatch,
):
    task = make_task(batch_size=8)
    task.device.count = task.device.num_processes = 2
    monkeypatch.setattr("core.trials.memory.fitting_batch", lambda *_: pytest.fail("a step was taken"))
    assert "4 may fit" in memory_full(task, 8, 8).fix


# The launch, with stand-ins for torchrun and its processes


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Follows a launch of stand-ins that play a scenario; returns its last event and the events before."""

    def command(launch: Launch, folder: Path) -> list[str]:
        return [sys.executable, "-m", "tests.ranks_double", str(folder), "2"]

    def follow(scenario: str, should_stop=lambda: False):
        events: list = []
        job = Job(make_config(data=scenario), "cpu", tmp_path, tmp_path, threads=1)
        with no_process_left(tmp_path):
            ended = train_in_processes(job, 2, emit=events.append, should_stop=should_stop, started=time.perf_counter())
        return ended, events

    monkeypatch.setattr(Launch, "_command", command)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return follow


class no_process_left:
    """Fails where processes or files of a launch are there after the block."""

    def __init__(self, temporary: Path):
        self.temporary = temporary

    def __enter__(self) -> None:
        self.before = set(psutil.Process().children(recursive=True))

    def __exit__(self, *_: object) -> None:
        assert set(psutil.Process().children(recursive=True)) - self.before == set()
        assert list(self.temporary.glob("ranks-*")) == []


def test_events_of_the_first_process_come_in_order_and_time_adds_up(doubles):
    ended, events = doubles("finish")
    assert [type(event) for event in events] == [PhaseChanged, RunPrepared, EpochEnded]
    assert list(events[1].setup_parts) == ["processes_s", "model_s"]
    assert ended.state == "finished"
    assert ended.phases.total_s() == pytest.approx(ended.total_s)
    assert ended.phases.setup_s == pytest.approx(1.0 + events[1].setup_parts["processes_s"])
    assert ended.phases.compute_s == 1.0


def test_a_stop_reaches_the_first_process(doubles):
    ended, _ = doubles("stop", should_stop=lambda: True)
    assert ended.state == "stopped" and ended.total_s < 20


def test_a_stop_before_anything_began_ends_it_all(doubles, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("core.running.launch.STOP_S", 0.2)
    ended, events = doubles("never_begin", should_stop=lambda: True)
    assert (ended.state, events) == ("stopped", [])
    assert ended.phases.setup_s + ended.phases.other_s == pytest.approx(ended.total_s)


def test_the_failure_of_one_ends_all_and_is_what_is_told(doubles, monkeypatch: pytest.MonkeyPatch):
    for limit in ("TELL_S", "LEAVE_S"):
        monkeypatch.setattr(f"core.running.launch.{limit}", 0.5)
    ended, _ = doubles("fail")
    assert (ended.state, ended.reason) == ("failed", "the second's own")


def test_a_process_that_is_killed_is_named_and_not_the_one_that_fails_of_it(doubles):
    ended, _ = doubles("die")
    assert ended.state == "failed" and "process 2 died" in ended.reason
    assert "what the processes wrote last" in ended.traceback


def test_processes_do_not_outlive_the_one_that_launched_them(tmp_path: Path):
    program = """
import sys, time
from pathlib import Path
from core.config import make_config
from core.running.launch import LOG_TAIL, Job, Launch, train_in_processes
Launch._command = lambda self, folder: [sys.executable, "-m", "tests.ranks_double", str(folder), "2"]
job = Job(make_config(data="stop"), "cpu", Path(), Path(), threads=1)
train_in_processes(job, 2, emit=print, should_stop=lambda: False, started=time.perf_counter())
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-uc", program], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent:
        while b"RunPrepared" not in parent.stdout.readline():
            assert parent.poll() is None
        family = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    assert len(family) == 3
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


# The real thing


def tiny(pictures: Path, **changes):
    frozen = {"model": "torchvision/resnet18", "weights": "none", "trainable": "head", "image_size": 32}
    return make_config(
        **{**frozen, "data": str(pictures), "device": "cpu", "batch_size": 8, "epochs": 2, "num_devices": 2, **changes}
    )


def test_a_run_of_two_processes_is_the_run_of_one(store: Store, pictures: Path):
    events: list = []
    run_id = store.create_run(tiny(pictures))
    before = set(psutil.Process().children(recursive=True))
    assert train_run(store, run_id, on_event=events.append) == "finished", summarise(store, run_id)
    assert set(psutil.Process().children(recursive=True)) == before
    alone_id = store.create_run(tiny(pictures, num_devices=1))
    train_run(store, alone_id)
    shared, alone = summarise(store, run_id), summarise(store, alone_id)
    for ours, theirs in zip(shared["epochs"], alone["epochs"], strict=True):
        assert (ours["train_loss"], ours["val_loss"]) == pytest.approx(
            (theirs["train_loss"], theirs["val_loss"]), rel=1e-5
        )
        assert ours["val_top1"] == theirs["val_top1"]
    assert shared["num_val"] == 9 and shared.keys() == alone.keys()
    assert shared["device"] == {"kind": "cpu", "name": f"2 x {cpu_name()}"}
    assert shared["environment"]["devices"] == 2
    assert sum(shared["phases"].values()) == pytest.approx(shared["total_s"])
    assert shared["phases"]["setup_s"] > shared["setup_parts"]["processes_s"] > 0
    # the machine is sampled in a thread of its own
    stored = [event.kind for event in store.events(run_id) if event.kind != "MachineSampled"]
    kinds = [type(event).__name__ for event in events]
    assert stored == [kind for kind in kinds if kind not in ("ProgressMade", "MachineSampled")]
    ours, theirs = (load_file(store.run_folder(name) / "last.safetensors") for name in (run_id, alone_id))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name])
    assert (store.run_folder(run_id) / "split.csv").exists()


def test_a_stop_through_the_store_ends_all_processes_after_saving(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, epochs=5000))
    stop_once_it_trains(store, run_id)
    assert store.get_run(run_id).state == "stopped"
    assert (store.run_folder(run_id) / "last.safetensors").exists()


def test_changes_and_pauses_reach_all_processes(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, epochs=5000, log_every=1))
    thread = threading.Thread(target=train_run, args=(store, run_id))
    thread.start()
    for kind, asked in (
        ("StepLogged", None),
        ("Tweaked", ("change", {"what": "lr", "value": 1e-5})),
        ("Paused", ("pause", None)),
        ("Resumed", ("resume", None)),
    ):
        if asked:
            store.request(run_id, *asked)
        while not store.events(run_id, kinds=[kind]):
            assert thread.is_alive(), summarise(store, run_id)
            time.sleep(0.05)
        if kind == "Paused":
            time.sleep(1.5)
    resumed = store.events(run_id, kinds=["Resumed"])[0]
    while not store.events(run_id, after=resumed.id, kinds=["StepLogged"]):
        time.sleep(0.05)
    store.request(run_id, "stop")
    thread.join(60)
    assert store.get_run(run_id).state == "stopped"
    assert store.events(run_id, kinds=["StepLogged"])[-1].payload["lr"] < 1e-5
    record, summary = store.get_run(run_id), summarise(store, run_id)
    assert summary["total_s"] == pytest.approx(sum(summary["phases"].values()))
    assert resumed.payload["seconds"] > 1.4 and summary["total_s"] < record.ended - record.started - 1.3


def test_torchrun_writes_how_a_process_ended_that_died_without_a_word(tmp_path: Path):
    job = Job(make_config(data="die"), "cpu", tmp_path, tmp_path, threads=1)
    ended = train_in_processes(
        job,
        2,
        emit=lambda event: None,
        should_stop=lambda: False,
        started=time.perf_counter(),
        module="tests.ranks_double",
    )
    assert ended.state == "failed" and "process 2 died" in ended.reason
    assert "Signal 9 (SIGKILL)" in ended.traceback and len(ended.traceback) <= LOG_TAIL
