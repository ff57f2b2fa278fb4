"""Takes the README's pictures from the real app in Chromium.

    python docs/screenshots.py [--group HOME]

With a home folder that holds a run group, the pictures of timings are taken anew from its newest group.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from core.store import Store  # noqa: E402
from tests.browser import CHROMIUM, CHROMIUM_ARGS, dashboard  # noqa: E402

IMAGES = ROOT / "docs" / "images"


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=Path)
    group = parser.parse_args().group
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        if group:
            with dashboard(group) as app:
                shoot_timings(views_of(browser, height=1900), app.url, group)
        with tempfile.TemporaryDirectory() as home, dashboard(Path(home)) as app:
            shoot_a_run(views_of(browser), app.url, Path(home))
        browser.close()


def views_of(browser: Any, height: int = 1000) -> dict[str, Any]:
    """A page for each scheme and width."""
    return {
        f"{scheme}-{width}": browser.new_context(
            color_scheme=scheme, viewport={"width": width, "height": height}, device_scale_factor=1
        ).new_page()
        for scheme in ("light", "dark")
        for width in (1280, 420)
    }


def shoot_timings(views: dict[str, Any], url: str, home: Path) -> None:
    """The newest group, and the times of its first cold repeat that compiled."""
    store = Store(home)
    group = store.groups.list_all()[0]
    run_id = next(member.run_id for member in group.members if (member.label, member.start) == ("xla", "cold"))
    store.close()
    for name, page in views.items():
        page.goto(f"{url}/timings?group={group.group_id}")
        page.locator(".js-plotly-plot").nth(2).wait_for(timeout=90_000)
        page.wait_for_timeout(3000)
        page.screenshot(path=IMAGES / f"timings-{name}.png")
        page.goto(f"{url}/runs?run={run_id}")
        page.get_by_role("tab", name="Where the time went").click(timeout=60_000)
        page.wait_for_timeout(3000)
        page.get_by_role("tab", name="Where the time went").scroll_into_view_if_needed()
        page.wait_for_timeout(1000)
        page.screenshot(path=IMAGES / f"times-{name}.png")


def shoot_a_run(views: dict[str, Any], url: str, home: Path) -> None:
    """Data, the form, a run that is changed while it trains and another that waits, and all runs."""
    shoot_data(views, url)
    first = views["light-1280"]
    first.goto(url)
    start = first.get_by_role("button", name="Start", exact=True)
    start.wait_for(timeout=90_000)
    first.wait_for_timeout(3000)
    for name, page in views.items():
        if page is not first:
            page.goto(url)
            page.get_by_role("button", name="Start", exact=True).wait_for(timeout=60_000)
            page.wait_for_timeout(1500)
        page.screenshot(path=IMAGES / f"train-{name}.png", full_page=True)
    start.click()
    first.locator(".js-plotly-plot").first.wait_for(timeout=60_000)
    change_a_run(first, home)
    for name, page in views.items():
        if page is not first:
            page.goto(f"{url}/live")
            page.locator(".js-plotly-plot").first.wait_for(timeout=60_000)
            page.wait_for_timeout(1500)
        page.screenshot(path=IMAGES / f"live-{name}.png")
    first.wait_for_timeout(45_000)
    for name, page in views.items():
        page.goto(f"{url}/runs")
        page.wait_for_timeout(4000)
        page.screenshot(path=IMAGES / f"runs-{name}.png")


def change_a_run(page: Any, home: Path) -> None:
    """Ask for twice the learning rate, less weight decay and more epochs, and let another run wait."""
    store = Store(home)
    run = store.list_runs()[0]
    store.create_run(run.config.model_copy(update={"trainable": "last", "lr": 3e-4}), name="Last stages, slowly")
    for what, value in (("epochs", 8), ("lr_factor", 2.0), ("weight_decay", 0.001)):
        page.wait_for_timeout(3000)
        store.request(run.run_id, "change", {"what": what, "value": value})
    page.wait_for_timeout(4000)
    store.close()


def shoot_data(views: dict[str, Any], url: str) -> None:
    """The data page over the built-in data, which are scanned by the first view and known to the others."""
    for name, page in views.items():
        page.goto(f"{url}/data")
        look = page.get_by_role("button", name="Look at it")
        look.wait_for(timeout=90_000)
        page.wait_for_timeout(1500)
        if not page.get_by_role("heading", name="Duplicates").count():
            look.click()
        page.get_by_role("heading", name="Duplicates").wait_for(timeout=60_000)
        page.mouse.move(400, 30)
        page.wait_for_timeout(3000)
        page.screenshot(path=IMAGES / f"data-{name}.png")


if __name__ == "__main__":
    main()
