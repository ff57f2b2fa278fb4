"""Changing a run's options between two of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.control import Wish, check_wish
from core.errors import ConfigError
from core.events import Event, Tweaked, TweakRefused
from core.schedule import lr_at
from core.training.task import Task


def make_changes(task: Task, wishes: Sequence[Wish], emit: Callable[[Event], None], *, step: int) -> None:
    """Fulfil the wishes before this step, tell of each, and keep in mind what was changed."""
    for wish in wishes:
        answer = fulfil(task, wish, step=step, epoch=task.position.epoch)
        if isinstance(answer, Tweaked):
            task.position.told.append(answer)
        emit(answer)


def fulfil(task: Task, wish: Wish, *, step: int, epoch: int) -> Event:
    """Make the change, which holds from this step on, in place; what cannot be is told by the event.

    A new learning rate is that of this step: the schedule goes on in proportion. With another number of epochs the
    schedule is that of the new number. An epoch that goes on is always finished.
    """
    try:
        check_wish(wish, task.config)
    except ConfigError as error:
        return TweakRefused(step, epoch, wish.what, wish.value, error.problem)
    if wish.what in ("lr", "lr_factor"):
        planned = lr_at(task.config, step, task.train.num_batches)
        before = task.lr_factor * planned
        task.lr_factor = wish.value if wish.what == "lr_factor" else wish.value / planned
        return Tweaked(step, epoch, "lr", before, task.lr_factor * planned, task.lr_factor)
    before = float(getattr(task.config, wish.what))
    value = max(wish.value, epoch) if wish.what == "epochs" else wish.value
    task.config = task.config.model_copy(update={wish.what: type(getattr(task.config, wish.what))(value)})
    if wish.what == "weight_decay":
        for group in task.optimizer.param_groups:
            group["weight_decay"] = value
    return Tweaked(step, epoch, wish.what, before, float(value))
