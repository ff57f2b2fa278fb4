"""How the launcher stands, as a file that a notebook reads: `<home>/serving.json`, for its owner's eyes alone."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from core.files import built

NAME = "serving.json"


@dataclass(frozen=True)
class Status:
    """How the launcher stands.

    Attributes:
        state: starting, ready, trouble or ended.
        address, link: public, without and with the token; "" where there is none.
        local: this machine's address, with the token.
        pid: the launcher's.
        problem, fix: what is wrong, in trouble.
        at: when it was written, Unix time.
    """

    state: str
    address: str = ""
    link: str = ""
    local: str = ""
    pid: int = field(default_factory=os.getpid)
    problem: str = ""
    fix: str = ""
    at: float = field(default_factory=time.time)


def write_status(home: Path, status: Status) -> None:
    """Write the file, whole or not at all."""
    path = home / NAME
    with built(path) as temporary:
        descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(status), file)


def read_status(home: Path) -> Status | None:
    """What the launcher of this home wrote last; None where there was none."""
    try:
        return Status(**json.loads((home / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
