"""From steps to logged figures, without making the device wait for the host."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from core.devices.base import StepTime
from core.errors import TrainingError
from core.events import Event, StepLogged
from core.metrics import Sums, Totals, TotalsOnTheWay
from core.timing import PhaseTimer
from core.training.step_times import StepTimes
from core.training.task import Task

SETTLING_STEPS = 2
"""Steps at the start of a run, and of each part of one that is taken up again, that throughput leaves out."""
MAX_AHEAD = 32
"""Steps that the host may be ahead of the device: each keeps a batch in the device's memory."""


SETTLED, FIRST, COMPILING, PACKING = "", "first steps", "compiling", "packing images"
"""Why steps don't count as settled."""


@dataclass
class _Stretch:
    """The steps since the last logged one."""

    steps: int = 0
    images: int = 0
    compiles: int = 0
    is_disturbed: bool = False
    is_packing: bool = False
    is_resumed: bool = False
    """It began before the run was taken up again."""
    waits_s: list[float] = field(default_factory=list)
    """How long the host waited for the batch of each step."""
    times: list[StepTime] = field(default_factory=list)
    """What the device told of the first of these steps, soon of all."""
    left_out: str | None = None
    """Known once it is logged."""

    def data_wait_s(self) -> float:
        """How long the device waited for batches; what it hasn't told yet is taken as the host saw it."""
        return sum(time.data_wait_s for time in self.times) + sum(self.waits_s[len(self.times) :])


@dataclass(frozen=True)
class _OnTheWay:
    """A stretch whose figures are being computed or fetched."""

    step: int
    lr: float
    stretch: _Stretch
    figures: TotalsOnTheWay


