"""The run store: one SQLite file under the home folder, and the only code that writes it.

Trainer and pages speak to each other through this file alone, also when they share a process.
A reader never blocks the trainer (WAL), nor does a writer that waits block a reader: each `Store` keeps one connection
to write and one to read. It may be shared by threads; each process opens its own.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from core.burial import last_words, log_of
from core.config import RunConfig
from core.errors import StoreError, StoreWriteError
from core.events import EndedEarly, Event, RanBeside, kind_of, payload_of
from core.files import is_full
from core.migrations import migrate
from core.records import (
    ACTIVE_STATES,
    ENDED_STATES,
    GroupRecord,
    Member,
    PlannedRun,
    RunRecord,
    StoredEvent,
    blocks_of,
    process_lives,
    process_start,
    record_of,
)
from core.step_blocks import BlockWriter, Columns, read_columns, read_columns_of_all

HOME_VARIABLE = "FINETUNE_HOME"
LOCKED_S = 30.0
"""Seconds that a writer waits for another process's writing to end."""
_WHY = {
    "SQLITE_READONLY": "the folder is read-only",
    "SQLITE_BUSY": "another program holds it locked",
    "SQLITE_CANTOPEN": "its files can't be opened",
}


def default_home() -> Path:
    """The folder that holds database, caches and runs: the environment variable, else ./runs."""
    return Path(os.environ.get(HOME_VARIABLE) or "runs").expanduser().resolve()


