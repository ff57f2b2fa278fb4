"""Whether a step fits into the device's memory, and what to tell when it does not."""

from __future__ import annotations

import torch

from core.data.augment import Mix
from core.data.loader import Batch
from core.errors import MemoryFullError
from core.metrics import Sums
from core.training.step_log import MAX_AHEAD
from core.training.task import Task, evaluation_step, place_parts, train_step

NONE_FITS = "Choose a smaller image size or model, or train the head only."


def memory_full(task: Task, batch_size: int, image_size: int) -> MemoryFullError:
    """What to tell when a batch of this size did not fit, with one that does.

    The task is of no more use afterwards: its weights have seen steps of noise.
    """
    task.optimizer.zero_grad(set_to_none=True)
    task.device.release()
    parts = task.device.count * task.config.accumulate
    # XLA would compile a program for each try, and other processes would not take the step along
    can_try = task.device.kind != "xla" and task.device.num_processes == 1
    fitting = fitting_batch(task, batch_size, image_size) if can_try else _half(batch_size, parts)
    problem = f"A batch of {batch_size} does not fit into the memory of {task.device.name}."
    if not fitting:
        return MemoryFullError(problem, fix=NONE_FITS)
    is_tried = "fits" if can_try else "may fit"
    share = -(-batch_size // fitting) * task.config.accumulate
    return MemoryFullError(
        problem, fix=f"{fitting} {is_tried}: --batch-size {fitting}, or --accumulate {share} for the same steps."
    )


def fitting_batch(task: Task, batch_size: int, image_size: int) -> int:
    """The largest batch that fits, of those that halving `batch_size` gives; 0 where none does.

    Args:
        batch_size: one that did not fit.
        image_size: side in pixels.
    """
    parts, size = task.device.count * task.config.accumulate, batch_size
    while size := _half(size, parts):
        if fits(task, size, image_size):
            return size
    return 0


def fits(task: Task, batch_size: int, image_size: int, *, as_in_a_run: bool = False) -> bool:
    """Whether a training step with a batch of this size fits; the task's weights have seen steps of noise then.

    Args:
        image_size: side in pixels.
        as_in_a_run: beside what the optimizer keeps from its first step on and the batches that wait on a device that
            runs behind the host; and a validation step, too.
    """
    try:
        with task.device.turn():
            _try(task, blank_batch(task, batch_size, image_size), as_in_a_run)
            task.device.wait()
        return True
    except (RuntimeError, MemoryError) as error:
        if not task.device.out_of_memory(error):
            raise
    finally:
        task.optimizer.zero_grad(set_to_none=True)
    # out here, since the error's traceback kept the step's memory
    task.device.release()
    return False


def blank_batch(task: Task, batch_size: int, image_size: int) -> Batch:
    """A training batch of black images."""
    images = torch.zeros(batch_size, 3, image_size, image_size, dtype=torch.uint8)
    mixes = task.config.mixup or task.config.cutmix
    mix = Mix(torch.ones(1), torch.ones(1)) if mixes else None
    return Batch(images, torch.zeros(batch_size, dtype=torch.int64), batch_size, mix)


def _try(task: Task, batch: Batch, as_in_a_run: bool) -> None:
    sums = Sums(task.device)
    waiting = min(MAX_AHEAD, task.config.log_every + 1) if as_in_a_run and task.device.runs_behind else 0
    batches = [place_parts(task, batch) for _ in range(1 + waiting)]
    task.set_train_mode()
    for _ in range(2 if as_in_a_run else 1):
        train_step(task, batches[0], 0.0, 1, sums)
    if as_in_a_run:
        # it begins when all training steps have ended
        batches.clear()
        task.model.eval()
        with torch.no_grad():
            evaluation_step(task, batch, sums)


def _half(size: int, parts: int) -> int:
    return size // 2 // parts * parts
