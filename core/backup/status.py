"""How a home's backup stands, as pages and commands show it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from core.backup.copying import read_json, write_json
from core.backup.source import OWN
from core.storage.records import process_lives, process_start

_NAME = "status.json"


@dataclass(frozen=True)
class BackupStatus:
    """The state of a home's backup. Times are Unix seconds, 0 where there was none yet.

    Attributes:
        folder: where it lies.
        at: when the last one was whole.
        runs, files, bytes: of that one.
        seconds: that it took.
        is_busy: one is being made now.
        problem, fix: why it can't be made, and what to do, a sentence each; "" where it can.
        since: when that began.
        next_try: when it is tried again.
        is_kept: a process that lives looks after it.
    """

    folder: str
    at: float = 0.0
    runs: int = 0
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    is_busy: bool = False
    problem: str = ""
    fix: str = ""
    since: float = 0.0
    next_try: float = 0.0
    is_kept: bool = False


def status(home: Path) -> BackupStatus | None:
    """How the home's backup stands; None where none was ever asked for."""
    plain = read_json(home / OWN / _NAME)
    keeper = plain.pop("keeper", None)
    try:
        found = BackupStatus(**plain)
    except TypeError:
        return None
    if isinstance(keeper, list) and len(keeper) == 2 and process_lives(*keeper):
        return found
    return BackupStatus(**{**asdict(found), "is_busy": False, "is_kept": False, "next_try": 0.0})


def write_status(home: Path, told: BackupStatus) -> None:
    """Write it for other processes; a home that can't be written keeps what it has."""
    keeper = [os.getpid(), process_start(os.getpid())]
    with contextlib.suppress(OSError):
        write_json(home / OWN / _NAME, {**asdict(told), "keeper": keeper})
