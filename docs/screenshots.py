"""Takes the README's pictures from the real app in Chromium: python docs/screenshots.py."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser import CHROMIUM, CHROMIUM_ARGS, dashboard  # noqa: E402

IMAGES = ROOT / "docs" / "images"


def main() -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as home, dashboard(Path(home)) as app, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        views = {
            f"{scheme}-{width}": browser.new_context(
                color_scheme=scheme, viewport={"width": width, "height": 1000}, device_scale_factor=1
            ).new_page()
            for scheme in ("light", "dark")
            for width in (1280, 420)
        }
        shoot_data(views, app.url)
        first = views["light-1280"]
        first.goto(app.url)
        start = first.get_by_role("button", name="Start", exact=True)
        start.wait_for(timeout=90_000)
        first.wait_for_timeout(3000)
        for name, page in views.items():
            if page is not first:
                page.goto(app.url)
                page.get_by_role("button", name="Start", exact=True).wait_for(timeout=60_000)
                page.wait_for_timeout(1500)
            page.screenshot(path=IMAGES / f"train-{name}.png", full_page=True)
        start.click()
        first.locator(".js-plotly-plot").first.wait_for(timeout=60_000)
        first.wait_for_timeout(8000)
        for name, page in views.items():
            if page is not first:
                page.goto(f"{app.url}/live")
                page.locator(".js-plotly-plot").first.wait_for(timeout=60_000)
                page.wait_for_timeout(1500)
            page.screenshot(path=IMAGES / f"live-{name}.png")
        first.wait_for_timeout(45_000)
        for name, page in views.items():
            page.goto(f"{app.url}/runs")
            page.wait_for_timeout(4000)
            page.screenshot(path=IMAGES / f"runs-{name}.png")
        browser.close()


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
