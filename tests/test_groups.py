"""Run groups: their plan, their runs in this process and in children, and what the store keeps of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from core.analysis.article import ARTICLE
from core.analysis.comparison import compare
from core.analysis.groups import load_group
from core.analysis.summary import summarise
from core.config import make_config
from core.errors import ConfigError, StoreError
from core.groups import plan_group, run_group, varied
from core.store import Store
from core.worker import train_queued

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
TINY = {
    "threads": 1, "model": "timm/test_resnet", "weights": "none", "image_size": 32, "epochs": 1, "trainable": "head",
    "device": "cpu", "batch_size": 8,
}  # fmt: skip


def tiny(pictures: Path, **changes):
    return make_config(**{**TINY, "data": str(pictures), **changes})


def test_each_round_runs_every_config_once_in_an_order_of_its_own():
    configs = varied(make_config(), {"batch_size": ["8", "16", "32"]})
    planned = plan_group(configs, repeats=6, start="cold")
    rounds = [planned[index : index + 3] for index in range(0, 18, 3)]
    assert all({run.repeat for run in block} == {number} for number, block in enumerate(rounds, start=1))
    assert all({run.label for run in block} == set(configs) for block in rounds)
    assert len({tuple(run.label for run in block) for block in rounds}) > 1
    assert [run.label for run in plan_group(configs, repeats=6, start="cold", seed=1)] != [run.label for run in planned]
    assert plan_group(configs, repeats=6, start="cold") == planned


def test_cold_repeats_start_anew_and_warm_ones_share_a_process_after_a_warm_up_of_each():
    configs = varied(make_config(epochs=4, warmup_epochs=2), {"device": ["cpu", "xla"]})
    planned = plan_group(configs, repeats=2, start="both")
    warm_ups = [run for run in planned if run.purpose == "warm-up"]
    assert [(run.label, run.config.epochs) for run in warm_ups] == [("cpu", 1), ("xla", 1)] and planned[:2] == warm_ups
    assert all(run.config.process == "own" and run.config.caches == "anew" for run in planned if run.start == "cold")
    assert all(run.config.process == "shared" and run.config.caches == "use" for run in planned if run.start == "warm")
    assert Counter((run.label, run.start) for run in planned[2:]) == {
        (label, start): 2 for label in ("cpu", "xla") for start in ("cold", "warm")
    }


def test_where_a_tpu_belongs_to_the_warm_process_the_cold_repeats_come_first():
    planned = plan_group(varied(make_config(), {"device": ["cpu", "xla"]}), repeats=3, start="both", cold_first=True)
    starts = [run.start for run in planned]
    assert starts == ["cold"] * 6 + ["warm"] * 8


def test_options_are_varied_together_and_named_by_what_differs():
    configs = varied(make_config(), {"device": ["cpu", "xla"], "precision": ["fp32", "bf16"]})
    assert list(configs) == [
        "device cpu, precision fp32",
        "device cpu, precision bf16",
        "device xla, precision fp32",
        "device xla, precision bf16",
    ]
    assert configs["device xla, precision bf16"].precision == "bf16"


@pytest.mark.parametrize(
    ("choices", "repeats"),
    [({}, 5), ({"device": ["cpu"]}, 5), ({"device": ["cpu", "xla"]}, 0), ({"lr": ["0.1", "0.2"]}, 9000)],
)
def test_what_can_not_be_compared_is_refused(choices: dict, repeats: int):
    with pytest.raises(ConfigError):
        plan_group(varied(make_config(), choices), repeats=repeats, start="warm")


def test_a_value_out_of_its_limits_is_refused_by_name():
    with pytest.raises(ConfigError, match="--batch-size can't be '-1'"):
        varied(make_config(), {"batch_size": ["16", "-1"]})


def test_a_group_runs_to_its_end_though_one_config_fails(store: Store, pictures: Path):
    configs = {"fine": tiny(pictures), "broken": tiny(pictures, model="timm/no_such_model")}
    group_id = store.groups.create("Two", plan_group(configs, repeats=2, start="warm"), plan={}, own=True)
    run_group(store, group_id)
    group = store.groups.get(group_id)
    assert not group.is_active
    states = Counter((member.label, member.purpose, member.state) for member in group.members)
    assert states == {
        ("fine", "warm-up", "finished"): 1, ("fine", "train", "finished"): 2,
        ("broken", "warm-up", "failed"): 1, ("broken", "train", "failed"): 2,
    }  # fmt: skip
    loaded = load_group(store, group_id)
    assert len(loaded.repeats) == 4 and compare(loaded)["cells"][1]["failed"] == 2


def test_a_cold_repeat_has_a_process_of_its_own_and_packs_anew(store: Store, pictures: Path):
    warm = store.create_run(tiny(pictures))
    assert train_queued(store, warm) == "finished"
    cold = store.create_run(tiny(pictures, process="own", caches="anew"))
    assert train_queued(store, cold) == "finished", (store.run_folder(cold) / "process.log").read_text()
    (pid,) = store.database.read("SELECT pid FROM runs WHERE run_id = ?", (cold,))[0]
    assert pid != os.getpid()
    summary = summarise(store, cold)
    assert summary["is_warm"] is False and summary["cache"]["images"] == 26
    assert not list((store.home / "cache").glob(".building-*"))
    assert summarise(store, warm)["epochs"][0]["train_loss"] == summary["epochs"][0]["train_loss"]


def test_a_process_that_is_killed_is_told_in_words_at_once(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, process="own", epochs=500))
    thread = threading.Thread(target=train_queued, args=(store, run_id))
    thread.start()
    while not store.events(run_id, kinds=["StepLogged"]):
        time.sleep(0.05)
        assert thread.is_alive()
    (pid,) = store.database.read("SELECT pid FROM runs WHERE run_id = ?", (run_id,))[0]
    os.kill(pid, signal.SIGKILL)
    thread.join(10)
    summary = summarise(store, run_id)
    assert summary["state"] == "interrupted" and summary["reason"] == "The run's own process was ended by SIGKILL."
    assert not store.is_held("cpu")


def test_a_run_of_its_own_process_stops_and_saves_when_asked(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, process="own", epochs=500))
    asked = threading.Event()
    thread = threading.Thread(target=train_queued, args=(store, run_id), kwargs={"should_stop": asked.is_set})
    thread.start()
    while not store.events(run_id, kinds=["StepLogged"]):
        time.sleep(0.05)
        assert thread.is_alive()
    asked.set()
    thread.join(60)
    assert store.get_run(run_id).state == "stopped"
    assert (store.run_folder(run_id) / "last.safetensors").exists()


def test_past_runs_are_grouped_by_hand_and_deleting_the_group_keeps_them(store: Store, pictures: Path):
    ids = [store.create_run(tiny(pictures)) for _ in range(3)]
    group_id = store.groups.of_past_runs("By hand", [(ids[0], "a", "warm"), (ids[1], "a", "warm"), (ids[2], "b", "")])
    members = store.groups.get(group_id).members
    assert [(member.run_id, member.label, member.repeat) for member in members] == [
        (ids[0], "a", 1), (ids[1], "a", 2), (ids[2], "b", 1),
    ]  # fmt: skip
    assert [record.group_id for record in store.groups.list_all()] == [group_id]
    with pytest.raises(StoreError):
        store.groups.of_past_runs("Broken", [(ids[0], "a", ""), ("nobody", "b", "")])
    assert len(store.groups.list_all()) == 1
    store.request(ids[0], "stop")
    store.delete(ids[0])
    assert len(store.groups.get(group_id).members) == 2
    store.groups.delete(group_id)
    assert store.get_run(ids[1]).run_id == ids[1]
    with pytest.raises(StoreError, match="no run group"):
        store.groups.get(group_id)


def test_the_reference_group_needs_no_store_entry(store: Store):
    assert load_group(store, ARTICLE.group_id) is ARTICLE


def cli(home: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "core", "--home", str(home), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def options(pictures: Path) -> list[str]:
    given = {**TINY, "data": str(pictures)}
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_the_command_line_compares_forecasts_and_exports(tmp_path: Path, pictures: Path):
    home = tmp_path / "home"
    ran = cli(home, "compare", *options(pictures), "--vary", "batch-size=8,13", "--repeats", "3", "--json")
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert [(cell["label"], cell["start"], cell["n"]) for cell in result["cells"]] == [
        ("batch_size 8", "warm", 3), ("batch_size 13", "warm", 3),
    ]  # fmt: skip
    (ratio,) = result["ratios"]
    assert ratio["low"] < ratio["ratio"] < ratio["high"] and result["diagnosis"]
    listed = json.loads(cli(home, "groups", "--json").stdout)["groups"]
    assert [group["group_id"] for group in listed] == [result["group_id"], "article-2020"]
    assert len(listed[0]["runs"]) == 8
    forecast = json.loads(cli(home, "forecast", *options(pictures), "--json").stdout)["forecast"]
    assert forecast["basis"] == "3 runs like this one" and forecast["total_low_s"] < forecast["total_s"]
    table = cli(home, "export", result["group_id"], "--to", "csv", "--table", "phases").stdout
    assert table.startswith("run_id,") and "data_wait" in table
    made = tmp_path / "report.html"
    assert cli(home, "export", result["group_id"], "--to", "html", "--out", str(made)).returncode == 0
    assert made.stat().st_size > 1_000_000
    again = cli(home, "compare", "--group", result["group_id"], "--measure", "epoch_s")
    assert again.returncode == 0 and "batch_size 13" in again.stdout


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["compare", "--vary", "colour=red"], "--vary colour=red names no option with values."),
        (["compare", "--runs", "nobody", "else"], "There is no run 'nobody'."),
        (["compare", "--device", "cpu"], "There is one config alone, so nothing to compare."),
        (["compare", "--group", "group-none"], "There is no run group 'group-none'."),
        (["compare", "--group", "article-2020", "--measure", "joy"], "There is no measure 'joy'."),
        (["export", "article-2020", "--to", "csv"], "The article tells no steps and epochs of its runs."),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: list[str], problem: str):
    ran = cli(tmp_path, *words)
    assert ran.returncode == 2 and ran.stderr.startswith(problem) and ran.stderr.count("\n") == 1
