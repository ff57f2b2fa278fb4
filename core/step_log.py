"""From steps to logged figures, without making the device wait for the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import TrainingError
from core.events import Event, StepLogged
from core.metrics import Sums, Totals, TotalsOnTheWay
from core.task import Task
from core.timing import PhaseTimer

SETTLING_STEPS = 2
"""Steps at the start of a run that throughput leaves out."""
MAX_AHEAD = 32
"""Steps that the host may be ahead of the device: each keeps a batch in the device's memory."""


@dataclass
class _Stretch:
    """The steps since the last logged one."""

    steps: int = 0
    images: int = 0
    data_wait_s: float = 0.0
    compiles: int = 0
    is_disturbed: bool = False


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
    sent, so that there is always work for the device. A stretch of steps lasts from the moment at which the figures
    of the stretch before were ready until its own are, by the device's own clock where it has one.

    Attributes:
        sums: where steps add their loss and hits.
        totals: of all stretches logged so far.
    """

    def __init__(self, task: Task, epoch: int, timer: PhaseTimer, emit: Callable[[Event], None]) -> None:
        self._device, self._epoch, self._timer, self._emit = task.device, epoch, timer, emit
        with self._device.turn():
            self.sums, self.totals = Sums(self._device), Totals()
        self._stretch, self._on_the_way = _Stretch(), list[_OnTheWay]()
        self._settled = _Settled()
        timer.lap("other")
        self._ended_s, self._ended_device_s = timer.total_s(), math.nan

    def waited_for_data(self, seconds: float) -> None:
        """The step to come had to wait so long for its batch."""
        self._stretch.data_wait_s += seconds

    def sent(self, images: int, compiles: int) -> None:
        """A step was sent, and these programs were compiled for it; figures of an earlier one are taken in now."""
        self._stretch.steps += 1
        self._stretch.images += images
        self._stretch.compiles += compiles
        if compiles:
            for earlier in self._on_the_way:
                # its end is seen only now, after the compile
                earlier.stretch.is_disturbed = True
        self.finish()
        if self._device.runs_behind and self._stretch.steps % MAX_AHEAD == 0:
            self._device.wait()
            self._timer.lap("compute")

    def cut(self, step: int, lr: float) -> None:
        """The step that was just sent is a logged one."""
        self._on_the_way.append(_OnTheWay(step, lr, self._stretch, self.sums.cut()))
        self._stretch = _Stretch()
        if not self._device.runs_behind:
            self.finish()

    def finish(self) -> None:
        """Wait for the figures that are on their way, and log them.

        Raises:
            TrainingError: a loss is not finite.
        """
        while self._on_the_way:
            self._log(self._on_the_way.pop(0))

    def images_per_s(self) -> float | None:
        """Throughput over the epoch's settled steps; None where there are none."""
        return self._settled.images / self._settled.seconds if self._settled.seconds > 0 else None

    def _log(self, logged: _OnTheWay) -> None:
        totals = logged.figures.totals()
        self._timer.lap("compute")
        self.totals += totals
        stretch, seconds, means = logged.stretch, self._seconds(logged.figures), totals.figures()
        if not math.isfinite(means.loss):
            raise TrainingError(
                f"The training loss is {means.loss} at step {logged.step} (epoch {self._epoch}).",
                fix="Lower the learning rate, add warm-up epochs, or train in fp32.",
            )
        is_settled = logged.step > SETTLING_STEPS and not stretch.compiles and not stretch.is_disturbed
        if is_settled:
            self._settled.images += stretch.images
            self._settled.seconds += seconds
        self._emit(
            StepLogged(
                step=logged.step,
                epoch=self._epoch,
                loss=means.loss,
                top1=means.top1,
                lr=logged.lr,
                images=means.images,
                seconds=seconds,
                data_wait_s=stretch.data_wait_s,
                images_per_s=stretch.images / seconds if is_settled and seconds > 0 else None,
                compiles=stretch.compiles,
            )
        )
        self._timer.lap("other")

    def _seconds(self, figures: TotalsOnTheWay) -> float:
        now_s, now_device_s = self._timer.total_s(), figures.fetch.device_s()
        by_host, by_device = now_s - self._ended_s, (now_device_s or math.nan) - self._ended_device_s
        self._ended_s, self._ended_device_s = now_s, now_device_s or math.nan
        return by_host if math.isnan(by_device) else by_device


@dataclass
class _Settled:
    """Settled steps: their images, and their seconds."""

    images: int = 0
    seconds: float = 0.0
