"""When a run's state is kept, and what of its progress goes with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.events import EpochEnded, Phases
from core.timing import PhaseTimer
from core.training.state import Position
from core.training.task import Task


class Keeper:
    """Keeps all that is needed to take a run up again.

    Made when a part of the run begins: its first part, or another one that takes it up again.

    Attributes:
        first_step: with which this part begins.
    """

    def __init__(self, task: Task, timer: PhaseTimer) -> None:
        self._task, self._timer = task, timer
        self._kept_s = timer.total_s()
        self._epoch_began, self._epoch_compiles = timer.phases(), task.device.compile_count()
        self.first_step = task.position.step + 1

    def epoch_begins(self) -> None:
        """What comes is of the position's epoch, or of what is left of it."""
        self._epoch_began, self._epoch_compiles = self._timer.phases(), self._task.device.compile_count()

    def is_due(self) -> bool:
        """Whether the config's minutes have gone by since the last time."""
        limit_s = 60 * self._task.config.checkpoint_min
        return limit_s > 0 and self._timer.total_s() - self._kept_s >= limit_s

    def keep_within(self, place: int, log: dict[str, Any]) -> None:
        """Keep the run in mid-epoch.

        Args:
            place: batches of the epoch that are done.
            log: see `StepLog.state`.
        """
        phases, compiles = self.epoch_so_far()
        self._keep(replace(self._task.position, place=place, log=log, earlier=phases, earlier_compiles=compiles))

    def keep_after(self, ended: EpochEnded) -> None:
        """Keep the run at an epoch's end; the next one begins."""
        at = self._task.position
        at.epoch, at.place, at.log = at.epoch + 1, 0, None
        at.told.append(ended)
        self._keep(replace(at, earlier=Phases(), earlier_compiles=0))

    def epoch_so_far(self) -> tuple[Phases, int]:
        """Where the epoch's time went, in all parts of the run, and programs compiled for it."""
        at, count = self._task.position, self._task.device.compile_count()
        phases = at.earlier + self._timer.phases() - self._epoch_began
        return phases, at.earlier_compiles + count - self._epoch_compiles

    def _keep(self, position: Position) -> None:
        self._task.keep(position)
        self._timer.lap("checkpoint")
        self._kept_s = self._timer.total_s()
