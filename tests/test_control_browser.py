"""Steering a run that trains, as a person does it in a Chromium."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from core.running.script import script_of
from core.store import Store
from tests.browser import chromium_page, dashboard
from tests.test_browser import POINTS, WAIT_MS, pytestmark
from tests.test_groups import tiny

__all__ = ["pytestmark"]
DARK = """() => {
  const chart = document.querySelector('.run-charts'), plot = chart.querySelector('.js-plotly-plot');
  const red = parseInt(plot.layout.font.color.slice(1, 3), 16);
  return red > 128 && plot.layout.font.color === getComputedStyle(chart).getPropertyValue('--st-text-color').trim();
}"""


def test_a_run_is_changed_paused_with_its_device_free_taken_up_again_and_aborted(tmp_path: Path, pictures: Path):
    store = Store(tmp_path / "home")
    run_id = store.create_run(tiny(pictures, epochs=9000, log_every=1, schedule="constant", lr=1e-3))
    with dashboard(tmp_path / "home") as running, chromium_page() as page:
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"{running.url}/live?run={run_id}")
        page.wait_for_function(f"() => ({POINTS})() >= 3", timeout=120_000)

        page.get_by_text("Change this run").click()
        rate = page.get_by_role("spinbutton", name=re.compile("^Learning rate"))
        rate.fill("0.0005")
        page.get_by_role("button", name="Change from the next step on").click()
        page.get_by_text(re.compile(r"Learning rate 0\.0005 from step")).wait_for(timeout=WAIT_MS)
        page.wait_for_function("() => document.querySelector('input[placeholder=\"0.0005\"]')", timeout=WAIT_MS)

        page.get_by_text("Free the device meanwhile").click()
        page.get_by_role("button", name="Pause").click()
        page.get_by_text("Paused, device free").wait_for(timeout=WAIT_MS)
        assert store.get_run(run_id).is_parked and not store.is_held("cpu")
        assert page.get_by_role("button", name="Abort").count() == 0
        shoot(page, "parked")

        page.get_by_role("button", name="Go on").click()
        page.get_by_text(re.compile("Taken up after step")).wait_for(timeout=WAIT_MS)
        page.get_by_text("Running", exact=True).wait_for(timeout=WAIT_MS)
        assert [change["what"] for change in script_of(store, run_id)] == ["lr_factor"]

        page.get_by_role("button", name="Abort").click()
        page.get_by_text("nothing is saved").wait_for(timeout=WAIT_MS)
        # the status goes on refreshing behind the question, which stays
        time.sleep(2.5)
        shoot(page, "abort")
        page.get_by_role("button", name="Abort now").click()
        page.get_by_text("Stopped", exact=True).wait_for(timeout=WAIT_MS)
        page.get_by_text("It was aborted").wait_for(timeout=WAIT_MS)

        page.get_by_text("Resume", exact=True).first.click()
        page.get_by_text(re.compile("^It goes on after step")).wait_for(timeout=WAIT_MS)
        shoot(page, "resume")
        # the charts of a run that ended are drawn anew where the page's colours change
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(DARK, timeout=WAIT_MS)
        assert page.locator("[data-testid=stException]").count() == 0 and not wrong
    store.close()


def shoot(page, name: str) -> None:
    """A picture of the page in both schemes and widths, where a folder for pictures is named."""
    if not (folder := os.environ.get("FINETUNE_SCREENSHOTS")):
        return
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for width in (1280, 420):
            page.set_viewport_size({"width": width, "height": 1000})
            page.wait_for_timeout(700)
            page.screenshot(path=f"{folder}/{name}-{scheme}-{width}.png")
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 1000})
