"""Events that come by the hundred thousand, as columns of numbers: a million of them are read in a tenth of a second.

As rows of JSON they would take half a minute. So whoever appends events also packs each `BLOCK` of one kind into a row
of `step_blocks`, in the same transaction, and what is left of them when the run ends. A block is made of the events as
they lie there, so the two can't disagree; blocks of a run and kind follow each other without a gap from the first event
on. Events in no block, the newest ones or all of a run from before there were blocks, are read as they are. Who only
reads never writes a block.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.events import MachineSampled

Columns = dict[str, NDArray[Any]]

BLOCK = 5000
"""Events in a block: reading as many takes 0.03 s, which is the most that the newest ones cost a reader."""
CHUNK = 50_000
"""Events in no block that are read at once, so that nobody waits long for the connection."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "StepLogged": ("id", "step", "loss", "top1", "lr", "images_per_s"),
    "MachineSampled": ("id", "at", *(field.name for field in fields(MachineSampled))),
    "EpochEnded": ("id", "epoch", "val_top1"),
}
"""Kind of event to what is kept of it: its id, perhaps its time, and fields that are numbers."""
_OWN = ("id", "at")
"""Columns of an event itself; the others are fields of its payload."""

Read = Callable[[str, Sequence[Any]], list[sqlite3.Row]]


