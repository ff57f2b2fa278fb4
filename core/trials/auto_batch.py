"""The largest batch size that fits the device, found before a run that asks for it (batch size auto).

A device that says when its memory is full (CUDA, an Apple GPU) is asked, by real steps. On a CPU too large an
allocation is granted, and the process killed later; on XLA and torch_tpu each size costs a program. There the size is
calculated: two small batches are trained on the CPU, and what torch holds after each operation grows in a line from one
to the other, and on; the most of all that is to stay within half of the memory. What was found is kept below the home
folder, so that the next run of the same shape doesn't search.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from core.devices.local import CpuDevice
from core.errors import MemoryFullError
from core.files import built
from core.machine.tpu import find_tpu
from core.metrics import Sums
from core.models.parts import set_train_mode
from core.optim import build_optimizer
from core.stages import widest
from core.training.preflight import hollow_copy
from core.training.task import Task, place_parts, train_step
from core.trials.host_memory import LiveBytes, memory_left
from core.trials.memory import NONE_FITS, blank_batch, fits

MOST = 1024
"""No batch is larger, whatever would fit."""
FIRST_TRIED = 8
"""With so many images in each part of the batch the search begins."""
SMALL = 2, 4
"""Images in each part of the two batches that are calculated from."""
SHARE = 0.5
"""Of the memory that is there, what a calculated batch may need."""
WAITING = 20
"""Batches of pictures that are prepared ahead, or wait on the device, at the most."""
RAISES = ("cuda", "mps")
"""Device kinds that say when their memory is full."""
FOLDER = "batch_sizes"

Tell = Callable[[int], None]


@dataclass(frozen=True)
class Shape:
    """What the memory of a run's step depends on; `most` is the largest batch that it could have."""

    device: str
    model: str
    image_size: int
    num_classes: int
    trainable: str
    precision: str
    matmul_precision: str
    torch_compile: str
    optimizer: str
    has_momentum: bool
    has_average: bool
    mixes: bool
    clips: bool
    accumulate: int
    most: int
    torch: str

    def file(self, cache: Path) -> Path:
        """Where the size for this shape is kept."""
        return cache / FOLDER / f"{hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True)
class Found:
    """A batch size, how it was come by, in words, and where that is kept, if anywhere."""

    batch_size: int
    how: str
    file: Path | None = None


def find_batch_size(
    task: Task, num_train: int, cache: Path | None = None, *, tell: Tell = lambda batch_size: None
) -> Found:
    """The largest power of two that fits, times the parts in which a batch is shared.

    Args:
        task: before its first step, with all trained that is trained at any time; it is left as it was.
        num_train: training images; no batch holds more.
        cache: the folder in which sizes are kept; None keeps none, and knows none.
        tell: called with each size before it is tried.

    Raises:
        MemoryFullError: no batch fits.
    """
    sizes = possible_sizes(task.device.count * task.config.accumulate, num_train)
    shape = shape_of(task, sizes[-1])
    file = shape.file(cache) if cache else None
    if file and (kept := _kept(file)) in sizes:
        return Found(kept, "kept from an earlier run", file)
    if task.device.kind in RAISES:
        size, how = _tried(task, sizes, tell), "tried"
    else:
        size, how = _calculated(task, sizes, tell), "calculated from two small batches"
    if not size:
        raise MemoryFullError(f"No batch fits into the memory of {task.device.name}.", fix=NONE_FITS)
    if file:
        with built(file) as temporary:
            temporary.write_text(json.dumps({"batch_size": size, **asdict(shape)}, indent=1), encoding="utf-8")
    return Found(size, how, file)


def possible_sizes(parts: int, num_train: int) -> list[int]:
    """`parts` times each power of two, up to `MOST` and to the number of training images; one at the least."""
    sizes = [parts]
    while 2 * sizes[-1] <= min(MOST, num_train):
        sizes.append(2 * sizes[-1])
    return sizes


def shape_of(task: Task, most: int) -> Shape:
    config, device = task.config, task.device
    return Shape(
        device=device.name,
        model=config.model,
        image_size=task.image_size,
        num_classes=task.num_classes,
        trainable=widest(config.trainable, config.trainable_from),
        precision=task.precision,
        matmul_precision=config.matmul_precision,
        torch_compile=config.torch_compile,
        optimizer=config.optimizer,
        has_momentum=config.momentum > 0,
        has_average=config.ema_decay > 0,
        mixes=config.mixup > 0 or config.cutmix > 0,
        clips=config.clip_grad_norm > 0,
        accumulate=config.accumulate,
        most=most,
        torch=str(torch.__version__),
    )


def largest(sizes: Sequence[int], first: int, does_fit: Callable[[int], bool]) -> int:
    """The largest of these sizes that fits, 0 where none does.

    Args:
        sizes: ascending; what is larger than one that doesn't fit, doesn't either.
        first: the first to be tried is the largest up to this; then they are gone through upwards, or downwards.
    """
    start = max((index for index, size in enumerate(sizes) if size <= first), default=0)
    if not does_fit(sizes[start]):
        return next((size for size in reversed(sizes[:start]) if does_fit(size)), 0)
    while start + 1 < len(sizes) and does_fit(sizes[start + 1]):
        start += 1
    return sizes[start]


