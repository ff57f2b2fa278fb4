"""Runs beside each other and in processes of their own: real threads, children and deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from core.analysis.summary import summarise
from core.config import make_config
from core.running import guard
from core.running.child import train_in_child
from core.running.guard import Guard, end_overdue
from core.running.trainer import train_run
from core.storage.records import PlannedRun
from core.store import Store
from core.worker import PROCESS_VARIABLE, Worker
from tests.test_groups import tiny

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
ENDLESS = {"epochs": 9000, "schedule": "constant", "log_every": 1}
"""With a constant schedule a run's losses don't depend on how many epochs it was to have."""


@contextmanager
def working(store: Store, **options) -> Iterator[Worker]:
    worker = Worker(store, **options)
    worker.start()
    try:
        yield worker
    finally:
        worker.shutdown(30)


def wait_until(is_so: Callable[[], object], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def steps(store: Store, run_id: str) -> list[float]:
    return [event.payload["loss"] for event in store.events(run_id, kinds=["StepLogged"])]


def last_of(store: Store, run_id: str) -> dict:
    [ended] = store.events(run_id, kinds=["RunEnded"])
    return ended.payload


@pytest.mark.xla
def test_two_runs_beside_each_other_have_the_losses_that_they_have_alone_and_both_are_saved_in_ten_seconds(
    store: Store, pictures: Path
):
    # one with dropout, which draws from the process's random numbers in every step
    configs = [
        tiny(pictures, model="torchvision/mobilenet_v3_small", trainable="all", **ENDLESS),
        tiny(pictures, device="xla", seed=3, **ENDLESS),
    ]
    here, beside = (store.create_run(config, name=config.device) for config in configs)
    with working(store) as worker:
        wait_until(lambda: len(steps(store, beside)) >= 3)
        counted = len(steps(store, here))
        wait_until(lambda: len(steps(store, beside)) >= 9 and len(steps(store, here)) >= counted + 3)
        assert [store.get_run(run_id).state for run_id in (here, beside)] == ["running", "running"]
        assert store.get_run(here).pid == os.getpid() != store.get_run(beside).pid
        began = time.monotonic()
        worker.shutdown(10)
        assert time.monotonic() - began < 10
    for run_id, other in ((here, "xla"), (beside, "cpu")):
        assert store.get_run(run_id).state == "stopped"
        assert (store.run_folder(run_id) / "last.safetensors").exists()
        assert [company["name"] for company in summarise(store, run_id)["company"]] == [other]
    for run_id, config in zip((here, beside), configs, strict=True):
        together = steps(store, run_id)
        epochs = len(together) // 3 + 1
        alone = store.create_run(config.model_copy(update={"epochs": epochs}))
        assert train_run(store, alone) == "finished"
        assert steps(store, alone)[: len(together)] == together and len(together) >= 9


@pytest.mark.xla
def test_a_run_of_a_comparison_waits_till_nothing_trains_and_nothing_begins_beside_it(store: Store, pictures: Path):
    first = store.create_run(tiny(pictures, epochs=60), name="first")
    compared = [PlannedRun(tiny(pictures, epochs=2), "a", "warm", number) for number in (1, 2)]
    group = store.groups.get(store.groups.create("Mine", compared, plan={}))
    last = store.create_run(tiny(pictures, device="xla"), name="last")
    with working(store):
        wait_until(lambda: not store.get_run(last).is_active)
    runs = [store.get_run(run_id) for run_id in (first, *(member.run_id for member in group.members), last)]
    assert [run.state for run in runs] == ["finished"] * 4
    assert all(one.ended <= other.started for one, other in pairwise(runs))
    assert not any(summarise(store, run.run_id)["company"] for run in runs)


DASHBOARD = """
import sys, time
from pathlib import Path
from core.store import Store
from core.worker import Worker
if __name__ == "__main__":
    Worker(Store(Path(sys.argv[1]))).start()
    time.sleep(600)
