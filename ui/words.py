"""Numbers and states as people say them."""

from __future__ import annotations

from typing import Any

from core.events import PHASE_WORDS, ForecastMade
from core.words import time_in_words

STATE_WORDS = {
    "queued": "Queued",
    "running": "Running",
    "paused": "Paused",
    "stopped": "Stopped",
    "finished": "Finished",
    "failed": "Failed",
    "interrupted": "Interrupted",
}
STATE_COLOURS = {
    "queued": "gray",
    "running": "primary",
    "paused": "orange",
    "stopped": "gray",
    "finished": "green",
    "failed": "red",
    "interrupted": "orange",
}


def seconds_in_words(seconds: float | None) -> str:
    """0.4 -> "0.4 s", 65 -> "1 min 5 s", 3725 -> "1 h 2 min"; a dash where there is none."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def percent(value: float | None) -> str:
    """An accuracy in percent with one decimal; a dash where there is none."""
    return "–" if value is None else f"{value:.1f} %"


def phase_in_words(phase: dict[str, Any]) -> str:
    """Where a trainer stands, as "Training: epoch 2 of 5, step 120 of 313"."""
    words = PHASE_WORDS.get(str(phase.get("phase") or ""), "Waiting for the worker")
    parts = []
    for name in ("epoch", "step"):
        if phase.get(name):
            total = phase.get(f"{name}s")
            parts.append(f"{name} {phase[name]:,} of {total:,}" if total else f"{name} {phase[name]:,}")
    if phase.get("detail"):
        parts.append(str(phase["detail"]))
    return f"{words}: {', '.join(parts)}" if parts else words


def forecast_in_words(forecast: ForecastMade) -> str:
    """ "About 1:02 min in all, 18 s an epoch (95 %: 58 s to 66 s in all), from 4 runs like this one." """
    bounds = ""
    if forecast.total_low_s is not None and forecast.total_high_s is not None:
        low, high = time_in_words(forecast.total_low_s), time_in_words(forecast.total_high_s)
        bounds = f" (95 %: {low} to {high} in all)" if low != high else ""
    about = f"About {time_in_words(forecast.total_s)} in all, {time_in_words(forecast.epoch_s)} an epoch"
    return f"{about}{bounds}, from {forecast.basis}."
