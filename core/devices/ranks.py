"""One of several processes that share each batch: a GPU or a part of the CPU of its own, through torch.distributed."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from core.devices.base import Fetch
from core.devices.local import CpuDevice, CudaDevice, LocalDevice, cuda_info
from core.errors import DeviceError

TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others in set-up and in a step; one that died is noticed at once, without this."""
_ALONE = {
    "mps": "An Apple GPU trains in one process.",
    "xla": "A TPU uses all its chips by itself.",
    "tpu": "torch_tpu drives one chip.",
}


def count_processes(kind: str, wanted: int) -> int:
    """How many processes train a run together.

    Args:
        kind: a device kind, resolved.
        wanted: as the config's `num_devices`: 0 takes all GPUs, and one process on other kinds.

    Raises:
        DeviceError: more than there are GPUs, more than one of a kind that trains in one process, or not on
            this system.
    """
    gpus = cuda_info().count if kind == "cuda" else 0
    count = wanted or max(1, gpus)
    if count == 1:
        return 1
    if kind in _ALONE:
        raise DeviceError(f"{wanted} devices of kind {kind} can't be asked for.", fix=f"{_ALONE[kind]} Choose 1.")
    if kind == "cuda" and count > gpus:
        raise DeviceError(f"{count} GPUs are asked for, and {gpus} can be used.", fix="0 takes all that are here.")
    if not (hasattr(socket, "AF_UNIX") and dist.is_available() and (kind == "cpu" or dist.is_nccl_available())):
        raise DeviceError(f"{count} devices can't train together on this system.", fix="Choose 1.")
    return count


def open_rank(kind: str, meeting: Path) -> LocalDevice:
    """Join the other processes and open this one's device; torchrun's variables say which this is.

    Args:
        kind: cpu or cuda.
        meeting: a file by which the processes find each other; it is made by the first.
    """
    # gloo carries what lies in the host's memory, also beside GPUs
    dist.init_process_group(
        "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{meeting}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=TIMEOUT,
    )
    return RankCpuDevice() if kind == "cpu" else RankCudaDevice()


class RankDevice(LocalDevice):
    """What is different where several processes share each batch. The process group must be there already.

    Rows of a batch go to the processes in turn, an equal stretch to each. Gradients are averaged over the processes
    while they are computed, so that after each step all hold the same weights. BatchNorm normalises a GPU's
    activations by the statistics of the whole batch. gloo lacks that: on the CPU each process normalises its rows by
    their own, and the running statistics are the mean of all processes'.
    """

    def _join(self) -> None:
        self._rank, self.count = dist.get_rank(), dist.get_world_size()
        self.num_processes = self.count
        self.name = f"{self.count} x {self.name}"
        self._norms: list[_BatchNorm] = []
        self._shared: DistributedDataParallel | None = None
        # or dropout would spare the same places in every process's rows
        torch.manual_seed(torch.initial_seed() + self._rank)
        torch.set_num_threads(max(1, torch.get_num_threads() // self.count))

    def share_model(self, model: nn.Module) -> nn.Module:
        super().share_model(model)
        if self._shared is not None:
            # or it would go on exchanging what its parameters get as gradients
            self._shared._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        if self.kind == "cuda" and not any(isinstance(part, nn.SyncBatchNorm) for part in model.modules()):
            from timm.layers.norm_act import convert_sync_batchnorm

            # torch's own would drop the activation that timm's BatchNormAct2d holds
            model = convert_sync_batchnorm(model)
        else:
            self._norms = [part for part in model.modules() if isinstance(part, _BatchNorm)]
        # a parameter that no image reaches is looked for in each step, since any of a thousand models may have one;
        # without gradients, as in validation, all this is the bare model
        self._shared = DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)
        return self._shared

    def place_batch(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        share = len(labels) // self.count
        rows = slice(self._rank * share, (self._rank + 1) * share)
        return super().place_batch(images[rows], labels[rows])

    def add_up(self, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().optimizer_step(optimizer)
        buffers = [
            buffer
            for norm in self._norms
            if norm.training
            for buffer in (norm.running_mean, norm.running_var)
            if buffer is not None
        ]
        if buffers:
            means = self.add_up(torch.cat(buffers)) / self.count
            for buffer, mean in zip(buffers, means.split([len(buffer) for buffer in buffers]), strict=True):
                buffer.copy_(mean)

    def fetch(self, sums: Tensor) -> Fetch:
        return super().fetch(self.add_up(sums))

    def set_random_state(self, states: dict[str, Any]) -> None:
        super().set_random_state(states)
        if self._rank:
            # the first process's was kept, and each must draw numbers of its own
            torch.manual_seed(int(torch.randint(2**31, ())) + self._rank)


class RankCpuDevice(RankDevice, CpuDevice):
    """A share of the processor's threads."""

    def __init__(self) -> None:
        super().__init__()
        self._join()


class RankCudaDevice(RankDevice, CudaDevice):
    """The GPU of this process's number."""

    def __init__(self) -> None:
        super().__init__(int(os.environ["LOCAL_RANK"]))
        self._join()
