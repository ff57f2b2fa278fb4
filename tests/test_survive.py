"""What goes wrong in mid-run, made to happen for real: the run goes on or ends cleanly, and no record is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from core.analysis.summary import summarise
from core.config import make_config
from core.data.cache import PackedImages
from core.devices.local import CpuDevice
from core.errors import StoreWriteError
from core.events import PhaseChanged, ProgressMade, StepLogged, Stuck, Tweaked
from core.machine.telemetry import Telemetry
from core.running.stuck import KNOWN, LOOK_S, STUCK_S, STUCK_TIMES, StuckWatch
from core.running.trainer import train_run
from core.store import Store
from core.training.state import read_state, state_files
from core.worker import Worker, train_queued
from tests.soak import soak
from tests.survive_cases import Commands, FullDisk, Told, compared, locked, make_pictures, tiny
from tests.test_pages import open_page, pages_store
from ui import registry

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def commands():
    with Commands(forked=True) as started:
        yield started


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("survive") / "pictures")


def case(name: str, *words: object) -> list[str]:
    return ["case", name, *map(str, words)]


KEEPS_ALL = {"same_steps": True, "same_kinds": True, "dense": True, "last": "RunEnded", "locked": False}


def kept(store: Store, run_id: str, told: Told) -> dict[str, Any]:
    found = compared(store, run_id, told)
    return {name: found[name] for name in KEEPS_ALL}


# -- the store can't be written -------------------------------------------------------------------------------------


def test_a_run_goes_on_while_the_disk_is_full_and_all_is_written_when_there_is_room(
    commands: Commands, pictures: Path, tmp_path: Path
):
    done = commands.run(case("full", tmp_path / "home", pictures), tmp_path / "told")
    assert done.status == 0, done.errors
    assert {name: done.told[name] for name in KEEPS_ALL} == KEEPS_ALL, done.errors
    assert done.told["state"] == "stopped" and done.told["steps"] >= 100
    assert done.told["troubles"] == ["the disk is full"]
    lines = done.errors.splitlines()
    assert "goes on, and its events are kept in memory" in lines[0] and "the disk is full" in lines[0]
    assert "is written again; nothing was lost" in lines[1]
    # whoever ends the process is not kept waiting for long
    assert any("has ended" in line and "wait in memory for another 5.0 s" in line for line in lines)
    # where no disk can be mounted only the database is full
    assert ("CheckpointFailed" in done.told["kinds"]) == done.told["own_disk"]


def test_an_end_that_can_not_be_written_is_told_again_and_again_and_then_given_up_with_status_1(
    commands: Commands, pictures: Path, tmp_path: Path
):
    done = commands.run(case("given_up", tmp_path / "home", pictures, "1"), tmp_path / "told")
    assert done.told == {"status": 1}, done.errors
    lines = [line for line in done.errors.splitlines() if "has ended" in line]
    assert len(lines) >= 2 and "wait in memory for another" in lines[0] and "the disk is full" in lines[0]
    assert "are given up. Make room" in lines[-1] and "Traceback" not in done.errors


def test_a_home_that_is_read_only_is_told_in_one_line_at_the_start(commands: Commands, pictures: Path, tmp_path: Path):
    done = commands.run(case("read_only", tmp_path / "home", pictures), tmp_path / "told")
    assert done.told == {"status": 2}
    [line] = done.errors.strip().splitlines()
    assert line.startswith("The home folder '") and "can't be used" in line and line.endswith("Choose another --home.")


def test_a_run_goes_on_while_its_store_is_read_only(store: Store, pictures: Path):
    def set_read_only(on: int) -> None:
        # a disk that has open files can't be made read-only here; SQLite answers in the same way to this
        with store.database.lock:
            store.database.writer.execute(f"PRAGMA query_only = {on}")

    def wait_until_it_is_noticed() -> None:
        while not store.database._trouble:
            time.sleep(0.01)
        troubles.append(store.trouble)

    troubles: list[str] = []
    told = Told({10: lambda: set_read_only(1), 30: wait_until_it_is_noticed, 40: lambda: set_read_only(0)})
    run_id = store.create_run(tiny(pictures, epochs=4))
    assert train_run(store, run_id, on_event=told) == "finished"
    assert troubles == ["the folder is read-only"] and kept(store, run_id, told) == KEEPS_ALL
    assert store.trouble == ""


def test_a_database_that_is_locked_for_5_seconds_slows_neither_the_run_nor_who_reads(store: Store, pictures: Path):
    told, reads = Told(), list[float]()
    run_id = store.create_run(tiny(pictures, epochs=3000))
    thread = threading.Thread(target=train_run, args=(store, run_id), kwargs={"on_event": told})
    thread.start()
    while len(told.steps) < 20:
        time.sleep(0.01)
    with locked(store.home):
        began = time.monotonic()
        while time.monotonic() - began < 5:
            before = time.monotonic()
            assert store.get_run(run_id).state == "running" and summarise(store, run_id)["run_id"] == run_id
            assert store.list_runs() and store.recover() == []
            reads.append(time.monotonic() - before)
            time.sleep(0.1)
        steps = [at - began for at in told.times if at > began]
    store.request(run_id, "stop")
    thread.join(60)
    assert max(reads) < 1
    # all the time, however slow this machine is: a trainer that waited would have logged nothing
    assert len({int(second) for second in steps}) >= 3
    assert kept(store, run_id, told) == KEEPS_ALL and store.get_run(run_id).state == "stopped"


# -- the clock ------------------------------------------------------------------------------------------------------


def test_a_clock_that_is_put_back_by_hours_spoils_no_duration(
    store: Store, pictures: Path, monkeypatch: pytest.MonkeyPatch
):
    true_time = time.time

    def put_back() -> None:
        # the clock of the machine can't be set for one process alone
        monkeypatch.setattr(time, "time", lambda: true_time() - 3 * 3600)

    began = true_time()
    told = Told({20: put_back})
    run_id = store.create_run(tiny(pictures, epochs=4))
    assert train_run(store, run_id, on_event=told) == "finished"
    took, record, summary = true_time() - began, store.get_run(run_id), summarise(store, run_id)
    assert 0 < summary["total_s"] <= took and summary["total_s"] == pytest.approx(sum(summary["phases"].values()))
    assert all(0 < epoch["seconds"] < took for epoch in summary["epochs"])
    assert 0 < record.ended - record.started <= took and 0 < record.phase["elapsed_s"] <= took
    events = store.events(run_id)
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert (
        summary["machine"] is None or summary["machine"]["interval_s"] is None or summary["machine"]["interval_s"] > 0
    )
    assert kept(store, run_id, told) == KEEPS_ALL


@pytest.mark.skipif(not psutil.LINUX, reason="elsewhere a process keeps the time at which it began")
@pytest.mark.parametrize("hours", [-3, 3])
def test_a_run_whose_process_lives_is_not_taken_for_dead_when_the_clock_is_set(
    store: Store, pictures: Path, monkeypatch: pytest.MonkeyPatch, hours: int
):
    run_id = store.create_run(tiny(pictures))
    assert store.claim(run_id, "cpu")
    booted = psutil.boot_time()
    # the kernel moves the time of its boot with the clock
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: booted + hours * 3600)
    assert store.recover() == [] and store.is_held("cpu")
    assert store.get_run(run_id).state == "running"


def test_the_live_page_says_that_the_disk_is_full_and_bears_a_clock_that_was_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = pages_store(tmp_path, monkeypatch)
    run_id = store.create_run(make_config("quick"))
    assert store.claim(run_id, "cpu")
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 3 * 3600)
    store.beat(run_id, {"phase": "training", "epoch": 1, "epochs": 3, "elapsed_s": 125.0})
    monkeypatch.undo()
    monkeypatch.setattr(registry._entry(), "services", registry.Services(store, None))
    FullDisk(store).fill()
    with pytest.raises(StoreWriteError, match="the disk is full"):
        store.append_events(run_id, [(1.0, PhaseChanged("training", 1, "x" * 100_000))])
    app = open_page("live", run=run_id)
    assert any("can't be written: the disk is full" in warning.value.replace("\\", "") for warning in app.warning)
    assert next(metric.value for metric in app.metric if metric.label == "Elapsed") == "2:05 min"
    assert any(caption.value == "Last sign of life 0 ms ago" for caption in app.caption)
    store.close()


# -- memory and numbers ---------------------------------------------------------------------------------------------


def test_a_batch_that_needs_more_memory_than_there_is_fails_with_one_that_then_trains(
    commands: Commands, tmp_path: Path
):
    few = make_pictures(tmp_path / "few", train=16, val=4)
    done = commands.run(case("no_memory", tmp_path / "home", few, "400"), tmp_path / "told")
    assert done.status == 0, done.errors
    failed, next_one = done.told["runs"]
    assert (failed["state"], failed["error"]) == ("failed", "MemoryFullError")
    assert failed["reason"].startswith("A batch of 16 does not fit into the memory of")
    size = done.told["batch_size"]
    assert (
        size in (2, 4, 8)
        and failed["fix"] == f"{size} fits: --batch-size {size}, or --accumulate {16 // size} for the same steps."
    )
    assert next_one["state"] == "finished", next_one
    # of 400 that it had
    assert done.told["kept_mib"] < 100


class SmallDevice(CpuDevice):
    """Has room for 5 images; no GPU is needed to see what CUDA's error comes to."""

    released = 0

    def place_batch(self, images: torch.Tensor, labels: torch.Tensor):
        if len(images) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().place_batch(images, labels)

    def release(self) -> None:
        SmallDevice.released += 1
        super().release()


