"""What the training loop asks of a device; what differs between devices lives behind this.

Sending work and waiting for it are two methods: on CUDA and XLA a call returns before anything
ran, so a clock is read only after `wait`, or after figures that were asked for have come.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT


@dataclass(frozen=True)
class DeviceInfo:
    """A device kind on this machine.

    Attributes:
        available, reason: whether it can be used, and if not, why.
        memory_gib: of one chip or card; None where it isn't known.
        count: chips or cards of this kind.
        note: what is worth knowing though it can be used, such as that it is experimental.
    """

    kind: str
    name: str
    available: bool
    reason: str = ""
    memory_gib: float | None = None
    count: int = 1
    note: str = ""


class Fetch(Protocol):
    """Figures on their way to the host."""

    def values(self) -> list[float]:
        """Block until they are there, and not longer: steps that were sent later go on."""


@dataclass(frozen=True)
class StepTime:
    """One step by the device's own account, in seconds.

    Attributes:
        seconds: from the end of the step before, or from when the watch began, to this one's; None where not known.
        data_wait_s: how long the device had nothing to do while the host waited for this step's batch.
        idle_s: how long it had nothing to do since the end of the step before; None where it can't tell.
    """

    seconds: float | None
    data_wait_s: float
    idle_s: float | None = None


class StepWatch(Protocol):
    """Watches the steps of an epoch without making the device wait."""

    def has_batch(self, waited_s: float) -> None:
        """The host has just got the batch of the next step, for which it had waited so long."""

    def sent(self) -> None:
        """All work of that step was sent."""

    def done(self, *, is_all: bool = False) -> list[StepTime]:
        """The steps that ended since the last call, in order; `is_all`: wait for all that were sent."""


class HostWatch:
    """For devices that give no account of themselves: what the host sees.

    Args:
        clock: the host's.
        is_exact: a step has ended when all of it was sent.
    """

    def __init__(self, clock: Callable[[], float], *, is_exact: bool) -> None:
        self._clock, self._is_exact = clock, is_exact
        self._last_s, self._waited_s, self._done = clock(), 0.0, list[StepTime]()

    def has_batch(self, waited_s: float) -> None:
        self._waited_s = waited_s

    def sent(self) -> None:
        now_s = self._clock()
        self._done.append(StepTime(now_s - self._last_s if self._is_exact else None, self._waited_s))
        self._last_s = now_s

    def done(self, *, is_all: bool = False) -> list[StepTime]:
        done, self._done = self._done, []
        return done


class Device(Protocol):
    """A place where steps run. All methods but `stage` are called from the thread that opened it.

    Attributes:
        kind: cpu, cuda, mps, xla or tpu (through torch_tpu).
        runs_behind: calls return before the work is done.
        count: chips, cards or processes that share each batch.
        num_processes: of those, what runs in a process of its own and sees its part of a batch alone.
        fast_precision: what trains fastest here without harm, fp32, bf16 or fp16; None where it must be tried.
    """

    kind: str
    name: str
    torch_device: torch.device
    runs_behind: bool
    count: int
    num_processes: int
    fast_precision: str | None

    def turn(self) -> AbstractContextManager[Any]:
        """Hold this while working with the device, and end it with everything flushed; not to be nested."""

    def place_model(self, model: nn.Module) -> nn.Module:
        """Move the model, in the memory format that is fastest here; called once, before the optimizer is made."""

    def share_model(self, model: nn.Module) -> nn.Module:
        """What to call in training in the place of a placed model: its gradients are means over all processes.

        Called anew when other parameters are trained; what it gave before is of no more use then.
        """

    def place(self, tensor: Tensor) -> Tensor:
        """Move a tensor that all chips need whole."""

    def stage(self, tensor: Tensor) -> Tensor:
        """Make a batch's part ready for a quick copy; called in the loader's threads."""

    def place_batch(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Send a batch: images (batch, 3, height, width) uint8, labels (batch,) int64; `count` divides batch.

        Of several processes that share it, each gets its own rows.
        """

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        """The context of the forward pass for fp32, bf16 or, on CUDA, fp16."""

    def set_matmul_precision(self, name: str) -> str:
        """Choose how fp32 products are computed (default, high, highest) until `close`; returns what that means."""

    def compile_model(self, model: nn.Module) -> None:
        """Have torch.compile translate the model's forward, in place.

        Raises:
            DeviceError: it does not work here.
        """

    def make_optimizer(self, name: str, parameters: ParamsT, **options: Any) -> torch.optim.Optimizer:
        """The fastest adam, adamw or sgd here, for placed parameters or groups; `options` as torch's own."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the gradients."""

    def watch_steps(self, clock: Callable[[], float]) -> StepWatch:
        """Watch the steps to come; `clock` is the host's, for devices that have none of their own."""

    def flush(self) -> None:
        """Send the work collected so far; returns at once."""

    def wait(self) -> None:
        """Block until all work that was sent is done."""

    def add_up(self, value: Tensor) -> Tensor:
        """The sum over the processes that share each batch, in each of them; `value` is as it was."""

    def fetch(self, sums: Tensor) -> Fetch:
        """Start bringing a few figures, added up over the processes that share a batch, to the host."""

    def to_host(self, value: Any) -> Any:
        """Copies on the CPU of all tensors in nested dicts and lists, in one go."""

    def random_state(self) -> dict[str, Any]:
        """The states of the random generators that training draws from, by name: tensors on the CPU and numbers."""

    def set_random_state(self, states: dict[str, Any]) -> None:
        """Go on from such states; those of another device kind are passed over."""

    def compile_count(self) -> int:
        """Programs compiled so far in this process; 0 where nothing compiles."""

    def compile_seconds(self) -> float:
        """Seconds spent compiling so far in this process."""

    def host_fallbacks(self) -> dict[str, int]:
        """Operations that the device left to the host so far in this process, by name."""

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether this error says that the device's memory is full."""

    def facts(self) -> dict[str, Any]:
        """What of it can change a run's speed or numbers, for the run's record: plain JSON values by name."""

    def release(self) -> None:
        """Give back memory that nothing uses any more."""

    def close(self) -> None:
        """Give memory and settings back."""
