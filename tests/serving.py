"""`python -m core serve` for a test, with a stand-in for the tunnel's program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from core.serve.status import Status, read_status
from tests.browser import ROOT, free_port

LIMIT_S = 120.0


@dataclass(frozen=True)
class Serving:
    """A running launcher.

    Attributes:
        told, printed: files with what went to standard error and output.
        orders: the folder of the stand-in.
    """

    process: subprocess.Popen[bytes]
    home: Path
    told: Path
    printed: Path
    orders: Path

    def wait_for(self, is_so: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """Wait until it is so, and return what it is."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if found := is_so():
                return found
            if self.process.poll() is not None:
                found = is_so()
                assert found, f"it ended with {self.process.poll()}: {self.told.read_text()}"
                return found
            time.sleep(0.05)
        raise AssertionError(f"not within {limit_s} s; it told: {self.told.read_text()}")

    def ready(self) -> Status:
        """Its status, once a link was printed."""
        self.wait_for(lambda: self.printed.read_text().endswith("\n"))
        status: Status = self.wait_for(self.status_if("ready"))
        return status

    def status_if(self, state: str) -> Callable[[], Status | None]:
        def found() -> Status | None:
            status = read_status(self.home)
            return status if status and status.state == state else None

        return found

    def says(self, words: str) -> Callable[[], bool]:
        return lambda: words in self.told.read_text()

    def starts(self) -> list[dict[str, Any]]:
        """The starts of the tunnel's stand-in."""
        file = self.orders / "starts.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def order(self, **orders: Any) -> None:
        """What the next stand-in is to do."""
        (self.orders / "orders.json").write_text(json.dumps(orders))

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: int = signal.SIGINT, limit_s: float = 60.0) -> int:
        """Ask for the end; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(limit_s)


@contextmanager
def serving(folder: Path, *options: str, program: str = "cloudflared", **orders: Any) -> Iterator[Serving]:
    """Run the launcher with `options` until the block ends; the stand-in does what `orders` say."""
    programs, double, home = folder / "programs", folder / "double", folder / "home"
    programs.mkdir(exist_ok=True)
    double.mkdir(exist_ok=True)
    script = programs / program
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/tests/tunnel_double.py" {program} "$@"\n')
    script.chmod(0o755)
    told, printed = folder / "told.txt", folder / "printed.txt"
    environment = {
        **{name: value for name, value in os.environ.items() if name != "FINETUNE_TOKEN"},
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "TUNNEL_DOUBLE": str(double / "orders.json"),
    }
    (double / "orders.json").write_text(json.dumps(orders))
    command = [sys.executable, "-m", "core", "serve", "--home", str(home)]
    if "--port" not in options:
        command += ["--port", str(free_port())]
    with told.open("wb") as err, printed.open("wb") as out:
        process = subprocess.Popen([*command, *options], cwd=ROOT, env=environment, stdout=out, stderr=err)
    one = Serving(process, home, told, printed, double)
    try:
        yield one
    finally:
        if process.poll() is None:
            one.end()
