"""How a run, what it tells and what is asked of it become rows of the store, inside a transaction of the caller's."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Any

from core.config import RunConfig
from core.events import Event, RanBeside, kind_of, payload_of
from core.storage.records import process_lives, process_start


def insert_run(
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
    """Queue a run behind all others and return its id; see `Store.create_run`."""
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


def insert_events(db: sqlite3.Connection, run_id: str, events: Iterable[tuple[float, Event]]) -> None:
    db.executemany(
        "INSERT INTO events (run_id, kind, at, payload) VALUES (?,?,?,?)",
        [(run_id, kind_of(event), at, json.dumps(payload_of(event), allow_nan=False)) for at, event in events],
    )


def note_company(db: sqlite3.Connection, run_id: str) -> None:
    """Tell of a run that has just begun, and of those under way, that they train beside each other."""
    rows = db.execute(
        "SELECT * FROM runs WHERE state IN ('running','paused') AND pid IS NOT NULL ORDER BY run_id <> ?", (run_id,)
    ).fetchall()
    mine, *others = [row for row in rows if row["run_id"] == run_id or process_lives(row["pid"], row["pid_started"])]
    for one, other in [pair for row in others for pair in ((mine, row), (row, mine))]:
        event = RanBeside(other["run_id"], other["name"], other["device_kind"])
        insert_events(db, one["run_id"], [(time.time(), event)])


def insert_request(db: sqlite3.Connection, run_id: str, kind: str, payload: dict[str, Any]) -> None:
    db.execute(
        "INSERT INTO requests (run_id, kind, payload, at) VALUES (?,?,?,?)",
        (run_id, kind, json.dumps(payload), time.time()),
    )


def _default_name(config: RunConfig) -> str:
    data = config.data.rstrip("/").rsplit("/", 1)[-1].removeprefix("builtin:")
    return f"{config.model.rsplit('/', 1)[-1]} on {data}"
