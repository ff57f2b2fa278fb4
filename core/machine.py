"""What this machine is: names, sizes and versions, as recorded with every run."""

from __future__ import annotations

import importlib.metadata
import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch


@lru_cache
def cpu_name() -> str:
    """The processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_gib() -> float:
    """The host's memory in GiB."""
    return float(round(psutil.virtual_memory().total / 2**30, 1))


def environment() -> dict[str, Any]:
    """What can change a run's speed or numbers: versions, processor, threads, memory."""
    versions = {}
    for package in ("torch", "torchvision", "torch_xla", "torch_tpu", "libtpu", "timm", "streamlit"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=True),
        "threads": torch.get_num_threads(),
        "memory_gib": memory_gib(),
        **versions,
    }
