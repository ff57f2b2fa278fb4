"""The dashboard as a person sees it, in a Chromium."""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from core.config import RunConfig
from core.events import EpochEnded, Phases, RunEnded, StepLogged
from core.store import Store
from tests.browser import CHROMIUM, chromium_page, dashboard

HAS_CHROMIUM = Path(CHROMIUM).exists()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not HAS_CHROMIUM and os.environ.get("CI") != "true", reason=f"{CHROMIUM} is not there"),
]
POINTS = """() => Math.max(0,
  ...[...document.querySelectorAll('.run-chart .js-plotly-plot')].map(plot => plot.data[0].x.length))"""
WAIT_MS = 30_000


def _step(number: int) -> StepLogged:
    return StepLogged(number, 1, 2 * math.exp(-number / 50), 50.0, 1e-3, 32, 0.5, 0.1, 50.0, 1)


def _steps(first: int, last: int) -> list[tuple[float, StepLogged]]:
    return [(time.time(), _step(number)) for number in range(first, last)]


def _wait_for_points(page: Any, least: int) -> int:
    page.wait_for_function(f"() => ({POINTS})() >= {least}", timeout=WAIT_MS)
    return int(page.evaluate(f"({POINTS})()"))


def test_without_runs_the_live_page_leads_to_train(tmp_path: Path):
    with dashboard(tmp_path) as running, chromium_page() as page:
        page.goto(f"{running.url}/live")
        page.get_by_text("Nothing has been trained here yet.").wait_for(timeout=WAIT_MS)
        page.get_by_role("link", name="Set up a run").wait_for(timeout=WAIT_MS)