@contextmanager
def left_as_it_was(task: Task) -> Iterator[None]:
    """Whatever steps are made within, all that a run begins with is the same afterwards, to the bit."""
    device, optimizer = task.device, task.optimizer
    assert not optimizer.state, "before the first step"
    modules = [task.module, *([task.ema.module] if task.ema else [])]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    rates = [group["lr"] for group in optimizer.param_groups]
    with device.turn():
        # in the host's memory, since the device's is what is tried
        kept, random = device.to_host(tensors), device.random_state()
    try:
        yield
    finally:
        optimizer.state.clear()
        optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        with device.turn(), torch.no_grad():
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.copy_(before)
            device.set_random_state(random)
            device.wait()
        device.release()


def _tried(task: Task, sizes: Sequence[int], tell: Tell) -> int:
    def does_fit(size: int) -> bool:
        tell(size)
        return fits(task, size, task.image_size)

    with left_as_it_was(task), _uncompiled(task):
        found = largest(sizes, FIRST_TRIED * sizes[0], does_fit)
        # a run needs more than its first step
        for size in reversed([size for size in sizes if size <= found]):
            if fits(task, size, task.image_size, as_in_a_run=True):
                return size
    return 0


def _calculated(task: Task, sizes: Sequence[int], tell: Tell) -> int:
    """The largest size whose step needs no more than `SHARE` of the memory, if that grows in a line with the batch."""
    count, parts = task.device.count, sizes[0]
    room = SHARE * _memory(task)
    if task.device.kind == "cpu":
        with left_as_it_was(task), _uncompiled(task):
            small = _histories(task, parts, room, tell)
        resident = 0
    else:
        # nothing is computed on the device; all of its chips hold the weights, and each its share of a batch
        with torch.random.fork_rng(devices=[]), _on_the_host(task) as copied:
            small = _histories(copied, parts, room, tell)
        resident = _weights_bytes(task)
    waiting = WAITING * 3 * task.image_size**2

    def does_fit(size: int) -> bool:
        return resident + extrapolated(small, parts, size / count) + waiting * size / count <= room

    return max((size for size in sizes if does_fit(size)), default=0)


def extrapolated(small: Sequence[NDArray[np.float64]], parts: int, batch_size: float) -> float:
    """The most bytes that training with a batch of this size holds at once.

    The line goes through each moment, not through the peaks: a small batch holds most when the weights are updated, a
    large one at the end of the forward.

    Args:
        small: what the `SMALL` batches held at each moment; of the first alone where it is much.
        parts: by which their sizes are multiplied.
    """
    first, last = (images * parts for images in SMALL)
    if len(small) < len(SMALL) or len(small[0]) != len(small[1]):
        return float(small[-1].max()) * max(1.0, batch_size / (SMALL[len(small) - 1] * parts))
    slopes = (small[1] - small[0]) / (last - first)
    return float((small[0] + slopes * (batch_size - first)).max())


def _histories(task: Task, parts: int, room: float, tell: Tell) -> list[NDArray[np.float64]]:
    """The bytes that training with each of the `SMALL` batches holds at each moment; see `extrapolated`.

    Args:
        room: bytes that may be used.
    """
    histories: list[NDArray[np.float64]] = []
    for images in SMALL:
        if histories and histories[-1].max() * images / SMALL[0] > room:
            break
        tell(images * parts)
        task.optimizer.state.clear()
        task.optimizer.zero_grad(set_to_none=True)
        task.set_train_mode()
        batch = blank_batch(task, images * parts, task.image_size)
        with LiveBytes() as live:
            # in the second step there is what the optimizer keeps
            for step in (1, 2):
                train_step(task, place_parts(task, batch), 0.0, step, Sums(task.device))
        histories.append(np.array(live.history, dtype=np.float64))
    return histories


@contextmanager
def _on_the_host(task: Task) -> Iterator[Task]:
    """The same task with weights that hold nothing, on the CPU."""
    host = CpuDevice()
    try:
        with task.device.turn():
            module = hollow_copy(task.module, host.torch_device)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.zero_()
        yield replace(
            task,
            device=host,
            model=module,
            optimizer=build_optimizer(task.config, module, host),
            set_train_mode=lambda: set_train_mode(module),
            ema=None,
        )
    finally:
        host.close()


def _uncompiled(task: Task) -> AbstractContextManager[Any]:
    # torch.compile would translate each size, and from the second one on for any size
    if task.config.torch_compile == "off":
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _memory(task: Task) -> float:
    """Bytes that each of the devices has to give; on the CPU, and XLA there, they share the host's."""
    device = task.device
    tpu = find_tpu() if device.kind == "tpu" or device.facts().get("xla_runtime") == "TPU" else None
    if tpu is not None and tpu.memory_gib_per_chip:
        return tpu.memory_gib_per_chip * 2**30 / (2 if tpu.has_two_devices_a_chip else 1)
    return memory_left() / device.count


def _weights_bytes(task: Task) -> int:
    tensors = [*task.module.parameters(), *task.module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) * (2 if task.ema else 1)


def _kept(file: Path) -> int:
    """The size in this file; 0 where there is none, or none that can be read."""
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["batch_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
