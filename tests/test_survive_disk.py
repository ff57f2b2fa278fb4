"""Checkpoints on a disk that becomes full, and back; files that rot; runs that are deleted beside one that trains."""

from __future__ import annotations

import errno
import hashlib
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from core import store as store_module
from core.data.cache import Fit, PackedImages
from core.data.images import decode
from core.errors import CheckpointError
from core.events import PhaseChanged
from core.running.resume import plan_resume, resume
from core.running.trainer import train_run
from core.store import Store
from core.training import saver
from core.training.state import read_state, state_files
from tests.long_runs import begin, ended, step, tell
from tests.survive_cases import make_pictures, tiny

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("disk") / "pictures")


def weights_of(store: Store, run_id: str) -> list[dict[str, torch.Tensor]]:
    return [load_file(store.run_folder(run_id) / f"{which}.safetensors") for which in ("best", "last")]


def are_equal(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(one[name], two[name]) for one, two in zip(ours, theirs, strict=True) for name in two)


def trained(store: Store, pictures: Path, on_event: Callable[[Any], None] = lambda event: None, **changes: Any) -> str:
    run_id = store.create_run(tiny(pictures, **changes))
    assert train_run(store, run_id, on_event=on_event) == "finished"
    return run_id


class NoRoom:
    """Nothing can be written at these files' places in a run's folder: folders stand in the way.

    Args:
        until: asked with each event; from the first one on for which it holds, there is room.
    """

    def __init__(self, store: Store, names: list[str], until: Callable[[Any], bool]) -> None:
        self._store, self._names, self._until = store, names, until
        self._places: list[Path] = []

    def __call__(self, event: Any) -> None:
        if type(event).__name__ == "RunPrepared":
            folder = self._store.run_folder(self._store.newest_run_id())
            self._places = [folder / f"{name}.tmp" for name in self._names]
            for place in self._places:
                place.mkdir()
        elif self._until(event):
            while self._places:
                self._places.pop().rmdir()


def checkpoints(store: Store, run_id: str, which: str) -> list[tuple[str, int]]:
    """What was told of them: failed or saved, and after which epoch."""
    events = store.events(run_id, kinds=["CheckpointFailed", "CheckpointSaved"])
    return [
        (event.kind.removeprefix("Checkpoint"), event.payload["epoch"])
        for event in events
        if event.payload["which"] == which
    ]


def test_checkpoints_that_a_full_disk_refused_to_the_end_are_written_once_there_is_room(store: Store, pictures: Path):
    whole = trained(store, pictures)
    waits = NoRoom(
        store,
        ["best.safetensors", "last.safetensors", "state-000000016.pt", "state-000000032.pt"],
        until=lambda event: isinstance(event, PhaseChanged) and "until there is room" in event.detail,
    )
    broken = trained(store, pictures, waits)
    assert are_equal(weights_of(store, broken), weights_of(store, whole))
    assert checkpoints(store, broken, "last") == [("Failed", 1), ("Failed", 2), ("Saved", 2)]
    assert checkpoints(store, broken, "state") == [("Failed", 1), ("Failed", 2), ("Saved", 2)]
    # and all is there to go on
    for run_id in (whole, broken):
        resume(store, plan_resume(store, run_id, changes={"epochs": 3}))
        assert train_run(store, run_id) == "finished"
    assert are_equal(weights_of(store, broken), weights_of(store, whole))


def test_the_best_weights_that_could_not_be_written_are_written_though_the_model_has_trained_on(
    store: Store, pictures: Path
):
    # the first epoch is as good as any
    options = {"epochs": 3, "ema_decay": 0.9, "mixup": 0.2}
    whole = trained(store, pictures, **options)
    frees = NoRoom(
        store, ["best.safetensors"], until=lambda event: isinstance(event, PhaseChanged) and event.epoch == 2
    )
    broken = trained(store, pictures, frees, **options)
    assert checkpoints(store, whole, "best") == [("Saved", 1)]
    assert checkpoints(store, broken, "best") == [("Failed", 1), ("Saved", 1)]
    assert are_equal(weights_of(store, broken), weights_of(store, whole))
    assert not are_equal(weights_of(store, broken)[:1], weights_of(store, whole)[1:])


def test_checkpoints_are_given_up_in_time_where_the_process_is_asked_to_end(
    store: Store, pictures: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(saver, "LEAVING_S", 0.5)
    asked: list[float] = []
    never = NoRoom(store, ["best.safetensors", "last.safetensors"], until=lambda event: False)

    def follow(event: Any) -> None:
        never(event)
        if isinstance(event, PhaseChanged) and "until there is room" in event.detail:
            asked.append(time.monotonic())

    run_id = store.create_run(tiny(pictures))
    assert train_run(store, run_id, on_event=follow, should_stop=lambda: bool(asked)) == "finished"
    assert time.monotonic() - asked[0] < 5
    assert checkpoints(store, run_id, "last")[-1] == ("Failed", 2)


def test_what_a_killed_process_had_half_written_is_removed_when_the_run_goes_on(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, epochs=1))
    half = store.run_folder(run_id) / "state-000000003.pt.tmp"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    assert train_run(store, run_id) == "finished"
    assert not half.exists()


