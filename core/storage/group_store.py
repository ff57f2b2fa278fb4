"""Run groups in the store: runs that were started together to be compared, or were put together afterwards."""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from core.config import RunConfig
from core.errors import StoreError
from core.storage.database import Database
from core.storage.records import GroupRecord, Member, PlannedRun, no_such_run
from core.storage.rows import insert_run


class GroupStore:
    """Groups, and which runs are in them.

    Args:
        admit: see `Store`.
    """

    def __init__(self, database: Database, admit: Callable[[RunConfig], None]) -> None:
        self._database, self._admit = database, admit

    def create(
        self, name: str, runs: Sequence[PlannedRun], *, plan: dict[str, Any], note: str = "", own: bool = False
    ) -> str:
        """Queue the runs of a new group in this order, and return the group's id.

        Args:
            plan: how the group was put together, for people: plain JSON values.
            own: see `Store.create_run`.
        """
        for run in runs:
            self._admit(run.config)
        with self._database.write() as db:
            group_id = _insert_group(db, name, plan, note)
            for run in runs:
                title = f"{name}: {run.label}, {run.start} {run.repeat}".replace(", warm 0", ", warm-up")
                run_id = insert_run(db, run.config, title, None, own, run.purpose)
                _insert_member(db, group_id, run_id, run.label, run.start, run.repeat)
        return group_id

    def of_past_runs(self, name: str, members: Sequence[tuple[str, str, str]], *, note: str = "") -> str:
        """Put past runs into a new group, and return its id.

        Args:
            members: run id, label and start (cold, warm or "") of each.

        Raises:
            StoreError: one of the runs is not there.
        """
        repeats: Counter[tuple[str, str]] = Counter()
        with self._database.write() as db:
            group_id = _insert_group(db, name, {}, note)
            for run_id, label, start in members:
                if not self._database.read("SELECT 1 FROM runs WHERE run_id = ?", (run_id,)):
                    raise no_such_run(run_id)
                repeats[label, start] += 1
                _insert_member(db, group_id, run_id, label, start, repeats[label, start])
        return group_id

    def get(self, group_id: str) -> GroupRecord:
        """The group with its runs; a run that was deleted is in it no more.

        Raises:
            StoreError: there is no such group.
        """
        rows = self._database.read("SELECT * FROM groups WHERE group_id = ?", (group_id,))
        if not rows:
            raise StoreError(f"There is no run group '{group_id}'.", fix="See python -m core groups for the ids.")
        return self._group(rows[0])

    def list_all(self) -> list[GroupRecord]:
        """All groups, newest first."""
        return [self._group(row) for row in self._database.read("SELECT * FROM groups ORDER BY rowid DESC")]

    def of(self, run_ids: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Id and name of the group of each of these runs that is in one, by run id."""
        marks = ",".join("?" * len(run_ids))
        rows = self._database.read(
            f"SELECT run_id, group_id, name FROM group_runs JOIN groups USING (group_id) WHERE run_id IN ({marks}) "
            "ORDER BY group_runs.rowid DESC",
            list(run_ids),
        )
        return {row["run_id"]: (row["group_id"], row["name"]) for row in rows}

    def delete(self, group_id: str) -> None:
        """Forget the group; its runs stay."""
        with self._database.write() as db:
            db.execute("DELETE FROM groups WHERE group_id = ?", (group_id,))

    def _group(self, row: sqlite3.Row) -> GroupRecord:
        members = self._database.read(
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


def _insert_group(db: sqlite3.Connection, name: str, plan: dict[str, Any], note: str) -> str:
    group_id = time.strftime("group-%Y%m%d-%H%M%S-") + secrets.token_hex(3)
    db.execute("INSERT INTO groups VALUES (?,?,?,?,?)", (group_id, name, time.time(), note, json.dumps(plan)))
    return group_id


def _insert_member(db: sqlite3.Connection, group_id: str, run_id: str, label: str, start: str, repeat: int) -> None:
    db.execute("INSERT INTO group_runs VALUES (?,?,?,?,?)", (group_id, run_id, label, start, repeat))