def test_points_arrive_while_zoom_and_curve_stay(tmp_path: Path):
    store = Store(tmp_path)
    run_id = store.create_run(RunConfig(), name="A run by hand", own=True)
    assert store.claim(run_id, "cpu")
    store.append_events(run_id, _steps(1, 11))
    phase = {"phase": "training", "epoch": 2, "epochs": 5, "step": 120, "steps": 313, "progress": 0.3, "eta_s": 65}
    store.beat(run_id, phase)
    with dashboard(tmp_path) as running, chromium_page() as page:
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"{running.url}/live")
        page.get_by_text("epoch 2 of 5, step 120 of 313").wait_for(timeout=WAIT_MS)
        page.get_by_text("65 s", exact=True).wait_for(timeout=WAIT_MS)
        assert _wait_for_points(page, 10) == 10
        page.evaluate("() => Plotly.relayout(document.querySelector('.js-plotly-plot'), {'xaxis.range': [2, 5]})")
        store.append_events(run_id, _steps(11, 31))
        ended = EpochEnded(1, 30, 1.0, 50.0, 0.9, 61.5, None, 3.0, 40.0, Phases(), 1, 1e-3)
        store.append_events(run_id, [(time.time(), ended)])
        assert _wait_for_points(page, 30) == 30
        page.get_by_text("61.5 %").wait_for(timeout=WAIT_MS)
        shown = page.evaluate("() => document.querySelector('.js-plotly-plot').layout.xaxis.range.slice()")
        assert shown == [2, 5]
        if folder := os.environ.get("FINETUNE_SCREENSHOTS"):
            page.screenshot(path=f"{folder}/live.png", full_page=True)
        page.reload()
        assert _wait_for_points(page, 30) == 30

        page.get_by_role("button", name="Stop").click()
        deadline = time.monotonic() + 10
        while not (taken := store.take_requests(run_id)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [kind for kind, _ in taken] == ["stop"]

        failure = RunEnded("failed", 3.0, Phases(), 1, 0.0, "The loss is not finite.", "Lower it.", "Traceback here")
        store.append_events(run_id, [(time.time(), failure)])
        store.end_run(run_id, "failed")
        page.get_by_text("The loss is not finite. Lower it.").wait_for(timeout=WAIT_MS)
        assert page.get_by_role("button", name="Stop").count() == 0
        page.set_viewport_size({"width": 600, "height": 900})
        lefts = page.evaluate(
            "() => [...document.querySelectorAll('.run-chart')].map(chart => chart.getBoundingClientRect().left)"
        )
        assert len(lefts) >= 4 and len(set(lefts)) == 1
        if folder:
            page.screenshot(path=f"{folder}/narrow.png", full_page=True)
        assert not wrong
    store.close()


def test_a_run_from_start_to_stop(tmp_path: Path):
    if not (Path(__file__).parents[1] / "pages" / "train.py").exists():
        pytest.skip("there is no train page")
    with dashboard(tmp_path) as running, chromium_page() as page:
        page.goto(running.url)
        start = page.get_by_role("button", name="Start", exact=True)
        start.wait_for(timeout=WAIT_MS)
        if folder := os.environ.get("FINETUNE_SCREENSHOTS"):
            page.screenshot(path=f"{folder}/train.png", full_page=True)
        start.click()
        page.wait_for_url("**/live**", timeout=WAIT_MS)
        page.wait_for_function(f"() => ({POINTS})() >= 2", timeout=120_000)
        seen = _wait_for_points(page, 2)
        page.reload()
        assert _wait_for_points(page, seen) >= seen

        second = page.context.new_page()
        second.goto(f"{running.url}/live")
        assert _wait_for_points(second, seen) >= seen
        second.close()

        stop = page.get_by_role("button", name="Stop")
        if stop.count():
            stop.click()
        page.get_by_text(re.compile("^(Stopped|Finished)$")).first.wait_for(timeout=60_000)
        page.get_by_role("link", name="Runs").click()
        page.wait_for_url("**/runs**", timeout=WAIT_MS)
        store = Store(tmp_path)
        [record] = store.list_runs()
        store.close()
        assert record.state in ("stopped", "finished")
        page.locator("[data-testid=stDataFrame], [data-testid=stTable]").first.wait_for(timeout=WAIT_MS)
        assert page.locator("[data-testid=stException]").count() == 0
        if folder:
            page.screenshot(path=f"{folder}/runs.png", full_page=True)


def test_the_form_survives_going_to_another_page_and_back(tmp_path: Path):
    with dashboard(tmp_path) as running, chromium_page() as page:
        page.goto(running.url)
        epochs = page.get_by_role("spinbutton", name=re.compile("Epochs")).first
        epochs.wait_for(timeout=WAIT_MS)
        epochs.fill("7")
        epochs.press("Enter")
        command = page.get_by_test_id("stCode").first
        command.get_by_text("7", exact=True).wait_for(timeout=WAIT_MS)
        page.get_by_role("link", name="Runs").click()
        page.get_by_text("No run").or_(page.get_by_role("heading", name="Runs")).first.wait_for(timeout=WAIT_MS)
        page.get_by_test_id("stSidebarNavItems").get_by_role("link", name="Train").click()
        page.get_by_role("button", name="Start", exact=True).wait_for(timeout=WAIT_MS)
        command.get_by_text("7", exact=True).wait_for(timeout=WAIT_MS)
        assert page.get_by_role("spinbutton", name=re.compile("Epochs")).first.input_value() == "7"


def test_data_are_looked_at_and_then_found_on_train(tmp_path: Path):
    spec = "tests/data/cases/truncated_jpeg/data"
    with dashboard(tmp_path) as running, chromium_page() as page:
        page.goto(f"{running.url}/data")
        data = page.get_by_role("combobox", name=re.compile("^Data")).first
        data.wait_for(timeout=WAIT_MS)
        data.fill(spec)
        data.press("Enter")
        page.get_by_text("Look at it shows what these data hold").wait_for(timeout=WAIT_MS)
        page.get_by_role("button", name="Look at it").click()
        page.get_by_text("14 files found = 12 used + 2 skipped + 0 not pictures").wait_for(timeout=WAIT_MS)
        page.get_by_role("heading", name="Duplicates").wait_for(timeout=WAIT_MS)
        # the table is painted on a canvas; what it says stands in a hidden table for screen readers
        page.get_by_role("heading", name="Duplicates").scroll_into_view_if_needed()
        for file in ("apple/cut_half.jpg", "pear/cut_header.jpg"):
            page.get_by_text(file).first.wait_for(state="attached", timeout=WAIT_MS)
        page.wait_for_function(
            "() => [...document.querySelectorAll('[data-testid=stImage] img')].filter(i => i.naturalWidth > 40).length"
            " >= 2",
            timeout=WAIT_MS,
        )
        page.get_by_role("button", name="Show the first batch").click()
        page.wait_for_function(
            "() => document.querySelectorAll('[data-testid=stImage] img').length >= 12", timeout=WAIT_MS
        )
        assert page.locator("[data-testid=stException]").count() == 0
        page.get_by_test_id("stSidebarNavItems").get_by_role("link", name="Train").click()
        page.get_by_role("button", name="Start", exact=True).wait_for(timeout=WAIT_MS)
        assert page.get_by_role("combobox", name=re.compile("^Data")).first.input_value() == spec
