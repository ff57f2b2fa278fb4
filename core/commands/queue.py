"""The command line of the queue: what waits, and for what."""

from __future__ import annotations

from typing import Any

from core.errors import ConfigError
from core.running.waiting import Entry, entries_of, take_out
from core.store import Store
from core.words import counted


def queue_command(store: Store, waiting_id: str, to: str) -> tuple[dict[str, Any], list[str]]:
    """Move a run or a group, or take it out, and list what waits then.

    Args:
        waiting_id: of a run or a group; "" moves nothing.
        to: first, up, down, remove; or "".

    Returns:
        The JSON object (`active`, `queue`), and the lines to print.

    Raises:
        ConfigError: one of the two is missing.
        StoreError: nothing of this id waits.
    """
    if bool(waiting_id) != bool(to):
        raise ConfigError(
            "Which run is to be moved where?", fix="Give RUN_ID with --first, --up, --down or --remove."
        )  # fmt: skip
    if to == "remove":
        take_out(store, waiting_id)
    elif to:
        store.move(waiting_id, to)
    active, entries = store.under_way(), entries_of(store)
    lines = [f"{run.run_id}  {run.state:8}  {run.name}  on {run.device_kind}" for run in active]
    lines += [f"{entry.entry_id}  waits     {_name(entry)} {entry.waits_for}" for entry in entries]
    result = {
        "active": [
            {"run_id": run.run_id, "name": run.name, "state": run.state, "device": run.device_kind} for run in active
        ],
        "queue": [
            {
                "id": entry.entry_id,
                "name": entry.name,
                "run_ids": [run.run_id for run in entry.runs],
                "devices": entry.kinds,
                "waits_for": entry.waits_for,
            }
            for entry in entries
        ],
    }
    return result, lines or ["Nothing trains, and nothing waits."]


def _name(entry: Entry) -> str:
    more = f" ({counted(len(entry.runs), 'run')})" if len(entry.runs) > 1 else ""
    return f"{entry.name}{more} for {' and '.join(entry.kinds)}:"
