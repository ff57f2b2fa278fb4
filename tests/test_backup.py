"""Backups of a home folder: real runs, real files, real databases; restored, damaged, refused, failing, hanging."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from core.__main__ import main
from core.analysis.summary import summarise
from core.backup import Backup, BackupStatus, keep, prepare, status
from core.backup.layout import Entry, Manifest, from_text, manifest_name, read_shelf, to_text
from core.backup.once import BusyError, back_up, lock_of
from core.backup.restore import restore
from core.backup.source import signature
from core.errors import BackupError
from core.events import CheckpointSaved, EpochEnded, Phases, StepLogged
from core.running.resume import plan_resume, resume
from core.running.trainer import train_run
from core.store import Store
from core.training.state import read_state, state_files
from tests.survive_cases import make_pictures
from tests.test_groups import tiny
from ui import registry

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("backup") / "pictures", 16, 8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, photographs: Path) -> Path:
    """A home with two runs that were trained; it is copied and not used."""
    home = tmp_path_factory.mktemp("trained") / "home"
    store = Store(home)
    for epochs in (1, 2):
        assert train_run(store, store.create_run(tiny(photographs, epochs=epochs))) == "finished"
    store.close()
    (home / "uploads").mkdir()
    (home / "uploads" / "big.zip").write_bytes(bytes(1000))
    return home


@pytest.fixture
def home(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "drive" / "backup"


@pytest.fixture(autouse=True)
def _drive(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()


def contents(folder: Path, but: str = "backup") -> dict[str, str]:
    """Hash of each file below a folder, but for what backups note down in a home."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] != but
    }


def run_ids(home: Path) -> list[str]:
    store = Store(home)
    try:
        return [record.run_id for record in store.list_runs()]
    finally:
        store.close()


@contextmanager
def opened(home: Path) -> Iterator[Store]:
    store = Store(home)
    yield store
    store.close()


def change(home: Path, note: str = "changed") -> None:
    with opened(home) as store:
        store.set_note(store.newest_run_id(), note)


