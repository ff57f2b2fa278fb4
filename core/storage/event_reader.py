"""Reads what runs told: events as values, those that come by the hundred thousand as columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from core.storage.records import StoredEvent
from core.storage.step_blocks import Columns, Read, read_columns, read_columns_of_all


class EventReader:
    """The events of all runs of a store.

    Args:
        read: runs a query and returns all rows.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._peaks: dict[str, float | None] = {}

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

    def peak_memory(self, run_id: str) -> float | None:
        """The most host memory in GiB that an ended run was seen to take; None where nobody looked."""
        if run_id not in self._peaks:
            taken = self.columns(run_id, "MachineSampled")["own_memory_gib"]
            taken = taken[np.isfinite(taken)]
            self._peaks[run_id] = float(taken.max()) if len(taken) else None
        return self._peaks[run_id]
