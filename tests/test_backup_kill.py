"""Processes that are killed while they train and back up, or restore: the backup holds a whole history each time."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import time
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

from core.analysis.summary import summarise
from core.backup import prepare
from core.backup.command import verify_command
from core.backup.layout import list_files, read_shelf
from core.backup.once import back_up
from core.running.resume import plan_resume, resume
from core.running.trainer import train_run
from core.store import Store
from core.training.state import read_state, state_files
from tests.backup_cases import run_of
from tests.survive_cases import Commands, make_pictures, tiny, words_of
from tests.test_backup import contents

pytestmark = pytest.mark.long
KILLS = 15
SEED = 7


@pytest.fixture(scope="module")
def commands():
    with Commands(forked=True, module="tests.backup_cases") as started:
        yield started


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("kills") / "pictures", 16, 8)


def figures(store: Store, run_id: str) -> tuple[list, dict]:
    epochs = [(epoch["epoch"], epoch["train_loss"], epoch["val_loss"]) for epoch in summarise(store, run_id)["epochs"]]
    weights = load_file(store.run_folder(run_id) / "last.safetensors")
    return epochs, {name: tensor.tolist() for name, tensor in weights.items()}


def test_a_history_that_lives_on_machines_which_are_killed_stays_whole_and_its_runs_equal_one_left_alone(
    commands: Commands, pictures: Path, tmp_path: Path
):
    draw, where = random.Random(SEED), Counter[str]()
    folder = tmp_path / "backup"
    seeds = map(str, range(1000))
    life_s = 0.0
    for kill in range(-2, KILLS):
        # each machine is a new one that has the backup alone; the first two live to their end, to see how long it takes
        home = tmp_path / f"machine-{kill}"
        before = read_shelf(folder).whole[0] if kill > -2 else None
        words = ["case", "live", str(home), str(folder), str(pictures), next(seeds)]
        with commands.start(words, tmp_path / "out.json") as running:
            while not (home / "is-up").exists() and not running.has_ended():
                time.sleep(0.001)
            began, until_s = time.monotonic(), draw.uniform(0, life_s)
            as_written = draw.randint(1, 12) if draw.random() < 0.7 else 0
            while not running.has_ended() and (kill < 0 or as_written or time.monotonic() < began + until_s):
                known = names_in(folder)
                time.sleep(0.001)
                if kill >= 0 and as_written and names_in(folder) - known:
                    as_written -= 1
                    if not as_written:
                        break
            running.kill()
        life_s = time.monotonic() - began if kill < 0 else life_s
        assert running.status in (-signal.SIGKILL, 0), (tmp_path / "out.err").read_text()
        if before is None:
            continue
        after = read_shelf(folder)
        where["killed"] += running.status != 0
        where["with a half-written manifest"] += len(after.damaged)
        named = {entry.file for manifest in after.whole for entry in manifest.entries()}
        where["with files that no manifest names"] += not set(list_files(folder)) <= named
        where["generations"] += after.whole[0].number - before.number
        assert set(before.run_ids) <= set(after.whole[0].run_ids)
        assert all(not each["damaged"] for each in verify_command(folder)[0]["generations"][:1])
        look_at_all(tmp_path / f"look-{kill}", folder, after.whole[0].run_ids)
        shutil.rmtree(tmp_path / f"look-{kill}")
        shutil.rmtree(home)
    # the last machine is left alone, and takes up what is left
    home = tmp_path / "last"
    done = commands.run(["case", "live", str(home), str(folder), str(pictures), next(seeds)], tmp_path / "o.json")
    assert done.status == 0, done.errors
    store = Store(home)
    reference = Store(tmp_path / "reference")
    assert where["generations"] > KILLS and where["killed"] > KILLS / 2, where
    assert where["with files that no manifest names"] > 2, where
    runs = [record for record in store.list_runs() if record.state == "finished"]
    assert len(runs) == len(store.list_runs()) > 4
    for record in draw.sample(runs, 4):
        run_id = reference.create_run(run_of(str(pictures), str(record.config.seed)))
        train_run(reference, run_id)
        assert figures(reference, run_id) == figures(store, record.run_id)
    store.close()
    reference.close()


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


def look_at_all(home: Path, folder: Path, run_ids: list[str]) -> None:
    """Restore, and read every row and every checkpoint."""
    restored = prepare(home, folder, tell=lambda line: None)
    assert restored is not None and [line for line in restored.missing if "manifest" not in line] == []
    with sqlite3.connect(home / "runs.sqlite") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    store = Store(home)
    assert {record.run_id for record in store.list_runs()} == set(run_ids)
    store.recover()
    for record in store.list_runs():
        assert not record.is_active
        summarise(store, record.run_id)
        files = list(store.run_folder(record.run_id).glob("*"))
        assert all(load_file(path) for path in files if path.suffix == ".safetensors")
        assert bool(state_files(store.run_folder(record.run_id))) == (read_state(path_of(store, record)) is not None)
    store.close()


def path_of(store: Store, record) -> Path:
    return store.run_folder(record.run_id)


def test_a_run_that_was_interrupted_goes_on_after_a_restore_as_it_would_have_in_its_place(
    commands: Commands, pictures: Path, tmp_path: Path
):
    home, folder = tmp_path / "home", tmp_path / "backup"
    with commands.start(["case", "live", str(home), str(folder), str(pictures), "3"], tmp_path / "o.json") as running:
        while not (folder.exists() and any(".pt" in name for name in contents(folder))):
            assert not running.has_ended()
            time.sleep(0.005)
        running.kill()
    prepare(tmp_path / "fresh", folder)
    found = []
    for place in (home, tmp_path / "fresh"):
        store = Store(place)
        store.recover()
        [record] = store.list_runs()
        assert record.state == "interrupted"
        resume(store, plan_resume(store, record.run_id))
        assert train_run(store, record.run_id) == "finished"
        found.append(figures(store, record.run_id))
        store.close()
    assert found[0] == found[1]


def test_a_restore_that_is_killed_is_done_anew_at_the_next_start(commands: Commands, pictures: Path, tmp_path: Path):
    home, folder, draw = tmp_path / "home", tmp_path / "backup", random.Random(SEED)
    store = Store(home)
    run_ids = [store.create_run(tiny(pictures)) for _ in range(40)]
    for run_id in run_ids:
        store.run_folder(run_id).mkdir(parents=True)
        (store.run_folder(run_id) / "best.safetensors").write_bytes(draw.randbytes(1 << 20))
        store.end_run(run_id, "stopped")
    store.close()
    back_up(home, folder)
    began = time.monotonic()
    prepare(tmp_path / "whole", folder)
    whole_s = time.monotonic() - began
    half = 0
    for kill in range(KILLS):
        fresh = tmp_path / f"fresh-{kill}"
        with commands.start(["case", "bring_back", str(fresh), str(folder)], tmp_path / "o.json") as running:
            while not (tmp_path / f"fresh-{kill}.begun").exists():
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 1.5 * whole_s))
            running.kill()
        half += (fresh / "backup" / "restoring.json").exists()
        assert commands.run(["case", "bring_back", str(fresh), str(folder)], tmp_path / "o.json").status == 0
        assert contents(fresh / "runs") == contents(home / "runs")
        restored = Store(fresh)
        assert [record.run_id for record in restored.list_runs()] == run_ids[::-1]
        restored.close()
        assert not (fresh / "backup" / "restoring.json").exists()
        # what it changes later is the same history
        assert back_up(fresh, folder).manifest.number == 1
        shutil.rmtree(fresh)
    assert half >= 3, "the kills came too early or too late"


def test_a_full_disk_is_told_and_all_is_backed_up_once_there_is_room(
    commands: Commands, pictures: Path, tmp_path: Path
):
    store = Store(tmp_path / "home")
    for _ in range(2):
        train_run(store, store.create_run(tiny(pictures)))
    store.close()
    told = commands.run(["case", "full", str(tmp_path / "home"), str(tmp_path / "disk")], tmp_path / "o.json").told
    assert len(told["told"]) == 2 and "can be used again" in told["told"][1]
    why = "it is full. Make room there" if told["is_own"] else "it takes no file so large"
    assert why in told["told"][0]
    assert (told["before"], told["missing"]) == (0, [])


def test_a_disk_that_becomes_read_only_is_told_and_used_again_later(commands: Commands, pictures: Path, tmp_path: Path):
    store = Store(tmp_path / "home")
    train_run(store, store.create_run(tiny(pictures, epochs=1)))
    store.close()
    told = commands.run(["case", "read_only", str(tmp_path / "home"), str(tmp_path / "disk")], tmp_path / "o.json").told
    if not told["is_own"]:
        pytest.skip("no disk of our own can be mounted here")
    assert len(told["told"]) == 2 and "it is read-only" in told["told"][0]
    assert told["number"] == 2


def test_ctrl_c_at_the_command_line_backs_up_before_it_ends(commands: Commands, pictures: Path, tmp_path: Path):
    home, folder = tmp_path / "home", tmp_path / "backup"
    words = ["--home", str(home), "--backup", str(folder), "train", *words_of(pictures, epochs=500), "--json"]
    with commands.start(words, tmp_path / "out.json") as running:
        while not list(home.glob("runs/*/state-*.pt")):
            assert not running.has_ended()
            time.sleep(0.02)
        os.kill(running.pid, signal.SIGINT)
    assert running.status == 130
    prepare(tmp_path / "fresh", folder)
    for place in (home, tmp_path / "fresh"):
        store = Store(place)
        [record] = store.list_runs()
        assert record.state == "stopped"
        store.close()
    assert contents(tmp_path / "fresh" / "runs").items() <= contents(home / "runs").items()
    assert "Traceback" not in (tmp_path / "out.err").read_text()


def test_a_run_in_a_process_of_its_own_is_backed_up_too(commands: Commands, pictures: Path, tmp_path: Path):
    home, folder = tmp_path / "home", tmp_path / "backup"
    words = ["--home", str(home), "--backup", str(folder), "train", *words_of(pictures, process="own"), "--json"]
    done = commands.run(words, tmp_path / "out.json")
    assert done.told["state"] == "finished", done.errors
    prepare(tmp_path / "fresh", folder)
    store = Store(tmp_path / "fresh")
    assert summarise(store, done.told["run_id"])["epochs"] == done.told["epochs"]
    store.close()
    # what it printed among its files
    restored = contents(tmp_path / "fresh" / "runs")
    assert f"{done.told['run_id']}/process.log" in restored and restored.items() <= contents(home / "runs").items()