@pytest.mark.parametrize(
    ("number", "why"), [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "the disk is read-only")]
)
def test_a_disk_without_room_is_told_in_words_wherever_it_is_met(store: Store, pictures: Path, number: int, why: str):
    def fail(event: Any) -> None:
        if isinstance(event, PhaseChanged) and event.phase == "building_model":
            raise OSError(number, "as the system says it")

    run_id = store.create_run(tiny(pictures))
    assert train_run(store, run_id, on_event=fail) == "failed"
    last = store.events(run_id, kinds=["RunEnded"])[-1].payload
    assert (last["reason"], last["traceback"]) == (f"A file can't be written: {why}.", "")


def test_pictures_that_can_not_be_kept_packed_end_nothing_where_a_run_breaks_off(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    packed = PackedImages(tmp_path, Fit(16, "bicubic", keeps_shape=False))
    content = next(pictures.rglob("*.png")).read_bytes()
    packed.add(hashlib.sha256(content).hexdigest(), decode(content, 16))
    # nothing was to be filled in: it was broken off before
    packed.close()


# -- files that rot ---------------------------------------------------------------------------------------------------


def flip(path: Path, share: float) -> bytes:
    """Flip one bit; the bytes as they were."""
    whole = path.read_bytes()
    spoilt = bytearray(whole)
    spoilt[int(len(whole) * share)] ^= 4
    path.write_bytes(bytes(spoilt))
    return whole


def test_a_state_in_which_a_bit_has_flipped_is_passed_over_for_the_one_before(store: Store, pictures: Path):
    run_id = trained(store, pictures)
    newest, before = state_files(store.run_folder(run_id))
    for share in (0.2, 0.4, 0.6, 0.8):
        whole = flip(newest, share)
        read = read_state(store.run_folder(run_id))
        assert read is not None and f"{read.position.step:09d}" in before.name
        newest.write_bytes(whole)


def test_a_run_whose_states_are_all_spoilt_fails_in_words_and_does_not_begin_anew(store: Store, pictures: Path):
    run_id = trained(store, pictures)
    resume(store, plan_resume(store, run_id, changes={"epochs": 3}))
    # since it was queued
    wholes = {path: flip(path, 0.5) for path in state_files(store.run_folder(run_id))}
    assert train_run(store, run_id) == "failed"
    last = store.events(run_id, kinds=["RunEnded"])[-1].payload
    assert last["reason"] == f"What run {run_id} kept can't be read any more." and not last["traceback"]
    assert len(store.events(run_id, kinds=["EpochEnded"])) == 2 and not store.is_held("cpu")
    with pytest.raises(CheckpointError, match="can't be read any more"):
        plan_resume(store, run_id)
    for path, whole in wholes.items():
        path.write_bytes(whole)
    assert plan_resume(store, run_id, changes={"epochs": 3}).step == 32


# -- runs that are deleted ---------------------------------------------------------------------------------------------


def test_a_long_run_is_deleted_in_portions_between_which_others_write(store: Store, monkeypatch: pytest.MonkeyPatch):
    run_id = begin(store)
    tell(store, run_id, *map(step, range(1, 40)), ended())
    store.end_run(run_id, "finished")
    other = store.create_run(tiny(Path("elsewhere")))
    monkeypatch.setattr(store_module, "DELETED_AT_ONCE", 10)
    left: list[int] = []

    def meanwhile(seconds: float) -> None:
        # nobody holds the file now
        with sqlite3.connect(store.home / "runs.sqlite", timeout=0) as database:
            database.execute("UPDATE runs SET note = 'written' WHERE run_id = ?", (other,))
        left.append(len(store.events(run_id)))

    monkeypatch.setattr(time, "sleep", meanwhile)
    store.delete(run_id)
    assert left == [31, 21, 11, 1]
    assert [record.run_id for record in store.list_runs()] == [other]
    assert store.events(run_id) == [] and store.get_run(other).note == "written"


def test_a_run_whose_deletion_was_broken_off_is_deleted_by_the_next_try(store: Store, monkeypatch: pytest.MonkeyPatch):
    run_id = begin(store)
    tell(store, run_id, *map(step, range(1, 40)), ended())
    store.end_run(run_id, "finished")
    monkeypatch.setattr(store_module, "DELETED_AT_ONCE", 10)
    with monkeypatch.context() as killed:
        killed.setattr(time, "sleep", lambda seconds: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.delete(run_id)
    assert store.get_run(run_id).state == "finished"
    store.delete(run_id)
    assert store.list_runs() == [] and store.events(run_id) == []