def flip(path: Path, at: float = 0.5) -> None:
    """Turn one bit of a file around."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def wait_for(is_so: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- what is copied -------------------------------------------------------------------------------------------------


def test_a_backup_holds_the_database_and_what_runs_need_and_nothing_else(home: Path, folder: Path):
    outcome = back_up(home, folder)
    kept = {entry.path for entry in outcome.manifest.entries()}
    newest = {run_id: state_files(home / "runs" / run_id)[0].name for run_id in run_ids(home)}
    wanted = {
        f"runs/{run_id}/{name}"
        for run_id in run_ids(home)
        for name in ("best.safetensors", "last.safetensors", "split.csv", newest[run_id])
    }
    assert kept == {"runs.sqlite"} | wanted
    assert max(len(state_files(home / "runs" / run_id)) for run_id in newest) == 2
    assert len(contents(folder)) == outcome.copied + 1 == len(kept) + 1
    for entry in outcome.manifest.files:
        assert (folder / entry.file).read_bytes() == (home / entry.path).read_bytes()


def test_nothing_is_written_where_nothing_changed(home: Path, folder: Path):
    back_up(home, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    again = back_up(home, folder)
    assert (again.copied, again.manifest.number) == (0, 1)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_change_costs_what_changed_and_two_generations_are_kept(home: Path, folder: Path):
    back_up(home, folder)
    (folder / "mine.txt").write_text("not yours")
    (folder / "runs" / "notes.1234.txt").write_text("not yours")
    for number in (2, 3, 4):
        change(home, f"note {number}")
        outcome = back_up(home, folder)
        assert (outcome.copied, outcome.manifest.number) == (1, number)
    assert [manifest.number for manifest in read_shelf(folder).whole] == [4, 3]
    assert len(list(folder.glob("store.*"))) == 2 and (folder / "mine.txt").exists()
    assert (folder / "runs" / "notes.1234.txt").exists()


def test_a_run_that_was_deleted_leaves_the_backup_after_two_generations(home: Path, folder: Path):
    back_up(home, folder)
    gone, stays = run_ids(home)
    with opened(home) as store:
        store.delete(gone)
    back_up(home, folder)
    assert (folder / "runs" / gone).exists()
    change(home)
    back_up(home, folder)
    assert not (folder / "runs" / gone).exists() and (folder / "runs" / stays).exists()


def test_a_state_that_was_cut_is_left_out_and_the_one_before_it_kept(home: Path, folder: Path):
    run_id = run_ids(home)[0]
    newest, before = state_files(home / "runs" / run_id)
    halve(newest)
    paths = {entry.path for entry in back_up(home, folder).manifest.files}
    assert f"runs/{run_id}/{before.name}" in paths and f"runs/{run_id}/{newest.name}" not in paths


def test_a_file_that_no_manifest_names_is_not_trusted_though_its_name_and_size_are_right(
    home: Path, folder: Path, tmp_path: Path
):
    manifest = back_up(home, folder).manifest
    (folder / manifest_name(1)).unlink()
    # as a disk leaves it whose machine lost power
    (folder / manifest.files[0].file).write_bytes(bytes(manifest.files[0].bytes))
    back_up(home, folder)
    assert restore(tmp_path / "fresh", folder).missing == []


def test_a_home_without_runs_makes_no_backup(tmp_path: Path, folder: Path):
    Store(tmp_path / "empty").close()
    assert back_up(tmp_path / "empty", folder).manifest is None and list(folder.iterdir()) == []


# -- restoring ------------------------------------------------------------------------------------------------------


def test_a_fresh_home_gets_all_back_bit_by_bit(home: Path, folder: Path, tmp_path: Path):
    manifest = back_up(home, folder).manifest
    told: list[str] = []
    restored = prepare(tmp_path / "fresh", folder, tell=told.append)
    assert (restored.number, restored.runs, restored.missing) == (1, 2, [])
    assert len(told) == 1 and told[0].startswith("Restored 2 runs as backed up on ")
    for entry in manifest.files:
        assert (tmp_path / "fresh" / entry.path).read_bytes() == (home / entry.path).read_bytes()
    with opened(home) as before, opened(tmp_path / "fresh") as after:
        for run_id in run_ids(home):
            assert summarise(after, run_id) == summarise(before, run_id)
    # and it goes on with the same backup, of which nothing has to be written anew
    assert back_up(tmp_path / "fresh", folder).copied == 0
    assert prepare(tmp_path / "fresh", folder) is None


def test_a_restored_run_is_extended_and_its_backup_goes_on(home: Path, folder: Path, tmp_path: Path):
    back_up(home, folder)
    prepare(tmp_path / "fresh", folder)
    run_id = run_ids(home)[0]
    losses = []
    for place in (home, tmp_path / "fresh"):
        with opened(place) as store:
            resume(store, plan_resume(store, run_id, changes={"epochs": 3}))
            assert train_run(store, run_id) == "finished"
            epochs = summarise(store, run_id)["epochs"]
            losses.append([(epoch["train_loss"], epoch["val_loss"]) for epoch in epochs])
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert back_up(tmp_path / "fresh", folder).manifest.number == 2


def test_a_store_that_another_process_has_open_without_runs_is_restored_under_it(
    home: Path, folder: Path, tmp_path: Path
):
    back_up(home, folder)
    with opened(tmp_path / "fresh") as store:
        assert store.list_runs() == []
        prepare(tmp_path / "fresh", folder)
        assert len(store.list_runs()) == 2
        store.set_note(store.newest_run_id(), "it can write")
        assert store.database.writer.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_runs_that_were_deleted_on_purpose_do_not_come_back(home: Path, folder: Path):
    back_up(home, folder)
    with opened(home) as store:
        for record in store.list_runs():
            store.delete(record.run_id)
    assert prepare(home, folder) is None and run_ids(home) == []


def test_a_home_that_was_moved_goes_on_and_a_copy_of_it_that_lags_behind_is_refused(
    home: Path, folder: Path, tmp_path: Path
):
    back_up(home, folder)
    shutil.copytree(home, tmp_path / "copy")
    shutil.move(home, tmp_path / "moved")
    change(tmp_path / "moved")
    assert back_up(tmp_path / "moved", folder).manifest.number == 2
    before = contents(folder)
    with pytest.raises(BackupError, match=r"Another home folder with the same runs was backed up"):
        prepare(tmp_path / "copy", folder)
    with pytest.raises(BackupError, match="Another home folder"):
        back_up(tmp_path / "copy", folder)
    assert contents(folder) == before


def test_of_two_homes_that_go_on_with_one_backup_the_second_is_refused(home: Path, folder: Path, tmp_path: Path):
    back_up(home, folder)
    prepare(tmp_path / "fresh", folder)
    change(tmp_path / "fresh")
    back_up(tmp_path / "fresh", folder)
    change(home, "what the first one still does")
    with pytest.raises(BackupError, match="Another home folder with the same runs"):
        back_up(home, folder)


def test_the_backup_of_other_runs_is_refused_in_one_line_and_nothing_is_overwritten(
    home: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], photographs: Path
):
    back_up(home, folder)
    with opened(tmp_path / "other") as store:
        store.create_run(tiny(photographs))
    before = contents(folder), contents(tmp_path / "other")
    for words in (["runs"], ["backup", str(folder)]):
        given = [] if words[0] == "backup" else ["--backup", str(folder)]
        assert main(["--home", str(tmp_path / "other"), *words, *given]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "holds the backup of other runs than this home folder. Choose another --backup folder" in line
    assert (contents(folder), contents(tmp_path / "other")) == before


@pytest.mark.parametrize("place", ["home", "home/backup", "home/runs/deeper", ".", "link", "other home"])
def test_a_folder_that_lies_wrong_is_refused(home: Path, tmp_path: Path, place: str):
    (tmp_path / "link").symlink_to(home / "runs")
    Store(tmp_path / "other home").close()
    before = contents(home)
    with pytest.raises(BackupError, match=r"is the home folder itself|lies inside|lies around|is a home folder"):
        prepare(home, tmp_path / place)
    with pytest.raises(BackupError, match="The backup folder"):
        back_up(home, tmp_path / place)
    assert contents(home) == before


def test_a_disk_that_is_not_mounted_stops_a_fresh_home_and_only_warns_one_with_runs(home: Path, tmp_path: Path):
    missing = tmp_path / "not mounted" / "MyDrive" / "backup"
    with pytest.raises(BackupError, match=r"can't be made.*Mount the disk"):
        prepare(tmp_path / "fresh", missing)
    told: list[str] = []
    assert prepare(home, missing, tell=told.append) is None
    assert len(told) == 1 and "Until then nothing is backed up" in told[0]
    with pytest.raises(BackupError, match="is not there any more"):
        back_up(home, missing)
    assert not (tmp_path / "not mounted").exists()


def test_a_manifest_with_any_bit_turned_or_cut_anywhere_is_none(home: Path, folder: Path):
    manifest = back_up(home, folder).manifest
    text = (folder / manifest_name(1)).read_text()
    assert from_text(text) == manifest
    for place in range(len(text) - 1):
        turned = text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]
        # the last digit of a time may read as the same number
        assert from_text(turned) in (None, manifest) and from_text(text[:place]) is None


def test_a_manifest_that_leads_out_of_the_home_is_none():
    sha256 = "0" * 64
    store = Entry("runs.sqlite", "store.0000000000000000.sqlite", sha256, 1)
    good = Entry("runs/20260101-000000-abcdef/a.txt", "runs/20260101-000000-abcdef/a.0000000000000000.txt", sha256, 1)
    assert from_text(to_text(Manifest(1, "h", "w", 0.0, [], store, [good]))).files == [good]
    for path, file in [
        ("runs/20260101-000000-abcdef/../../../x", good.file),
        ("runs/20260101-000000-abcdef/..", "runs/20260101-000000-abcdef/..0000000000000000."),
        ("/etc/passwd", good.file),
        ("runs.sqlite", good.file),
        (good.path, "../../x.0000000000000000.txt"),
        (good.path, "mine.txt"),
    ]:
        assert from_text(to_text(Manifest(1, "h", "w", 0.0, [], store, [Entry(path, file, sha256, 1)]))) is None


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def generations(home: Path, folder: Path, photographs: Path) -> tuple[Manifest, Manifest]:
    """The newest generation and the one before, which has a run less."""
    before = back_up(home, folder).manifest
    with opened(home) as store:
        assert train_run(store, store.create_run(tiny(photographs))) == "finished"
    return back_up(home, folder).manifest, before


DAMAGE = {"a bit": flip, "half": halve, "empty": lambda path: os.truncate(path, 0), "gone": Path.unlink}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("what", ["manifest", "database"])
def test_a_damaged_newest_generation_falls_back_to_the_one_before(
    home: Path, folder: Path, tmp_path: Path, generations: tuple[Manifest, Manifest], what: str, how: str
):
    newest, before = generations
    DAMAGE[how](folder / (manifest_name(newest.number) if what == "manifest" else newest.store.file))
    told: list[str] = []
    restored = prepare(tmp_path / "fresh", folder, tell=told.append)
    assert restored.number == before.number
    assert set(run_ids(tmp_path / "fresh")) == set(before.run_ids)
    if what == "database":
        [lost] = set(newest.run_ids) - set(before.run_ids)
        assert lost in told[0] and "is damaged, so the one before" in told[0]
    elif how != "gone":
        assert told[0] == f"The backup's '{manifest_name(newest.number)}' is damaged."
    # and it goes on from there
    change(tmp_path / "fresh")
    assert back_up(tmp_path / "fresh", folder).manifest.number > before.number
    shelf = read_shelf(folder)
    assert shelf.damaged == [] and len(shelf.whole) == 2


@pytest.mark.parametrize("what", ["manifests", "databases"])
def test_where_both_generations_are_damaged_nothing_is_made_and_nothing_goes(
    folder: Path, tmp_path: Path, generations: tuple[Manifest, Manifest], what: str
):
    for manifest in generations:
        flip(folder / (manifest_name(manifest.number) if what == "manifests" else manifest.store.file))
    before = contents(folder)
    with pytest.raises(BackupError, match=r"can be read any more|The database is damaged in all"):
        prepare(tmp_path / "fresh", folder)
    assert run_ids(tmp_path / "fresh") == [] and contents(folder) == before


def test_where_all_manifests_are_damaged_the_home_they_came_from_makes_a_new_one(
    home: Path, folder: Path, generations: tuple[Manifest, Manifest], tmp_path: Path
):
    for manifest in generations:
        flip(folder / manifest_name(manifest.number))
    assert back_up(home, folder).manifest.number == 3
    assert prepare(tmp_path / "fresh", folder).runs == 3


@pytest.mark.parametrize("how", DAMAGE)
def test_a_run_whose_checkpoint_is_damaged_is_still_listed(
    home: Path, folder: Path, tmp_path: Path, generations: tuple[Manifest, Manifest], how: str
):
    bad = next(entry for entry in generations[1].files if entry.path.endswith("best.safetensors"))
    DAMAGE[how](folder / bad.file)
    restored = restore(tmp_path / "fresh", folder)
    assert restored.missing == [f"'{bad.path}' is damaged in the backup; run {bad.run_id} is listed without it."]
    assert run_ids(tmp_path / "fresh") == run_ids(home)
    assert not (tmp_path / "fresh" / bad.path).exists()
    for run_id in run_ids(home):
        assert load_file(tmp_path / "fresh" / "runs" / run_id / "last.safetensors")
        assert read_state(tmp_path / "fresh" / "runs" / run_id)


def test_where_the_newest_state_is_damaged_the_older_generations_one_is_taken(home: Path, folder: Path, tmp_path: Path):
    run_id = run_ids(home)[0]
    old = back_up(home, folder).manifest
    with opened(home) as store:
        resume(store, plan_resume(store, run_id, changes={"epochs": 3}))
        train_run(store, run_id)
    newest = back_up(home, folder).manifest
    states = [
        next(entry for entry in made.files if entry.run_id == run_id and entry.path.endswith(".pt"))
        for made in (newest, old)
    ]
    flip(folder / states[0].file)
    restored = restore(tmp_path / "fresh", folder)
    assert restored.missing == [f"'{states[0].path}' is damaged in the backup; an older one is taken."]
    assert [path.name for path in state_files(tmp_path / "fresh" / "runs" / run_id)] == [Path(states[1].path).name]
    assert read_state(tmp_path / "fresh" / "runs" / run_id).position.epoch == 3


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("what", ["manifest", "database", "checkpoint"])
def test_verifying_names_what_is_damaged_and_changes_nothing_and_a_backup_mends_it(
    home: Path,
    folder: Path,
    generations: tuple[Manifest, Manifest],
    what: str,
    how: str,
    capsys: pytest.CaptureFixture[str],
):
    assert main(["backup", str(folder), "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_whole"]
    newest = generations[0]
    names = {"manifest": manifest_name(2), "database": newest.store.file, "checkpoint": newest.files[0].file}
    DAMAGE[how](folder / names[what])
    before = contents(folder)
    is_seen = (what, how) != ("manifest", "gone")
    assert main(["backup", str(folder), "--verify", "--json"]) == int(is_seen)
    told = json.loads(capsys.readouterr().out)
    bad = told["damaged_manifests"] + [one["file"] for one in told["generations"][0]["damaged"]]
    assert bad == [names[what]] * is_seen and contents(folder) == before
    assert main(["backup", str(folder), "--home", str(home)]) == 0
    assert main(["backup", str(folder), "--verify"]) == 0


def test_verifying_a_folder_without_a_backup_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for place, words in (("drive", "There is no backup in"), ("nowhere", "is not there any more")):
        assert main(["backup", str(tmp_path / place), "--verify"]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert words in line


# -- while a process lives ------------------------------------------------------------------------------------------


def test_ends_of_epochs_checkpoints_and_new_runs_make_a_backup_due_and_steps_do_not(store: Store, photographs: Path):
    def is_due_after(deed: Callable[[], object]) -> bool:
        before = signature(store.home)[0]
        deed()
        return signature(store.home)[0] != before

    def tell(event: object) -> Callable[[], object]:
        return lambda: store.append_events(run_id, [(time.time(), event)])

    assert is_due_after(lambda: store.create_run(tiny(photographs)))
    run_id = store.newest_run_id()
    assert is_due_after(lambda: store.claim(run_id, "cpu"))
    step = StepLogged(1, 1, 0.7, 50.0, 1e-3, 32, 0.5, 0.1, 60.0, 0)
    assert not is_due_after(tell(step)) and not is_due_after(lambda: store.beat(run_id, {"phase": "training"}))
    assert is_due_after(tell(CheckpointSaved("best", 1, "best.safetensors", 1)))
    assert is_due_after(tell(EpochEnded(1, 4, 0.7, 60.0, 0.6, 75.0, None, 2.5, 32.0, Phases(), 0, 1e-3)))
    assert not is_due_after(tell(step))
    assert is_due_after(lambda: store.rename(run_id, "another name"))
    assert is_due_after(lambda: store.groups.of_past_runs("Past runs", [(run_id, "one", "")]))
    assert is_due_after(lambda: store.end_run(run_id, "finished"))


def test_a_run_that_trains_is_backed_up_meanwhile_and_at_the_end(store: Store, folder: Path, photographs: Path):
    with Backup(store.home, folder, pause_s=0.05, look_s=0.01):
        run_id = store.create_run(tiny(photographs, epochs=6))
        numbers = []
        train_run(store, run_id, on_event=lambda event: numbers.append(_number(store.home)))
    assert max(numbers) > 0, "none was made while it trained"
    assert read_shelf(folder).whole[0].run_ids == [run_id]
    told = status(store.home)
    assert (told.runs, told.problem, told.is_busy, told.is_kept) == (1, "", False, False)
    assert told.at == pytest.approx(time.time(), abs=20) and told.bytes > 10_000
    assert told.folder == str(folder)
    restored = restore(store.home.parent / "fresh", folder)
    assert restored.missing == []
    with opened(store.home.parent / "fresh") as again:
        assert again.get_run(run_id).state == "finished"


def _number(home: Path) -> int:
    told = status(home)
    return int(told.at) if told else 0


def test_what_a_run_tells_within_an_epoch_is_backed_up_after_a_while(
    store: Store, folder: Path, photographs: Path, monkeypatch: pytest.MonkeyPatch
):
    run_id = store.create_run(tiny(photographs), own=True)
    monkeypatch.setattr(keep, "LATE_S", 0.3)
    backup = Backup(store.home, folder, pause_s=0)
    backup._look()
    store.append_events(run_id, [(time.time(), StepLogged(1, 1, 0.7, 50.0, 1e-3, 32, 0.5, 0.1, 60.0, 0))])
    backup._look()
    assert read_shelf(folder).whole[0].number == 1
    time.sleep(0.3)
    backup._look()
    assert read_shelf(folder).whole[0].number == 2


def test_there_is_a_pause_between_two_backups_and_none_where_nothing_changed(home: Path, folder: Path):
    with Backup(home, folder, pause_s=0.4, look_s=0.01):
        for note in range(80):
            change(home, str(note))
            time.sleep(0.01)
        wait_for(lambda: status(home).at)
        during = read_shelf(folder).whole[0].number
    assert 1 <= during <= 6
    last = read_shelf(folder).whole[0].number
    with Backup(home, folder, pause_s=0.01, look_s=0.01):
        time.sleep(0.2)
    assert read_shelf(folder).whole[0].number == last
    prepare(home.parent / "fresh", folder)
    with opened(home.parent / "fresh") as store:
        assert store.get_run(store.newest_run_id()).note == "79"


def test_one_process_at_a_time_backs_a_home_up_and_the_last_backup_waits_for_its_turn(home: Path, folder: Path):
    with lock_of(home):
        with pytest.raises(BusyError):
            back_up(home, folder)
        backup = Backup(home, folder, pause_s=0.05, look_s=0.01)
        backup.start()
        time.sleep(0.1)
        stopping = threading.Thread(target=backup.stop)
        stopping.start()
        time.sleep(0.1)
        assert stopping.is_alive() and not folder.exists()
    stopping.join(10)
    assert read_shelf(folder).whole[0].number == 1


def test_another_process_that_never_comes_to_an_end_is_told(home: Path, folder: Path):
    told: list[str] = []
    backup = Backup(home, folder, tell=told.append, pause_s=0, quiet_s=0.2)
    with lock_of(home):
        backup._look()
    backup._look()
    time.sleep(0.3)
    change(home)
    with lock_of(home):
        backup._look()
        assert told == [], "it was free in between"
        time.sleep(0.3)
        backup._look()
        backup._look()
    assert len(told) == 1 and "Another process has been at the backup of" in told[0]
    backup._look()
    assert len(told) == 2 and "can be used again" in told[1]


def test_a_last_backup_that_takes_too_long_is_left_and_the_one_before_stays(home: Path, folder: Path):
    back_up(home, folder)
    change(home)
    told: list[str] = []
    backup = Backup(home, folder, tell=told.append, pause_s=60)
    with lock_of(home):
        backup.start()
        began = time.monotonic()
        assert not backup.stop(0.3)
        assert time.monotonic() - began < 2
    assert told == ["Not backed up: The last backup was not made in time. It is made at the next start."]
    assert [manifest.number for manifest in read_shelf(folder).whole] == [1]
    wait_for(lambda: not backup._thread.is_alive())


def test_a_folder_that_fails_is_told_once_and_tried_again_until_it_works(home: Path, folder: Path):
    folder.write_text("a file lies in its place")
    told: list[str] = []
    with Backup(home, folder, tell=told.append, pause_s=0.02, look_s=0.01):
        wait_for(lambda: status(home).problem)
        shown = status(home)
        assert isinstance(shown, BackupStatus) and shown.fix and shown.since and shown.next_try and shown.is_kept
        time.sleep(0.2)
        assert len(told) == 1 and told[0].startswith("Not backed up: The backup folder '") and "\n" not in told[0]
        folder.unlink()
        wait_for(lambda: not status(home).problem)
    assert told[1:] == [f"The backup folder '{folder}' can be used again, and all is backed up."]
    assert len(read_shelf(folder).whole) == 1


def test_pauses_between_tries_grow(home: Path, folder: Path):
    folder.write_text("a file lies in its place")
    backup = Backup(home, folder, tell=lambda line: None, pause_s=1.0)
    pauses = []
    for _ in range(12):
        before = time.monotonic()
        backup._look()
        pauses.append(round(backup._next - before))
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]


def test_a_folder_that_hangs_holds_up_neither_start_nor_training_nor_end(
    store: Store, folder: Path, photographs: Path, tmp_path: Path
):
    # a pipe in the place of a manifest: who opens it to read waits until somebody writes, as on a dead network disk
    folder.mkdir()
    pipe = folder / manifest_name(9)
    os.mkfifo(pipe)
    with pytest.raises(BackupError, match="hasn't answered for 0 s"):
        prepare(tmp_path / "fresh", folder, answer_s=0.2)
    told: list[str] = []
    run_id = store.create_run(tiny(photographs))
    assert prepare(store.home, folder, tell=told.append, answer_s=0.2) is None
    wait_for(lambda: not _let_go(pipe))
    backup = Backup(store.home, folder, tell=told.append, pause_s=0.02, look_s=0.01, quiet_s=0.3)
    backup.start()
    try:
        assert train_run(store, run_id) == "finished"
        wait_for(lambda: "hasn't answered" in status(store.home).problem)
        assert status(store.home).is_busy
        began = time.monotonic()
        assert not backup.stop()
        assert time.monotonic() - began < 5
    finally:
        wait_for(lambda: not _let_go(pipe))
    pipe.unlink()
    assert len(told) == 2 and all("hasn't answered" in line for line in told)
    with Backup(store.home, folder, tell=told.append, pause_s=0.02, look_s=0.01):
        wait_for(lambda: not status(store.home).problem)
    assert read_shelf(folder).whole[0].run_ids == [run_id]


def _let_go(pipe: Path) -> bool:
    """Answer all that wait to read the pipe; whether there were any."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return any(thread.name in ("restore", "backup-files") for thread in threading.enumerate())
    return True


