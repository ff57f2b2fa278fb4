"""The run store: one SQLite file under the home folder, and the only code that writes it.

Trainer and pages speak to each other through this file alone, also when they share a process.
A reader never blocks the trainer (WAL). Each `Store` keeps one connection and may be shared by
threads; each process opens its own.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from core.config import RunConfig
from core.errors import StoreError
from core.events import Event, kind_of, payload_of
from core.migrations import migrate

ACTIVE_STATES = ("queued", "running", "paused")
ENDED_STATES = ("stopped", "finished", "failed", "interrupted")
HOME_VARIABLE = "FINETUNE_HOME"


def default_home() -> Path:
    """The folder that holds database, caches and runs: the environment variable, else ./runs."""
    return Path(os.environ.get(HOME_VARIABLE) or "runs").expanduser().resolve()


@dataclass(frozen=True)
class StoredEvent:
    """An event as it lies in the store; `id` grows over all runs, `at` is Unix time."""

    id: int
    kind: str
    at: float
    payload: dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """A run's row. Times are Unix seconds; `phase` is the last `PhaseChanged` and where it stands."""

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

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE_STATES


class Store:
    """Runs, their events and the requests made to them.

    Args:
        home: the folder that holds everything; made where it is missing.
    """

    def __init__(self, home: Path | None = None) -> None:
        self.home = (home or default_home()).expanduser().resolve()
        self._lock = threading.RLock()
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                self.home / "runs.sqlite", check_same_thread=False, isolation_level=None, timeout=30
            )
            self._db.execute("PRAGMA journal_mode = WAL")
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"The home folder '{self.home}' can't be used: {getattr(error, 'strerror', None) or error}.",
                fix="Choose another --home.",
            ) from error
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA synchronous = NORMAL")
        migrate(self._db)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def run_folder(self, run_id: str) -> Path:
        return self.home / "runs" / run_id

    # Runs

    def create_run(
        self, config: RunConfig, *, name: str = "", request_token: str | None = None, own: bool = False
    ) -> str:
        """Queue a run and return its id.

        Args:
            request_token: two calls with the same token make one run, and both get its id.
            own: this process will train it itself, so a waiting worker leaves it alone.
        """
        pid, started = (os.getpid(), _process_start(os.getpid())) if own else (None, None)
        run_id = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)
        with self._write() as db:
            if request_token is not None:
                row = db.execute("SELECT run_id FROM runs WHERE request_token = ?", (request_token,)).fetchone()
                if row:
                    return str(row["run_id"])
            db.execute(
                "INSERT INTO runs (run_id, name, state, config, pid, pid_started, created, request_token) "
                "VALUES (?,?,'queued',?,?,?,?,?)",
                (
                    run_id,
                    name or _default_name(config),
                    config.model_dump_json(),
                    pid,
                    started,
                    time.time(),
                    request_token,
                ),
            )
        return run_id

    def get_run(self, run_id: str) -> RunRecord:
        """The run's row.

        Raises:
            StoreError: there is no such run.
        """
        rows = self._read("SELECT * FROM runs WHERE run_id = ?", (run_id,))
        if not rows:
            raise StoreError(f"There is no run '{run_id}'.", fix="See python -m core runs for the ids.")
        return _record(rows[0])

    def list_runs(self, *, active_only: bool = False) -> list[RunRecord]:
        """All runs, newest first."""
        where = f"WHERE state IN {ACTIVE_STATES}" if active_only else ""
        return [_record(row) for row in self._read(f"SELECT * FROM runs {where} ORDER BY created DESC, rowid DESC")]

    def waiting_runs(self) -> list[RunRecord]:
        """Queued runs that no process keeps for itself, oldest first."""
        query = "SELECT * FROM runs WHERE state = 'queued' AND pid IS NULL ORDER BY created, rowid"
        return [_record(row) for row in self._read(query)]

    def rename(self, run_id: str, name: str) -> None:
        if not name.strip():
            raise StoreError("A run's name can't be empty.", fix="Give it at least one letter.")
        self._set(run_id, name=name.strip())

    def set_note(self, run_id: str, note: str) -> None:
        self._set(run_id, note=note)

    def set_tags(self, run_id: str, tags: Sequence[str]) -> None:
        self._set(run_id, tags=json.dumps(sorted({tag.strip() for tag in tags if tag.strip()})))

    def delete(self, run_id: str) -> None:
        """Remove the run, its events and its folder.

        Raises:
            StoreError: the run is still active.
        """
        with self._write() as db:
            if self.get_run(run_id).is_active:
                raise StoreError(f"Run {run_id} is still active.", fix="Stop it first.")
            db.execute("DELETE FROM runs WHERE run_id = ?", (run_id,))
        shutil.rmtree(self.run_folder(run_id), ignore_errors=True)

    # What the trainer tells

    def append_events(self, run_id: str, events: Iterable[tuple[float, Event]]) -> None:
        """Add events with their Unix times, in one transaction."""
        rows = [(run_id, kind_of(event), at, json.dumps(payload_of(event), allow_nan=False)) for at, event in events]
        with self._write() as db:
            db.executemany("INSERT INTO events (run_id, kind, at, payload) VALUES (?,?,?,?)", rows)

    def events(self, run_id: str, *, after: int = 0, kinds: Sequence[str] = ()) -> list[StoredEvent]:
        """The run's events with an id above `after`, oldest first."""
        marks = f"AND kind IN ({','.join('?' * len(kinds))})" if kinds else ""
        rows = self._read(
            f"SELECT * FROM events WHERE run_id = ? AND id > ? {marks} ORDER BY id", (run_id, after, *kinds)
        )
        return [StoredEvent(row["id"], row["kind"], row["at"], json.loads(row["payload"])) for row in rows]

    def beat(self, run_id: str, phase: dict[str, Any]) -> None:
        """Say that the trainer lives, and where it stands."""
        self._set(run_id, heartbeat=time.time(), phase=json.dumps(phase))

    def claim(self, run_id: str, device_kind: str) -> bool:
        """Take a queued run and its device for this process; False where another run holds the device.

        Raises:
            StoreError: the run is not queued.
        """
        pid, started = os.getpid(), _process_start(os.getpid())
        with self._write() as db:
            if self.get_run(run_id).state != "queued":
                raise StoreError(f"Run {run_id} is not queued.", fix="Start a new run.")
            row = db.execute("SELECT * FROM device_locks WHERE device_kind = ?", (device_kind,)).fetchone()
            if row and _process_lives(row["pid"], row["pid_started"]):
                return False
            db.execute("INSERT OR REPLACE INTO device_locks VALUES (?,?,?,?)", (device_kind, run_id, pid, started))
            db.execute(
                "UPDATE runs SET state='running', device_kind=?, pid=?, pid_started=?, started=?, heartbeat=? "
                "WHERE run_id=?",
                (device_kind, pid, started, time.time(), time.time(), run_id),
            )
        return True

    def end_run(self, run_id: str, state: str) -> None:
        """Set the run's last state and give its device back."""
        assert state in ENDED_STATES, state
        with self._write() as db:
            db.execute("UPDATE runs SET state = ?, ended = ? WHERE run_id = ?", (state, time.time(), run_id))
            db.execute("DELETE FROM device_locks WHERE run_id = ?", (run_id,))

    def recover(self) -> list[str]:
        """Mark runs whose process is dead as interrupted; return their ids."""
        dead = []
        with self._write() as db:
            for row in db.execute(
                "SELECT * FROM runs WHERE state IN ('running','paused') OR (state = 'queued' AND pid IS NOT NULL)"
            ).fetchall():
                if not _process_lives(row["pid"], row["pid_started"]):
                    db.execute(
                        "UPDATE runs SET state='interrupted', ended=coalesce(heartbeat, created) WHERE run_id=?",
                        (row["run_id"],),
                    )
                    db.execute("DELETE FROM device_locks WHERE run_id = ?", (row["run_id"],))
                    dead.append(str(row["run_id"]))
        return dead

    # What is asked of the trainer

    def request(self, run_id: str, kind: str, payload: dict[str, Any] | None = None) -> None:
        """Ask the run's trainer for something (kind `stop`); a queued run is stopped at once."""
        with self._write() as db:
            record = self.get_run(run_id)
            if not record.is_active:
                raise StoreError(f"Run {run_id} is {record.state} already.", fix="Choose an active run.")
            if kind == "stop" and record.state == "queued":
                db.execute("UPDATE runs SET state='stopped', ended=? WHERE run_id=?", (time.time(), run_id))
                return
            db.execute(
                "INSERT INTO requests (run_id, kind, payload, at) VALUES (?,?,?,?)",
                (run_id, kind, json.dumps(payload or {}), time.time()),
            )

    def take_requests(self, run_id: str) -> list[tuple[str, dict[str, Any]]]:
        """The requests not taken yet, oldest first; each is handed out once."""
        open_requests = self._read("SELECT * FROM requests WHERE run_id = ? AND taken IS NULL ORDER BY id", (run_id,))
        if not open_requests:
            return []
        with self._write() as db:
            db.executemany(
                "UPDATE requests SET taken = ? WHERE id = ?", [(time.time(), row["id"]) for row in open_requests]
            )
        return [(row["kind"], json.loads(row["payload"])) for row in open_requests]

    def _set(self, run_id: str, **values: Any) -> None:
        columns = ", ".join(f"{name} = ?" for name in values)
        with self._write() as db:
            changed = db.execute(f"UPDATE runs SET {columns} WHERE run_id = ?", (*values.values(), run_id)).rowcount
        if not changed:
            raise StoreError(f"There is no run '{run_id}'.", fix="See python -m core runs for the ids.")

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


def _record(row: sqlite3.Row) -> RunRecord:
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
    )


def _default_name(config: RunConfig) -> str:
    data = config.data.rstrip("/").rsplit("/", 1)[-1].removeprefix("builtin:")
    return f"{config.model.rsplit('/', 1)[-1]} on {data}"


def _process_start(pid: int) -> float:
    return float(psutil.Process(pid).create_time())


def _process_lives(pid: int | None, started: float | None) -> bool:
    """Whether that very process lives; a number used again by another process does not count."""
    if pid is None or started is None:
        return False
    try:
        process = psutil.Process(pid)
        return bool(abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
