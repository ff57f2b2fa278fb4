"""The run store: one SQLite file under the home folder, and the only code that writes it.

Trainer and pages speak to each other through this file alone, also when they share a process.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from core.config import RunConfig
from core.errors import StoreError
from core.events import EndedEarly, Event, kind_of
from core.storage.burial import last_words, log_of
from core.storage.database import Database
from core.storage.event_reader import EventReader
from core.storage.group_store import GroupStore
from core.storage.records import (
    ACTIVE_STATES,
    ENDED_STATES,
    RunRecord,
    blocks_of,
    no_such_run,
    process_lives,
    process_start,
    record_of,
)
from core.storage.rows import insert_events, insert_request, insert_run, note_company
from core.storage.step_blocks import BlockWriter

HOME_VARIABLE = "FINETUNE_HOME"
DELETED_AT_ONCE = 20_000
"""Events of a run that is deleted, in one transaction: a fraction of a second."""
DELETED_PAUSE_S = 0.12
"""Between two of them; SQLite's longest wait between two looks whether a file is free is 0.1 s."""


def default_home() -> Path:
    """The folder that holds database, caches and runs: the environment variable, else ./runs."""
    return Path(os.environ.get(HOME_VARIABLE) or "runs").expanduser().resolve()


class Store(EventReader):
    """Runs, the events that they tell, the requests made to them, and their groups.

    Args:
        home: the folder that holds everything; made where it is missing.

    Attributes:
        admit: is shown each config that is to be queued through this object, and raises where it must not be.
        groups: which runs belong together.

    Raises:
        StoreError: the folder can't be used; from any method that writes, `StoreWriteError` where that can't be done
            now. Nothing is half written then.
    """

    def __init__(self, home: Path | None = None) -> None:
        self.home = (home or default_home()).expanduser().resolve()
        self.database = Database(self.home)
        super().__init__(self.database.read)
        self.admit: Callable[[RunConfig], None] = lambda config: None
        self.groups = GroupStore(self.database, lambda config: self.admit(config))
        self._blocks = BlockWriter()
        self._records: dict[str, tuple[tuple[Any, ...], RunRecord]] = {}

    def close(self) -> None:
        self.database.close()

    @property
    def trouble(self) -> str:
        """Why the store can't be written now, as far as this process knows; "" where it can."""
        return self.database.trouble

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
        with self.database.write() as db:
            if request_token is not None:
                row = db.execute("SELECT run_id FROM runs WHERE request_token = ?", (request_token,)).fetchone()
                if row:
                    return str(row["run_id"])
            return insert_run(
                db, config, name, request_token, own, purpose, work=work, script=script, forked_from=forked_from
            )

    def get_run(self, run_id: str) -> RunRecord:
        """The run's row.

        Raises:
            StoreError: there is no such run.
        """
        rows = self.database.read("SELECT * FROM runs WHERE run_id = ?", (run_id,))
        if not rows:
            raise no_such_run(run_id)
        return self._record(rows[0])

    def list_runs(self, *, active_only: bool = False, with_probes: bool = False) -> list[RunRecord]:
        """All runs, newest first; probes are no runs to people."""
        where = "WHERE " + " AND ".join(
            [f"state IN {ACTIVE_STATES}" if active_only else "1", "1" if with_probes else "purpose <> 'probe'"]
        )
        # by when they were made, and not by their times: a clock may be put back
        return [self._record(row) for row in self.database.read(f"SELECT * FROM runs {where} ORDER BY rowid DESC")]

    def newest_run_id(self) -> str:
        """The id of the first of `list_runs`; "" where there is none."""
        rows = self.database.read("SELECT run_id FROM runs WHERE purpose <> 'probe' ORDER BY rowid DESC LIMIT 1")
        return str(rows[0]["run_id"]) if rows else ""

    def waiting_runs(self) -> list[RunRecord]:
        """Queued runs that no process keeps for itself, in the order of the queue."""
        query = "SELECT * FROM runs WHERE state = 'queued' AND pid IS NULL ORDER BY place, rowid"
        return [record_of(row) for row in self.database.read(query)]

    def under_way(self) -> list[RunRecord]:
        """Runs that have a device and a process, probes too, in the order in which they began."""
        query = "SELECT * FROM runs WHERE state IN ('running','paused') AND pid IS NOT NULL ORDER BY started"
        return [record_of(row) for row in self.database.read(query)]

    def move(self, waiting_id: str, to: str) -> None:
        """Put a waiting run elsewhere in the queue; the runs of a group go together, in their order.

        Args:
            waiting_id: of the run, of one of a group's runs, or of the group.
            to: first, up or down by one.

        Raises:
            StoreError: nothing of this id waits.
        """
        assert to in ("first", "up", "down"), to
        with self.database.write() as db:
            waiting = self.waiting_runs()
            groups = self.groups.of([record.run_id for record in waiting])
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
        rows = self.database.read(
            "SELECT run_id FROM runs WHERE state = 'finished' AND purpose <> 'probe' "
            "AND json_extract(config, '$.model') = ? AND json_extract(config, '$.image_size') IS ? "
            "AND json_extract(config, '$.batch_size') = ? ORDER BY device_kind = ? DESC, EXISTS "
            "(SELECT 1 FROM events WHERE events.run_id = runs.run_id AND kind = 'RanBeside'), created DESC LIMIT 1",
            (config.model, config.image_size, config.batch_size, device_kind),
        )
        return str(rows[0]["run_id"]) if rows else None

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

        Events go first, the newest before the others and some at a time, so that no trainer waits for long.

        Raises:
            StoreError: the run is still active.
        """
        while True:
            with self.database.write() as db:
                if self.get_run(run_id).is_active:
                    raise StoreError(f"Run {run_id} is still active.", fix="Stop it first.")
                gone = db.execute(
                    "DELETE FROM events WHERE id IN (SELECT id FROM events WHERE run_id = ? ORDER BY id DESC LIMIT ?)",
                    (run_id, DELETED_AT_ONCE),
                ).rowcount
                if gone < DELETED_AT_ONCE:
                    db.execute("DELETE FROM runs WHERE run_id = ?", (run_id,))
                    break
            # whoever waits to write looks again that often at the least
            time.sleep(DELETED_PAUSE_S)
        self._records.pop(run_id, None)
        shutil.rmtree(self.run_folder(run_id), ignore_errors=True)

    # What the trainer tells

    def append_events(self, run_id: str, events: Iterable[tuple[float, Event]]) -> None:
        """Add events with their Unix times, in one transaction."""
        told = list(events)
        with self.database.write() as db:
            insert_events(db, run_id, told)
            self._blocks.follow(db, run_id, [kind_of(event) for _, event in told])

    def beat(self, run_id: str, phase: dict[str, Any], state: str = "running") -> None:
        """Say that the trainer lives, where it stands, and whether it is running or paused."""
        assert state in ("running", "paused"), state
        with self.database.write() as db:
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
        with self.database.write() as db:
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
            note_company(db, run_id)
        return True

    def is_held(self, device_kind: str) -> bool:
        """Whether a run of a process that lives has this device."""
        rows = self.database.read("SELECT * FROM device_locks WHERE device_kind = ?", (device_kind,))
        return any(process_lives(row["pid"], row["pid_started"]) for row in rows)

    def end_run(self, run_id: str, state: str, *, at: float | None = None) -> None:
        """Set the run's last state and give its device back; `at` is Unix time, now where None."""
        assert state in ENDED_STATES, state
        with self.database.write() as db:
            ended = time.time() if at is None else at
            db.execute("UPDATE runs SET state = ?, ended = ? WHERE run_id = ?", (state, ended, run_id))
            self._blocks.finish(db, run_id)
            db.execute("DELETE FROM device_locks WHERE run_id = ?", (run_id,))

    def park(self, run_id: str) -> None:
        """The run stands still, saved, and gives back its device and its process."""
        with self.database.write() as db:
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
        with self.database.write() as db:
            record = self.get_run(run_id)
            if record.is_active and not record.is_parked:
                raise StoreError(f"Run {run_id} is {record.state}.", fix="Stop it first, or let it go on.")
            self.admit(config or record.config)
            if not record.is_parked:
                # what was asked of it before it ended
                db.execute("UPDATE requests SET taken = ? WHERE run_id = ? AND taken IS NULL", (time.time(), run_id))
            db.execute("DELETE FROM requests WHERE run_id = ? AND kind = 'abort'", (run_id,))
            for what, value in (changes or {}).items():
                insert_request(db, run_id, "change", {"what": what, "value": value})
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
            ran_out: see `core.storage.burial`.
        """
        # a run that is paused without a process has freed its device and lies saved
        rows = self.database.read(
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
            how, ran_out: see `core.storage.burial`.
            log: the last that the process printed; found where None.
        """
        with self.database.write() as db:
            row = db.execute("SELECT * FROM runs WHERE run_id = ?", (run_id,)).fetchone()
            # one that is kept for whoever saw its own process die never got as far as that process
            is_ours = bool(how) and row is not None and row["state"] == "queued" and row["pid"] == os.getpid()
            if row is None or row["state"] not in ACTIVE_STATES:
                return False
            if not is_ours and process_lives(row["pid"], row["pid_started"]):
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
            insert_events(db, run_id, [(now, event) for event in told])
            db.execute("UPDATE runs SET state = ?, ended = ? WHERE run_id = ?", (ended.state, until, run_id))
            self._blocks.finish(db, run_id)
            db.execute("DELETE FROM device_locks WHERE run_id = ?", (run_id,))
        return True

    # What is asked of the trainer

    def overdue_aborts(self, seconds: float) -> list[tuple[str, int, float]]:
        """Runs that were aborted so long ago and go on: run id, process id and the process's start."""
        rows = self.database.read(
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
        with self.database.write() as db:
            record = self.get_run(run_id)
            if not record.is_active:
                raise StoreError(f"Run {run_id} is {record.state} already.", fix="Choose an active run.")
            if kind in ("stop", "abort") and (record.state == "queued" or record.is_parked):
                db.execute("UPDATE runs SET state='stopped', ended=? WHERE run_id=?", (time.time(), run_id))
                return
            if record.state == "queued":
                raise StoreError(f"Run {run_id} has not begun.", fix="Wait until it trains, or stop it.")
            # one that lies saved stands still, and would do so again as soon as it is taken up
            if kind not in ("pause", "resume") or not record.is_parked:
                insert_request(db, run_id, kind, payload or {})
        if kind == "resume" and record.is_parked:
            self.requeue(run_id)

    def take_requests(self, run_id: str) -> list[tuple[str, dict[str, Any]]]:
        """The requests not taken yet, oldest first; each is handed out once."""
        open_requests = self.database.read(
            "SELECT * FROM requests WHERE run_id = ? AND taken IS NULL ORDER BY id", (run_id,)
        )
        if not open_requests:
            return []
        with self.database.write() as db:
            db.executemany(
                "UPDATE requests SET taken = ? WHERE id = ?", [(time.time(), row["id"]) for row in open_requests]
            )
        return [(row["kind"], json.loads(row["payload"])) for row in open_requests]

    def _set(self, run_id: str, **values: Any) -> None:
        columns = ", ".join(f"{name} = ?" for name in values)
        with self.database.write() as db:
            changed = db.execute(f"UPDATE runs SET {columns} WHERE run_id = ?", (*values.values(), run_id)).rowcount
        if not changed:
            raise no_such_run(run_id)

    def _record(self, row: sqlite3.Row) -> RunRecord:
        # most runs ended long ago, and reading a config takes ten times as long as comparing its text
        values = tuple(row)
        known = self._records.get(row["run_id"])
        if known is None or known[0] != values:
            known = self._records[row["run_id"]] = (values, record_of(row))
        return known[1]