class Store:
    """Runs, their events and the requests made to them.

    Args:
        home: the folder that holds everything; made where it is missing.

    Attributes:
        admit: is shown each config that is to be queued through this object, and raises where it must not be.

    Raises:
        StoreError: the folder can't be used; from any method that writes, `StoreWriteError` where that can't be done
            now. Nothing is half written then.
    """

    def __init__(self, home: Path | None = None) -> None:
        self.home = (home or default_home()).expanduser().resolve()
        self._lock, self._read_lock = threading.RLock(), threading.Lock()
        self._writer: int | None = None
        self._trouble = ""
        self._peaks: dict[str, float | None] = {}
        self._blocks = BlockWriter()
        self._records: dict[str, tuple[tuple[Any, ...], RunRecord]] = {}
        self.admit: Callable[[RunConfig], None] = lambda config: None
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            self._db, self._reader = self._connect(), self._connect()
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            migrate(self._db)
        except (OSError, sqlite3.Error) as error:
            why = self._why(error) if isinstance(error, sqlite3.Error) else error.strerror or str(error)
            raise StoreError(
                f"The home folder '{self.home}' can't be used: {why}.", fix="Choose another --home."
            ) from error

    def close(self) -> None:
        with self._lock, self._read_lock:
            self._reader.close()
            self._db.close()

    @property
    def trouble(self) -> str:
        """Why the store can't be written now, as far as this process knows; "" where it can."""
        return self._trouble or ("the disk is full" if is_full(self.home) else "")

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
        work: str = "",
        script: Sequence[dict[str, Any]] = (),
        forked_from: str = "",
    ) -> str:
        """Queue a run and return its id.

        Args:
            request_token: two calls with the same token make one run, and both get its id.
            own: this process will train it itself, so a waiting worker leaves it alone.
            purpose, work, script, forked_from: see `RunRecord`.
        """
        self.admit(config)
        with self._write() as db:
            if request_token is not None:
                row = db.execute("SELECT run_id FROM runs WHERE request_token = ?", (request_token,)).fetchone()
                if row:
                    return str(row["run_id"])
            return _insert(
                db, config, name, request_token, own, purpose, work=work, script=script, forked_from=forked_from
            )

    def get_run(self, run_id: str) -> RunRecord:
        """The run's row.

        Raises:
            StoreError: there is no such run.
        """
        rows = self._read("SELECT * FROM runs WHERE run_id = ?", (run_id,))
        if not rows:
            raise StoreError(f"There is no run '{run_id}'.", fix="See python -m core runs for the ids.")
        return self._record(rows[0])

    def list_runs(self, *, active_only: bool = False, with_probes: bool = False) -> list[RunRecord]:
        """All runs, newest first; probes are no runs to people."""
        where = "WHERE " + " AND ".join(
            [f"state IN {ACTIVE_STATES}" if active_only else "1", "1" if with_probes else "purpose <> 'probe'"]
        )
        # by when they were made, and not by their times: a clock may be put back
        return [self._record(row) for row in self._read(f"SELECT * FROM runs {where} ORDER BY rowid DESC")]

    def newest_run_id(self) -> str:
        """The id of the first of `list_runs`; "" where there is none."""
        rows = self._read("SELECT run_id FROM runs WHERE purpose <> 'probe' ORDER BY rowid DESC LIMIT 1")
        return str(rows[0]["run_id"]) if rows else ""

    def waiting_runs(self) -> list[RunRecord]:
        """Queued runs that no process keeps for itself, in the order of the queue."""
        query = "SELECT * FROM runs WHERE state = 'queued' AND pid IS NULL ORDER BY place, rowid"
        return [record_of(row) for row in self._read(query)]

    def under_way(self) -> list[RunRecord]:
        """Runs that have a device and a process, probes too, in the order in which they began."""
        query = "SELECT * FROM runs WHERE state IN ('running','paused') AND pid IS NOT NULL ORDER BY started"
        return [record_of(row) for row in self._read(query)]

    def move(self, waiting_id: str, to: str) -> None:
        """Put a waiting run elsewhere in the queue; the runs of a group go together, in their order.

        Args:
            waiting_id: of the run, of one of a group's runs, or of the group.
            to: first, up or down by one.

        Raises:
            StoreError: nothing of this id waits.
        """
        assert to in ("first", "up", "down"), to
        with self._write() as db:
            waiting = self.waiting_runs()
            groups = self.groups_of([record.run_id for record in waiting])
            blocks = blocks_of(waiting, groups)
            key = groups.get(waiting_id, (waiting_id, ""))[0]
            # people don't see probes
            shown = [name for name, runs in blocks.items() if runs[0].purpose != "probe"]
            if key not in shown:
                raise StoreError(f"{waiting_id} doesn't wait.", fix="See python -m core queue for what does.")
            at = shown.index(key)
            neighbour = {"first": 0, "up": max(0, at - 1), "down": min(len(shown) - 1, at + 1)}[to]
            if neighbour == at:
                return
            order = [name for name in blocks if name != key]
            order.insert(0 if to == "first" else order.index(shown[neighbour]) + (to == "down"), key)
            lowest = min(record.place for record in waiting)
            run_ids = [record.run_id for name in order for record in blocks[name]]
            db.executemany(
                "UPDATE runs SET place = ? WHERE run_id = ?",
                [(lowest + index, run_id) for index, run_id in enumerate(run_ids)],
            )

    def newest_like(self, config: RunConfig, device_kind: str) -> str | None:
        """The id of a finished run of the same model, image size and batch size; None where there is none.

        One on the same device kind comes first, then one that had no other run beside it, then the newest.
        """
        rows = self._read(
            "SELECT run_id FROM runs WHERE state = 'finished' AND purpose <> 'probe' "
            "AND json_extract(config, '$.model') = ? AND json_extract(config, '$.image_size') IS ? "
            "AND json_extract(config, '$.batch_size') = ? ORDER BY device_kind = ? DESC, EXISTS "
            "(SELECT 1 FROM events WHERE events.run_id = runs.run_id AND kind = 'RanBeside'), created DESC LIMIT 1",
            (config.model, config.image_size, config.batch_size, device_kind),
        )
        return str(rows[0]["run_id"]) if rows else None

    def peak_memory(self, run_id: str) -> float | None:
        """The most host memory in GiB that an ended run was seen to take; None where nobody looked."""
        if run_id not in self._peaks:
            taken = self.columns(run_id, "MachineSampled")["own_memory_gib"]
            taken = taken[np.isfinite(taken)]
            self._peaks[run_id] = float(taken.max()) if len(taken) else None
        return self._peaks[run_id]

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
        self._records.pop(run_id, None)
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
        for run in runs:
            self.admit(run.config)
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
        return [self._group(row) for row in self._read("SELECT * FROM groups ORDER BY rowid DESC")]

    def groups_of(self, run_ids: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Id and name of the group of each of these runs that is in one, by run id."""
        marks = ",".join("?" * len(run_ids))
        rows = self._read(
            f"SELECT run_id, group_id, name FROM group_runs JOIN groups USING (group_id) WHERE run_id IN ({marks}) "
            "ORDER BY group_runs.rowid DESC",
            list(run_ids),
        )
        return {row["run_id"]: (row["group_id"], row["name"]) for row in rows}

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
        told = list(events)
        with self._write() as db:
            _insert_events(db, run_id, told)
            self._blocks.follow(db, run_id, [kind_of(event) for _, event in told])

    def columns(self, run_id: str, kind: str, *, after: int = 0) -> Columns:
        """The run's events of a kind that comes by the hundred thousand, as columns; see `read_columns`."""
        return read_columns(self._read, run_id, kind, after)

    def columns_of_all(self, run_ids: Sequence[str], kind: str) -> dict[str, Columns]:
        """The same of many runs at once, each with few such events, by run id."""
        return read_columns_of_all(self._read, run_ids, kind)

    def events(self, run_id: str, *, after: int = 0, kinds: Sequence[str] = ()) -> list[StoredEvent]:
        """The run's events with an id above `after`, oldest first."""
        # else SQLite goes through all events of the run for the few of these kinds
        index = "INDEXED BY events_of_kind" if kinds else ""
        marks = f"AND kind IN ({','.join('?' * len(kinds))})" if kinds else ""
        rows = self._read(
            f"SELECT * FROM events {index} WHERE run_id = ? AND id > ? {marks} ORDER BY id", (run_id, after, *kinds)
        )
        return [StoredEvent(row["id"], row["kind"], row["at"], json.loads(row["payload"])) for row in rows]

    def iter_events(self, run_id: str, kinds: Sequence[str]) -> Iterator[StoredEvent]:
        """As `events`, of kinds that come by the hundred thousand: read bit by bit, so that they need little memory."""
        after = 0
        # a kind's events lie in order in its own index; those of several would have to be sorted anew for each bit
        index = "events_of_kind" if len(kinds) == 1 else "events_of_run"
        query = (
            f"SELECT * FROM events INDEXED BY {index} WHERE run_id = ? AND id > ? "
            f"AND kind IN ({','.join('?' * len(kinds))}) ORDER BY id LIMIT 10000"
        )
        while rows := self._read(query, (run_id, after, *kinds)):
            for row in rows:
                yield StoredEvent(row["id"], row["kind"], row["at"], json.loads(row["payload"]))
            after = rows[-1]["id"]

    def last_event(self, run_id: str) -> int:
        """The id of the run's newest event, 0 where it told nothing yet."""
        [row] = self._read("SELECT coalesce(max(id), 0) AS last FROM events WHERE run_id = ?", (run_id,))
        return int(row["last"])

    def glance(self, run_ids: Sequence[str], wanted: Mapping[str, Sequence[str]]) -> dict[str, list[StoredEvent]]:
        """Of many runs at once the events of some kinds, oldest first, by run id.

        Args:
            wanted: kind of event to the fields of its payload that are read; the others are left out.
        """
        # with several paths JSON comes back whose numbers are as they were written; so there is one more than is asked
        paths = {kind: ", ".join(f"'$.{name}'" for name in [*names, "_"]) for kind, names in wanted.items() if names}
        cases = " ".join(f"WHEN '{kind}' THEN json_extract(payload, {names})" for kind, names in paths.items())
        rows = self._read(
            f"SELECT run_id, events.id, kind, at, CASE kind {cases} ELSE '[]' END AS told FROM json_each(?) AS asked "
            "CROSS JOIN events INDEXED BY events_of_kind "
            f"ON run_id = asked.value AND kind IN ({','.join('?' * len(wanted))}) ORDER BY asked.key, events.id",
            (json.dumps(list(run_ids)), *wanted),
        )
        told = json.loads(f"[{','.join(row['told'] for row in rows)}]")
        found: dict[str, list[StoredEvent]] = {run_id: [] for run_id in run_ids}
        for (run_id, event_id, kind, at, _), values in zip(rows, told, strict=True):
            payload = dict(zip(wanted[kind], values, strict=False))
            found[run_id].append(StoredEvent(event_id, kind, at, payload))
        return found

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
            _note_company(db, run_id)
        return True

    def is_held(self, device_kind: str) -> bool:
        """Whether a run of a process that lives has this device."""
        rows = self._read("SELECT * FROM device_locks WHERE device_kind = ?", (device_kind,))
        return any(process_lives(row["pid"], row["pid_started"]) for row in rows)

    def end_run(self, run_id: str, state: str, *, at: float | None = None) -> None:
        """Set the run's last state and give its device back; `at` is Unix time, now where None."""
        assert state in ENDED_STATES, state
        with self._write() as db:
            ended = time.time() if at is None else at
            db.execute("UPDATE runs SET state = ?, ended = ? WHERE run_id = ?", (state, ended, run_id))
            self._blocks.finish(db, run_id)
            db.execute("DELETE FROM device_locks WHERE run_id = ?", (run_id,))

    def park(self, run_id: str) -> None:
        """The run stands still, saved, and gives back its device and its process."""
        with self._write() as db:
            db.execute("UPDATE runs SET state = 'paused', pid = NULL, pid_started = NULL WHERE run_id = ?", (run_id,))
            db.execute("DELETE FROM device_locks WHERE run_id = ?", (run_id,))

    def requeue(
        self,
        run_id: str,
        *,
        config: RunConfig | None = None,
        changes: dict[str, float] | None = None,
        script: Sequence[dict[str, Any]] | None = None,
        rules: Sequence[str] = (),
        own: bool = False,
    ) -> None:
        """Queue a run again that has ended or is parked; it is taken up from what it saved, before all others.

        Args:
            config: that holds from now on; the run's own where None.
            changes: what is changed before its next step, see `core.control`.
            script: changes of themselves after that; the run's own where None.
            rules: what holds then, in sentences.
            own: see `create_run`.

        Raises:
            StoreError: there is no such run, or it is active.
        """
        pid, started = (os.getpid(), process_start(os.getpid())) if own else (None, None)
        with self._write() as db:
            record = self.get_run(run_id)
            if record.is_active and not record.is_parked:
                raise StoreError(f"Run {run_id} is {record.state}.", fix="Stop it first, or let it go on.")
            self.admit(config or record.config)
            if not record.is_parked:
                # what was asked of it before it ended
                db.execute("UPDATE requests SET taken = ? WHERE run_id = ? AND taken IS NULL", (time.time(), run_id))
            db.execute("DELETE FROM requests WHERE run_id = ? AND kind = 'abort'", (run_id,))
            for what, value in (changes or {}).items():
                _insert_request(db, run_id, "change", {"what": what, "value": value})
            db.execute(
                "UPDATE runs SET state = 'queued', ended = NULL, pid = ?, pid_started = ?, config = ?, script = ?, "
                "phase = ?, place = (SELECT coalesce(min(place), 0) - 1 FROM runs) WHERE run_id = ?",
                (
                    pid,
                    started,
                    (config or record.config).model_dump_json(),
                    json.dumps(list(record.script if script is None else script)),
                    json.dumps({"phase": "queued", "rules": list(rules)}),
                    run_id,
                ),
            )

    def recover(self, *, but: Collection[str] = (), ran_out: bool = False) -> list[str]:
        """End the runs whose process is dead, with a last event that says so; return their ids.

        Args:
            but: runs that somebody waits for who knows more.
            ran_out: see `core.burial`.
        """
        # a run that is paused without a process has freed its device and lies saved
        rows = self._read(
            "SELECT * FROM runs WHERE state = 'running' OR (state IN ('queued','paused') AND pid IS NOT NULL)"
        )
        dead = [
            str(row["run_id"])
            for row in rows
            if row["run_id"] not in but and not process_lives(row["pid"], row["pid_started"])
        ]
        return [run_id for run_id in dead if self.bury(run_id, ran_out=ran_out)]

    def bury(self, run_id: str, how: str = "", *, ran_out: bool = False, log: str | None = None) -> bool:
        """End a run whose process died, with a last event that says so; False where it lives or the run has ended.

        Args:
            how, ran_out: see `core.burial`.
            log: the last that the process printed; found where None.
        """
        with self._write() as db:
            row = db.execute("SELECT * FROM runs WHERE run_id = ?", (run_id,)).fetchone()
            if row is None or row["state"] not in ACTIVE_STATES or process_lives(row["pid"], row["pid_started"]):
                return False
            record, now = record_of(row), time.time()
            if record.is_parked:
                return False
            since = now if record.state == "queued" else record.started or now
            until = now if record.state == "queued" else record.last_seen or now
            epochs = db.execute(
                "SELECT payload FROM events WHERE run_id = ? AND kind = 'EpochEnded' AND at >= ?", (run_id, since)
            ).fetchall()
            asked = db.execute("SELECT 1 FROM requests WHERE run_id = ? AND kind = 'abort'", (run_id,)).fetchone()
            ended = last_words(
                [json.loads(epoch["payload"]) for epoch in epochs],
                seconds=until - since,
                how=how,
                ran_out=ran_out,
                is_aborted=asked is not None,
                log=log_of(self.run_folder(run_id), record.pid) if log is None else log,
            )
            # an abort is no failure, whose reason is shown
            told: list[Event] = [EndedEarly(ended.reason), ended] if ended.state == "stopped" else [ended]
            _insert_events(db, run_id, [(now, event) for event in told])
            db.execute("UPDATE runs SET state = ?, ended = ? WHERE run_id = ?", (ended.state, until, run_id))
            self._blocks.finish(db, run_id)
            db.execute("DELETE FROM device_locks WHERE run_id = ?", (run_id,))
        return True

    # What is asked of the trainer

    def overdue_aborts(self, seconds: float) -> list[tuple[str, int, float]]:
        """Runs that were aborted so long ago and go on: run id, process id and the process's start."""
        rows = self._read(
            "SELECT DISTINCT run_id, pid, pid_started FROM runs JOIN requests USING (run_id) WHERE pid IS NOT NULL "
            "AND state IN ('running','paused') AND kind = 'abort' AND at <= ?",
            (time.time() - seconds,),
        )
        return [(row["run_id"], row["pid"], row["pid_started"]) for row in rows]

    def request(self, run_id: str, kind: str, payload: dict[str, Any] | None = None) -> None:
        """Ask the run's trainer for something; a queued run is stopped at once.

        Args:
            kind: stop, abort; pause, with `free` in the payload where its device is to be free meanwhile, resume; or
                change, with `what` and `value` in the payload, see `core.control`.

        Raises:
            StoreError: there is no such run, it has ended, or it has not begun and is not to be stopped.
        """
        with self._write() as db:
            record = self.get_run(run_id)
            if not record.is_active:
                raise StoreError(f"Run {run_id} is {record.state} already.", fix="Choose an active run.")
            if kind in ("stop", "abort") and (record.state == "queued" or record.is_parked):
                db.execute("UPDATE runs SET state='stopped', ended=? WHERE run_id=?", (time.time(), run_id))
                return
            if record.state == "queued":
                raise StoreError(f"Run {run_id} has not begun.", fix="Wait until it trains, or stop it.")
            if kind != "resume" or not record.is_parked:
                _insert_request(db, run_id, kind, payload or {})
        if kind == "resume" and record.is_parked:
            self.requeue(run_id)

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

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.home / "runs.sqlite", check_same_thread=False, isolation_level=None, timeout=LOCKED_S
        )
        connection.row_factory = sqlite3.Row
        return connection

    def _record(self, row: sqlite3.Row) -> RunRecord:
        # most runs ended long ago, and reading a config takes ten times as long as comparing its text
        values = tuple(row)
        known = self._records.get(row["run_id"])
        if known is None or known[0] != values:
            known = self._records[row["run_id"]] = (values, record_of(row))
        return known[1]

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        # who is writing reads what it has written
        is_writer = self._writer == threading.get_ident()
        db, lock = (self._db, self._lock) if is_writer else (self._reader, self._read_lock)
        try:
            with lock:
                return db.execute(query, values).fetchall()
        except sqlite3.OperationalError as error:
            raise StoreError(
                f"The run store can't be read: {self._why(error)}.", fix="Look at the disk that holds the home folder."
            ) from error

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                self._writer = threading.get_ident()
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as error:
                # SQLite ends some transactions by itself where the disk fails
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if not isinstance(error, sqlite3.OperationalError):
                    raise
                self._trouble = self._why(error)
                raise StoreWriteError(
                    f"The run store can't be written: {self._trouble}.",
                    fix=f"Make room in the home folder '{self.home}', or see what holds it.",
                ) from error
            finally:
                self._writer = None
            self._trouble = ""

    def _why(self, error: sqlite3.Error) -> str:
        name = getattr(error, "sqlite_errorname", None) or ""
        if name == "SQLITE_FULL" or is_full(self.home):
            return "the disk is full"
        return next((words for begin, words in _WHY.items() if name.startswith(begin)), str(error))


