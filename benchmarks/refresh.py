"""What long runs, many runs and long evenings cost the server: opening a run, refreshing the live page, listing runs.

    python benchmarks/refresh.py [--steps 1000 100000 1000000] [--refreshes 1000] [--runs 1000] [--without-blocks]

The runs are made by SQL (`tests/long_runs.py`) and packed by the store. Opening and listing are timed in this process,
in a store that knows nothing yet. For refreshing the real server is started on a run that goes on; a viewer
(`tests/viewer.py`) asks for all that the browser asks for once a second, as fast as it is answered, while the run logs
one more step each time. Server times are of the processor, which other work on the machine changes least.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core.analysis.summary import list_rows, summarise
from core.series import RunSeries
from core.store import Store
from tests.browser import dashboard
from tests.long_runs import ServerTime, ended, long_run, many_runs, step, tell
from tests.viewer import Viewer, server_of

POLLS = 200
SETTLE_S = 20.0
"""How long the server loads its libraries after it has started, at the most."""


def opening_ms(home: Path, run_id: str) -> tuple[float, float]:
    """Milliseconds of processor to open a run's charts, and its summary."""
    store = Store(home)
    with ServerTime() as opening:
        series = RunSeries(store, run_id)
        series.update()
        json.dumps(series.since(""))
    with ServerTime() as summing:
        summarise(store, run_id)
    store.close()
    return 1000 * opening.seconds, 1000 * summing.seconds


def without_blocks_ms(home: Path, run_id: str) -> float:
    """As `opening_ms`, of a run from before there were blocks."""
    store = Store(home)
    with store.database.write() as db:
        db.execute("DELETE FROM step_blocks")
    store.close()
    return opening_ms(home, run_id)[0]


def refresh(home: Path, run_id: str, steps: int, refreshes: int) -> list[str]:
    """Columns of the table: what a poll and a refresh cost, and by how many MB the server grew."""
    store = Store(home)
    with dashboard(home) as app:
        time.sleep(SETTLE_S)
        server = server_of(app.url)

        def server_ms() -> float:
            return 1000 * (server.cpu_times().user + server.cpu_times().system)

        with Viewer(app.url, run_id) as viewer:
            _, whole = viewer.poll()
            viewer.refresh()
            spent: dict[str, list[float]] = {"poll": [0.0, 0.0, 0.0], "refresh": [0.0, 0.0, 0.0]}
            for what in spent:
                for number in range(POLLS):
                    steps += 1
                    tell(store, run_id, step(steps))
                    began, busy = time.perf_counter(), server_ms()
                    size = viewer.poll()[1] if what == "poll" else viewer.refresh()
                    if number:
                        took = (server_ms() - busy, 1000 * (time.perf_counter() - began), size)
                        spent[what] = [total + more for total, more in zip(spent[what], took, strict=True)]
            before = server.memory_info().rss
            for _ in range(refreshes):
                steps += 1
                tell(store, run_id, step(steps))
                viewer.poll()
                viewer.refresh()
            grown = server.memory_info().rss - before
    store.close()
    (poll_ms, poll_wall, poll_bytes), (fresh_ms, fresh_wall, fresh_bytes) = (
        [total / (POLLS - 1) for total in totals] for totals in spent.values()
    )
    return [
        f"{whole:,}",
        f"{poll_ms:.1f} ({poll_wall:.1f})",
        f"{poll_bytes:.0f}",
        f"{fresh_ms:.1f} ({fresh_wall:.1f})",
        f"{fresh_bytes:,.0f}",
        f"{grown / 1e6:+.1f} MB",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="*", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--refreshes", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=1000, help="with 2,000 logged steps and 200 samples each; 0: none")
    parser.add_argument("--without-blocks", action="store_true", help="open also as runs of an older home are opened")
    options = parser.parse_args()
    print(
        "| logged steps | opened, live | opened, ended | summary | first poll, bytes | poll, ms (wall) | bytes |",
        end="",
    )
    print(f" refresh, ms (wall) | bytes | growth in {options.refreshes:,} refreshes |")
    print("|---" * 10 + "|")
    for steps in options.steps:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            store = Store(home)
            run_id = long_run(store, steps, samples=steps // 400)
            live_ms, _ = opening_ms(home, run_id)
            refreshed = refresh(home, run_id, steps, options.refreshes)
            tell(store, run_id, ended())
            store.end_run(run_id, "finished")
            store.close()
            ended_ms, summary_ms = opening_ms(home, run_id)
            opened = [f"{steps:,}", *(f"{taken:.0f} ms" for taken in (live_ms, ended_ms, summary_ms))]
            print(f"| {' | '.join([*opened, *refreshed])} |", flush=True)
            if options.without_blocks:
                print(f"{steps:,} steps in no block: opened in {without_blocks_ms(home, run_id):.0f} ms", flush=True)
    if options.runs:
        with tempfile.TemporaryDirectory() as folder:
            store = Store(Path(folder))
            many_runs(store, options.runs, steps=2000, samples=200)
            store.close()
            store = Store(Path(folder))
            for when in ("first time", "again"):
                with ServerTime() as listing:
                    list_rows(store)
                print(f"{options.runs:,} runs listed, {when}: {1000 * listing.seconds:.0f} ms", flush=True)
            store.close()


if __name__ == "__main__":
    main()
