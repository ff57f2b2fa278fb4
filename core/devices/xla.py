"""TPUs and XLA's CPU runtime through torch_xla; the only file that imports it, inside functions.

Two threads that touch XLA at once crash each other, so whoever works with it holds `XLA_LOCK`.
"""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from core.devices.base import DeviceInfo, Fetch, StepWatch
from core.devices.batchnorm import unbias_running_variance
from core.devices.executions import Executions, ExecutionWatch
from core.devices.fair_lock import FairLock
from core.devices.scalars import apart
from core.errors import DeviceError
from core.machine.facts import cpu_name, memory_gib
from core.machine.tpu import find_tpu, library_problem, trial_start

XLA_LOCK = FairLock()
"""Held for a training step, an evaluation step, a prediction, and whatever else touches an XLA tensor."""

MATMUL_ON_TPU = {"default": "bf16", "high": "three passes of bf16", "highest": "fp32 (six passes of bf16)"}


@dataclass(frozen=True)
class Runtime:
    """XLA as it was started in this process; none of it can change any more.

    Attributes:
        is_tpu: else it is XLA on the CPU.
        devices: that share each batch, by SPMD where there are several: chips, or their halves.
        cache: folder of compiled programs that a later process finds again; "" where the runtime has none.
    """

    is_tpu: bool
    devices: int
    cache: str


_runtime: Runtime | None = None


def wants_tpu() -> bool:
    """Whether XLA would be, or is, a TPU in this process."""
    if _runtime:
        return _runtime.is_tpu
    return os.environ.get("PJRT_DEVICE", "TPU" if find_tpu() else "CPU") == "TPU"


def holds_tpu() -> bool:
    """Whether XLA was started on a TPU in this process, so that no other process can have it."""
    return _runtime is not None and _runtime.is_tpu


def xla_info() -> DeviceInfo:
    """What `--device xla` would train on, read from package metadata, sysfs and the environment; starts nothing."""
    try:
        ours = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        reason = f"torch_xla is not installed; its last release fits torch 2.9, and this is {torch.__version__}."
        return DeviceInfo("xla", "TPU", False, reason)
    if ours.split(".")[:2] != torch.__version__.split(".")[:2]:
        reason = f"torch_xla {ours} does not fit torch {torch.__version__}; their first two numbers must agree."
        return DeviceInfo("xla", "TPU", False, reason)
    if os.environ.get("XLA_USE_BF16"):
        return DeviceInfo("xla", "TPU", False, "XLA_USE_BF16 is set, which silently changes every number: unset it.")
    if not wants_tpu():
        name, chips = f"XLA on the CPU ({cpu_name()})", _virtual_chips()
        return DeviceInfo("xla", name, True, memory_gib=memory_gib(), count=chips)
    tpu = find_tpu()
    if tpu is None:
        return DeviceInfo("xla", "TPU", False, "PJRT_DEVICE asks for a TPU, and none shows on this machine.")
    # what this very process holds is not in its way
    problem = "" if _runtime else tpu.problem or library_problem()
    return DeviceInfo("xla", tpu.name, not problem, problem, memory_gib=tpu.memory_gib_per_chip, count=tpu.chips)


def initialise(home: Path | None = None) -> Runtime:
    """Start XLA's runtime once for this process; later calls are free. Hold `XLA_LOCK`.

    It must happen before the first `backward()` on the CPU in this process: autograd lays out its
    queues then, and XLA's backward would fail for the process's life. Device type and SPMD are decided here too.

    Args:
        home: where a TPU's compiled programs are kept for later processes; None keeps none.

    Raises:
        DeviceError: torch_xla is missing, unfit, or its runtime does not start.
    """
    global _runtime
    if _runtime:
        return _runtime
    info = xla_info()
    if not info.available:
        raise DeviceError(f"XLA can't be used: {info.reason}", fix="Choose another device.")
    is_tpu = wants_tpu()
    # a runtime that can't start would block this process for minutes, holding the GIL
    if is_tpu and (problem := trial_start()):
        raise DeviceError(f"The TPU does not start: {problem}", fix="Choose another device, or restart the machine.")
    os.environ.setdefault("PJRT_DEVICE", "TPU" if is_tpu else "CPU")
    import torch_xla
    import torch_xla.runtime as runtime

    # both must come before the first use
    tpu = find_tpu() if is_tpu else None
    is_shared = info.count > 1 or (tpu is not None and tpu.has_two_devices_a_chip)
    if is_shared:
        runtime.use_spmd()
    # the CPU's runtime writes such a cache and can't read it back
    cache = str(home / "cache" / "xla") if home and is_tpu else ""
    if cache:
        runtime.initialize_cache(cache)
    try:
        torch_xla.device()
        found = str(torch_xla.real_devices()[0])
    except RuntimeError as error:
        line = str(error).strip().splitlines()[0]
        raise DeviceError(f"XLA's runtime did not start: {line}", fix="Choose another device.") from error
    if is_tpu and not found.startswith("TPU"):
        raise DeviceError(f"XLA took {found} in the place of the TPU.", fix="Restart, or choose another device.")
    _runtime = Runtime(is_tpu, int(runtime.global_runtime_device_count()) if is_shared else 1, cache)
    return _runtime


