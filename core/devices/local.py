"""CPU, CUDA and Apple GPUs: the devices that torch itself drives."""

from __future__ import annotations

import gc
import shutil
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from core.devices.base import DeviceInfo, Fetch, HostWatch, StepTime, StepWatch
from core.errors import DeviceError
from core.machine.facts import cpu_name, memory_gib

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


_COMPILE_TIMES = ("_compile.compile_inner", "compile_fx.<locals>.bw_compiler_base")


class Fetched:
    """Figures that are on the host already."""

    def __init__(self, sums: Tensor) -> None:
        self._values: list[float] = sums.tolist()

    def values(self) -> list[float]:
        return self._values


class LocalDevice:
    """What CPU, CUDA and MPS share: eager execution, and a compiler only where it is asked for."""

    kind = "cpu"
    runs_behind = False
    count = 1
    num_processes = 1
    fast_precision: str | None = "fp32"

    def __init__(self) -> None:
        self.torch_device = torch.device(self.kind)
        self.name = cpu_name()
        self._undo: list[Callable[[], object]] = []
        self._compiles = self._is_shared = False

    def turn(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def place_model(self, model: nn.Module) -> nn.Module:
        moved: nn.Module = model.to(self.torch_device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        return moved

    def share_model(self, model: nn.Module) -> nn.Module:
        if self._compiles and self._is_shared:
            # what was compiled doesn't look whether its parameters need gradients
            torch.compiler.reset()
        self._is_shared = True
        return model

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.torch_device)

    def stage(self, tensor: Tensor) -> Tensor:
        return tensor

    def place_batch(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return images.to(self.torch_device), labels.to(self.torch_device)

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self.kind, torch.bfloat16 if precision == "bf16" else torch.float16)

    def set_matmul_precision(self, name: str) -> str:
        return "fp32"

    def compile_model(self, model: nn.Module) -> None:
        if self.kind == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
            raise DeviceError(
                "torch.compile needs a C++ compiler on the CPU, and none is installed.",
                fix="Install g++, or leave --torch-compile off.",
            )
        self._compiles = True
        model.compile()

    def make_optimizer(self, name: str, parameters: ParamsT, **options: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](parameters, **options, fused=True)  # type: ignore[call-arg]

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def watch_steps(self, clock: Callable[[], float]) -> StepWatch:
        return HostWatch(clock, is_exact=not self.runs_behind)

    def flush(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def add_up(self, value: Tensor) -> Tensor:
        return value

    def fetch(self, sums: Tensor) -> Fetch:
        return Fetched(sums)

    def to_host(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            # a copy even of what is on the CPU already: training goes on while it is written
            return value.detach().to("cpu", copy=True)
        if isinstance(value, dict):
            return {key: self.to_host(item) for key, item in value.items()}
        return [self.to_host(item) for item in value] if isinstance(value, list) else value

    def random_state(self) -> dict[str, Any]:
        return {"cpu": torch.get_rng_state()}

    def set_random_state(self, states: dict[str, Any]) -> None:
        torch.set_rng_state(states["cpu"])

    def compile_count(self) -> int:
        return int(_dynamo().counters["stats"]["unique_graphs"]) if self._compiles else 0

    def compile_seconds(self) -> float:
        if not self._compiles:
            return 0.0
        # the backward is compiled on its first use, outside the forward's time
        times = _dynamo().compilation_time_metrics
        return float(sum(sum(times.get(name, [])) for name in _COMPILE_TIMES))

    def host_fallbacks(self) -> dict[str, int]:
        return {}

    def out_of_memory(self, error: BaseException) -> bool:
        # the CPU's allocator and Metal raise plain RuntimeErrors
        words = ("not enough memory", "can't allocate memory", "out of memory")
        return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
            isinstance(error, RuntimeError) and any(part in str(error) for part in words)
        )

    def facts(self) -> dict[str, Any]:
        return {}

    def release(self) -> None:
        gc.collect()

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()


class CpuDevice(LocalDevice):
    """The processor: work is done when a call returns."""

    fast_precision: str | None = None

    def __init__(self) -> None:
        super().__init__()
        # of this thread alone; tiny numbers that late layers and moments decay to take a slow path otherwise
        if torch.set_flush_denormal(True):
            self._undo.append(lambda: torch.set_flush_denormal(False))


class CudaFetch:
    """Figures on their way to pinned memory, with an event behind them."""

    def __init__(self, sums: Tensor) -> None:
        self._copy = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        self._copy.copy_(sums, non_blocking=True)
        self._end = torch.cuda.Event()
        self._end.record()

    def values(self) -> list[float]:
        self._end.synchronize()
        values: list[float] = self._copy.tolist()
        return values


class CudaWatch:
    """Events on the stream at the beginning and the end of each step; the device passes them without a stop."""

    def __init__(self) -> None:
        self._before = self._mark()
        self._sent: deque[tuple[float, torch.cuda.Event, torch.cuda.Event]] = deque()

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_batch(self, waited_s: float) -> None:
        self._waited_s, self._first = waited_s, self._mark()

    def sent(self) -> None:
        self._sent.append((self._waited_s, self._first, self._mark()))

    def done(self, *, is_all: bool = False) -> list[StepTime]:
        times = []
        while self._sent and (is_all or self._sent[0][2].query()):
            waited_s, first, last = self._sent.popleft()
            last.synchronize()
            # where the host is ahead, a step's first event stands right behind the last one of the step before
            idle_s = self._before.elapsed_time(first) / 1e3
            times.append(StepTime(self._before.elapsed_time(last) / 1e3, min(waited_s, idle_s), idle_s))
            self._before = last
        return times


class CudaDevice(LocalDevice):
    """An NVIDIA (or ROCm) GPU: work is queued on a stream."""

    kind = "cuda"
    runs_behind = True

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.name = torch.cuda.get_device_name(index)
        # below Ampere bf16 is emulated, though torch says that it is supported
        major = torch.cuda.get_device_capability(index)[0]
        self.fast_precision = "bf16" if major >= 8 else "fp16" if major == 7 else "fp32"
        self._copies = torch.cuda.Stream(self.torch_device)

    def stage(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def place_batch(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        compute = torch.cuda.current_stream(self.torch_device)
        with torch.cuda.stream(self._copies):
            placed = [part.to(self.torch_device, non_blocking=True) for part in (images, labels)]
        compute.wait_stream(self._copies)
        for part in placed:
            # else the allocator could hand this memory out while a step still reads it
            part.record_stream(compute)
        return placed[0], placed[1]

    def set_matmul_precision(self, name: str) -> str:
        backends: Any = torch.backends
        matmul, convolution = backends.cuda.matmul, backends.cudnn.conv
        before = matmul.fp32_precision, convolution.fp32_precision

        def undo() -> None:
            matmul.fp32_precision, convolution.fp32_precision = before

        self._undo.append(undo)
        if name != "default":
            matmul.fp32_precision = convolution.fp32_precision = "tf32" if name == "high" else "ieee"
            return "TF32" if name == "high" else "fp32"
        return "torch's default: TF32 in convolutions, fp32 in matrix products"

    def watch_steps(self, clock: Callable[[], float]) -> StepWatch:
        return CudaWatch()

    def wait(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def fetch(self, sums: Tensor) -> Fetch:
        return CudaFetch(sums)

    def random_state(self) -> dict[str, Any]:
        return {**super().random_state(), "cuda": torch.cuda.get_rng_state(self.torch_device)}

    def set_random_state(self, states: dict[str, Any]) -> None:
        super().set_random_state(states)
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.torch_device)

    def release(self) -> None:
        super().release()
        torch.cuda.empty_cache()

    def close(self) -> None:
        super().close()
        torch.cuda.empty_cache()


class MpsDevice(LocalDevice):
    """An Apple GPU."""

    kind = "mps"
    runs_behind = True

    def __init__(self) -> None:
        super().__init__()
        self.name = f"Apple GPU ({cpu_name()})"

    def wait(self) -> None:
        torch.mps.synchronize()

    def random_state(self) -> dict[str, Any]:
        return {**super().random_state(), "mps": torch.mps.get_rng_state()}

    def set_random_state(self, states: dict[str, Any]) -> None:
        super().set_random_state(states)
        if "mps" in states:
            torch.mps.set_rng_state(states["mps"])

    def release(self) -> None:
        super().release()
        torch.mps.empty_cache()

    def close(self) -> None:
        super().close()
        torch.mps.empty_cache()


def cpu_info() -> DeviceInfo:
    return DeviceInfo("cpu", cpu_name(), True, memory_gib=memory_gib())


def cuda_info() -> DeviceInfo:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        memory, count = round(properties.total_memory / 2**30, 1), torch.cuda.device_count()
        return DeviceInfo("cuda", properties.name, True, memory_gib=memory, count=count)
    reason = "No NVIDIA GPU answers here." if torch.version.cuda else "This torch was built without CUDA."
    return DeviceInfo("cuda", "NVIDIA GPU", False, reason)


def mps_info() -> DeviceInfo:
    if torch.backends.mps.is_available():
        return DeviceInfo("mps", f"Apple GPU ({cpu_name()})", True, memory_gib=memory_gib())
    return DeviceInfo("mps", "Apple GPU", False, "No Apple GPU answers here.")


def _dynamo() -> Any:
    # seconds to import, so only where something was compiled
    import torch._dynamo.utils

    return torch._dynamo.utils
