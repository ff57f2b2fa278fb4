"""The dashboard's server as a process of the launcher."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import ServeError
from core.serve.knock import INSTANCE_VARIABLE, TOKEN_VARIABLE, is_ours
from core.serve.processes import Program

ROOT = Path(__file__).parents[2]
START_S = 180.0
"""How long a start may be silent: on a cold disk the libraries are read for a minute. A restore tells how far it is."""
STOP_S = 20.0
"""Runs stop and save within eight seconds, see `ui.registry`."""
POLL_S = 0.1
BAD_INPUT = 2


@dataclass(frozen=True)
class Place:
    """Where the server listens, and for whom.

    Attributes:
        address: as "127.0.0.1" or "0.0.0.0".
        instance: what it calls itself, so that it is known behind a tunnel.
        environment: variables that it gets besides ours.
    """

    home: Path
    port: int
    token: str
    instance: str
    address: str = "127.0.0.1"
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def local(self) -> str:
        """Its address for this machine."""
        host = "127.0.0.1" if self.address in ("0.0.0.0", "::", "localhost") else self.address
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


class Server:
    """A server that is being started, or runs."""

    def __init__(self, place: Place) -> None:
        self._place = place
        options = {
            "server.port": place.port,
            "server.address": place.address,
            "server.headless": "true",
            "server.enableXsrfProtection": "true",
            "server.enableCORS": "true",
        }
        self._program = Program(
            [
                *(sys.executable, "-m", "streamlit", "run", "app.py"),
                *(f"--{name}={value}" for name, value in options.items()),
            ],
            log=place.home / "server.log",
            # Streamlit's settings lie beside app.py
            cwd=ROOT,
            environment={
                **os.environ,
                **place.environment,
                "FINETUNE_HOME": str(place.home),
                TOKEN_VARIABLE: place.token,
                INSTANCE_VARIABLE: place.instance,
            },
        )

    @property
    def pid(self) -> int:
        return self._program.pid

    @property
    def lives(self) -> bool:
        return self._program.status is None

    def answers(self, limit_s: float = 5.0) -> bool:
        """Whether its gate answers."""
        return is_ours(self._place.local, self._place.instance, limit_s)

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until it answers, or it is not wanted any more.

        Raises:
            ServeError: it ended, or doesn't answer.
        """
        while not is_over():
            if not self.lives:
                raise self.why()
            if self.answers(2.0):
                return
            if time.monotonic() > self._program.heard + START_S:
                raise ServeError(
                    f"The dashboard has not answered for {START_S:.0f} s.", fix=f"See {self._place.home}/server.log."
                )
            time.sleep(POLL_S)

    @property
    def is_final(self) -> bool:
        """Whether it ended since something about it has to be mended first."""
        return self._program.status == BAD_INPUT

    def why(self) -> ServeError:
        """Why it ended, from the last that it said."""
        last = next((line.strip() for line in reversed(self._program.lines()) if line.strip()), "")
        if self.is_final and last:
            problem, _, fix = last.partition(". ")
            return ServeError(f"{problem.rstrip('.')}.", fix=fix)
        said = f" Its last words: {last[:200]}" if last else ""
        return ServeError(
            f"The dashboard ended with status {self._program.status}.{said}",
            fix=f"See {self._place.home}/server.log.",
        )

    def stop(self) -> None:
        """End it; runs stop and save first."""
        self._program.stop(STOP_S)


def check_port(address: str, port: int) -> None:
    """Refuse a port that can't be had.

    Raises:
        ServeError: it is in use, forbidden, or the address isn't this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        # as the server itself does it: a port whose last connections are just closing can be had
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except PermissionError as error:
            raise ServeError(f"Port {port} may not be opened.", fix="Take one over 1023 with --port.") from error
        except OSError as error:
            if error.errno in (98, 48):  # EADDRINUSE on Linux, on a Mac
                raise ServeError(
                    f"Port {port} is in use.", fix="Take another with --port, or --port 0 for any free one."
                ) from error
            raise ServeError(
                f"Address '{address}' can't be listened on: {error.strerror or error}.",
                fix="Take 127.0.0.1 for this machine alone, or 0.0.0.0 for all.",
            ) from error


def free_port(address: str) -> int:
    """A port that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
