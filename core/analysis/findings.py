"""What a diagnosis is made of: findings, and the facts of a run that they are found in."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from core.events import Phases
from core.words import percent_in_words, time_in_words

PHASES = tuple(name.removesuffix("_s") for name in asdict(Phases()))
LEAST_S = 0.5
"""Seconds that a stretch of time must have to be worth a sentence."""


@dataclass(frozen=True)
class Finding:
    """One thing to know about a run or a group.

    Attributes:
        rule: the name of the rule that found it.
        seconds: how much time it explains; 0 for a mere remark.
        sentence: what was found, with its figures.
        advice: what to do; empty where nothing is to be done.
        chart: phases, epochs, steps, machine, programs, setup or group; where it can be seen.
        phase: the phase it is about, without _s; empty where it is about none.
        figures: the numbers behind the sentence.
    """

    rule: str
    seconds: float
    sentence: str
    advice: str
    chart: str
    phase: str = ""
    figures: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunFacts:
    """A summary, read so that what it lacks is 0, empty or None."""

    summary: dict[str, Any]

    def get(self, *path: str) -> Any:
        """What lies at the end of the path."""
        value: Any = self.summary
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def machine(self, column: str, which: str = "mean") -> float | None:
        """Mean, min or max of what was sampled of the machine."""
        value = self.get("machine", column, which)
        return None if value is None else float(value)

    @property
    def epochs(self) -> list[dict[str, Any]]:
        return self.summary.get("epochs") or []

    def by_epoch(self, phase: str) -> list[float]:
        """Seconds of the phase in each epoch."""
        return [float((epoch.get("phases") or {}).get(f"{phase}_s") or 0) for epoch in self.epochs]

    def phase_s(self, phase: str) -> float:
        seconds = float(self.get("phases", f"{phase}_s") or 0)
        if phase == "setup" and not seconds:
            # a run that has not ended knows only the parts of its set-up
            return float(sum((self.get("setup_parts") or {}).values()))
        return seconds

    @property
    def total_s(self) -> float:
        """All phases together: of a run that goes on, what is known of it."""
        return sum(self.phase_s(phase) for phase in PHASES)

    def percent(self, seconds: float) -> float:
        return 100 * seconds / self.total_s if self.total_s else 0.0

    def is_much(self, seconds: float, percent: float = 5.0) -> bool:
        return seconds >= LEAST_S and self.percent(seconds) >= percent

    def of_run(self, seconds: float) -> str:
        """ "21 % of this run (74 s)" """
        is_open = self.get("state") in ("queued", "running", "paused")
        share = percent_in_words(self.percent(seconds))
        return f"{share} of this run{' so far' if is_open else ''} ({time_in_words(seconds)})"

    def figures(self, seconds: float) -> dict[str, float | int | str]:
        return {"seconds": seconds, "percent": self.percent(seconds)}

    def packing_wait_s(self) -> float:
        """How much longer epoch 1 waited for images than later epochs did, because they were still being packed."""
        waits = self.by_epoch("data_wait")
        if not waits:
            return 0.0
        usual = float(np.median(waits[1:])) if waits[1:] else 0.0
        return min(max(waits[0] - usual, 0.0), float(self.get("cache", "seconds") or 0))

    def recompiles(self) -> list[dict[str, Any]]:
        """Programs that were compiled though nothing should have been."""
        programs = self.get("programs") or []
        return [program for program in programs if program.get("cause") and not program.get("is_planned")]

    def planned_programs(self) -> list[dict[str, Any]]:
        """Programs that were compiled in later epochs because these do something else by the config."""
        return [program for program in self.get("programs") or [] if program.get("is_planned")]

    @property
    def changes_between_epochs(self) -> bool:
        """Whether epochs, and so their steps, differ by the config."""
        return bool(self.get("config", "trainable_from") or self.get("config", "first_image_size"))

    def keeps_programs(self) -> bool:
        """Whether a later process finds what was compiled."""
        return str(self.get("environment", "compiled_programs") or "").startswith("kept")
