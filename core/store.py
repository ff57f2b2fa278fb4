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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.config import RunConfig
from core.errors import StoreError
from core.events import Event, kind_of, payload_of
from core.migrations import migrate
from core.records import (
    ACTIVE_STATES,
    ENDED_STATES,
    GroupRecord,
    Member,
    PlannedRun,
    RunRecord,
    StoredEvent,
    process_lives,
    process_start,
    record_of,
)

HOME_VARIABLE = "FINETUNE_HOME"


def default_home() -> Path:
    """The folder that holds database, caches and runs: the environment variable, else ./runs."""
    return Path(os.environ.get(HOME_VARIABLE) or "runs").expanduser().resolve()


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
        self,
        config: RunConfig,
        *,
        name: str = "",
        request_token: str | None = None,
        own: bool = False,
        purpose: str = "train",
    ) -> str:
        """Queue a run and return its id.

        Args:
            request_token: two calls with the same token make one run, and both get its id.
            own: this process will train it itself, so a waiting worker leaves it alone.
            purpose: see `RunRecord`.
        """
        with self._write() as db:
            if request_token is not None:
                row = db.execute("SELECT run_id FROM runs WHERE request_token = ?", (request_token,)).fetchone()
                if row:
                    return str(row["run_id"])
            return _insert(db, config, name, request_token, own, purpose)

    def get_run(self, run_id: str) -> RunRecord:
        """The run's row.

        Raises:
            StoreError: there is no such run.
        """
        rows = self._read("SELECT * FROM runs WHERE run_id = ?", (run_id,))
        if not rows:
            raise StoreError(f"There is no run '{run_id}'.", fix="See python -m core runs for the ids.")
        return record_of(rows[0])

    def list_runs(self, *, active_only: bool = False, with_probes: bool = False) -> list[RunRecord]:
        """All runs, newest first; probes are no runs to people."""
        where = "WHERE " + " AND ".join(
            [f"state IN {ACTIVE_STATES}" if active_only else "1", "1" if with_probes else "purpose <> 'probe'"]
        )
        return [record_of(row) for row in self._read(f"SELECT * FROM runs {where} ORDER BY created DESC, rowid DESC")]

    def waiting_runs(self) -> list[RunRecord]:
        """Queued runs that no process keeps for itself, oldest first."""
        query = "SELECT * FROM runs WHERE state = 'queued' AND pid IS NULL ORDER BY created, rowid"
        return [record_of(row) for row in self._read(query)]

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

    # Groups

    def create_group(
        self, name: str, runs: Sequence[PlannedRun], *, plan: dict[str, Any], note: str = "", own: bool = False
    ) -> str:
        """Queue the runs of a new group in this order, and return the group's id.

        Args:
            plan: how the group was put together, for people: plain JSON values.
            own: see `create_run`.
        """
        with self._write() as db:
            group_id = _insert_group(db, name, plan, note)
            for run in runs:
                title = f"{name}: {run.label}, {run.start} {run.repeat}".replace(", warm 0", ", warm-up")
                run_id = _insert(db, run.config, title, None, own, run.purpose)
                _insert_member(db, group_id, run_id, run.label, run.start, run.repeat)
        return group_id

    def group_runs(self, name: str, members: Sequence[tuple[str, str, str]], *, note: str = "") -> str:
        """Put past runs into a new group, and return its id.

        Args:
            members: run id, label and start (cold, warm or "") of each.

        Raises:
            StoreError: one of the runs is not there.
        """
        repeats: Counter[tuple[str, str]] = Counter()
        with self._write() as db:
            group_id = _insert_group(db, name, {}, note)
            for run_id, label, start in members:
                self.get_run(run_id)
                repeats[label, start] += 1
                _insert_member(db, group_id, run_id, label, start, repeats[label, start])
        return group_id

    def get_group(self, group_id: str) -> GroupRecord:
        """The group with its runs; a run that was deleted is in it no more.

        Raises:
            StoreError: there is no such group.
        """
        rows = self._read("SELECT * FROM groups WHERE group_id = ?", (group_id,))
        if not rows:
            raise StoreError(f"There is no run group '{group_id}'.", fix="See python -m core groups for the ids.")
        return self._group(rows[0])

    def list_groups(self) -> list[GroupRecord]:
        """All groups, newest first."""
        return [self._group(row) for row in self._read("SELECT * FROM groups ORDER BY created DESC, rowid DESC")]

    def delete_group(self, group_id: str) -> None:
        """Forget the group; its runs stay."""
        with self._write() as db:
            db.execute("DELETE FROM groups WHERE group_id = ?", (group_id,))

    def _group(self, row: sqlite3.Row) -> GroupRecord:
        members = self._read(
            "SELECT run_id, label, start, repeat, purpose, state FROM group_runs JOIN runs USING (run_id) "
            "WHERE group_id = ? ORDER BY group_runs.rowid",
            (row["group_id"],),
        )
        return GroupRecord(
            row["group_id"],
            row["name"],
            row["created"],
            row["note"],
            json.loads(row["plan"]),
            [Member(**member) for member in members],
        )

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

    def beat(self, run_id: str, phase: dict[str, Any], state: str = "running") -> None:
        """Say that the trainer lives, where it stands, and whether it is running or paused."""
        assert state in ("running", "paused"), state
        with self._write() as db:
            db.execute(
                "UPDATE runs SET heartbeat = ?, phase = ?, "
                "state = CASE WHEN state IN ('running','paused') THEN ? ELSE state END WHERE run_id = ?",
                (time.time(), json.dumps(phase), state, run_id),
            )

    def claim(self, run_id: str, device_kind: str) -> bool:
        """Take a queued run and its device for this process; False where another run holds the device.

        Raises:
            StoreError: the run is not queued.
        """
        pid, started = os.getpid(), process_start(os.getpid())
        with self._write() as db:
            if self.get_run(run_id).state != "queued":
                raise StoreError(f"Run {run_id} is not queued.", fix="Start a new run.")
            row = db.execute("SELECT * FROM device_locks WHERE device_kind = ?", (device_kind,)).fetchone()
            if row and process_lives(row["pid"], row["pid_started"]):
                return False
            db.execute("INSERT OR REPLACE INTO device_locks VALUES (?,?,?,?)", (device_kind, run_id, pid, started))
            db.execute(
                "UPDATE runs SET state='running', device_kind=?, pid=?, pid_started=?, started=?, heartbeat=? "
                "WHERE run_id=?",
                (device_kind, pid, started, time.time(), time.time(), run_id),
            )
        return True

    def is_held(self, device_kind: str) -> bool:
        """Whether a run of a process that lives has this device."""
        rows = self._read("SELECT * FROM device_locks WHERE device_kind = ?", (device_kind,))
        return any(process_lives(row["pid"], row["pid_started"]) for row in rows)

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
                if not process_lives(row["pid"], row["pid_started"]):
                    db.execute(
                        "UPDATE runs SET state='interrupted', ended=coalesce(heartbeat, created) WHERE run_id=?",
                        (row["run_id"],),
                    )
                    db.execute("DELETE FROM device_locks WHERE run_id = ?", (row["run_id"],))
                    dead.append(str(row["run_id"]))
        return dead

    # What is asked of the trainer

    def request(self, run_id: str, kind: str, payload: dict[str, Any] | None = None) -> None:
        """Ask the run's trainer for something; a queued run is stopped at once.

        Args:
            kind: stop; pause, resume; or change, with `what` and `value` in the payload, see `core.control`.

        Raises:
            StoreError: there is no such run, it has ended, or it has not begun and is not to be stopped.
        """
        with self._write() as db:
            record = self.get_run(run_id)
            if not record.is_active:
                raise StoreError(f"Run {run_id} is {record.state} already.", fix="Choose an active run.")
            if kind == "stop" and record.state == "queued":
                db.execute("UPDATE runs SET state='stopped', ended=? WHERE run_id=?", (time.time(), run_id))
                return
            if record.state == "queued":
                raise StoreError(f"Run {run_id} has not begun.", fix="Wait until it trains, or stop it.")
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