def _insert(
    db: sqlite3.Connection,
    config: RunConfig,
    name: str,
    token: str | None,
    own: bool,
    purpose: str,
    *,
    work: str = "",
    script: Sequence[dict[str, Any]] = (),
    forked_from: str = "",
) -> str:
    pid, started = (os.getpid(), process_start(os.getpid())) if own else (None, None)
    run_id = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)
    db.execute(
        "INSERT INTO runs (run_id, name, state, config, pid, pid_started, created, request_token, purpose, work, "
        "script, forked_from, place) VALUES (?,?,'queued',?,?,?,?,?,?,?,?,?,"
        "(SELECT coalesce(max(place), 0) + 1 FROM runs))",
        (
            run_id,
            name or _default_name(config),
            config.model_dump_json(),
            pid,
            started,
            time.time(),
            token,
            purpose,
            work,
            json.dumps(list(script)),
            forked_from,
        ),
    )
    return run_id


def _insert_events(db: sqlite3.Connection, run_id: str, events: Iterable[tuple[float, Event]]) -> None:
    db.executemany(
        "INSERT INTO events (run_id, kind, at, payload) VALUES (?,?,?,?)",
        [(run_id, kind_of(event), at, json.dumps(payload_of(event), allow_nan=False)) for at, event in events],
    )


