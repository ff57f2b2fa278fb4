"""What lies in the store: rows as values."""

from __future__ import annotations

import contextlib
import functools
import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from core.config import RunConfig
from core.errors import StoreError

ACTIVE_STATES = ("queued", "running", "paused")
ENDED_STATES = ("stopped", "finished", "failed", "interrupted")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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

    `purpose` is train; warm-up, for a run that only makes a process warm for others; or probe, which tries something
    in the place of a run: `work` says what, "" where it times a few steps. Waiting runs go by `place`, low ones first.
    `script` are changes to be made of themselves, see `core.running.script`. `forked_from` is the run that
    this one was made from.
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
    place: float = 0.0
    script: list[dict[str, Any]] = field(default_factory=list)
    forked_from: str = ""
    work: str = ""
    pid: int | None = None

    @property
    def is_parked(self) -> bool:
        """It is paused without a process: saved, its device free."""
        return self.state == "paused" and self.pid is None

    @property
    def is_taken_up(self) -> bool:
        """It began before and is queued to go on, and no process keeps it for itself."""
        return self.state == "queued" and self.started is not None and self.pid is None

    @property
    def last_seen(self) -> float | None:
        """When the trainer was last known to live, right beside `started` also where the clock was put back since."""
        elapsed_s = self.phase.get("elapsed_s")
        return self.heartbeat if elapsed_s is None or self.started is None else self.started + elapsed_s

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
        place=row["place"],
        script=json.loads(row["script"]),
        forked_from=row["forked_from"],
        work=row["work"],
        pid=row["pid"],
    )


def no_such_run(run_id: str) -> StoreError:
    return StoreError(f"There is no run '{run_id}'.", fix="See python -m core runs for the ids.")


def blocks_of(records: Iterable[RunRecord], groups: Mapping[str, tuple[str, str]]) -> dict[str, list[RunRecord]]:
    """Waiting runs as they stand in the queue: a run by its id, the runs of a group together by the group's.

    Args:
        groups: id and name of a run's group, by run id.
    """
    blocks: dict[str, list[RunRecord]] = {}
    for record in records:
        group_id, _ = groups.get(record.run_id, (record.run_id, ""))
        blocks.setdefault(group_id, []).append(record)
    return blocks


def process_start(pid: int) -> float:
    """A number by which a process is told from others of the same id, earlier or later.

    It stays as it is while the process lives. Its start in Unix time does not on Linux, which counts from when the
    machine was booted, and moves that when the clock is set.

    Raises:
        psutil.NoSuchProcess: there is none.
    """
    process = psutil.Process(pid)
    if not psutil.LINUX:
        return float(process.create_time())
    try:
        # the name before may hold anything
        ticks = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
    # after another boot the same number may begin at the same tick
    return float(_this_boot() * 2**36 + ticks)


@functools.cache
def _this_boot() -> int:
    """Below 2^16, so that ticks of 21 years beside it are exact in a float."""
    with contextlib.suppress(OSError, ValueError):
        return int(_BOOT_ID.read_text()[:4], 16)
    return 0


def process_lives(pid: int | None, started: float | None) -> bool:
    """Whether that very process lives; a number used again by another process does not count."""
    if pid is None or started is None:
        return False
    try:
        return abs(process_start(pid) - started) < 1 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
