"""What the training loop asks of a device; what differs between devices lives behind this.

Sending work and waiting for it are two methods: on CUDA and XLA a call returns before anything
ran, so a clock is read only after `wait`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class DeviceInfo:
    """A device kind on this machine; `reason` says why it is not available, else it is empty."""

    kind: str
    name: str
    available: bool
    reason: str = ""
    memory_gib: float | None = None


class Device(Protocol):
    """A place where steps run. All methods are called from the thread that opened it."""

    kind: str
    name: str
    torch_device: torch.device

    def place_model(self, model: nn.Module) -> nn.Module:
        """Move the model, in the memory format that is fastest here."""

    def place_batch(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Move a batch: images (batch, 3, height, width) uint8, labels (batch,) int64."""

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        """The context of the forward pass for fp32, bf16 or, on CUDA, fp16."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the gradients."""

    def flush(self) -> None:
        """Send the work collected so far; returns at once."""

    def wait(self) -> None:
        """Block until all work that was sent is done."""

    def compile_count(self) -> int:
        """Programs compiled so far in this process; 0 where nothing compiles."""

    def compile_seconds(self) -> float:
        """Seconds spent compiling so far in this process."""

    def close(self) -> None:
        """Give memory back."""
