"""When a step does not fit into the device's memory."""

from __future__ import annotations

import torch

from core.data.loader import Batch
from core.errors import MemoryFullError
from core.metrics import Sums
from core.task import Task, place_parts, train_step


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
        return MemoryFullError(problem, fix="Choose a smaller image size or model, or train the head only.")
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
        images = torch.zeros(size, 3, image_size, image_size, dtype=torch.uint8)
        if _fits(task, Batch(images, torch.zeros(size, dtype=torch.int64), size)):
            return size
        task.device.release()
    return 0


def _half(size: int, parts: int) -> int:
    return size // 2 // parts * parts


def _fits(task: Task, batch: Batch) -> bool:
    try:
        with task.device.turn():
            train_step(task, place_parts(task, batch), 0.0, 1, Sums(task.device))
            task.device.wait()
    except (RuntimeError, MemoryError) as error:
        if not task.device.out_of_memory(error):
            raise
        return False
    finally:
        task.optimizer.zero_grad(set_to_none=True)
    return True
