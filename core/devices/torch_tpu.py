"""TPUs through torch_tpu, the successor of torch_xla: eager, with the device name "tpu". Experimental.

Written against torch_tpu 0.2.0 (a beta for torch 2.11 to 2.15) without a TPU at hand: everything up to the first
access to a chip was tried, nothing beyond. This is the only file that calls it, and it imports nothing of it; where
it is installed and a chip is passed through by VFIO, `import torch` loads it. It has no CPU to fall back on.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import nn

from core.devices.base import DeviceInfo
from core.devices.local import LocalDevice
from core.errors import DeviceError
from core.machine.tpu import TpuFound, find_tpu, library_problem, trial_start

_MATMUL = {
    "default": ("medium", "bf16"),
    "high": ("high", "three passes of bf16"),
    "highest": ("highest", "fp32 (six passes of bf16)"),
}

# Copying a tensor over raises where the chip does not answer; making one there aborts the whole process.
START = """
from importlib.metadata import entry_points
import torch
for entry in entry_points(group="torch.backends", name="torch_tpu"):
    entry.load()()
torch.ones(1).to("tpu").cpu()
"""


def torch_tpu_info(find: Callable[[], TpuFound | None] = find_tpu) -> DeviceInfo:
    """What `--device tpu` would train on, read from package metadata and the kernel's files; starts nothing."""
    try:
        version = importlib.metadata.version("torch_tpu")
    except importlib.metadata.PackageNotFoundError:
        return DeviceInfo("tpu", "TPU", False, "torch_tpu is not installed.")
    needs = map(Requirement, importlib.metadata.requires("torch_tpu") or [])
    unfit = [need for need in needs if need.name == "torch" and not need.specifier.contains(torch.__version__, True)]
    if unfit:
        reason = f"torch_tpu {version} needs {unfit[0]}, and torch {torch.__version__} is installed."
        return DeviceInfo("tpu", "TPU", False, reason)
    tpu = find()
    if tpu is None:
        return DeviceInfo("tpu", "TPU", False, "No TPU shows on this machine.")
    return DeviceInfo(
        "tpu",
        f"{tpu.name} through torch_tpu",
        available=not (reason := tpu.problem or _not_driven(tpu) or library_problem()),
        reason=reason,
        memory_gib=tpu.memory_gib_per_chip,
        count=tpu.chips,
        note=f"Experimental: torch_tpu {version} is a beta, never tried with this app on a TPU. One chip trains.",
    )


def _not_driven(tpu: TpuFound) -> str:
    """torch_tpu counts a chip only if it knows it from the PCI bus and VFIO passes it through."""
    if tpu.source == "PCI bus" and any("/vfio/" in node for node in tpu.nodes):
        return ""
    return (
        f"torch_tpu drives chips on the PCI bus that VFIO passes through (v4 and later), and this {tpu.name} is none."
    )


@cache
def start() -> None:
    """Start torch_tpu's runtime once for this process; later calls are free.

    Raises:
        DeviceError: it is missing, unfit, or does not start.
    """
    info = torch_tpu_info()
    if not info.available:
        raise DeviceError(f"torch_tpu can't be used: {info.reason}", fix="Choose another device.")
    # `torch.manual_seed`, of a run on the CPU, may have started it already
    is_started = hasattr(torch, "tpu") and torch.tpu.is_initialized()
    if not is_started and (reason := trial_start(program=START)):
        raise DeviceError(f"The TPU does not start: {reason}", fix="Choose another device.")
    for entry in importlib.metadata.entry_points(group="torch.backends", name="torch_tpu"):
        entry.load()()
    try:
        torch.ones(1).to("tpu")
    except RuntimeError as error:
        line = str(error).strip().splitlines()[0]
        raise DeviceError(f"The TPU did not start: {line}", fix="Choose another device.") from error


class TorchTpuDevice(LocalDevice):
    """One chip of a TPU (one of the two devices of a v7 chip); each operation is compiled on its first use.

    Its figures on compiling come from calls that torch_tpu doesn't promise to keep; without them they are 0.

    Args:
        start: is called first, and leaves torch with a device of this kind.
    """

    kind = "tpu"
    runs_behind = True
    fast_precision: str | None = "bf16"

    def __init__(self, start: Callable[[], None] = start) -> None:
        start()
        super().__init__()
        self.name = torch_tpu_info().name

    def place_model(self, model: nn.Module) -> nn.Module:
        # XLA lays tensors out itself, so channels_last would only make it copy
        return model.to(self.torch_device)

    def set_matmul_precision(self, name: str) -> str:
        before = torch.get_float32_matmul_precision()
        self._undo.append(lambda: torch.set_float32_matmul_precision(before))
        ours, meaning = _MATMUL[name]
        torch.set_float32_matmul_precision(ours)
        return meaning

    def compile_model(self, model: nn.Module) -> None:
        self._compiles = True
        model.compile(backend="tpu", dynamic=False)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.accelerator.synchronize()

    def compile_count(self) -> int:
        return int(getattr(self._cache_stats(), "num_compilations", 0))

    def compile_seconds(self) -> float:
        entries = getattr(self._cache_stats(), "per_entry_stats", [])
        return float(sum(entry.compilation_duration.total_seconds() for entry in entries))

    def _cache_stats(self) -> Any:
        module = torch.get_device_module(self.torch_device)
        return module._get_cache_stats() if hasattr(module, "_get_cache_stats") else None

    def host_fallbacks(self) -> dict[str, int]:
        # an operation that it lacks raises: its fall-back to the host is off unless asked for
        return {}

    def out_of_memory(self, error: BaseException) -> bool:
        return super().out_of_memory(error) or (isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error))

    def close(self) -> None:
        self.wait()
        super().close()
