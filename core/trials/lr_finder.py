"""A range test in the place of a run: some steps, each with a higher learning rate than the one before.

Smith, "Cyclical Learning Rates for Training Neural Networks" (2015, arXiv:1506.01186); `core.trials.lr_curve`
says what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from itertools import count

from core.control import Control
from core.data.loader import Batch
from core.events import TRYING_RATES, Event, PhaseChanged, ProgressMade
from core.metrics import Sums, TotalsOnTheWay
from core.timing import PhaseTimer
from core.training.compiles import CompileWatch
from core.training.task import Loader, Task, place_parts, shapes_of, train_step
from core.trials.lr_curve import RunningMean, judge, learning_rates

WORK = "lr"
"""What the record of such a run has as its `work`."""


def range_test(task: Task, *, emit: Callable[[Event], None], control: Control, timer: PhaseTimer) -> str:
    """Train with growing learning rates and tell the loss of each; the task is spent afterwards.

    The test ends when the running mean of the loss is four times its best, when a loss is no number, or with its last
    step; each is a good end. The images are gone over again where an epoch is shorter.

    Returns:
        `finished` or `stopped`.
    """
    device, rates = task.device, learning_rates()
    losses, watch = _Losses(), CompileWatch(task.device, emit)
    with device.turn():
        sums = Sums(device)
    task.begin_epoch(1)
    task.begin_epoch(1)
    task.set_train_mode()
    emit(PhaseChanged("compiling" if device.kind == "xla" else "training"))
    timer.lap("other")
    with closing(_over_and_over(task.train)) as batches:
        for step, (lr, batch) in enumerate(zip(rates, batches, strict=False), start=1):
            timer.lap("data_wait")
            with device.turn():
                timer.lap("other")
                parts = place_parts(task, batch)
                timer.lap("transfer")
                train_step(task, parts, lr, step, sums)
                _, compile_s = watch.look("training", step, 0, shapes_of(batch))
                if step == 1:
                    emit(PhaseChanged("training"))
                # of the step before: so the device has work while the host waits for the figures
                losses.take()
                losses.on_the_way = sums.cut()
                if not device.runs_behind:
                    losses.take()
                timer.lap("compute", compile_s=compile_s)
            emit(ProgressMade(TRYING_RATES, step, len(rates)))
            if losses.is_over:
                break
            if control.should_stop():
                return "stopped"
    with device.turn():
        losses.take()
        timer.lap("compute")
    tested = len(losses.values)
    emit(judge(rates[:tested], losses.values))
    timer.lap("other")
    return "finished"


def _over_and_over(loader: Loader) -> Generator[Batch, None, None]:
    for epoch in count(1):
        with closing(loader.epoch(epoch)) as batches:
            yield from batches


class _Losses:
    """The loss of each step, from when its figures are here.

    Attributes:
        on_the_way: what is still being computed or fetched.
        is_over: the test has seen enough; what comes later is dropped.
    """

    def __init__(self) -> None:
        self.values: list[float] = []
        self.on_the_way: TotalsOnTheWay | None = None
        self.is_over = False
        self._mean = RunningMean()

    def take(self) -> None:
        """Wait for what is on the way, if there is any."""
        if self.on_the_way is None:
            return
        totals, self.on_the_way = self.on_the_way.totals(), None
        if not self.is_over:
            self.values.append(totals.figures().loss)
            self.is_over = self._mean.is_over(self.values[-1])
