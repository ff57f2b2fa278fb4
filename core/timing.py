"""Splitting wall time into phases without losing a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from core.events import Phases


class PhaseTimer:
    """Gives each stretch of time to one phase, so that the phases add up to the wall time.

    Args:
        clock: seconds that only grow, as `time.perf_counter`.
        start: when time began to count, by that clock; now where None.
    """

    def __init__(self, clock: Callable[[], float], start: float | None = None) -> None:
        self._clock = clock
        self._spent = dict.fromkeys(asdict(Phases()), 0.0)
        self._start = self._last = clock() if start is None else start

    def lap(self, phase: str, *, compile_s: float = 0.0) -> float:
        """Give the time since the last lap to `phase`, less what of it went into compiling.

        Returns:
            The seconds since the last lap, compiling included.
        """
        now = self._clock()
        seconds = now - self._last
        compile_s = min(max(compile_s, 0.0), seconds)
        self._spent[f"{phase}_s"] += seconds - compile_s
        self._spent["compile_s"] += compile_s
        self._last = now
        return seconds

    def skip(self) -> float:
        """The time since the last lap doesn't count; returns its seconds."""
        now = self._clock()
        seconds = now - self._last
        self._start += seconds
        self._last = now
        return seconds

    def move(self, source: str, target: str, seconds: float) -> None:
        """Seconds that were given to the phase `source` turn out to belong to `target`."""
        self._spent[f"{source}_s"] -= seconds
        self._spent[f"{target}_s"] += seconds

    def phases(self) -> Phases:
        """The laps so far."""
        return Phases(**self._spent)

    def total_s(self) -> float:
        """From the start to the last lap; equals the sum of the phases."""
        return self._last - self._start
