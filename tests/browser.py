"""A dashboard of its own for a test: a free port, a fresh home, and a Chromium to look at it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = "/usr/bin/chromium"
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


@dataclass(frozen=True)
class Dashboard:
    """A running dashboard; `log` is what it printed."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def dashboard(home: Path, *options: str, token: str | None = None) -> Iterator[Dashboard]:
    """Run `streamlit run app.py` on a free port until the block ends."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "FINETUNE_TOKEN"}
    environment["FINETUNE_HOME"] = str(home)
    if token is not None:
        environment["FINETUNE_TOKEN"] = token
    home.mkdir(parents=True, exist_ok=True)
    log = home / "dashboard.log"
    command = [sys.executable, "-m", "streamlit", "run", "app.py", f"--server.port={port}", "--server.headless=true"]
    with log.open("w") as out:
        process = subprocess.Popen([*command, *options], cwd=ROOT, env=environment, stdout=out, stderr=out)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for_answer(url, process, log)
        yield Dashboard(url, log, process)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def chromium_page(*local_names: str) -> Iterator[Any]:
    """A page of a headless Chromium, to which these host names are this machine; their certificates aren't checked."""
    from playwright.sync_api import sync_playwright

    rules = [f"--host-resolver-rules={', '.join(f'MAP {name} 127.0.0.1' for name in local_names)}"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*CHROMIUM_ARGS, *(rules if local_names else [])]
        )
        try:
            size = {"width": 1280, "height": 1000}
            yield browser.new_context(viewport=size, ignore_https_errors=bool(local_names)).new_page()
        finally:
            browser.close()


def status_of(url: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str]]:
    """Status and headers of the answer; redirects are not followed."""

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *args: Any, **kwargs: Any) -> None:
            return None

    try:
        request = urllib.request.Request(url, headers=headers or {})
        with urllib.request.build_opener(Stay).open(request, timeout=10) as answer:
            return answer.status, dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers)


def _wait_for_answer(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"The dashboard ended at once:\n{log.read_text()}")
        try:
            status_of(f"{url}/_stcore/health")
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"The dashboard does not answer:\n{log.read_text()}")