"""


@contextmanager
def another_dashboard(store: Store) -> Iterator[subprocess.Popen]:
    """A process with a worker that puts every run into a process of its own, which no one stops."""
    process = subprocess.Popen(
        [sys.executable, "-c", DASHBOARD, str(store.home)], cwd=ROOT, env={**os.environ, PROCESS_VARIABLE: "own"}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_run_of_its_own_process_outlives_its_dashboard_and_another_one_tells_its_death(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, **ENDLESS))
    with another_dashboard(store) as dashboard:
        wait_until(lambda: steps(store, run_id))
        dashboard.kill()
        dashboard.wait()
    record = store.get_run(run_id)
    assert record.config.process == "shared" and record.pid not in (None, dashboard.pid)
    count = len(steps(store, run_id))
    with working(store):
        wait_until(lambda: len(steps(store, run_id)) > count + 5)
        assert store.get_run(run_id).state == "running"
        os.kill(record.pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: store.get_run(run_id).state == "interrupted")
        assert time.monotonic() - killed < 5
        waiting = store.create_run(tiny(pictures))
        wait_until(lambda: store.get_run(waiting).state == "finished")
    told = last_of(store, run_id)
    assert told["reason"] == "The process that trained this run is gone." and "memory ran out" in told["fix"]
    assert told["total_s"] == pytest.approx(sum(told["phases"].values())) and told["total_s"] > 0
    assert f"Process {record.pid}\n" in told["traceback"]


def test_a_death_is_told_once_however_many_look(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures))
    script = (
        "import sys, os; from pathlib import Path; from core.store import Store\n"
        "Store(Path(sys.argv[1])).claim(sys.argv[2], 'cpu'); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", script, str(store.home), run_id], cwd=ROOT, check=False)
    stores = [Store(store.home) for _ in range(4)]
    found: list[str] = []
    threads = [threading.Thread(target=lambda one=one: found.extend(one.recover())) for one in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in stores:
        one.close()
    assert found == [run_id] and last_of(store, run_id)["state"] == "interrupted"
    assert not store.bury(run_id, "was ended by SIGKILL")


def test_a_crash_in_native_code_is_told_in_words_and_with_the_line_that_crashed(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, **ENDLESS))
    states: list[str | None] = []
    thread = threading.Thread(target=lambda: states.append(train_in_child(store, run_id)))
    thread.start()
    wait_until(lambda: steps(store, run_id))
    os.kill(store.get_run(run_id).pid, signal.SIGSEGV)
    thread.join(20)
    told = last_of(store, run_id)
    assert states == ["interrupted"] and told["reason"] == "The run's own process crashed in native code (SIGSEGV)."
    assert "memory" not in told["fix"] and told["fix"].startswith("Resume it")
    assert "Segmentation fault" in told["traceback"] and "core/engine.py" in told["traceback"]


def test_a_run_whose_process_dies_before_it_took_the_run_has_failed_on_the_command_line(store: Store, pictures: Path):
    line = [sys.executable, "-m", "core", "--home", str(store.home), "train", "--data", str(pictures)]
    line += ["--model", "resnet18", "--weights", "none", "--device", "cpu", "--process", "own"]
    # its own process can't import what it needs
    broken = {**os.environ, "PYTHONPATH": str(store.home)}
    (store.home / "sitecustomize.py").write_text(
        "import os, signal, sys\nif 'core.running.child' in sys.orig_argv:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    told = subprocess.run(line, cwd=ROOT, env=broken, capture_output=True, text=True, timeout=60, check=False)
    [record] = store.list_runs()
    assert record.state == "interrupted" and told.returncode == 1, told.stderr
    assert "The run's own process was ended by SIGKILL." in told.stderr


HANGING = """
import sys, time
from pathlib import Path
from core.store import Store

Store(Path(sys.argv[3])).claim(sys.argv[2], "cpu")
time.sleep(600)
"""


@contextmanager
def hanging_child(store: Store, run_id: str) -> Iterator[psutil.Process]:
    """A run's own process that hangs as soon as it has its device, and of which nobody here takes notice."""
    line = [sys.executable, "-c", HANGING, "core.running.child", run_id, str(store.home)]
    process = subprocess.Popen(line, cwd=ROOT)
    try:
        wait_until(lambda: store.get_run(run_id).state == "running" or process.poll() is not None)
        assert process.poll() is None
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def test_an_aborted_run_that_does_not_end_is_killed_by_any_dashboards_guard(
    store: Store, pictures: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(guard, "ABORT_S", 1.0)
    monkeypatch.setattr(guard, "LOOK_S", 0.2)
    run_id = store.create_run(tiny(pictures))
    with hanging_child(store, run_id) as process:
        watcher = Guard(store)
        watcher.start()
        try:
            time.sleep(0.5)
            assert store.get_run(run_id).state == "running"
            store.request(run_id, "abort")
            wait_until(lambda: store.get_run(run_id).state == "stopped", 10)
        finally:
            watcher.shutdown()
        assert process.status() == psutil.STATUS_ZOMBIE
    told, summary = last_of(store, run_id), summarise(store, run_id)
    words = "It was aborted and didn't end by itself; it was killed. What it saved before is kept."
    assert told["reason"] == summary["ended_early"] == words
    assert not store.is_held("cpu")


def test_who_started_an_aborted_run_kills_it(store: Store, pictures: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guard, "ABORT_S", 1.0)
    run_id = store.create_run(tiny(pictures, **ENDLESS))
    states: list[str | None] = []
    thread = threading.Thread(target=lambda: states.append(train_in_child(store, run_id)))
    thread.start()
    wait_until(lambda: steps(store, run_id))
    os.kill(store.get_run(run_id).pid, signal.SIGSTOP)
    store.request(run_id, "abort")
    thread.join(20)
    assert states == ["stopped"] and "it was killed" in last_of(store, run_id)["reason"]


def test_the_command_line_aborts_and_kills_where_nobody_else_does(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures))
    with hanging_child(store, run_id):
        line = [sys.executable, "-m", "core", "--home", str(store.home), "control", run_id, "--abort"]
        told = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("The run has ended: stopped. It was aborted and didn't end by itself")


def test_an_abort_kills_no_process_that_is_not_the_runs_own(
    store: Store, pictures: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(guard, "ABORT_S", 0.0)
    run_id = store.create_run(tiny(pictures))
    assert store.claim(run_id, "cpu")
    store.request(run_id, "abort")
    assert end_overdue(store) == [] and store.get_run(run_id).state == "running"


def test_a_run_that_was_aborted_earlier_is_not_killed_when_it_is_taken_up_again(store: Store):
    run_id = store.create_run(make_config("quick"))
    store.claim(run_id, "cpu")
    store.request(run_id, "abort")
    assert [found for found, _, _ in store.overdue_aborts(0.0)] == [run_id]
    store.end_run(run_id, "stopped")
    store.requeue(run_id)
    store.claim(run_id, "cpu")
    assert store.overdue_aborts(0.0) == []


def test_a_run_that_was_stopped_while_its_process_starts_ends_without_a_word_of_failure(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures))
    states: list[str | None] = []
    thread = threading.Thread(target=lambda: states.append(train_in_child(store, run_id)))
    thread.start()
    log = store.run_folder(run_id) / "process.log"
    wait_until(log.exists)
    store.request(run_id, "stop")
    thread.join(60)
    assert states == ["stopped"] and not store.events(run_id)
    assert "is not queued" in log.read_text() and "Traceback" not in log.read_text()
