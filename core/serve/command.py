"""The command line's serve: what has to be there first, what is told, and the end at Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from core.browser.roots import ROOTS_VARIABLE
from core.errors import ServeError
from core.machine.packages import mismatches
from core.runtime import find_runtime
from core.serve.knock import TOKEN_VARIABLE
from core.serve.launcher import Launcher, new_home
from core.serve.server import Place, check_port, free_port
from core.serve.status import Status
from core.serve.tunnels import KINDS, NO_TUNNEL, find_program

MIN_TOKEN = 8
"""Characters that a token must have at least; the one that is made has 32."""


def serve_command(arguments: argparse.Namespace, home: Path) -> int:
    """Serve until Ctrl-C or SIGTERM.

    Raises:
        ServeError: the options can't be met, or something never came up.
    """
    home = home.expanduser().resolve()
    _check_versions()
    kind = None if arguments.tunnel == NO_TUNNEL else KINDS[arguments.tunnel]
    if kind is not None:
        find_program(kind)
    if not 0 <= arguments.port <= 65535:
        raise ServeError(f"There is no port {arguments.port}.", fix="Take one from 1024 to 65535.")
    check_port(arguments.address, arguments.port)
    place = Place(
        home=home,
        port=arguments.port or free_port(arguments.address),
        token=_token(arguments.token),
        instance=secrets.token_hex(8),
        address=arguments.address,
        environment=_environment(arguments),
    )
    new_home(home)
    began = time.monotonic()
    is_told = False

    def show(status: Status) -> None:
        nonlocal is_told
        if arguments.json and is_told:
            # one object is promised; a new address is told as progress, and stands in the home's serving.json
            _tell(f"Now at {status.address}, with the same token.")
            return
        seconds = time.monotonic() - began
        _show(status, place, seconds, as_json=arguments.json, with_qr=arguments.qr)
        is_told = True

    with _until_signal() as ending:
        Launcher(place, kind, _tell, show, lambda: ending() != 0).run()
        number = ending()
    _tell("The tunnel and the dashboard have ended." if kind else "The dashboard has ended.")
    return 128 + number


def _check_versions() -> None:
    """Refuse to start what would fail in the middle of something: packages that are missing or don't fit each other."""
    kind = find_runtime().kind
    for mismatch in mismatches(kind=kind):
        if mismatch.package == "torch_xla" and kind != "tpu":
            _tell(f"{mismatch.found} Nothing here needs it.")
        else:
            raise ServeError(mismatch.found, fix=f"Run {mismatch.command}")


def _token(given: str) -> str:
    token = (given or os.environ.get(TOKEN_VARIABLE, "")).strip()
    if token and len(token) < MIN_TOKEN:
        raise ServeError(
            f"The token has {len(token)} characters, which can be guessed.",
            fix=f"Give one of {MIN_TOKEN} or more, or none, and a good one is made.",
        )
    return token or secrets.token_urlsafe(24)


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    added = {}
    if arguments.root:
        missing = next((root for root in arguments.root if not root.expanduser().is_dir()), None)
        if missing is not None:
            raise ServeError(f"--root '{missing}' is no folder.", fix="Give one that is there.")
        roots = [str(root.expanduser().resolve()) for root in arguments.root]
        added[ROOTS_VARIABLE] = os.pathsep.join(filter(None, [os.environ.get(ROOTS_VARIABLE, ""), *roots]))
    if getattr(arguments, "backup", None):
        from core.backup import BACKUP_VARIABLE

        added[BACKUP_VARIABLE] = str(Path(arguments.backup).expanduser().resolve())
    return added


def _show(status: Status, place: Place, seconds: float, *, as_json: bool, with_qr: bool) -> None:
    link = status.link or status.local
    if as_json:
        shown = {
            "link": link,
            "address": status.address or place.local,
            "local": status.local,
            "home": str(place.home),
            "ready_s": round(seconds, 2),
        }
        print(json.dumps(shown), flush=True)
    else:
        _tell(f"Ready after {seconds:.1f} s. Open the dashboard with this link; who has it gets in:")
        print(link, flush=True)
        if status.link:
            _tell(f"On this machine it is {place.local}, with the same token.")
        _tell("Ctrl-C ends it; runs that train are saved first.")
    if with_qr:
        import segno

        segno.make(link, micro=False).terminal(out=sys.stderr if as_json else sys.stdout, compact=True)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _until_signal() -> Iterator[Callable[[], int]]:
    """Yields what tells the signal that asked for the end, 0 before; a second one breaks off."""
    number = 0

    def heed(asked: int, frame: FrameType | None) -> None:
        nonlocal number
        if number:
            raise KeyboardInterrupt
        number = asked
        _tell("Ending; runs that train are saved.")

    before = {one: signal.signal(one, heed) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: number
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
