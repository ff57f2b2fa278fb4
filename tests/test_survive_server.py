"""The real dashboard is stopped in mid-run, loses its browser, or finds its store locked."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.store import Store
from tests.browser import CHROMIUM, Dashboard, chromium_page, dashboard
from tests.survive_cases import locked, make_pictures, tiny

pytestmark = pytest.mark.long

HAS_CHROMIUM = Path(CHROMIUM).exists()
WAIT_MS = 60_000
END_S = 10.0
"""Seconds in which a dashboard that is asked to end must have saved its runs and be gone."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def watched(home: Path):
    store = Store(home)
    yield store
    store.close()


def wait_for(is_so: Callable[[], Any], seconds: float = 90) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def kinds_of(store: Store, run_id: str) -> list[str]:
    return [event.kind for event in store.events(run_id)]


def is_in_phase(store: Store, run_id: str, phase: str) -> bool:
    record = store.get_run(run_id)
    return record.state == "running" and record.phase.get("phase") == phase


def end(running: Dashboard, number: int) -> float:
    """Send the signal, and wait; seconds until the process is gone."""
    began = time.monotonic()
    running.process.send_signal(number)
    running.process.wait(60)
    return time.monotonic() - began


def stalled_upload(url: str) -> socket.socket:
    """A client that began to upload something and then went away without a word."""
    connection = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    connection.sendall(
        b"POST /api/uploads HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-Finetune: upload\r\n"
        b"Content-Length: 1000\r\n\r\n{"
    )
    return connection


def test_a_dashboard_that_is_terminated_in_mid_epoch_saves_and_ends_in_time(home: Path, watched: Store, tmp_path: Path):
    run_id = watched.create_run(tiny(make_pictures(tmp_path / "pictures"), epochs=9000))
    waiting = watched.create_run(tiny(tmp_path / "pictures", epochs=9000))
    with dashboard(home) as running:
        wait_for(lambda: "StepLogged" in kinds_of(watched, run_id))
        with stalled_upload(running.url):
            seconds = end(running, signal.SIGTERM)
    assert watched.get_run(run_id).state == "stopped" and kinds_of(watched, run_id)[-1] == "RunEnded"
    assert list(watched.run_folder(run_id).glob("state-*.pt")) and seconds < END_S
    # what waited waits for the next start
    assert watched.get_run(waiting).state == "queued"
    assert "Traceback" not in running.log.read_text()


@pytest.mark.parametrize("phase", ["loading_data", "validating", "paused"])
def test_a_dashboard_that_is_interrupted_at_any_time_leaves_a_stopped_run(
    home: Path, watched: Store, tmp_path: Path, phase: str
):
    # many pictures to read, or to validate on, so that the signal comes in its midst
    counts = {"loading_data": (2500, 2, 160), "validating": (4, 6000, 40), "paused": (16, 4, 40)}
    pictures = make_pictures(tmp_path / "pictures", *counts[phase])
    run_id = watched.create_run(tiny(pictures, epochs=9000))
    with dashboard(home) as running:
        if phase == "paused":
            wait_for(lambda: "StepLogged" in kinds_of(watched, run_id))
            watched.request(run_id, "pause")
        wait_for(lambda: is_in_phase(watched, run_id, phase) or watched.get_run(run_id).state == phase)
        seconds = end(running, signal.SIGINT)
    told = kinds_of(watched, run_id)
    assert watched.get_run(run_id).state == "stopped" and told[-1] == "RunEnded" and seconds < END_S
    # it was where it was meant to be
    assert ("RunPrepared" in told) == (phase != "loading_data") and ("EpochEnded" in told) == (phase == "paused")
    assert bool(list(watched.run_folder(run_id).glob("state-*.pt"))) == (phase != "loading_data")


def test_a_run_in_a_process_of_its_own_goes_on_when_the_dashboard_ends(home: Path, watched: Store, tmp_path: Path):
    pictures = make_pictures(tmp_path / "pictures")
    run_id = watched.create_run(tiny(pictures, epochs=9000, process="own"))
    with dashboard(home) as running:
        wait_for(lambda: "StepLogged" in kinds_of(watched, run_id))
        seconds = end(running, signal.SIGTERM)
    last = watched.events(run_id)[-1].id
    wait_for(lambda: [event for event in watched.events(run_id, after=last) if event.kind == "StepLogged"], 30)
    assert watched.get_run(run_id).state == "running" and seconds < END_S
    watched.request(run_id, "stop")
    wait_for(lambda: watched.get_run(run_id).state == "stopped")


def test_a_home_that_can_not_be_used_ends_the_dashboard_in_one_line_and_status_2():
    import subprocess
    import sys

    from tests.browser import ROOT, free_port

    command = [sys.executable, "-m", "streamlit", "run", "app.py", f"--server.port={free_port()}"]
    environment = {**os.environ, "FINETUNE_HOME": "/proc/home"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    [told] = done.stderr.strip().splitlines()
    assert told.startswith("The home folder '/proc/home' can't be used")


@pytest.mark.browser
@pytest.mark.skipif(not HAS_CHROMIUM and os.environ.get("CI") != "true", reason=f"{CHROMIUM} is not there")
def test_a_run_whose_browser_is_gone_goes_on_to_its_end_and_pages_answer_while_the_store_is_locked(
    home: Path, watched: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pictures = make_pictures(tmp_path / "pictures")
    config = tiny(pictures, epochs=12)
    with dashboard(home) as running:
        with chromium_page() as page:
            page.goto(running.url)
            page.get_by_role("button", name="Start", exact=True).wait_for(timeout=WAIT_MS)
            run_id = watched.create_run(config)
            wait_for(lambda: "StepLogged" in kinds_of(watched, run_id))
            page.goto(f"{running.url}/live")
            page.get_by_role("button", name="Stop").wait_for(timeout=WAIT_MS)
        # from here on nobody looks
        with locked(home):
            for _ in range(10):
                began = time.monotonic()
                with urllib.request.urlopen(f"{running.url}/api/runs/{run_id}/series", timeout=10) as answer:
                    assert answer.status == 200
                assert time.monotonic() - began < 2
                time.sleep(0.1)
        wait_for(lambda: not watched.get_run(run_id).is_active)
    events = watched.events(run_id)
    steps = [event.payload["step"] for event in events if event.kind == "StepLogged"]
    assert watched.get_run(run_id).state == "finished" and steps == list(range(1, 12 * 16 + 1))
    assert [event.payload["epoch"] for event in events if event.kind == "EpochEnded"] == list(range(1, 13))
    assert events[-1].kind == "RunEnded"
