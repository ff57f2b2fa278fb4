"""What torch_xla's own record of executions tells of the steps of an epoch, without making the device wait.

The runtime notes of each program that it ran when it ended, and how long before that it had been sent. So it is known
when the device had nothing to do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from core.devices.base import StepTime

Executions = tuple[int, list[tuple[float, float]]]
"""How many programs ended so far, and of the last of them: Unix time of the end, and seconds since it was sent."""


@dataclass(frozen=True)
class _Sent:
    """A step whose work was sent, in so many programs; times are Unix seconds."""

    waited_s: float
    has_batch: float
    sent: float
    num_programs: int


class ExecutionWatch:
    """Gives each step the programs that were sent for it, in their order.

    Args:
        executions: reads the record.
        sendings: how often work was sent to the device so far, each time as one program.
        wait: blocks until all that was sent has ended and is in the record.
        clock: Unix time.
    """

    def __init__(
        self,
        executions: Callable[[], Executions],
        sendings: Callable[[], int],
        wait: Callable[[], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._executions, self._sendings, self._wait, self._clock = executions, sendings, wait, clock
        self._seen = executions()[0]
        self._steps: deque[_Sent] = deque()
        self._ran: deque[tuple[float, float]] = deque()
        self._before = clock()

    def has_batch(self, waited_s: float) -> None:
        self._waited_s, self._has_batch, self._sent_before = waited_s, self._clock(), self._sendings()

    def sent(self) -> None:
        num_programs = max(1, self._sendings() - self._sent_before)
        self._steps.append(_Sent(self._waited_s, self._has_batch, self._clock(), num_programs))

    def done(self, *, is_all: bool = False) -> list[StepTime]:
        if is_all:
            self._wait()
        self._read()
        times = []
        while self._steps and (time := self._time(is_all)):
            times.append(time)
        return times

    def _read(self) -> None:
        count, last = self._executions()
        fresh = last[max(0, len(last) - (count - self._seen)) :] if count > self._seen else []
        self._seen = count
        # several threads keep the record, so that neighbours may have changed places
        self._ran = deque(sorted([*self._ran, *((at - lasted, at) for at, lasted in fresh)]))

    def _time(self, is_all: bool) -> StepTime | None:
        """What is known of the oldest step that was not told; None where its programs are not in the record yet."""
        step, later = self._steps[0], self._steps[1] if len(self._steps) > 1 else None
        while self._ran and self._ran[0][0] < step.has_batch:
            # a prediction, say, that came between two steps
            self._before = max(self._before, self._ran.popleft()[1])
        mine = [ran for ran in islice(self._ran, step.num_programs) if later is None or ran[0] < later.sent]
        if len(mine) < step.num_programs and not is_all and len(mine) == len(self._ran):
            return None
        self._steps.popleft()
        if not mine:
            # the record holds so many programs, and later ones have taken its place
            return StepTime(None, step.waited_s)
        before, idle_s, data_wait_s = self._before, 0.0, 0.0
        for sent, ended in mine:
            self._ran.popleft()
            idle_s += max(0.0, sent - self._before)
            # of the time in which nothing ran, what lay in the host's wait for the batch
            free_since = max(self._before, step.has_batch - step.waited_s)
            data_wait_s += max(0.0, min(sent, step.has_batch) - free_since)
            self._before = max(self._before, ended)
        return StepTime(self._before - before, data_wait_s, idle_s)