def test_a_gpu_without_room_fails_the_run_in_words_and_the_proposed_batch_trains(
    store: Store, pictures: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("core.running.trainer.open_device", lambda kind, home: SmallDevice())
    failed = store.create_run(tiny(pictures, batch_size=16))
    assert train_run(store, failed) == "failed"
    summary = summarise(store, failed)
    assert summary["fix"] == "4 fits: --batch-size 4, or --accumulate 4 for the same steps."
    assert store.events(failed, kinds=("RunEnded",))[0].payload["traceback"] == "" and SmallDevice.released
    assert train_run(store, store.create_run(tiny(pictures, batch_size=4, epochs=1))) == "finished"


@pytest.mark.xla
def test_a_tpu_without_room_fails_the_run_in_words_and_the_next_one_trains(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from core.devices.xla import XlaDevice

    place = XlaDevice.place_batch

    def place_few(self: XlaDevice, images: torch.Tensor, labels: torch.Tensor):
        if len(images) > 5:
            # what a TPU says; XLA on the CPU takes what the machine has
            raise RuntimeError("RESOURCE_EXHAUSTED: Attempting to allocate 3.20G. That was not possible.")
        return place(self, images, labels)

    monkeypatch.setattr(XlaDevice, "place_batch", place_few)
    pictures = make_pictures(tmp_path / "pictures", train=8, val=4)
    failed = store.create_run(tiny(pictures, batch_size=8, device="xla"))
    assert train_run(store, failed) == "failed"
    assert summarise(store, failed)["fix"].startswith("4 may fit: --batch-size 4")
    assert train_run(store, store.create_run(tiny(pictures, batch_size=4, device="xla", epochs=1))) == "finished"


def test_a_loss_that_is_no_number_fails_the_run_in_one_line_and_keeps_the_epochs_before(store: Store, pictures: Path):
    # the third epoch trains with a rate that no loss survives
    script = [{"step": 33, "what": "lr", "value": 1.0}, {"step": 33, "what": "lr_factor", "value": 1e12}]
    run_id = store.create_run(tiny(pictures, epochs=9, optimizer="sgd"), script=script)
    assert train_run(store, run_id) == "failed"
    summary = summarise(store, run_id)
    assert "The training loss is nan at step" in summary["reason"] and "\n" not in summary["reason"]
    assert summary["fix"].startswith("Lower the learning rate") and summary["error"] == "TrainingError"
    assert [epoch["epoch"] for epoch in summary["epochs"]] == [1, 2]
    assert train_run(store, store.create_run(tiny(pictures, epochs=1))) == "finished"


# -- the data -------------------------------------------------------------------------------------------------------


@contextmanager
def packed_beside_training(store: Store, pictures: Path, **changes: Any):
    """A run whose pictures are decoded beside its first epoch, since they were only scanned before; yields its id."""
    assert train_run(store, store.create_run(tiny(pictures, epochs=1, image_size=16))) == "finished"
    yield store.create_run(tiny(pictures, epochs=2, image_size=32, **changes))


def test_files_that_vanish_beside_the_first_epoch_are_told_and_the_run_goes_on(store: Store, tmp_path: Path):
    pictures = make_pictures(tmp_path / "pictures", train=120)
    gone = [pictures / "val" / "light" / "11.png", pictures / "val" / "dark" / "10.png"]
    lost = list[str]()

    def follow(event: Any) -> None:
        if isinstance(event, ProgressMade) and event.what == "packing images":
            # the first is packed, a few dozen are on their way, and validation comes last
            for file in gone:
                file.unlink(missing_ok=True)
        elif type(event).__name__ == "ImageLost":
            lost.append(event.file)

    with packed_beside_training(store, pictures) as run_id:
        assert train_run(store, run_id, on_event=follow) == "finished"
    assert sorted(lost) == ["val/dark/10.png", "val/light/11.png"]
    assert len(store.events(run_id, kinds=("ImageLost",))) == 2
    # accuracy is over those that are left
    [first, *_] = summarise(store, run_id)["epochs"]
    assert first["val_top1"] * 10 / 100 == pytest.approx(round(first["val_top1"] * 10 / 100))


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_packed_cache_that_is_deleted_in_mid_run_ends_nothing(store: Store, tmp_path: Path, is_packed: bool):
    import shutil

    pictures = make_pictures(tmp_path / "pictures", side=200)

    def delete(event: Any) -> None:
        if isinstance(event, StepLogged) and event.step == 2:
            shutil.rmtree(store.home / "cache")

    if is_packed:
        assert train_run(store, store.create_run(tiny(pictures, epochs=1))) == "finished"
    undisturbed = store.create_run(tiny(pictures, caches="anew"))
    assert train_run(store, undisturbed) == "finished"
    run_id = store.create_run(tiny(pictures))
    assert train_run(store, run_id, on_event=delete) == "finished", summarise(store, run_id)["reason"]
    assert losses_of(store, run_id) == losses_of(store, undisturbed)
    assert train_run(store, store.create_run(tiny(pictures, epochs=1))) == "finished"


def losses_of(store: Store, run_id: str) -> list[tuple[int, float]]:
    return [(event.payload["step"], event.payload["loss"]) for event in store.events(run_id, kinds=("StepLogged",))]


def test_what_breaks_the_packing_is_no_lost_picture_but_fails_the_run(
    store: Store, pictures: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object) -> None:
        raise ValueError("a mistake of ours")

    with packed_beside_training(store, pictures) as run_id:
        monkeypatch.setattr(PackedImages, "add", broken)
        assert train_run(store, run_id) == "failed"
    assert summarise(store, run_id)["reason"] == "ValueError: a mistake of ours"
    assert store.events(run_id, kinds=("ImageLost",)) == []


# -- mistakes of our own --------------------------------------------------------------------------------------------

TOLD_BY_THE_TRAINER = (
    "CheckpointSaved", "EndedEarly", "EpochEnded", "ForecastMade", "Paused", "PhaseChanged", "ProgressMade", "Resumed",
    "RunEnded", "RunPrepared", "StepLogged", "Tweaked",
)  # fmt: skip
TOLD_BESIDE_IT = ("CacheBuilt", "MachineSampled")


class Asks:
    """Asks a run for a pause and to go on, as people do, and raises at one kind of event."""

    def __init__(self, store: Store, raises_at: str = "") -> None:
        self.store, self.raises_at, self.kinds, self.run_id = store, raises_at, set[str](), ""

    def __call__(self, event: Any) -> None:
        kind = type(event).__name__
        if kind == self.raises_at:
            raise RuntimeError(f"at {kind}")
        if kind == "StepLogged" and "Paused" not in self.kinds:
            self.store.request(self.run_id, "pause")
            time.sleep(0.3)
        if kind == "Paused":
            self.store.request(self.run_id, "resume")
        self.kinds.add(kind)


@pytest.fixture
def asked_run(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Makes runs that emit all that a run on the CPU may."""
    monkeypatch.setattr("core.running.trainer.Telemetry", partial(Telemetry, interval_s=0.02))
    pictures = make_pictures(tmp_path / "pictures", train=12, val=6)
    script = [{"step": 2, "what": "lr", "value": 1e-4}]
    # epochs go on until one is no better, and packing anew is told
    options = {"epochs": 20, "image_size": 16, "patience": 1, "caches": "anew"}
    assert train_run(store, store.create_run(tiny(pictures, **{**options, "epochs": 2}))) == "finished"
    return lambda: store.create_run(tiny(pictures, **options), script=script)


def test_the_kinds_of_events_are_all_that_a_tiny_run_emits(store: Store, asked_run: Callable[[], str]):
    asks = Asks(store)
    asks.run_id = asked_run()
    assert train_run(store, asks.run_id, on_event=asks) == "finished"
    assert sorted(asks.kinds) == sorted((*TOLD_BY_THE_TRAINER, *TOLD_BESIDE_IT))


@pytest.mark.parametrize("kind", TOLD_BY_THE_TRAINER)
def test_an_exception_at_any_event_fails_the_run_and_the_worker_trains_the_next(
    store: Store, asked_run: Callable[[], str], kind: str, monkeypatch: pytest.MonkeyPatch
):
    asks = Asks(store, raises_at=kind)
    monkeypatch.setattr("core.worker.train_queued", partial(train_queued, on_event=asks))
    worker = Worker(store)
    worker.start()
    try:
        asks.run_id = asked_run()
        ended(store, worker, asks.run_id)
        asks.raises_at, asks.kinds = "", set()
        good, failed = asked_run(), asks.run_id
        asks.run_id = good
        ended(store, worker, good)
    finally:
        worker.shutdown(30)
    told = [event.payload for event in store.events(failed, kinds=("RunEnded",))]
    assert [(one["state"], one["reason"]) for one in told] == [("failed", f"RuntimeError: at {kind}")]
    assert "in __call__" in told[0]["traceback"] and store.get_run(failed).state == "failed"
    assert store.get_run(good).state == "finished" and not store.is_held("cpu")


@pytest.mark.parametrize("kind", TOLD_BESIDE_IT)
def test_an_exception_in_a_thread_beside_the_trainer_does_not_end_the_run(
    store: Store, asked_run: Callable[[], str], kind: str
):
    asks = Asks(store, raises_at=kind)
    asks.run_id = asked_run()
    assert train_run(store, asks.run_id, on_event=asks) == "finished"


def ended(store: Store, worker: Worker, run_id: str) -> None:
    worker.wake()
    deadline = time.monotonic() + 60
    while store.get_run(run_id).is_active:
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- a run that hangs -----------------------------------------------------------------------------------------------


def logged(step: int, seconds: float, steps: int = 1) -> StepLogged:
    return StepLogged(step, 1, 1.0, 50.0, 0.1, 4, seconds, 0.0, None, 0, steps)


def looks(watch: StuckWatch, seconds: float) -> list[Stuck]:
    """What the watch tells within so many seconds of looking twice a second."""
    now = watch._looked or 0.0
    told = [watch.look(now + 0.5 * number) for number in range(1, int(2 * seconds) + 1)]
    return [stuck for stuck in told if stuck]


def watch_after(*events: Any) -> StuckWatch:
    watch = StuckWatch()
    watch.look(0.0)
    watch.follow(PhaseChanged("training", 1))
    for event in events:
        watch.follow(event)
    return watch


FIVE_SHORT = [logged(step, 0.2) for step in range(1, 6)]


def test_a_run_of_short_steps_is_stuck_after_half_a_minute_and_it_is_told_once():
    watch = watch_after(*FIVE_SHORT)
    assert looks(watch, STUCK_S) == []
    [stuck] = looks(watch, 600)
    assert (stuck.step, stuck.epoch, stuck.usual_s) == (5, 1, 0.2) and STUCK_S < stuck.seconds < STUCK_S + 1
    watch.follow(logged(6, 700.0))
    [again] = looks(watch, 600)
    assert again.step == 6


def test_a_run_of_long_steps_may_take_many_times_a_step():
    watch = watch_after(*[logged(step, 10.0) for step in range(1, 6)])
    assert looks(watch, 10 * STUCK_TIMES) == [] and looks(watch, 5)


def test_where_few_steps_are_logged_what_lies_between_two_is_usual():
    watch = watch_after(logged(1, 0.5), logged(100, 49.5, 99), logged(200, 50.0, 100))
    assert looks(watch, 50 * STUCK_TIMES) == []
    assert looks(watch, 50)[0].usual_s == 0.5


def test_steps_that_are_to_be_logged_more_seldom_from_now_on_are_waited_for():
    watch = watch_after(*FIVE_SHORT, Tweaked(6, 1, "log_every", 1, 1000))
    assert looks(watch, 1000 * 0.2 * STUCK_TIMES) == []


@pytest.mark.parametrize("phase", ["compiling", "validating", "saving", "paused"])
def test_what_is_no_training_is_never_stuck(phase: str):
    watch = watch_after(*FIVE_SHORT)
    watch.follow(PhaseChanged(phase, 1))
    assert looks(watch, 9000) == []
    watch.follow(PhaseChanged("training", 2))
    assert looks(watch, STUCK_S) == [] and looks(watch, 2)


def test_before_anything_is_known_to_be_usual_nothing_is_stuck():
    assert looks(watch_after(*FIVE_SHORT[: KNOWN - 1]), 9000) == []


def test_a_process_that_stood_still_itself_is_not_stuck():
    watch = watch_after(*FIVE_SHORT)
    assert LOOK_S < STUCK_S and watch.look(9000.0) is None and watch.look(9000.5) is None


def test_a_step_that_blocks_is_noticed_and_over_with_the_next_one(
    store: Store, pictures: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("core.running.stuck.STUCK_S", 0.5)
    held: list[float] = []

    def hold() -> None:
        # the trainer's own thread stands still
        began = time.monotonic()
        while not store.events(run_id, kinds=("Stuck",)) and time.monotonic() - began < 30:
            time.sleep(0.05)
        held.append(time.monotonic() - began)

    told = Told({12: hold})
    run_id = store.create_run(tiny(pictures))
    assert train_run(store, run_id, on_event=told) == "finished"
    [stuck] = store.events(run_id, kinds=("Stuck",))
    assert stuck.payload["step"] == 12 and 0.5 < stuck.payload["seconds"] <= held[0] + 0.5
    assert kept(store, run_id, told) == KEEPS_ALL


# -- death ----------------------------------------------------------------------------------------------------------


def test_runs_that_are_killed_at_any_moment_lose_no_record_and_end_as_if_nothing_had_happened(
    commands: Commands, tmp_path: Path
):
    report = soak(tmp_path, 4, commands, seed=1)
    assert report.kills == 4 and report.resumes >= 1, report.lines()
    assert (report.lost, report.unequal) == ([], []), report.lines()


def test_a_state_that_was_cut_anywhere_is_passed_over_for_the_one_before(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, epochs=2, checkpoint_min=1e-9))
    assert train_run(store, run_id) == "finished"
    newest, before = state_files(store.run_folder(run_id))
    whole = newest.read_bytes()
    cuts = [len(whole) * share // 24 for share in range(24)] + [len(whole) - cut for cut in (1, 2, 7, 22, 23, 64, 999)]
    steps = set()
    for size in cuts:
        newest.write_bytes(whole[:size])
        read = read_state(store.run_folder(run_id))
        assert read is not None
        steps.add(read.position.step)
    assert len(steps) == 1 and f"{steps.pop():09d}" in before.name
    newest.write_bytes(whole)
    read = read_state(store.run_folder(run_id))
    assert read is not None and f"{read.position.step:09d}" in newest.name
