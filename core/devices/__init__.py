"""The devices a run can train on."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from core.devices.base import Device, DeviceInfo
from core.devices.local import CpuDevice, CudaDevice, MpsDevice, cpu_info, cuda_info, mps_info
from core.devices.ranks import count_processes
from core.devices.torch_tpu import TorchTpuDevice, torch_tpu_info
from core.devices.xla import XLA_LOCK, XlaDevice, xla_info
from core.errors import DeviceError

__all__ = [
    "Device",
    "DeviceInfo",
    "check_precision",
    "count_sharing",
    "list_devices",
    "open_device",
    "resolve_kind",
]

_LOCAL: dict[str, Callable[[], Device]] = {
    "cpu": CpuDevice,
    "cuda": CudaDevice,
    "mps": MpsDevice,
    "tpu": TorchTpuDevice,
}


def list_devices() -> list[DeviceInfo]:
    """Every device kind, with the reason where it is not available; starts none of them.

    The experimental kind tpu is among them only where torch_tpu is installed.
    """
    infos = [cpu_info(), cuda_info(), mps_info(), xla_info()]
    return [*infos, torch_tpu_info()] if find_spec("torch_tpu") else infos


def resolve_kind(kind: str) -> str:
    """The kind that `auto` stands for here: cuda, a TPU, mps, else cpu.

    Raises:
        DeviceError: the kind that was asked for is not available.
    """
    infos = {info.kind: info for info in list_devices()}
    if kind == "auto":
        has_chip = infos["xla"].available and infos["xla"].name.startswith("TPU")
        ranking = [("cuda", infos["cuda"].available), ("xla", has_chip), ("mps", infos["mps"].available)]
        return next((name for name, usable in ranking if usable), "cpu")
    if kind not in infos:
        raise DeviceError("Device tpu is not available: torch_tpu is not installed.", fix="Choose device xla.")
    if not infos[kind].available:
        usable = ", ".join(info.kind for info in infos.values() if info.available)
        raise DeviceError(f"Device {kind} is not available: {infos[kind].reason}", fix=f"Choose one of {usable}.")
    return kind


def check_precision(kind: str, precision: str) -> None:
    """Refuse what a device kind can't compute in.

    Raises:
        DeviceError: fp16 on anything but CUDA.
    """
    if precision == "fp16" and kind != "cuda":
        raise DeviceError(f"Device {kind} does not train in fp16.", fix="Choose bf16 or fp32.")


def count_sharing(kind: str, wanted: int) -> int:
    """How many devices share each batch, as far as it shows without starting one.

    Args:
        kind: resolved.
        wanted: as the config's `num_devices`.

    Raises:
        DeviceError: so many can't be had.
    """
    count = count_processes(kind, wanted)
    return xla_info().count if kind == "xla" else count


def open_device(kind: str, home: Path | None = None) -> Device:
    """Start a device in this thread.

    Args:
        home: where a device may keep compiled programs.

    Raises:
        DeviceError: it is not there or does not start.
    """
    resolved = resolve_kind(kind)
    if resolved == "xla":
        with XLA_LOCK:
            return XlaDevice(home)
    return _LOCAL[resolved]()
