"""TPUs and XLA's CPU runtime through torch_xla; the only file that imports it, inside functions.

Two threads that touch XLA at once crash each other, so it belongs to the trainer thread alone.
"""

from __future__ import annotations

import importlib.metadata
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.devices.base import DeviceInfo
from core.errors import DeviceError
from core.machine import cpu_name, memory_gib

_GOOGLE_PCI_VENDOR = "0x1ae0"
_TPU_PCI_DEVICES = {"0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}


def has_tpu(sysfs: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether a TPU chip shows on the PCI bus or the environment names one; starts nothing.

    Asking libtpu itself would block for minutes, holding the GIL, on a machine without a TPU.
    """
    if os.environ.get("TPU_ACCELERATOR_TYPE") or os.environ.get("COLAB_TPU_1VM") == "1":
        return True
    try:
        return any(
            (chip / "vendor").read_text().strip() == _GOOGLE_PCI_VENDOR
            and (chip / "device").read_text().strip() in _TPU_PCI_DEVICES
            for chip in sysfs.iterdir()
        )
    except OSError:
        return False


def xla_info() -> DeviceInfo:
    """What `--device xla` would train on, read from package metadata and sysfs alone."""
    try:
        ours = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return DeviceInfo("xla", "TPU", False, "torch_xla is not installed.")
    if ours.split(".")[:2] != torch.__version__.split(".")[:2]:
        reason = f"torch_xla {ours} does not fit torch {torch.__version__}; their first two numbers must agree."
        return DeviceInfo("xla", "TPU", False, reason)
    if os.environ.get("XLA_USE_BF16"):
        return DeviceInfo("xla", "TPU", False, "XLA_USE_BF16 is set, which silently changes every number: unset it.")
    if os.environ.get("PJRT_DEVICE", "TPU" if has_tpu() else "CPU") == "TPU":
        return DeviceInfo("xla", f"TPU {os.environ.get('TPU_ACCELERATOR_TYPE', '')}".strip(), True)
    return DeviceInfo("xla", f"XLA on the CPU ({cpu_name()})", True, memory_gib=memory_gib())


def initialise() -> torch.device:
    """Start XLA's runtime and return its device; later calls are free.

    It must happen before the first `backward()` on the CPU in this process: autograd lays out its
    queues then, and XLA's backward would fail for the process's life.

    Raises:
        DeviceError: torch_xla is missing, unfit, or its runtime does not start.
    """
    info = xla_info()
    if not info.available:
        raise DeviceError(f"XLA can't be used: {info.reason}", fix="Choose another device.")
    os.environ.setdefault("PJRT_DEVICE", "TPU" if has_tpu() else "CPU")
    import torch_xla

    try:
        return torch.device(torch_xla.device())
    except RuntimeError as error:
        line = str(error).strip().splitlines()[0]
        raise DeviceError(f"XLA's runtime did not start: {line}", fix="Choose another device.") from error


class XlaDevice:
    """A TPU, or XLA's CPU runtime where there is no TPU."""

    kind = "xla"

    def __init__(self) -> None:
        self.torch_device = initialise()
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as metrics

        self._torch_xla, self._xm, self._metrics = torch_xla, xm, metrics
        self.name = xla_info().name

    def place_model(self, model: nn.Module) -> nn.Module:
        return model.to(self.torch_device)

    def place_batch(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return images.to(self.torch_device), labels.to(self.torch_device)

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        return nullcontext() if precision == "fp32" else torch.autocast("xla", torch.bfloat16)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._xm.optimizer_step(optimizer)

    def flush(self) -> None:
        self._torch_xla.sync()

    def wait(self) -> None:
        self._torch_xla.sync()
        self._xm.wait_device_ops()

    def compile_count(self) -> int:
        return int(self._metrics.counter_value("UncachedCompile") or 0)

    def compile_seconds(self) -> float:
        data = self._metrics.metric_data("CompileTime")
        return float(data[1]) / 1e9 if data else 0.0

    def close(self) -> None:
        self.wait()