class StepLog:
    """Logs an epoch's steps.

    On a device that runs behind the host, the figures of a logged step are fetched when the step after it has been
    sent, so that there is always work for the device. How long steps lasted is what the device tells of them; where it
    tells nothing, it is seen from when figures come. The host's waits for data count as such only as far as the device
    had nothing to do meanwhile, else as compute.

    Args:
        first_step: with which this part of the run begins: what settles does so from there on.

    Attributes:
        sums: where steps add their loss and hits.
        totals: of all stretches logged so far.
        step_times: of all settled steps so far.
        left_out: steps that are not settled, by reason.
        idle_s: how long the device had nothing to do, None where it can't tell.
    """

    def __init__(
        self, task: Task, epoch: int, timer: PhaseTimer, emit: Callable[[Event], None], *, first_step: int = 1
    ) -> None:
        self._device, self._epoch, self._timer, self._emit = task.device, epoch, timer, emit
        self._is_packing, self._settles_at = task.is_packing, first_step - 1 + SETTLING_STEPS
        with self._device.turn():
            self.sums, self.totals = Sums(self._device), Totals()
        self._stretch, self._on_the_way = _Stretch(), list[_OnTheWay]()
        self._settled = _Settled()
        self.step_times, self.left_out = StepTimes(), Counter[str]()
        self.idle_s: float | None = None
        timer.lap("other")
        self._watch = self._device.watch_steps(timer.total_s)
        self._untold: deque[_Stretch] = deque()
        self._ended_s = timer.total_s()

    def state(self) -> dict[str, Any]:
        """What an epoch's log needs to go on from here in another process: plain values; waits for the figures."""
        self.finish(is_all=True)
        sums, images = self.sums.state() if self._stretch.steps else ([0.0, 0.0, 0.0], 0)
        return {
            "sums": sums,
            "sum_images": images,
            "steps": self._stretch.steps,
            "images": self._stretch.images,
            "totals": asdict(self.totals),
            "settled": asdict(self._settled),
            "step_times": self.step_times.counts(),
            "left_out": dict(self.left_out),
            "idle_s": self.idle_s,
        }

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Begin with what `state` gave."""
        if state["steps"]:
            self.sums.go_on_from(state["sums"], state["sum_images"])
        self._stretch = _Stretch(steps=state["steps"], images=state["images"], is_resumed=bool(state["steps"]))
        self.totals, self._settled = Totals(**state["totals"]), _Settled(**state["settled"])
        self.step_times = StepTimes([state["step_times"]])
        self.left_out = Counter(state["left_out"])
        self.idle_s = state["idle_s"]

    def has_batch(self, waited_s: float) -> None:
        """The batch of the step to come has arrived, for which the host had to wait so long."""
        self._stretch.waits_s.append(waited_s)
        self._watch.has_batch(waited_s)

    def sent(self, images: int, compiles: int) -> None:
        """A step was sent, and these programs were compiled for it; figures of an earlier one are taken in now."""
        self._watch.sent()
        self._untold.append(self._stretch)
        self._stretch.steps += 1
        self._stretch.images += images
        self._stretch.compiles += compiles
        self._stretch.is_packing |= self._is_packing()
        if compiles:
            for earlier in self._on_the_way:
                # its end is seen only now, after the compile
                earlier.stretch.is_disturbed = True
        self.finish()
        if self._device.runs_behind and self._stretch.steps % MAX_AHEAD == 0:
            self._device.wait()
            self._timer.lap("compute")
            self._take_times()

    def cut(self, step: int, lr: float) -> None:
        """The step that was just sent is a logged one."""
        self._on_the_way.append(_OnTheWay(step, lr, self._stretch, self.sums.cut()))
        self._stretch = _Stretch()
        if not self._device.runs_behind:
            self.finish()

    def finish(self, *, is_all: bool = False) -> None:
        """Wait for the figures that are on their way, and log them.

        Args:
            is_all: also wait until the device has told of all steps.

        Raises:
            TrainingError: a loss is not finite.
        """
        while self._on_the_way:
            logged = self._on_the_way.pop(0)
            self._log(logged, is_all=is_all and not self._on_the_way)

    def go_on(self) -> None:
        """The steps to come begin now: what lies behind was a pause."""
        self._watch = self._device.watch_steps(self._timer.total_s)
        self._ended_s = self._timer.total_s()

    def images_per_s(self) -> float | None:
        """Throughput over the epoch's settled steps; None where there are none."""
        return self._settled.images / self._settled.seconds if self._settled.seconds > 0 else None

    def _log(self, logged: _OnTheWay, *, is_all: bool) -> None:
        totals = logged.figures.totals()
        self._timer.lap("compute")
        self._take_times(is_all=is_all)
        self.totals += totals
        stretch, seconds, means = logged.stretch, self._seconds(logged.stretch), totals.figures()
        if not math.isfinite(means.loss):
            raise TrainingError(
                f"The training loss is {means.loss} at step {logged.step} (epoch {self._epoch}).",
                fix="Lower the learning rate, add warm-up epochs, or train in fp32.",
            )
        stretch.left_out = _reason(logged.step <= self._settles_at, stretch)
        if stretch.left_out == SETTLED:
            self._settled.images += stretch.images
            self._settled.seconds += seconds
            for time in stretch.times:
                self._keep(time)
        else:
            self.left_out[stretch.left_out] += stretch.steps
        is_timed = stretch.left_out == SETTLED and seconds > 0
        self._emit(
            StepLogged(
                step=logged.step,
                epoch=self._epoch,
                loss=means.loss,
                top1=means.top1,
                lr=logged.lr,
                images=means.images,
                seconds=seconds,
                data_wait_s=stretch.data_wait_s(),
                images_per_s=stretch.images / seconds if is_timed else None,
                compiles=stretch.compiles,
                steps=stretch.steps,
                left_out=stretch.left_out,
            )
        )
        self._timer.lap("other")

    def _take_times(self, *, is_all: bool = False) -> None:
        """Hear which steps have ended, and how long the device really waited for their batches."""
        for time in self._watch.done(is_all=is_all):
            stretch = self._untold.popleft()
            host_s = stretch.waits_s[len(stretch.times)]
            stretch.times.append(time)
            # the device was still busy with earlier steps
            self._timer.move("data_wait", "compute", host_s - time.data_wait_s)
            if time.idle_s is not None:
                self.idle_s = (self.idle_s or 0.0) + time.idle_s
            if stretch.left_out == SETTLED:
                self._keep(time)

    def _keep(self, time: StepTime) -> None:
        if time.seconds is not None:
            self.step_times.add(time.seconds)

    def _seconds(self, stretch: _Stretch) -> float:
        """How long the stretch lasted: as the device told of its steps, else until its figures were here."""
        now_s, began_s = self._timer.total_s(), self._ended_s
        self._ended_s = now_s
        told = [time.seconds for time in stretch.times if time.seconds is not None]
        if self._device.runs_behind and len(told) == stretch.steps:
            return sum(told)
        return now_s - began_s


def _reason(is_first: bool, stretch: _Stretch) -> str:
    """Why the stretch is left out of throughput; empty where it counts."""
    if is_first or stretch.is_resumed:
        return FIRST
    if stretch.compiles or stretch.is_disturbed:
        return COMPILING
    return PACKING if stretch.is_packing else SETTLED


@dataclass
class _Settled:
    """Settled steps: their images, and their seconds."""

    images: int = 0
    seconds: float = 0.0
