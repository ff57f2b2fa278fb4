"""The page System: what the doctor found, drawn without a browser and in one."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from core.health import doctor
from core.health.findings import Finding, Report, by_state
from core.store import Store
from tests.browser import CHROMIUM, chromium_page, dashboard
from tests.test_control_browser import shoot
from tests.test_pages import button, open_page, pages_store
from ui import registry
from ui.words import escaped

pytestmark = pytest.mark.long

WAIT_MS = 150_000
HOSTILE = "<img src=x onerror=alert(1)> [a](javascript:alert(1)) **bold** $x$ :red[no]"
FOUND = [
    Finding("versions", "ok", "Python 3.11.7, torch 2.9.1."),
    Finding("network huggingface.co", "warning", "It can't be reached.", "The quick start works without it."),
    Finding("environment", "problem", f"XLA_USE_BF16={HOSTILE}", "Unset XLA_USE_BF16."),
]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = pages_store(tmp_path, monkeypatch)
    yield store
    store.close()


def report(findings: list[Finding]) -> Report:
    return Report(by_state(findings), "this machine with no accelerator", "/home/me/runs", 7.0)


def finds(monkeypatch: pytest.MonkeyPatch, findings: list[Finding]) -> list[int]:
    """The doctor finds this, and says here how often it was asked."""
    asked: list[int] = []
    monkeypatch.setattr(doctor, "examine", lambda home, store, tell: asked.append(1) or report(findings))
    return asked


def looked(app) -> None:
    """Wait for the look that goes on, and draw the page anew."""
    assert registry.services().checkups.last.wait(30)
    app.run()
    assert not app.exception, app.exception


def markdown(app) -> str:
    return "\n".join(item.value for item in app.markdown)


def test_the_first_visit_looks_and_the_next_one_shows_what_was_found(store: Store, monkeypatch: pytest.MonkeyPatch):
    asked = finds(monkeypatch, FOUND)
    looked(open_page("system"))
    app = open_page("system")
    assert asked == [1]
    assert app.error[0].value.startswith("**1 problem and 1 warning.**")
    assert any("Looked at " in item.value and "in 7 s" in item.value for item in app.caption)
    button(app, "Look again").click().run()
    looked(app)
    assert asked == [1, 1]


def test_problems_stand_first_each_with_what_to_do_and_nothing_in_them_is_markup(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    finds(monkeypatch, FOUND)
    app = open_page("system")
    looked(app)
    told = markdown(app)
    places = [told.index(words) for words in ("Unset XLA", "can't be reached", "quick start works", "Python 3")]
    assert places == sorted(places)
    assert escaped(HOSTILE) in told and HOSTILE not in told


def test_where_everything_is_in_order_that_is_said(store: Store, monkeypatch: pytest.MonkeyPatch):
    finds(monkeypatch, FOUND[:1])
    app = open_page("system")
    looked(app)
    assert app.success[0].value == "**Everything is in order.**" and not app.error and not app.warning


def test_progress_is_shown_while_it_looks_and_a_second_visit_joins(store: Store, monkeypatch: pytest.MonkeyPatch):
    go_on, asked = threading.Event(), []

    def slow(home: Path, store: Store, tell) -> Report:
        asked.append(1)
        tell("database", 3, 15)
        assert go_on.wait(30)
        return report(FOUND)

    monkeypatch.setattr(doctor, "examine", slow)
    app = open_page("system")
    try:
        until = time.monotonic() + 30
        while registry.services().checkups.last.progress[1] != 3:
            assert time.monotonic() < until
            time.sleep(0.02)
        app.run()
        assert button(app, "Look again").disabled
        open_page("system")
        assert not app.error and asked == [1]
    finally:
        go_on.set()
    looked(app)
    assert app.error and not button(app, "Look again").disabled


def test_a_look_that_breaks_is_told_in_a_line_and_can_be_made_again(store: Store, monkeypatch: pytest.MonkeyPatch):
    def broken(*given: object) -> Report:
        raise RuntimeError("no such thing\nTraceback")

    monkeypatch.setattr(doctor, "examine", broken)
    app = open_page("system")
    looked(app)
    assert app.error[0].value == "The look failed: RuntimeError: no such thing"
    assert not button(app, "Look again").disabled


def test_the_home_folder_and_the_folders_that_may_be_read_are_named(store: Store, monkeypatch: pytest.MonkeyPatch):
    finds(monkeypatch, FOUND)
    app = open_page("system")
    home, roots = (item.value for item in app.code)
    assert home == str(store.home)
    assert roots.splitlines() == [str(folder) for folder in registry.services().roots.folders]
    looked(app)


@pytest.mark.browser
@pytest.mark.skipif(not Path(CHROMIUM).exists() and os.environ.get("CI") != "true", reason=f"{CHROMIUM} is not there")
def test_the_real_doctor_is_followed_on_a_phone_and_nothing_is_cut_off(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XLA_USE_BF16", "1")
    with dashboard(tmp_path) as running, chromium_page() as page:
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.set_viewport_size({"width": 390, "height": 844})
        page.goto(running.url)
        page.goto(f"{running.url}/system")
        page.get_by_role("progressbar").wait_for(timeout=WAIT_MS)
        page.get_by_text("XLA_USE_BF16=1 silently changes every number").wait_for(timeout=WAIT_MS)
        page.get_by_text("What to do", exact=True).first.wait_for(timeout=WAIT_MS)
        assert page.get_by_text("Device cpu", exact=True).count() == 1
        main = page.get_by_test_id("stMain")
        assert main.evaluate("main => main.scrollWidth <= main.clientWidth")
        assert page.locator("[data-testid=stException]").count() == 0 and wrong == []
        shoot(page, "system")