class XlaFetch:
    """Figures that were computed by a step that was sent."""

    def __init__(self, sums: Tensor) -> None:
        self._sums = sums

    def values(self) -> list[float]:
        values: list[float] = self._sums.tolist()
        return values


class XlaDevice:
    """A TPU with all its chips, or XLA's CPU runtime where there is no TPU."""

    kind = "xla"
    runs_behind = True
    num_processes = 1

    def __init__(self, home: Path | None = None) -> None:
        self.runtime = initialise(home)
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as metrics

        self._torch_xla: Any = torch_xla
        self._xm, self._metrics = xm, metrics
        self.torch_device = torch.device(torch_xla.device())
        self.count = self.runtime.devices
        self.name = xla_info().name + (f", {self.count} devices" if self.count > 1 else "")
        self.fast_precision: str | None = "bf16" if self.runtime.is_tpu else "fp32"
        self._marks = self._flushes = 0
        self._mesh = self._one_axis_mesh() if self.count > 1 else None

    def _one_axis_mesh(self) -> Any:
        import numpy as np
        from torch_xla.distributed.spmd import Mesh

        return Mesh(np.arange(self.count), (self.count,), ("batch",))

    def turn(self) -> AbstractContextManager[Any]:
        return XLA_LOCK

    def place_model(self, model: nn.Module) -> nn.Module:
        placed: nn.Module = model._apply(self.place)  # type: ignore[no-untyped-call]
        unbias_running_variance(placed)
        return placed

    def share_model(self, model: nn.Module) -> nn.Module:
        return model

    def place(self, tensor: Tensor) -> Tensor:
        # not .to(): a 0-d tensor of 0 or 1 would become a constant, and compile anew once it has changed
        return self._send(tensor.detach(), None)

    def stage(self, tensor: Tensor) -> Tensor:
        return tensor

    def place_batch(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        placed = self._send(images, self._split(images))
        for _ in range(self._marks):
            placed = placed.unsqueeze(0).squeeze(0)
        return placed, self._send(labels, self._split(labels))

    def _send(self, tensor: Tensor, sharding: Any) -> Tensor:
        sent: Any = self._xm.send_cpu_data_to_device([tensor], self.torch_device, sharding)
        placed: Tensor = sent[0]
        return placed

    def _split(self, part: Tensor) -> Any:
        if self._mesh is None:
            return None
        from torch_xla.distributed.spmd import ShardingSpec

        return ShardingSpec(self._mesh, ("batch",) + (None,) * (part.dim() - 1))

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        return nullcontext() if precision == "fp32" else torch.autocast("xla", torch.bfloat16)

    def set_matmul_precision(self, name: str) -> str:
        from torch_xla import backends

        if backends.get_mat_mul_precision() != name:
            # it warns of every change, since a program that was compiled before would be used again as it is
            logging.getLogger("torch_xla.backends").setLevel(logging.ERROR)
            backends.set_mat_mul_precision(name)
        # so each precision gets programs of its own: an operation that does nothing is part of what tells them apart
        self._marks = list(MATMUL_ON_TPU).index(name)
        return MATMUL_ON_TPU[name] if self.runtime.is_tpu else "fp32"

    def compile_model(self, model: nn.Module) -> None:
        raise DeviceError("XLA compiles every model by itself.", fix="Leave --torch-compile off.")

    def make_optimizer(self, name: str, parameters: ParamsT, **options: Any) -> torch.optim.Optimizer:
        """One of torch_xla's sync-free optimizers: one operation a parameter, so that the host traces a step quickly.

        Their state exists before the first step, since a state that is born in it would compile a second program.
        """
        from torch_xla.amp import syncfree

        kind = getattr(syncfree, {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}[name])
        optimizer: torch.optim.Optimizer = kind(parameters, **options)
        buffers = ("momentum_buffer",) if name == "sgd" else ("exp_avg", "exp_avg_sq")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = {buffer: self.place(torch.zeros(parameter.shape)) for buffer in buffers}
                if name != "sgd":
                    state["max_exp_avg_sq"] = self.place(torch.empty(0))
                optimizer.state[parameter] = {"step": self.place(torch.zeros(())), **state}
        return optimizer

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        asked = [(group["lr"], group["weight_decay"]) for group in groups]
        for index, (group, (lr, weight_decay)) in enumerate(zip(groups, asked, strict=True)):
            group["lr"], group["weight_decay"] = apart(lr, 2 * index + 1), apart(weight_decay, 2 * index + 2)
        # a constant of the program: no step is left out for overflow
        found_inf = torch.zeros((), device=self.torch_device)
        optimizer.step(found_inf=found_inf)  # type: ignore[call-overload]
        for group, (lr, weight_decay) in zip(groups, asked, strict=True):
            group["lr"], group["weight_decay"] = lr, weight_decay

    def watch_steps(self, clock: Callable[[], float]) -> StepWatch:
        return ExecutionWatch(self._executions, lambda: self._flushes, self._xm.wait_device_ops)

    def _executions(self) -> Executions:
        """Of all programs that ran in this process: how many, and of the last ones when each ended and how long ago
        it had been sent then.
        """
        for name in ("ExecuteReplicatedTime", "ExecuteTime") if self.count > 1 else ("ExecuteTime",):
            if data := self._metrics.metric_data(name):
                return int(data[0]), [(float(at), float(lasted) / 1e9) for at, lasted in data[2]]
        return 0, []

    def flush(self) -> None:
        self._flushes += 1
        self._torch_xla.sync()

    def wait(self) -> None:
        self._torch_xla.sync()
        self._xm.wait_device_ops()

    def add_up(self, value: Tensor) -> Tensor:
        return value

    def fetch(self, sums: Tensor) -> Fetch:
        return XlaFetch(sums)

    def to_host(self, value: Any) -> Any:
        return self._xm._maybe_convert_to_cpu(value, convert=True)

    def random_state(self) -> dict[str, Any]:
        return {"cpu": torch.get_rng_state(), "xla": self._xm.get_rng_state()}

    def set_random_state(self, states: dict[str, Any]) -> None:
        torch.set_rng_state(states["cpu"])
        if "xla" in states:
            self._xm.set_rng_state(states["xla"])

    def compile_count(self) -> int:
        return int(self._metrics.counter_value("UncachedCompile") or 0)

    def compile_seconds(self) -> float:
        data = self._metrics.metric_data("CompileTime")
        return float(data[1]) / 1e9 if data else 0.0

    def host_fallbacks(self) -> dict[str, int]:
        names = [name for name in self._metrics.counter_names() if name.startswith("aten::")]
        return {name.removeprefix("aten::"): int(self._metrics.counter_value(name) or 0) for name in names}

    @contextmanager
    def keep_random_state(self) -> Iterator[None]:
        """XLA's random numbers go on afterwards as if none had been drawn within."""
        state = self._xm.get_rng_state()
        try:
            yield
        finally:
            self._xm.set_rng_state(state)

    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)

    def facts(self) -> dict[str, Any]:
        programs = "kept for later processes" if self.runtime.cache else "of this process alone"
        if not self.runtime.is_tpu:
            programs += ": XLA on the CPU can't read back what it would keep"
        return {"xla_runtime": "TPU" if self.runtime.is_tpu else "CPU", "compiled_programs": programs}

    def release(self) -> None:
        gc.collect()

    def close(self) -> None:
        with XLA_LOCK:
            # what a step that failed has collected is dropped, or it would be compiled and run now
            self._torch_xla._XLAC._clear_pending_irs(str(self.torch_device))
            self._xm.wait_device_ops()


def _virtual_chips() -> int:
    # so is the CPU runtime split up; torch_xla reads the same variable
    value = os.environ.get("CPU_NUM_DEVICES", "")
    return max(1, int(value)) if value.isdigit() else 1
