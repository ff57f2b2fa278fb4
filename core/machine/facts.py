"""What this machine is: names, sizes, versions and how busy it was, as recorded with every run."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import re
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import psutil
import torch

from core.machine.accelerators import gpu_facts
from core.machine.telemetry import CpuReader, Family

LOAD_S = 0.1
"""How long other processes are watched for `load_at_start`."""

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_ON_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "afs"}
# of file systems in user space, those that lie elsewhere; the rest may lie anywhere
_ON_NETWORK |= {f"fuse.{name}" for name in ("sshfs", "rclone", "gcsfuse", "s3fs", "drive", "glusterfs", "juicefs")}
_KIND_BY_DRIVER = {"nvme": "nvme", "zram": "memory", "ram": "memory", "nbd": "network", "rbd": "network"}

_log = logging.getLogger(__name__)


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


def environment(home: Path | None = None) -> dict[str, Any]:
    """What can change a run's speed or numbers: versions, processor, threads, memory, disk, load.

    Takes little more than the tenth of a second in which it watches the other processes, and never fails:
    `physical_cores`, `cpu_max_mhz`, `cpu_limit` (in cores), `disk`, `load_at_start`, `gpu_driver` and `cuda` are left
    out where they aren't known.

    Args:
        home: the folder whose disk is told.
    """
    versions = {}
    for package in ("torch", "torchvision", "torch_xla", "torch_tpu", "libtpu", "timm", "streamlit"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    looks: dict[str, Callable[[], Any]] = {
        "physical_cores": partial(psutil.cpu_count, logical=False),
        "cpu_max_mhz": cpu_max_mhz,
        "cpu_limit": cpu_limit,
        "disk": lambda: disk_of(home) if home else None,
        "load_at_start": load,
    }
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=True),
        "threads": torch.get_num_threads(),
        "memory_gib": memory_gib(),
        **versions,
        **{name: value for name, look in looks.items() if (value := _found(look)) is not None},
        **(_found(gpu_facts) or {}),
    }


def load() -> dict[str, float | None]:
    """How busy the machine is: `cpu_percent` of all processes but this one and its children, and `load_1m`."""
    others = CpuReader(Family())
    time.sleep(LOAD_S)
    return {"cpu_percent": others().get("other_cpu_percent"), "load_1m": psutil.getloadavg()[0]}


def cpu_max_mhz(sysfs: Path = Path("/sys")) -> float | None:
    """The first core's highest clock; virtual machines seldom tell it."""
    khz = _text(sysfs / "devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    return int(khz) / 1000 if khz.isdigit() else None


def cpu_limit(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """How many cores' time this process's control groups leave it, as containers set it; None without a limit.

    Args:
        proc: has `self/cgroup`.
        cgroups: where control groups of version 2 are, or the folder `cpu` with those of version 1.
    """
    limits = []
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            if not controllers:
                quota, _, period = _text(cgroups / group / "cpu.max").partition(" ")
            elif "cpu" in controllers.split(","):
                quota = _text(cgroups / "cpu" / group / "cpu.cfs_quota_us")
                period = _text(cgroups / "cpu" / group / "cpu.cfs_period_us")
            else:
                continue
            if quota.isdigit() and period.isdigit():  # "max" and -1 are no limit
                limits.append(int(quota) / int(period))
    return min(limits, default=None)


# -- the disk -------------------------------------------------------------------------------------------------------


class _Mount(NamedTuple):
    device: str
    point: Path
    filesystem: str
    source: str


def disk_of(folder: Path, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> dict[str, str]:
    """What a folder lies on.

    Args:
        proc: has `self/mountinfo` and `cpuinfo`.
        sysfs: has `dev/block` and `class/block`.

    Returns:
        `filesystem`, and `kind`: nvme, ssd, hdd, network, memory or unknown. A virtual machine's disk is told by what
        the machine sees of it; where layers hide the disk (overlay, 9p, most of fuse), and on other systems than
        Linux, it is unknown.
    """
    folder = folder.resolve()
    around = [mount for mount in _mounts(proc) if folder.is_relative_to(mount.point)]
    if not around:
        return {"kind": "unknown", "filesystem": ""}
    # of two mounts on the same folder the later one is seen
    mount = max(reversed(around), key=lambda mount: len(mount.point.parts))
    if mount.filesystem in _IN_MEMORY:
        kind = "memory"
    elif mount.filesystem in _ON_NETWORK:
        kind = "network"
    else:
        # btrfs has a device number of its own, so that its source tells
        places = (sysfs / "dev/block" / mount.device, sysfs / "class/block" / Path(mount.source).resolve().name)
        block = next((place.resolve() for place in places if (place / "dev").exists()), None)
        is_virtual = "hypervisor" in _text(proc / "cpuinfo").split()
        kind = _kind_of(block, is_virtual) if block else "unknown"
    return {"kind": kind, "filesystem": mount.filesystem}


def _mounts(proc: Path) -> Iterator[_Mount]:
    for line in _text(proc / "self/mountinfo").splitlines():
        where, _, what = line.partition(" - ")
        _, _, device, _, point, *_ = where.split(" ")
        filesystem, source, *_ = what.split(" ")
        yield _Mount(device, Path(_unescaped(point)), filesystem, _unescaped(source))


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _kind_of(block: Path, is_virtual: bool) -> str:
    """The kind of a block device, of a partition's disk, or of what a mapped device or an array is made of."""
    if (block / "partition").exists():
        block = block.parent
    parts = list((block / "slaves").iterdir()) if (block / "slaves").is_dir() else []
    if parts:
        kinds = {_kind_of(part.resolve(), is_virtual) for part in parts}
        return kinds.pop() if len(kinds) == 1 else "unknown"
    driver = re.match(r"[a-z]*", block.name)
    known = _KIND_BY_DRIVER.get(driver[0] if driver else "")
    if known:
        return known
    # a disk that doesn't say whether it turns passes for one that does, and virtual ones mostly don't say
    turns = "unknown" if is_virtual or block.name.startswith(("vd", "xvd", "loop")) else "hdd"
    return {"0": "ssd", "1": turns}.get(_text(block / "queue/rotational"), "unknown")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _found(look: Callable[[], Any]) -> Any:
    try:
        return look()
    except Exception:  # kernels and drivers answer in many ways, and none is worth a run
        _log.info("A fact about this machine is not known.", exc_info=True)
        return None
