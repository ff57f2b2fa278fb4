"""What torch_xla's own record of executions tells of the steps of an epoch, without making the device wait.

The runtime notes of each program that it ran when it ended, and how long before that it had been sent. So it is known
when the device had nothing to do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from core.devices.base import StepTime

Executions = tuple[int, list[tuple[float, float]]]
"""How many programs ended so far, and of the last of them: Unix time of the end, and seconds since it was sent."""


@dataclass(frozen=True)
class _Sent:
    """A step whose work was sent; times are Unix seconds."""

    waited_s: float
    has_batch: float
    sent: float

    @property
    def first_program(self) -> float:
        """Before this, a program that is sent belongs to the step before: it is handed over a little late, by a thread
        of the runtime's, and the host takes longer to collect the operations of the next one.
        """
        return self.has_batch + (self.sent - self.has_batch) / 4


class ExecutionWatch:
    """Tells which executions belong to which step by when they were sent.

    Args:
        executions: reads the record.
        wait: blocks until all that was sent has ended and is in the record.
        clock: Unix time.
    """

    def __init__(
        self, executions: Callable[[], Executions], wait: Callable[[], object], clock: Callable[[], float] = time.time
    ) -> None:
        self._executions, self._wait, self._clock = executions, wait, clock
        self._seen = executions()[0]
        self._steps: deque[_Sent] = deque()
        self._ran: deque[tuple[float, float]] = deque()
        self._before = clock()

    def has_batch(self, waited_s: float) -> None:
        self._waited_s, self._has_batch = waited_s, self._clock()

    def sent(self) -> None:
        self._steps.append(_Sent(self._waited_s, self._has_batch, self._clock()))

    def done(self, *, is_all: bool = False) -> list[StepTime]:
        if is_all:
            self._wait()
        self._read()
        times = []
        while self._steps and self._ran and (is_all or self._is_past(self._steps[0])):
            times.append(self._time(self._steps.popleft()))
        return times

    def _read(self) -> None:
        count, last = self._executions()
        fresh = last[max(0, len(last) - (count - self._seen)) :] if count > self._seen else []
        self._seen = count
        self._ran.extend((at - lasted, at) for at, lasted in fresh)

    def _is_past(self, step: _Sent) -> bool:
        """Whether something that was sent for a later step is in the record already, so that nothing more comes."""
        return len(self._steps) > 1 and self._ran[-1][0] >= self._steps[1].first_program

    def _time(self, step: _Sent) -> StepTime:
        until = self._steps[0].first_program if self._steps else float("inf")
        before, idle_s, data_wait_s, num_programs = self._before, 0.0, 0.0, 0
        # each step has one, however late it was handed over
        while self._ran and (not num_programs or self._ran[0][0] < until):
            num_programs += 1
            sent, ended = self._ran.popleft()
            idle_s += max(0.0, sent - self._before)
            # of the time in which nothing ran, what lay in the host's wait for the batch
            free_since = max(self._before, step.has_batch - step.waited_s)
            data_wait_s += max(0.0, min(sent, step.has_batch) - free_since)
            self._before = max(self._before, ended)
        return StepTime(self._before - before, data_wait_s, idle_s)
