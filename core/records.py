"""What lies in the store: rows as values."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field
from typing import Any

import psutil

from core.config import RunConfig

ACTIVE_STATES = ("queued", "running", "paused")
ENDED_STATES = ("stopped", "finished", "failed", "interrupted")


@dataclass(frozen=True)
class StoredEvent:
    """An event as it lies in the store; `id` grows over all runs, `at` is Unix time."""

    id: int
    kind: str
    at: float
    payload: dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """A run's row. Times are Unix seconds; `phase` is the last `PhaseChanged` and where it stands.

    `purpose` is train; warm-up, for a run that only makes a process warm for others; or probe, which times a few
    steps.
    """

    run_id: str
    name: str
    state: str
    config: RunConfig
    device_kind: str | None
    created: float
    started: float | None
    ended: float | None
    heartbeat: float | None
    phase: dict[str, Any]
    note: str
    tags: list[str]
    purpose: str = "train"

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE_STATES


@dataclass(frozen=True)
class PlannedRun:
    """A run of a group that is yet to be made; `start` is cold or warm, and `repeat` counts from 1."""

    config: RunConfig
    label: str
    start: str
    repeat: int
    purpose: str = "train"


@dataclass(frozen=True)
class Member:
    """A run of a group; `start` is what was asked for: cold, warm, or "" where nothing was."""

    run_id: str
    label: str
    start: str
    repeat: int
    purpose: str
    state: str


@dataclass(frozen=True)
class GroupRecord:
    """A run group, its runs in the order in which they were to run; `created` is Unix time."""

    group_id: str
    name: str
    created: float
    note: str
    plan: dict[str, Any]
    members: list[Member] = field(default_factory=list)

    @property
    def is_active(self) -> bool:
        return any(member.state in ACTIVE_STATES for member in self.members)


def record_of(row: sqlite3.Row) -> RunRecord:
    return RunRecord(
        run_id=row["run_id"],
        name=row["name"],
        state=row["state"],
        config=RunConfig.model_validate_json(row["config"]),
        device_kind=row["device_kind"],
        created=row["created"],
        started=row["started"],
        ended=row["ended"],
        heartbeat=row["heartbeat"],
        phase=json.loads(row["phase"]),
        note=row["note"],
        tags=json.loads(row["tags"]),
        purpose=row["purpose"],
    )


def process_start(pid: int) -> float:
    return float(psutil.Process(pid).create_time())


def process_lives(pid: int | None, started: float | None) -> bool:
    """Whether that very process lives; a number used again by another process does not count."""
    if pid is None or started is None:
        return False
    try:
        process = psutil.Process(pid)
        return bool(abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
