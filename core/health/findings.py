"""What was looked at and what came of it, as the doctor tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from core.words import counted

STATES = ("problem", "warning", "ok")
"""Worst first."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what, such as "device cpu"; more than one finding may have it.
        state: ok; warning, where something is missing that not everybody needs; problem, where work will fail.
        found: in a sentence or two.
        fix: what to do about it; "" where there is nothing to do.
    """

    check: str
    state: str
    found: str
    fix: str = ""

    @property
    def line(self) -> str:
        """As the command line prints it."""
        return " ".join(filter(None, [f"{self.state:8} {self.check}: {self.found}", self.fix]))


@dataclass(frozen=True)
class Report:
    """All findings, worst first.

    Attributes:
        runtime: kind of runtime in words.
        home: the folder of runs and caches.
        seconds: that the looks took.
    """

    findings: Sequence[Finding]
    runtime: str
    home: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing is a problem."""
        return all(finding.state != "problem" for finding in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        """How many findings there are of each state."""
        return {state: sum(finding.state == state for finding in self.findings) for state in STATES}

    def told(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "ok": self.ok,
            "runtime": self.runtime,
            "home": self.home,
            "seconds": round(self.seconds, 1),
            "checks": [asdict(finding) for finding in self.findings],
        }

    @property
    def lines(self) -> list[str]:
        """For a terminal."""
        bad = f"{counted(self.counts['problem'], 'problem')}, {counted(self.counts['warning'], 'warning')}"
        last = f"{bad}, {self.counts['ok']} ok, in {self.seconds:.1f} s."
        return [f"This is {self.runtime}; runs lie in {self.home}.", *(item.line for item in self.findings), last]


def by_state(findings: Sequence[Finding]) -> list[Finding]:
    """Worst first; else in the order in which they came."""
    return sorted(findings, key=lambda finding: STATES.index(finding.state))
