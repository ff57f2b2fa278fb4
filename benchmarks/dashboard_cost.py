"""What viewers of the live page cost the training in the same process, with and without our settings.

    python benchmarks/dashboard_cost.py [--rounds 2] [--viewers 3] [--epochs 4]

Each round starts the real server once a setting, in turn, trains a head-only run on the built-in data while
that many Chromium tabs watch it, and notes the median seconds of the epochs after the first. Thread count fixed at 2.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from playwright.sync_api import sync_playwright

from core.config import make_config
from core.store import Store
from tests.browser import CHROMIUM, CHROMIUM_ARGS, dashboard

SETTINGS = {
    "ours": {},
    "collector after each script run": {"STREAMLIT_RUNNER_POST_SCRIPT_GC": "true"},
    "spinning OpenMP threads": {"OMP_WAIT_POLICY": "ACTIVE"},
}


def epoch_seconds(settings: dict[str, str], viewers: int, epochs: int) -> float:
    """Median seconds of the epochs after the first, with `viewers` tabs on the live page."""
    with (
        tempfile.TemporaryDirectory() as home,
        mock.patch.dict(os.environ, settings),
        dashboard(Path(home)) as app,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        store = Store(Path(home))
        run_id = store.create_run(make_config("quick", epochs=epochs, threads=2, device="cpu"))
        for _ in range(viewers):
            browser.new_page().goto(f"{app.url}/live")
        while store.get_run(run_id).is_active:
            time.sleep(0.5)
        seconds = [event.payload["seconds"] for event in store.events(run_id, kinds=["EpochEnded"])]
        store.close()
        browser.close()
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--viewers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {"no viewer": []} | {name: [] for name in SETTINGS}
    for number in range(1, options.rounds + 1):
        alone = epoch_seconds({}, 0, options.epochs)
        line = [f"round {number}: no viewer {alone:.2f} s"]
        for name, settings in SETTINGS.items():
            watched = epoch_seconds(settings, options.viewers, options.epochs)
            ratios[name].append(alone / watched)
            line.append(f"{name} {watched:.2f} s ({alone / watched:.2f} of the speed)")
        print("; ".join(line), flush=True)
    for name in SETTINGS:
        print(f"{name}: median {statistics.median(ratios[name]):.2f} of the speed without viewers")


if __name__ == "__main__":
    main()
