"""Noticing that a run hangs: no step has ended for many times what one usually takes."""

from __future__ import annotations

from collections import deque
from statistics import median

from core.events import (
    CheckpointFailed,
    CheckpointSaved,
    EpochEnded,
    Event,
    Paused,
    PhaseChanged,
    ProgramCompiled,
    Resumed,
    StepLogged,
    Stuck,
    Tweaked,
)

STUCK_TIMES = 20
"""A run is stuck when this many times the usual time has gone by without a logged step, but not before..."""
STUCK_S = 30.0
"""...so many seconds."""
RECENT = 50
"""Logged steps that tell what is usual, the last ones."""
KNOWN = 3
"""Without so many, nothing is known to be usual."""
LOOK_S = 5.0
"""What counts at most between two looks: the process itself may have stood still."""

_SIGNS = (
    StepLogged,
    EpochEnded,
    Tweaked,
    ProgramCompiled,
    CheckpointSaved,
    CheckpointFailed,
    Paused,
    Resumed,
    PhaseChanged,
)
"""What the trainer itself tells, and not a thread beside it."""


class StuckWatch:
    """Watches one run's training steps; set-up, compiling, evaluation, saving and pauses are left out.

    Times are seconds of any clock that only grows.
    """

    def __init__(self) -> None:
        self._step_s: deque[float] = deque(maxlen=RECENT)
        self._steps: deque[int] = deque(maxlen=RECENT)
        self._step = self._epoch = 0
        self._is_training = self._is_told = False
        self._silent_s = 0.0
        self._looked: float | None = None

    def follow(self, event: Event) -> None:
        """Hear what the trainer tells."""
        if isinstance(event, StepLogged):
            self._step, self._epoch, self._is_told = event.step, event.epoch, False
            # a stretch is told as a whole, so a step of it is known by its share alone
            self._step_s.append(event.seconds / event.steps)
            self._steps.append(event.steps)
        elif isinstance(event, Tweaked) and event.what == "log_every":
            self._steps.append(int(event.after))
        if isinstance(event, PhaseChanged):
            self._is_training, self._epoch = event.phase == "training", event.epoch
        elif isinstance(event, Paused | Resumed):
            self._is_training = isinstance(event, Resumed)
        if isinstance(event, _SIGNS):
            self._silent_s = 0.0

    def look(self, now: float) -> Stuck | None:
        """Look at the clock, again and again; once there is something to tell, it is told."""
        passed = min(now - self._looked, LOOK_S) if self._looked is not None else 0.0
        self._looked = now
        if not self._is_training:
            return None
        self._silent_s += passed
        if self._is_told or len(self._step_s) < KNOWN:
            return None
        usual_s = median(self._step_s)
        if self._silent_s <= max(STUCK_S, STUCK_TIMES * usual_s * max(self._steps)):
            return None
        self._is_told = True
        return Stuck(self._step, self._epoch, self._silent_s, usual_s)
