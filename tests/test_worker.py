"""Real training of the built-in data through the store, from start to failure."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.analysis.summary import summarise
from core.checkpoint import read_about
from core.config import make_config
from core.running.trainer import train_run
from core.store import Store
from core.training.state import read_state
from core.worker import Worker
from tests.tiny import stop_once_it_trains

ROOT = Path(__file__).parents[1]
TINY = {"threads": 1, "model": "torchvision/resnet18", "weights": "none", "image_size": 32, "epochs": 1}


def train(store: Store, **changes) -> dict:
    run_id = store.create_run(make_config(**{**TINY, **changes}))
    train_run(store, run_id)
    return summarise(store, run_id)


def train_in_worker(store: Store, **changes) -> dict:
    worker = Worker(store)
    worker.start()
    try:
        run_id = store.create_run(make_config(**{**TINY, **changes}))
        worker.wake()
        while store.get_run(run_id).is_active:
            time.sleep(0.05)
    finally:
        worker.shutdown(30)
    return summarise(store, run_id)


def test_a_last_batch_of_one_trains_and_validation_counts_all_images(store: Store, pictures: Path):
    summary = train(store, data=str(pictures), batch_size=16)
    assert summary["state"] == "finished", summary.get("reason")
    assert (summary["num_train"], summary["num_val"]) == (17, 9)
    hits = summary["epochs"][0]["val_top1"] * 9 / 100
    assert hits == pytest.approx(round(hits), abs=1e-6)


def test_a_batch_of_one_that_batchnorm_cannot_take_is_told_in_one_line(store: Store, pictures: Path):
    summary = train(store, data=str(pictures), batch_size=1)
    assert (summary["state"], summary["error"]) == ("failed", "ConfigError")
    assert summary["reason"].startswith("A batch of 1 at this image size leaves BatchNorm a single value")


def test_phases_add_up_to_the_wall_time(store: Store, pictures: Path):
    summary = train(store, data=str(pictures))
    assert sum(summary["phases"].values()) == pytest.approx(summary["total_s"], rel=1e-6)
    assert all(seconds >= 0 for seconds in summary["phases"].values())


def test_the_same_seed_gives_the_same_losses(store: Store, pictures: Path):
    first, second = (train(store, data=str(pictures), batch_size=8, epochs=2) for _ in range(2))
    for one, two in zip(first["epochs"], second["epochs"], strict=True):
        assert (one["train_loss"], one["val_loss"]) == (two["train_loss"], two["val_loss"])


def test_a_checkpoint_brings_classes_normalisation_and_config(store: Store, pictures: Path):
    summary = train(store, data=str(pictures))
    folder = store.run_folder(summary["run_id"])
    for which in ("best", "last"):
        about = read_about(folder / f"{which}.safetensors")
        assert about["classes"] == ["dark", "light"] and len(about["mean"]) == 3
        assert about["config"]["model"] == "torchvision/resnet18"
        assert load_file(folder / f"{which}.safetensors")["fc.weight"].shape == (2, 512)
    assert read_state(folder).position.epoch == 2


def test_a_frozen_backbone_stays_as_it_was_statistics_too(store: Store, pictures: Path):
    summary = train(store, data=str(pictures), trainable="head", epochs=2)
    folder = store.run_folder(summary["run_id"])
    best, last = load_file(folder / "best.safetensors"), load_file(folder / "last.safetensors")
    frozen = [name for name in last if not name.startswith("fc.")]
    assert all(torch.equal(best[name], last[name]) for name in frozen)
    assert last["bn1.running_mean"].abs().max() == 0


def test_a_failure_is_kept_with_its_reason_and_the_next_run_works(store: Store, pictures: Path):
    worker = Worker(store)
    worker.start()
    try:
        bad = store.create_run(make_config(**TINY, data=str(pictures / "nothing")))
        good = store.create_run(make_config(**TINY, data=str(pictures)))
        worker.wake()
        deadline = time.monotonic() + 60
        while store.get_run(good).state in ("queued", "running") and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        worker.shutdown(30)
    assert store.get_run(bad).state == "failed" and store.get_run(good).state == "finished"
    failed = store.events(bad, kinds=["RunEnded"])[-1].payload
    assert "nothing" in failed["reason"] and failed["fix"] and failed["traceback"] == ""


def test_an_exception_is_kept_with_its_traceback(store: Store, pictures: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of paper\nsecond line")

    monkeypatch.setattr("core.running.trainer.fit", broken)
    summary = train(store, data=str(pictures))
    assert (summary["state"], summary["reason"]) == ("failed", "RuntimeError: out of paper")
    assert "in broken" in store.events(summary["run_id"], kinds=["RunEnded"])[-1].payload["traceback"]


def test_a_stop_through_the_store_ends_a_run_that_another_thread_trains(store: Store, pictures: Path):
    run_id = store.create_run(make_config(**{**TINY, "epochs": 500}, data=str(pictures)))
    stop_once_it_trains(store, run_id)
    assert store.get_run(run_id).state == "stopped"
    assert (store.run_folder(run_id) / "last.safetensors").exists()


def test_a_stop_is_heard_while_the_data_are_read(store: Store, pictures: Path, monkeypatch: pytest.MonkeyPatch):
    from core.data import probe

    probe_file = probe.probe_file

    def stop_then_probe(*arguments):
        if pulses:
            pulses.pop().ask_stop()
        return probe_file(*arguments)

    pulses: list = []
    monkeypatch.setattr(probe, "probe_file", stop_then_probe)
    run_id = store.create_run(make_config(**TINY, data=str(pictures)))
    assert train_run(store, run_id, on_pulse=pulses.append) == "stopped"
    summary = summarise(store, run_id)
    assert summary["epochs"] == []
    assert summary["phases"]["setup_s"] == pytest.approx(summary["total_s"])


def test_a_file_that_vanishes_between_scan_and_use_ends_nothing(
    store: Store, pictures: Path, monkeypatch: pytest.MonkeyPatch
):
    train(store, data=str(pictures))
    (pictures / "train" / "dark" / "0.png").unlink()
    (pictures / "val" / "light" / "0.png").unlink()
    from core.data import scan as scanning

    # the tree as it was, as if the files went just after it was read
    monkeypatch.setattr(scanning, "read_tree", remembered_tree(pictures, store.home))
    summary = train(store, data=str(pictures), image_size=40)
    assert summary["state"] == "finished"
    assert summary["num_val"] == 9
    lost = store.events(summary["run_id"], kinds=("ImageLost",))
    assert sorted(event.payload["file"] for event in lost) == ["train/dark/0.png", "val/light/0.png"]
    hits = summary["epochs"][0]["val_top1"] * 8 / 100
    assert hits == pytest.approx(round(hits))


def remembered_tree(root: Path, home: Path):
    """`read_tree` with the two removed files as an earlier scan knew them."""
    import sqlite3

    from core.data.tree import File, read_tree

    with sqlite3.connect(home / "cache" / "files-1.sqlite3") as memory:
        rows = memory.execute("SELECT name, size, mtime_ns, ctime_ns FROM probes").fetchall()

    def read(folder: Path, without: Path | None = None):
        tree = read_tree(folder, without)
        present = {file.name for file in tree.top.all_files()}
        for name, *facts in rows:
            if name not in present:
                split, label, _ = name.split("/")
                at = next(f for s in tree.top.folders if s.name == split for f in s.folders if f.name == label)
                at.files.append(File(str(root / name), name, *facts))
        return tree

    return read


@pytest.mark.xla
def test_xla_trains_to_the_numbers_of_the_cpu_from_the_background_thread(store: Store, pictures: Path):
    changes = {"data": str(pictures), "model": "tf_efficientnet_lite0", "weights": "default", "trainable": "head"}
    on_cpu, on_xla = (train_in_worker(store, device=kind, image_size=61, **changes) for kind in ("cpu", "xla"))
    assert on_xla["device"]["kind"] == "xla" and on_xla["compile"]["count"] >= 2
    for ours, theirs in zip(on_xla["epochs"], on_cpu["epochs"], strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-3)
        assert ours["val_top1"] == theirs["val_top1"]


def command(home: Path, *words: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "core", "--home", str(home), *words]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_line_learns_fashion_and_prints_one_json_object(tmp_path: Path):
    done = command(tmp_path, "train", "--preset", "quick", "--epochs", "2", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["num_train"] == 1000 and summary["num_val"] == 400
    assert summary["best"]["val_top1"] > 70
    # time adds up, and what no phase holds is under 1 %
    phases = summary["phases"]
    assert sum(phases.values()) == pytest.approx(summary["total_s"], rel=1e-6)
    assert phases["other_s"] < 0.01 * summary["total_s"]
    listed = json.loads(command(tmp_path, "runs", "--json").stdout)["runs"]
    assert [row["run_id"] for row in listed] == [summary["run_id"]]


def test_a_run_that_has_no_figures_yet_is_printed_too(tmp_path: Path):
    store = Store(tmp_path)
    run_id = store.create_run(make_config())
    store.close()
    done = command(tmp_path, "run", run_id)
    assert done.returncode == 0, done.stderr
    assert f"{run_id}  queued  on auto" in done.stdout


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["train", "--epochs", "0"], "--epochs can't be 0"),
        (["train", "--epochs", "many"], "invalid int value"),
        (["train", "--model", "resnet81"], "resnet81"),
        (["train", "--device", "mps"], "mps is not available"),
        (["train", "--data", "/no/such/folder"], "/no/such/folder"),
        (["train", "--preset", "blog"], "imagenetv2"),
        (["train", "--precision", "fp16"], "fp16"),
        (["run", "nope"], "no run 'nope'"),
        (["scan", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path: Path, words: list[str], problem: str):
    done = command(tmp_path, *words)
    assert done.returncode == 2, done.stderr
    assert problem in done.stderr and len(done.stderr.strip().splitlines()) == 1 and done.stdout == ""


def test_a_time_limit_stops_and_saves_the_run(store: Store, pictures: Path):
    summary = train(store, data=str(pictures), epochs=10_000, batch_size=8, time_limit_min=0.08)
    assert summary["state"] == "stopped" and summary["ended_early"] == "The time limit of 4.8 s was reached."
    assert 4.8 <= summary["total_s"] < 15
    assert (store.run_folder(summary["run_id"]) / "last.safetensors").exists()