def test_another_disk_in_the_place_of_the_folder_is_not_written_to(home: Path, folder: Path, tmp_path: Path):
    told: list[str] = []
    backup = Backup(home, folder, tell=told.append, pause_s=0)
    backup._look()
    change(home)
    # memory in /dev/shm is another disk than that of the tests
    elsewhere = Path("/dev/shm") / f"backup-{os.getpid()}"
    elsewhere.mkdir()
    try:
        assert elsewhere.stat().st_dev != folder.stat().st_dev
        folder.rename(tmp_path / "unmounted")
        folder.symlink_to(elsewhere)
        backup._look()
        assert list(elsewhere.iterdir()) == [] and "lies another disk than before" in told[0]
    finally:
        elsewhere.rmdir()
    folder.unlink()
    (tmp_path / "unmounted").rename(folder)
    backup._look()
    assert read_shelf(folder).whole[0].number == 2 and backup.status.problem == ""


# -- the command line and the dashboard -----------------------------------------------------------------------------


def test_every_command_takes_the_option_and_the_environment_variable(
    home: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    back_up(home, folder)
    run_id = run_ids(home)[0]
    for number, words in enumerate(
        (
            ["--backup", str(folder), "runs"],
            ["runs", "--backup", str(folder)],
            ["run", run_id, "--backup", str(folder)],
            ["export", run_id, "--backup", str(folder)],
            ["resume", run_id, "--plan", "--epochs", "4", "--backup", str(folder)],
        )
    ):
        assert main([*words, "--home", str(tmp_path / f"fresh-{number}")]) == 0
        assert "Restored 2 runs" in capsys.readouterr().err
    monkeypatch.setenv("FINETUNE_BACKUP", str(folder))
    assert main(["runs", "--json", "--home", str(tmp_path / "variable")]) == 0
    assert [row["run_id"] for row in json.loads(capsys.readouterr().out)["runs"]] == run_ids(home)


def test_the_command_line_trains_and_resumes_with_a_backup(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], photographs: Path
):
    options = ["--data", str(photographs), "--backup", str(folder), "--json"]
    options += [f"--{name.replace('_', '-')}={value}" for name, value in _TINY.items()]
    assert main(["--home", str(tmp_path / "one"), "train", *options]) == 0
    run_id = json.loads(capsys.readouterr().out)["run_id"]
    words = ["resume", run_id, "--epochs", "2", "--backup", str(folder), "--json"]
    assert main(["--home", str(tmp_path / "two"), *words]) == 0
    out = capsys.readouterr()
    assert len(json.loads(out.out)["epochs"]) == 2 and "Traceback" not in out.err
    assert f"Backed up to '{folder}': 1 run, " in out.err
    assert prepare(tmp_path / "three", folder).missing == []
    with opened(tmp_path / "three") as store:
        assert len(summarise(store, run_id)["epochs"]) == 2


