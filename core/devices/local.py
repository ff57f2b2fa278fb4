"""CPU, CUDA and Apple GPUs: the devices that torch itself drives."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from core.devices.base import DeviceInfo
from core.machine import cpu_name, memory_gib


class LocalDevice:
    """What CPU, CUDA and MPS share: eager execution and no compiling."""

    kind = "cpu"

    def __init__(self) -> None:
        self.torch_device = torch.device(self.kind)
        self.name = cpu_name()

    def place_model(self, model: nn.Module) -> nn.Module:
        moved: nn.Module = model.to(self.torch_device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        return moved

    def place_batch(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return images.to(self.torch_device, non_blocking=True), labels.to(self.torch_device, non_blocking=True)

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self.kind, torch.bfloat16 if precision == "bf16" else torch.float16)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def flush(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def compile_count(self) -> int:
        return 0

    def compile_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


class CpuDevice(LocalDevice):
    """The processor: work is done when a call returns."""


class CudaDevice(LocalDevice):
    """An NVIDIA (or ROCm) GPU: work is queued on a stream."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.name = torch.cuda.get_device_name()

    def place_batch(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return super().place_batch(images.pin_memory(), labels.pin_memory())

    def wait(self) -> None:
        torch.cuda.synchronize()

    def close(self) -> None:
        torch.cuda.empty_cache()


class MpsDevice(LocalDevice):
    """An Apple GPU."""

    kind = "mps"

    def __init__(self) -> None:
        super().__init__()
        self.name = f"Apple GPU ({cpu_name()})"

    def wait(self) -> None:
        torch.mps.synchronize()

    def close(self) -> None:
        torch.mps.empty_cache()


def cpu_info() -> DeviceInfo:
    return DeviceInfo("cpu", cpu_name(), True, memory_gib=memory_gib())


def cuda_info() -> DeviceInfo:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return DeviceInfo("cuda", properties.name, True, memory_gib=round(properties.total_memory / 2**30, 1))
    reason = "No NVIDIA GPU answers here." if torch.version.cuda else "This torch was built without CUDA."
    return DeviceInfo("cuda", "NVIDIA GPU", False, reason)


def mps_info() -> DeviceInfo:
    if torch.backends.mps.is_available():
        return DeviceInfo("mps", f"Apple GPU ({cpu_name()})", True, memory_gib=memory_gib())
    return DeviceInfo("mps", "Apple GPU", False, "No Apple GPU answers here.")
