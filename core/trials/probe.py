"""Timing a few steps of a run in the place of the run."""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import islice

from core.control import Control
from core.data.loader import Batch
from core.engine import evaluate, train_epoch
from core.events import Event, ProbeMeasured, StepLogged
from core.timing import PhaseTimer
from core.training.compiles import CompileWatch
from core.training.keeper import Keeper
from core.training.step_log import SETTLED
from core.training.task import Loader, Task

STEPS, EVALUATION_STEPS, EVALUATIONS = 12, 2, 3


class _First:
    """The first batches of each epoch alone."""

    def __init__(self, loader: Loader, most: int) -> None:
        self._loader, self.num_batches = loader, min(most, loader.num_batches)

    def epoch(self, epoch: int, first: int = 0) -> Generator[Batch, None, None]:
        batches = self._loader.epoch(epoch, first)
        try:
            yield from islice(batches, self.num_batches)
        finally:
            batches.close()


def probe(task: Task, *, emit: Callable[[Event], None], control: Control, timer: PhaseTimer) -> str:
    """Train and validate a few batches, and tell how long each took; the task is spent afterwards.

    Where epochs differ by the config, the steps are those of the dearest: all that is ever trained, at the full size.

    Returns:
        `finished` or `stopped`.
    """
    wholes = task.train.num_batches, task.val.num_batches
    setup_s = timer.phases().setup_s
    task.train, task.val = _First(task.train, STEPS), _First(task.val, EVALUATION_STEPS)
    task.config = task.config.model_copy(update={"log_every": 1, "trainable_from": "", "first_image_size": None})
    logged: list[StepLogged] = []

    def hear(event: Event) -> None:
        if isinstance(event, StepLogged):
            logged.append(event)
        else:
            emit(event)

    watch = CompileWatch(task.device, emit)
    _, left_as = train_epoch(task, timer, hear, control, watch, Keeper(task, timer))
    if left_as:
        return "stopped"
    evaluation_step_s = []
    for _ in range(1 + EVALUATIONS):
        before_s = timer.phases().evaluation_s
        evaluate(task, timer, watch, step=task.position.step, epoch=1)
        evaluation_step_s.append((timer.phases().evaluation_s - before_s) / task.val.num_batches)
    settled = [event.seconds for event in logged if event.left_out == SETTLED]
    emit(
        ProbeMeasured(
            step_s=settled or [logged[-1].seconds],
            # the first pass warms up, as it may compile
            evaluation_step_s=evaluation_step_s[1:],
            steps_per_epoch=wholes[0],
            evaluation_steps=wholes[1],
            setup_s=setup_s,
            compile_s=timer.phases().compile_s,
        )
    )
    return "finished"