_TINY = {
    "threads": 1, "model": "timm/test_resnet", "weights": "none", "image_size": 32, "epochs": 1, "device": "cpu",
    "batch_size": 8,
}  # fmt: skip


def test_printing_a_config_touches_no_backup(folder: Path, tmp_path: Path):
    assert main(["--home", str(tmp_path / "fresh"), "train", "--print-config", "--backup", str(folder)]) == 0
    assert not folder.exists() and not (tmp_path / "fresh").exists()


def test_the_dashboard_restores_before_it_opens_its_store_and_backs_up_when_it_ends(
    home: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    back_up(home, folder)
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "fresh"))
    monkeypatch.setenv("FINETUNE_BACKUP", str(folder))
    run_id = run_ids(home)[0]
    try:
        services = registry.services()
        assert [record.run_id for record in services.store.list_runs()] == run_ids(home)
        assert status(tmp_path / "fresh").is_kept
        resume(services.store, plan_resume(services.store, run_id, changes={"epochs": 3}))
        services.worker.wake()
        wait_for(lambda: services.store.get_run(run_id).state == "finished", 60)
    finally:
        registry.close()
    assert read_shelf(folder).whole[0].number >= 2 and not status(tmp_path / "fresh").is_kept
    prepare(tmp_path / "again", folder)
    with opened(tmp_path / "again") as store:
        assert len(summarise(store, run_id)["epochs"]) == 3


def test_the_dashboard_refuses_the_backup_of_other_runs(
    home: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photographs: Path
):
    back_up(home, folder)
    with opened(tmp_path / "other") as store:
        store.create_run(tiny(photographs), own=True)
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("FINETUNE_BACKUP", str(folder))
    with pytest.raises(BackupError, match="other runs"):
        registry.services()


def test_a_damaged_database_in_the_home_never_reaches_the_backup(home: Path, folder: Path):
    back_up(home, folder)
    change(home)
    before = contents(folder)
    with sqlite3.connect(home / "runs.sqlite") as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with (home / "runs.sqlite").open("r+b") as file:
        # everything but the first page, which has the schema
        file.seek(4096)
        file.write(b"\x55" * ((home / "runs.sqlite").stat().st_size - 4096))
    told: list[str] = []
    Backup(home, folder, tell=told.append)._look()
    assert len(told) == 1 and "can't be read" in told[0]
    assert contents(folder) == before