def _note_company(db: sqlite3.Connection, run_id: str) -> None:
    """Tell of a run that has just begun, and of those under way, that they train beside each other."""
    rows = db.execute(
        "SELECT * FROM runs WHERE state IN ('running','paused') AND pid IS NOT NULL ORDER BY run_id <> ?", (run_id,)
    ).fetchall()
    mine, *others = [row for row in rows if row["run_id"] == run_id or process_lives(row["pid"], row["pid_started"])]
    for one, other in [pair for row in others for pair in ((mine, row), (row, mine))]:
        event = RanBeside(other["run_id"], other["name"], other["device_kind"])
        _insert_events(db, one["run_id"], [(time.time(), event)])


def _insert_request(db: sqlite3.Connection, run_id: str, kind: str, payload: dict[str, Any]) -> None:
    db.execute(
        "INSERT INTO requests (run_id, kind, payload, at) VALUES (?,?,?,?)",
        (run_id, kind, json.dumps(payload), time.time()),
    )


def _insert_group(db: sqlite3.Connection, name: str, plan: dict[str, Any], note: str) -> str:
    group_id = time.strftime("group-%Y%m%d-%H%M%S-") + secrets.token_hex(3)
    db.execute("INSERT INTO groups VALUES (?,?,?,?,?)", (group_id, name, time.time(), note, json.dumps(plan)))
    return group_id


def _insert_member(db: sqlite3.Connection, group_id: str, run_id: str, label: str, start: str, repeat: int) -> None:
    db.execute("INSERT INTO group_runs VALUES (?,?,?,?,?)", (group_id, run_id, label, start, repeat))


def _default_name(config: RunConfig) -> str:
    data = config.data.rstrip("/").rsplit("/", 1)[-1].removeprefix("builtin:")
    return f"{config.model.rsplit('/', 1)[-1]} on {data}"
