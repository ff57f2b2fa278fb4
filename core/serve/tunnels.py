"""Tunnels: programs that give the local port a public address, and what their words mean.

The words were read in the programs' own issues and documentation: cloudflared's quick tunnels
(https://developers.cloudflare.com/cloudflare-one/connections/connect-networks/do-more-with-tunnels/trycloudflare/) and
ngrok's error codes (https://ngrok.com/docs/errors).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from core.errors import ServeError
from core.serve.knock import TOKEN_VARIABLE
from core.serve.processes import Program

STOP_S = 5.0


@dataclass(frozen=True)
class Trouble:
    """What a tunnel's words mean.

    Attributes:
        words: a pattern of them.
        is_final: trying again is of no use.
    """

    words: str
    problem: str
    fix: str
    is_final: bool = False


@dataclass(frozen=True)
class TunnelKind:
    """A tunnel program.

    Attributes:
        name: of its program.
        arguments: by the local address, as "http://127.0.0.1:8501", and the number of the try, from 0.
        address: finds the public address in a line.
        ready: the words after which the address should answer.
        troubles: what it may say, the first that fits counts.
        get: how to get the program.
    """

    name: str
    arguments: Callable[[str, int], list[str]]
    address: re.Pattern[str]
    ready: re.Pattern[str]
    troubles: tuple[Trouble, ...]
    get: str


_OFFLINE = Trouble(
    r"no such host|network is unreachable|connection refused|i/o timeout|no route to host|failed to dial|"
    r"temporary failure in name resolution|failed to reconnect session",
    "The tunnel's provider can't be reached.",
    "Check this machine's network, or open the dashboard on this machine with --tunnel none.",
)
_CLOUDFLARED = TunnelKind(
    "cloudflared",
    # its faster protocol is blocked in some networks; the second try takes the other one
    lambda local, number: [
        "tunnel",
        "--no-autoupdate",
        "--url",
        local,
        *(["--protocol", "http2"] if number % 2 else []),
    ],
    re.compile(r"\|\s+(https?://\S+)\s+\|"),
    re.compile(r"Registered tunnel connection"),
    (
        Trouble(
            r"\b429 Too Many|error code: 1015|too many requests",
            "Cloudflare gives out no more addresses for now: its rate limit is reached.",
            "Wait some minutes, or take --tunnel ngrok.",
        ),
        _OFFLINE,
        Trouble(
            r"failed to (request|unmarshal) quick tunnel|error unmarshaling quicktunnel",
            "Cloudflare gave no address.",
            "Try again later, or take --tunnel ngrok.",
        ),
    ),
    "Get it from https://github.com/cloudflare/cloudflared/releases and put it on the PATH",
)
_NGROK = TunnelKind(
    "ngrok",
    lambda local, number: ["http", local, "--log", "stdout", "--log-format", "logfmt"],
    re.compile(r"\burl=(https?://\S+)"),
    re.compile(r"started tunnel"),
    (
        Trouble(
            r"ERR_NGROK_(4018|105|106|107)\b",
            "ngrok needs the authtoken of an account.",
            "Run ngrok config add-authtoken with the one of https://dashboard.ngrok.com.",
            is_final=True,
        ),
        Trouble(
            r"ERR_NGROK_(108|334)\b",
            "Another ngrok of this account is on, and the account allows no second one.",
            "End the other one, or take --tunnel cloudflared.",
        ),
        Trouble(
            r"ERR_NGROK_(12[01])\b",
            "This ngrok is too old.",
            "Run ngrok update.",
            is_final=True,
        ),
        Trouble(
            r"ERR_NGROK_(70\d|71\d|72\d)\b|rate limit",
            "ngrok's rate limit is reached.",
            "Wait some minutes, or take --tunnel cloudflared.",
        ),
        _OFFLINE,
    ),
    "Get it from https://ngrok.com/download and put it on the PATH",
)
NO_TUNNEL = "none"
KINDS = {kind.name: kind for kind in (_CLOUDFLARED, _NGROK)}


def find_program(kind: TunnelKind, environment: Mapping[str, str] = os.environ) -> str:
    """The path of a tunnel's program.

    Raises:
        ServeError: it is not installed.
    """
    found = shutil.which(kind.name, path=environment.get("PATH"))
    if found is None:
        raise ServeError(f"{kind.name} is not installed.", fix=f"{kind.get}, or take --tunnel none.")
    return found


class Tunnel:
    """A tunnel that is being opened, or open.

    Args:
        kind: the program.
        local: the address that it is to make public.
        number: of the try, from 0.
        log: gets what it prints.
    """

    def __init__(self, kind: TunnelKind, local: str, number: int, log: Path) -> None:
        self._kind = kind
        self._address, self._is_ready = "", False
        self._trouble: Trouble | None = None
        command = [find_program(kind), *kind.arguments(local, number)]
        # it forwards what it can't read, and has no use for what opens the dashboard
        environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        self._program = Program(command, log=log, environment=environment, hear=self._hear)

    @property
    def pid(self) -> int:
        return self._program.pid

    @property
    def address(self) -> str:
        """The public address, "" before it is known and connected."""
        return self._address if self._is_ready else ""

    @property
    def lives(self) -> bool:
        return self._program.status is None

    def why(self) -> ServeError:
        """What seems to be wrong, from the last that it said."""
        if self._trouble is not None:
            return ServeError(self._trouble.problem, fix=self._trouble.fix)
        last = next((line.strip() for line in reversed(self._program.lines()) if line.strip()), "")
        said = f" Its last words: {last[:200]}" if last else " It said nothing."
        state = "gave no address" if self.lives else f"ended with status {self._program.status}"
        return ServeError(f"{self._kind.name} {state}.{said}", fix="Try again, or take another --tunnel.")

    @property
    def is_final(self) -> bool:
        """Whether trying again is of no use."""
        return self._trouble is not None and self._trouble.is_final

    def stop(self) -> None:
        self._program.stop(STOP_S)

    def _hear(self, line: str) -> None:
        if match := self._kind.address.search(line):
            self._address = match[1].rstrip("/")
        if self._kind.ready.search(line):
            self._is_ready, self._trouble = True, None
        elif (found := _trouble_in(line, self._kind)) is not None and (self._trouble is None or found.is_final):
            self._trouble = found


def _trouble_in(line: str, kind: TunnelKind) -> Trouble | None:
    return next((one for one in kind.troubles if re.search(one.words, line, re.IGNORECASE)), None)
