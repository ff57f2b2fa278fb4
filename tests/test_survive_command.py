"""The command line when it is asked to end, and when nobody listens to it any more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.errors import DeviceError
from core.running.resume import plan_resume
from core.running.trainer import train_run
from core.store import Store
from core.training.state import state_files
from tests.survive_cases import ROOT, make_pictures, tiny, words_of

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("command") / "pictures")


@contextmanager
def start(
    home: Path, words: Sequence[str], when_closed: signal.Handlers = signal.SIG_DFL
) -> Iterator[subprocess.Popen[str]]:
    """Start `train`; what it does when its terminal is closed is not what whoever started these tests chose."""
    process = subprocess.Popen(
        [sys.executable, "-m", "core", "--home", str(home), "train", *words, "--json"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, when_closed),
    )
    with process:
        try:
            yield process
        finally:
            # a test that fails must not wait for it
            process.kill()


def wait_for_steps(store: Store, process: subprocess.Popen[str]) -> str:
    """The id of the run, once it trains."""
    while process.poll() is None:
        for record in store.list_runs():
            if store.events(record.run_id, kinds=["StepLogged"]):
                return record.run_id
        time.sleep(0.02)
    raise AssertionError(process.communicate()[1])


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_command_that_is_asked_to_end_stops_and_saves_its_run(store: Store, pictures: Path, name: str, status: int):
    with start(store.home, words_of(pictures, epochs=10_000)) as process:
        run_id = wait_for_steps(store, process)
        process.send_signal(getattr(signal, name))
        printed, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    assert json.loads(printed)["state"] == store.get_run(run_id).state == "stopped"
    last = store.events(run_id, kinds=["StepLogged"])[-1].payload["step"]
    assert state_files(store.run_folder(run_id))[0].name == f"state-{last:09d}.pt"


def test_a_command_that_is_to_outlive_its_terminal_trains_on_when_that_is_closed(store: Store, pictures: Path):
    with start(store.home, words_of(pictures, epochs=10_000), signal.SIG_IGN) as process:
        run_id = wait_for_steps(store, process)
        process.send_signal(signal.SIGHUP)
        seen = store.last_event(run_id)
        while process.poll() is None and not store.events(run_id, after=seen, kinds=["EpochEnded"]):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 143


def test_a_command_whose_terminal_is_gone_trains_to_the_end(store: Store, pictures: Path):
    with start(store.home, words_of(pictures, epochs=3)) as process:
        assert process.stdout and process.stderr
        process.stderr.close()
        printed = process.stdout.read()
        process.stderr = None
        process.wait(120)
    assert json.loads(printed)["state"] == "finished" and process.returncode == 0
    [record] = store.list_runs()
    assert record.state == "finished"


def test_a_device_that_does_not_answer_is_refused_before_the_run_is_of_it(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, epochs=1))
    assert train_run(store, run_id) == "finished"
    with pytest.raises(DeviceError, match="mps is not available"):
        plan_resume(store, run_id, changes={"epochs": 2}, device="mps")
    assert store.get_run(run_id).config.device == "cpu" and store.get_run(run_id).state == "finished"