class BlockWriter:
    """Packs what is appended; knows how many events of a run lie in no block, so that it need not look each time."""

    def __init__(self) -> None:
        self._loose: dict[tuple[str, str], int] = {}

    def follow(self, db: sqlite3.Connection, run_id: str, kinds: Iterable[str]) -> None:
        """Write the blocks that are due, after events of these kinds were inserted in the same transaction."""
        for kind, count in Counter(kinds).items():
            if kind not in COLUMNS:
                continue
            known = self._loose.get((run_id, kind))
            loose = _count_loose(db, run_id, kind) if known is None else known + count
            # a run from before there were blocks catches up bit by bit, which holds up nobody
            for _ in range(min(loose // BLOCK, 1 + count // BLOCK)):
                if not _write_block(db, run_id, kind, BLOCK):
                    # a transaction was undone, or another process has packed them
                    loose = _count_loose(db, run_id, kind)
                    break
                loose -= BLOCK
            self._loose[run_id, kind] = loose

    def finish(self, db: sqlite3.Connection, run_id: str) -> None:
        """Pack what is left, in the transaction that ends the run."""
        for kind in COLUMNS:
            _write_block(db, run_id, kind, 1)
            self._loose.pop((run_id, kind), None)


def read_columns(read: Read, run_id: str, kind: str, after: int = 0) -> Columns:
    """The run's events of a kind of `COLUMNS` with an id above `after`, in order, a column each.

    Args:
        read: runs a query and returns all rows.

    Returns:
        Arrays of one length; `id` of int64, the others of float64, NaN where nothing is known.
    """
    rows = read(
        "SELECT last_event, count, data FROM step_blocks WHERE run_id = ? AND kind = ? AND first_event >= "
        "(SELECT coalesce(max(first_event), 0) FROM step_blocks WHERE run_id = ? AND kind = ? AND first_event <= ?) "
        "AND last_event > ? ORDER BY first_event",
        (run_id, kind, run_id, kind, after, after),
    )
    parts = [_unpacked(row) for row in rows]
    last = rows[-1]["last_event"] if rows else after
    while True:
        part = _read_loose(read, run_id, kind, last, CHUNK)
        parts.append(part)
        if part.shape[1] < CHUNK:
            break
        last = int(part[0, -1])
    table = np.concatenate(parts, axis=1)
    return _named(kind, table[:, np.searchsorted(table[0], after, side="right") :])


def read_columns_of_all(read: Read, run_ids: Sequence[str], kind: str) -> dict[str, Columns]:
    """As `read_columns`, of many runs with few events each, by run id."""
    asked = json.dumps(list(run_ids))
    rows = read(
        "SELECT run_id, count, data FROM json_each(?) AS asked CROSS JOIN step_blocks "
        "ON run_id = asked.value AND kind = ? ORDER BY asked.key, first_event",
        (asked, kind),
    )
    loose = read(
        f"SELECT run_id, {_told(kind)} FROM json_each(?) AS asked CROSS JOIN events INDEXED BY events_of_kind "
        "ON run_id = asked.value AND kind = ? AND events.id > (SELECT coalesce(max(last_event), 0) FROM step_blocks "
        "WHERE step_blocks.run_id = asked.value AND step_blocks.kind = ?) ORDER BY asked.key, events.id",
        (asked, kind, kind),
    )
    parts: dict[str, list[NDArray[np.float64]]] = {run_id: [] for run_id in run_ids}
    for row in rows:
        parts[row["run_id"]].append(_unpacked(row))
    # one column an event
    for row, column in zip(loose, _tabled(kind, loose).T, strict=True):
        parts[row["run_id"]].append(column[:, None])
    empty = np.zeros((len(COLUMNS[kind]), 0))
    return {run_id: _named(kind, np.concatenate(found or [empty], axis=1)) for run_id, found in parts.items()}


def _read_loose(read: Read, run_id: str, kind: str, after: int, most: int) -> NDArray[np.float64]:
    """(columns, events): events in no block, from the JSON they lie in."""
    rows = read(
        f"SELECT {_told(kind)} FROM events INDEXED BY events_of_kind "
        "WHERE run_id = ? AND kind = ? AND events.id > ? ORDER BY events.id LIMIT ?",
        (run_id, kind, after, most),
    )
    return _tabled(kind, rows)


def _told(kind: str) -> str:
    """What to select of an event. Several paths give a JSON array with the numbers as they were written, unrounded."""
    paths = ", ".join(f"'$.{name}'" for name in COLUMNS[kind] if name not in _OWN)
    return f"events.id AS id, events.at AS at, json_extract(payload, {paths}) AS told"


def _tabled(kind: str, rows: Sequence[sqlite3.Row]) -> NDArray[np.float64]:
    own = [np.array([row[name] for row in rows], dtype=np.float64) for name in COLUMNS[kind] if name in _OWN]
    told = np.array(json.loads(f"[{','.join(row['told'] for row in rows)}]"), dtype=np.float64)
    return np.concatenate([np.stack(own), told.reshape(len(rows), len(COLUMNS[kind]) - len(own)).T])


def _unpacked(row: sqlite3.Row) -> NDArray[np.float64]:
    return np.frombuffer(row["data"], dtype="<f8").reshape(-1, row["count"])


def _named(kind: str, table: NDArray[np.float64]) -> Columns:
    columns: Columns = dict(zip(COLUMNS[kind], table, strict=True))
    return {**columns, "id": columns["id"].astype(np.int64)}


def _count_loose(db: sqlite3.Connection, run_id: str, kind: str) -> int:
    (count,) = db.execute(
        "SELECT count(*) FROM events INDEXED BY events_of_kind WHERE run_id = ? AND kind = ? AND id > ?",
        (run_id, kind, _last_packed(db, run_id, kind)),
    ).fetchone()
    return int(count)


def _last_packed(db: sqlite3.Connection, run_id: str, kind: str) -> int:
    (last,) = db.execute(
        "SELECT coalesce(max(last_event), 0) FROM step_blocks WHERE run_id = ? AND kind = ?", (run_id, kind)
    ).fetchone()
    return int(last)


def _write_block(db: sqlite3.Connection, run_id: str, kind: str, fewest: int) -> bool:
    """Pack the oldest events that lie in no block, `BLOCK` at the most; False where there are fewer than `fewest`."""

    def read(query: str, values: Sequence[Any]) -> list[sqlite3.Row]:
        return db.execute(query, values).fetchall()

    table = _read_loose(read, run_id, kind, _last_packed(db, run_id, kind), BLOCK)
    count = table.shape[1]
    if count < fewest:
        return False
    db.execute(
        "INSERT INTO step_blocks (run_id, kind, first_event, last_event, count, data) VALUES (?,?,?,?,?,?)",
        (run_id, kind, int(table[0, 0]), int(table[0, -1]), count, table.astype("<f8").tobytes()),
    )
    return True
