"""What viewers of the live page cost the training in the same process, with and without our settings.

    python benchmarks/dashboard_cost.py [--rounds 3] [--viewers 5] [--epochs 4]

Each round starts the real server once a setting, in turn, and trains a head-only run on the built-in data, with 2
threads, while that many viewers follow it. A viewer speaks Streamlit's own protocol over a websocket and reruns the
status fragment when the page asks for it, and polls the chart's route once a second, as the browser does; a browser
itself would take the cores that it is to leave alone. Noted are the median seconds of the epochs after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.asyncio.client import connect

from core.config import make_config
from core.store import Store
from tests.browser import dashboard

SETTINGS = {
    "ours": {},
    "collecting after each script run": {"STREAMLIT_RUNNER_POST_SCRIPT_GC": "true"},
    "spinning OpenMP threads": {"OMP_WAIT_POLICY": "ACTIVE"},
}


async def view(url: str, run_id: str, counts: dict[str, int]) -> None:
    """Follow the live page until cancelled; adds to `counts` what it asked for."""
    socket_url = url.replace("http", "ws", 1) + "/_stcore/stream"
    async with connect(socket_url, subprotocols=["streamlit"], origin=url, max_size=None) as socket:  # type: ignore[list-item]
        page, fragment, interval = BackMsg(), "", 1.0
        page.rerun_script.page_name = "live"
        await socket.send(page.SerializeToString())

        async def tick() -> None:
            while True:
                await asyncio.sleep(interval)
                await asyncio.to_thread(lambda: urllib.request.urlopen(f"{url}/api/runs/{run_id}/series").read())
                counts["polls"] += 1
                if fragment:
                    again = BackMsg()
                    again.rerun_script.fragment_id = fragment
                    again.rerun_script.is_auto_rerun = True
                    await socket.send(again.SerializeToString())
                    counts["fragments"] += 1

        ticking = asyncio.create_task(tick())
        try:
            async for raw in socket:
                message = ForwardMsg.FromString(raw)  # type: ignore[arg-type]
                if message.WhichOneof("type") == "auto_rerun":
                    fragment, interval = message.auto_rerun.fragment_id, message.auto_rerun.interval
        finally:
            ticking.cancel()


async def watch(url: str, run_id: str, viewers: int, done: threading.Event, counts: dict[str, int]) -> None:
    views = [asyncio.create_task(view(url, run_id, counts)) for _ in range(viewers)]
    await asyncio.to_thread(done.wait)
    for task in views:
        task.cancel()
    results = await asyncio.gather(*views, return_exceptions=True)
    for result in results:
        if not isinstance(result, asyncio.CancelledError):
            print(f"a viewer ended early: {result!r}", file=sys.stderr)


def epoch_seconds(settings: dict[str, str], viewers: int, epochs: int) -> tuple[float, dict[str, int]]:
    """Median seconds of the epochs after the first, and what the viewers asked for meanwhile."""
    counts, done = {"polls": 0, "fragments": 0}, threading.Event()
    with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, settings), dashboard(Path(home)) as app:
        time.sleep(8)  # the libraries are loaded in the background
        store = Store(Path(home))
        run_id = store.create_run(make_config("quick", epochs=epochs, threads=2, device="cpu"))
        thread = threading.Thread(target=lambda: asyncio.run(watch(app.url, run_id, viewers, done, counts)))
        thread.start()
        while store.get_run(run_id).is_active:
            time.sleep(0.5)
        done.set()
        thread.join()
        seconds = [event.payload["seconds"] for event in store.events(run_id, kinds=["EpochEnded"])]
        store.close()
    return statistics.median(seconds[1:]), counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for number in range(1, options.rounds + 1):
        alone, _ = epoch_seconds({}, 0, options.epochs)
        print(f"round {number}: no viewer {alone:.2f} s an epoch", flush=True)
        for name, settings in SETTINGS.items():
            watched, counts = epoch_seconds(settings, options.viewers, options.epochs)
            ratios[name].append(alone / watched)
            print(f"  {name}: {watched:.2f} s ({alone / watched:.2f} of the speed; {counts})", flush=True)
    for name, values in ratios.items():
        print(f"{name}: median {statistics.median(values):.2f} of the speed without viewers")


if __name__ == "__main__":
    main()
