"""Numbers and states as people say them."""

from __future__ import annotations

from typing import Any

from core.events import PHASE_WORDS
from core.storage.records import RunRecord
from core.words import escaped as escaped
from core.words import time_in_words

STATE_WORDS = {
    "queued": "Queued",
    "running": "Running",
    "paused": "Paused",
    "parked": "Paused, device free",
    "stopped": "Stopped",
    "finished": "Finished",
    "failed": "Failed",
    "interrupted": "Interrupted",
}
STATE_COLOURS = {
    "queued": "gray",
    "running": "primary",
    "paused": "orange",
    "parked": "orange",
    "stopped": "gray",
    "finished": "green",
    "failed": "red",
    "interrupted": "orange",
}


def state_of(record: RunRecord) -> str:
    """The run's state; `parked` where it is paused and has left its device."""
    return "parked" if record.is_parked else record.state


def seconds_in_words(seconds: float | None) -> str:
    """As `time_in_words`; a dash where there is none."""
    return "–" if seconds is None else time_in_words(max(seconds, 0.0))


def percent(value: float | None) -> str:
    """An accuracy in percent with one decimal; a dash where there is none."""
    return "–" if value is None else f"{value:.1f} %"


def phase_in_words(phase: dict[str, Any]) -> str:
    """Where a trainer stands, as "Training: epoch 2 of 5, step 120 of 313"."""
    words = PHASE_WORDS.get(str(phase.get("phase") or ""), "Waiting for the worker")
    place = place_in_words(phase)
    return f"{words}: {place}" if place else words


def place_in_words(phase: dict[str, Any]) -> str:
    """What of `phase_in_words` comes after the colon; "" where there is nothing."""
    parts = []
    for name in ("epoch", "step"):
        if phase.get(name):
            total = phase.get(f"{name}s")
            parts.append(f"{name} {phase[name]:,} of {total:,}" if total else f"{name} {phase[name]:,}")
    if phase.get("detail"):
        parts.append(str(phase["detail"]))
    return ", ".join(parts)