def _insert(db: sqlite3.Connection, config: RunConfig, name: str, token: str | None, own: bool, purpose: str) -> str:
    pid, started = (os.getpid(), process_start(os.getpid())) if own else (None, None)
    run_id = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)
    db.execute(
        "INSERT INTO runs (run_id, name, state, config, pid, pid_started, created, request_token, purpose) "
        "VALUES (?,?,'queued',?,?,?,?,?,?)",
        (
            run_id,
            name or _default_name(config),
            config.model_dump_json(),
            pid,
            started,
            time.time(),
            token,
            purpose,
        ),
    )
    return run_id


def _insert_group(db: sqlite3.Connection, name: str, plan: dict[str, Any], note: str) -> str:
    group_id = time.strftime("group-%Y%m%d-%H%M%S-") + secrets.token_hex(3)
    db.execute("INSERT INTO groups VALUES (?,?,?,?,?)", (group_id, name, time.time(), note, json.dumps(plan)))
    return group_id


def _insert_member(db: sqlite3.Connection, group_id: str, run_id: str, label: str, start: str, repeat: int) -> None:
    db.execute("INSERT INTO group_runs VALUES (?,?,?,?,?)", (group_id, run_id, label, start, repeat))


def _default_name(config: RunConfig) -> str:
    data = config.data.rstrip("/").rsplit("/", 1)[-1].removeprefix("builtin:")
    return f"{config.model.rsplit('/', 1)[-1]} on {data}"
