"""Whether a TPU is here and free, told from the kernel's files and the environment alone.

Nothing in this module starts a runtime in this process: where no TPU answers, Google's library
`libtpu` blocks for minutes holding the interpreter's lock, and it can't be started a second time.
`find_tpu` reads files and is cheap enough for every page; `trial_start` starts the runtime once in
a child process under a time limit, and belongs before the first start in this process.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_GOOGLE = "0x1ae0"
_KIND_BY_DEVICE = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "v7"}
_V2_OR_V3 = "0x0027"  # told apart by the subsystem
_KIND_BY_SUBSYSTEM = {"0x004e": "v2", "0x004f": "v3"}

_MEMORY_GIB = {"v2": 16.0, "v3": 32.0, "v4": 32.0, "v5e": 16.0, "v5p": 95.0, "v6e": 32.0, "v7": 192.0}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v7x": "v7", "7x": "v7"}
# In TPU_ACCELERATOR_TYPE the number counts cores for these, two a chip: v4-8 and tpu7x-8 are 4 chips, v5e-8 is 8.
_COUNTED_IN_CORES = {"v2", "v3", "v4", "v5p", "v7"}


@dataclass(frozen=True)
class TpuFound:
    """A TPU that this machine has, or says it has.

    Attributes:
        kind: "v2" to "v7", "v5e", "v5p", "v6e"; "v2 or v3" or empty where nothing tells.
        chips: those this process may use, at least 1.
        memory_gib_per_chip: published capacity of one chip, None for an unknown kind. On v2, v3 and v7 a chip
            shows as two devices with half of it each. Figures: the pages of Google Cloud's documentation on each
            TPU version, equal to the table of tpu-info 0.14.2 (which gives v2 and v3 a core).
        source: what told: "PCI bus", "/dev" or the name of an environment variable.
        problem: why it can't be used now, with the fix; empty where nothing speaks against it.
        nodes: the device files of those chips, such as "/dev/vfio/0".
    """

    kind: str
    chips: int
    memory_gib_per_chip: float | None
    source: str
    problem: str = ""
    nodes: tuple[str, ...] = ()

    @property
    def has_two_devices_a_chip(self) -> bool:
        """Whether XLA sees each chip as two devices."""
        return self.kind in ("v2", "v3", "v7", "v2 or v3")

    @property
    def name(self) -> str:
        """Such as "TPU v5e"."""
        return f"TPU {self.kind}".strip()


def find_tpu(
    sysfs: Path = Path("/sys/bus/pci/devices"),
    dev: Path = Path("/dev"),
    environ: Mapping[str, str] = os.environ,
    *,
    proc: Path = Path("/proc"),
    access: Callable[[Path, int], bool] = os.access,
) -> TpuFound | None:
    """Look for a TPU without opening its device files, starting anything or waiting for anything.

    Chips come from the PCI bus, else from `/dev/accel*`, else from what Colab, Kaggle and Kubernetes write into
    the environment; of several hosts only this one's chips count, and of those only what TPU_VISIBLE_CHIPS leaves.

    Whether a chip is free is read from the links in `/proc/*/fd`, and whether it may be opened is asked of
    `access`; the files themselves stay closed. Opening one would tell more surely, but a VFIO group admits one
    opener (the second gets EBUSY), so that a look at the wrong moment would make a starting run fail. libtpu itself
    looks for a holder in the same links. Processes of other users and outside this container stay
    unseen that way, as do rules of the container against opening (EPERM); `trial_start` meets both.

    Args:
        sysfs: the PCI devices, a folder each, with `vendor`, `device`, `subsystem_device`, `iommu_group`.
        dev: where the device files are.
        environ: the environment to believe.
        proc: the processes; this process and its descendants don't count as holders.
        access: as `os.access`.
    """
    named, slice_chips, variable = _from_environment(environ)
    on_bus = _chips_on_bus(sysfs)
    nodes_by_chip = _nodes_by_chip(on_bus, dev, is_named=bool(variable))
    kind = on_bus[0].kind if on_bus else named
    if kind == "v2 or v3" and named in ("v2", "v3"):
        kind = named
    if on_bus:
        source = "PCI bus"
    elif variable:
        source = variable
    elif nodes_by_chip:
        source = "/dev"
    else:
        return None

    visible, problem = _visible(environ, len(nodes_by_chip) or len(on_bus) or slice_chips)
    nodes = [node for place, chip in enumerate(nodes_by_chip) if place in visible for node in chip]
    if not problem:
        problem = _problem(kind, source, nodes, is_on_bus=bool(on_bus), dev=dev, proc=proc, access=access)
    return TpuFound(
        kind=kind,
        chips=max(1, len(visible)),
        memory_gib_per_chip=_MEMORY_GIB.get(kind),
        source=source,
        problem=problem,
        nodes=tuple(str(node) for node in nodes),
    )


def library_problem(environ: Mapping[str, str] = os.environ) -> str:
    """Why libtpu, which drives the chips, can't be loaded, with the fix; empty where it is there. Loads nothing."""
    path = environ.get("TPU_LIBRARY_PATH")
    if path:
        return "" if Path(path).is_file() else f"TPU_LIBRARY_PATH names {path}, which is not there. Unset it."
    if importlib.util.find_spec("libtpu"):
        return ""
    package = importlib.util.find_spec("torch_xla")
    if package and package.origin and (Path(package.origin).parent / "lib" / "libtpu.so").is_file():
        return ""
    return "libtpu is not installed. Install it with the version that torch_xla[tpu] or torch_tpu asks for."


# -- the PCI bus and /dev -------------------------------------------------------------------------------------------


@dataclass
class _Chip:
    kind: str
    iommu_groups: list[str] = field(default_factory=list)


def _chips_on_bus(sysfs: Path) -> list[_Chip]:
    """Chips in the order of their addresses; a v7 chip shows as two functions of one address."""
    chips: dict[str, _Chip] = {}
    for device in sorted(_entries(sysfs)):
        if _text(device / "vendor") != _GOOGLE:
            continue
        number = _text(device / "device")
        kind = _KIND_BY_DEVICE.get(number, "")
        if number == _V2_OR_V3:
            kind = _KIND_BY_SUBSYSTEM.get(_text(device / "subsystem_device"), "v2 or v3")
        if not kind:
            continue  # Google's network and disk functions bear the same vendor
        chip = chips.setdefault(device.name.rpartition(".")[0], _Chip(kind))
        try:
            chip.iommu_groups.append((device / "iommu_group").readlink().name)
        except OSError:
            continue
    return list(chips.values())


def _nodes_by_chip(on_bus: list[_Chip], dev: Path, *, is_named: bool) -> list[list[Path]]:
    """The device files a chip, for the chips that have any: by IOMMU group where VFIO drives them, else by number.

    A numbered file in `/dev/vfio` may be any device that is passed through, so without the bus it counts only where
    the environment names a TPU.
    """
    by_group = [[dev / "vfio" / group for group in chip.iommu_groups] for chip in on_bus]
    existing = [sorted((node for node in chip if node.exists()), key=_number) for chip in by_group]
    passed_through = [chip for chip in existing if chip]
    if passed_through:
        return sorted(passed_through, key=lambda nodes: _number(nodes[0]))
    accel = [[node] for node in sorted(_entries(dev), key=_number) if re.fullmatch(r"accel\d+", node.name)]
    if accel or on_bus or not is_named:
        return accel
    return [[node] for node in sorted(_entries(dev / "vfio"), key=_number) if node.name.isdigit()]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(node: Path) -> int:
    digits = re.search(r"\d+$", node.name)
    return int(digits[0]) if digits else -1


# -- the environment ------------------------------------------------------------------------------------------------


def _from_environment(environ: Mapping[str, str]) -> tuple[str, int, str]:
    """The kind, the chips of this host and the variable that told; ("", 1, "") where none does.

    Colab sets TPU_ACCELERATOR_TYPE=v5e-1 and COLAB_TPU_1VM=1 (which is empty on its other runtimes), Kubernetes and
    Kaggle v5litepod-8; Kaggle also TPU_PROCESS_ADDRESSES=local.
    """
    match = re.fullmatch(r"(?:tpu)?(v?\d+[a-z]*)(?:-(\d+))?", environ.get("TPU_ACCELERATOR_TYPE", "").lower())
    if match:
        kind = _ALIASES.get(match[1], match[1])
        chips = int(match[2] or 1) // (2 if kind in _COUNTED_IN_CORES else 1)
        return kind, max(1, chips // _hosts(environ)), "TPU_ACCELERATOR_TYPE"
    if environ.get("COLAB_TPU_1VM") == "1":
        return "", 1, "COLAB_TPU_1VM"
    if environ.get("TPU_PROCESS_ADDRESSES") == "local":
        return "", 1, "TPU_PROCESS_ADDRESSES"
    return "", 1, ""


def _hosts(environ: Mapping[str, str]) -> int:
    """Hosts of the slice: the product of TPU_HOST_BOUNDS, such as 2,2,1, else the names in TPU_WORKER_HOSTNAMES."""
    bounds = re.findall(r"\d+", environ.get("TPU_HOST_BOUNDS", ""))
    names = [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    return max(1, math.prod(map(int, bounds)) if bounds else len(names))


def _visible(environ: Mapping[str, str], chips: int) -> tuple[set[int], str]:
    """The places of the chips that this process may use, and a problem where the variable leaves none.

    The numbers count the chips here from 0 in the order of their device files.
    """
    for variable in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        value = environ.get(variable, "")
        if numbers := re.findall(r"\d+", value):
            visible = {int(number) for number in numbers} & set(range(chips))
            return visible, "" if visible else f"{variable}={value} names none of the {chips} chips here. Unset it."
    return set(range(chips)), ""


# -- what speaks against it -----------------------------------------------------------------------------------------


def _problem(
    kind: str,
    source: str,
    nodes: list[Path],
    *,
    is_on_bus: bool,
    dev: Path,
    proc: Path,
    access: Callable[[Path, int], bool],
) -> str:
    if not nodes and is_on_bus:
        return (
            f"TPU {kind} shows on the PCI bus, but {dev} has no file for it. "
            "In a container, pass it through (docker run --privileged)."
        )
    if not nodes:
        return f"{source} names a TPU, but none shows on the PCI bus or in {dev}. Unset it, or start on a TPU runtime."
    gate = dev / "vfio" / "vfio"  # the runtime opens it too
    for node in [*nodes, gate] if gate.exists() else nodes:
        if not access(node, os.R_OK | os.W_OK):
            return f"{node} may not be opened by this user. Allow it (sudo chmod a+rw {node}), or run as another user."
    for pid, held in _holders(set(map(str, nodes)), proc):
        return f"{held} is held by process {pid} ({_program(proc / str(pid))}). End it, or wait until it has ended."
    return ""


def _holders(nodes: set[str], proc: Path) -> Iterator[tuple[int, str]]:
    """Processes, other than this one and its descendants, that have one of the files open."""
    for process in _entries(proc):
        if not process.name.isdigit():
            continue
        for link in _entries(process / "fd"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target in nodes and not _is_ours(int(process.name), proc):
                yield int(process.name), target


def _is_ours(pid: int, proc: Path) -> bool:
    while pid > 1 and pid != os.getpid():
        # the name, in brackets, may itself hold brackets and blanks; state and parent follow the last one
        fields = _text(proc / str(pid) / "stat").rpartition(")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 else 0
    return pid == os.getpid()


def _program(process: Path) -> str:
    """The program and, for Python, its script or module; the further arguments may hold secrets and stay out."""
    words = [word for word in _text(process / "cmdline").split("\0") if word]
    if not words:
        return _text(process / "comm") or "name unknown"
    program = Path(words[0]).name
    if not program.startswith("python"):
        return program
    for place, word in enumerate(words[1:], start=1):
        if word == "-m" and place + 1 < len(words):
            return f"{program} -m {words[place + 1]}"
        if word == "-c":
            return f"{program} -c"
        if not word.startswith("-"):
            return f"{program} {Path(word).name}"
    return program


# -- the trial start ------------------------------------------------------------------------------------------------

XLA_START = """
import torch_xla
torch_xla.device()
real = torch_xla.real_devices()[0]
if not real.startswith("TPU"):
    raise RuntimeError(f"torch_xla took {real} for the TPU.")
"""

_FIXES = {
    "libtpu not found": "Install libtpu in the version that torch_xla[tpu] asks for.",
    "accessing libtpu multi-process lockfile": "Remove /tmp/libtpu_lockfile, which another user's process left.",
    "already in use": "End the process that holds it.",
    "resource busy": "End the process that holds it.",
    "not permitted": "Run as a user, or in a container, that may open the chip's file.",
    "ermission denied": "Run as a user, or in a container, that may open the chip's file.",
    "slice_builder_worker_addresses": "Unset TPU_PROCESS_ADDRESSES and CLOUD_TPU_TASK_ID.",
}


def trial_start(timeout_s: float = 60.0, *, program: str = XLA_START, environ: Mapping[str, str] = os.environ) -> str:
    """Start the runtime once in a child process, which gives the chips back by ending.

    Call it before the runtime is started in this process: afterwards the chips are held, and the trial fails.

    Args:
        timeout_s: after this the child and all its children are killed. Importing torch alone takes seconds.
        program: Python source that starts the runtime and raises where it can't.
        environ: the child's environment; PJRT_DEVICE=TPU is added.

    Returns:
        Empty if the runtime started, else the reason in one line, with the fix where it is a known one.
    """
    # TPU_SKIP_MDS_QUERY is passed on but never added. It makes libtpu and torch_xla take kind and topology from
    # variables instead of the metadata server. Colab, Kaggle and Kubernetes set it together with those variables; a
    # Cloud TPU VM sets neither, and with the switch alone torch_xla fails on import there and libtpu guesses. Without
    # it a machine that has no TPU blocks for minutes, which the time limit ends.
    limit = math.ceil(timeout_s) + 10
    # the alarm ends the child even if this process is killed meanwhile: the kernel delivers it, whoever holds locks
    command = [sys.executable, "-P", "-c", f"import signal\nsignal.alarm({limit})\n{program}"]
    with tempfile.TemporaryFile() as log:  # a pipe would stay open, and be waited for, as long as any grandchild lives
        child = subprocess.Popen(
            command,
            env={**environ, "PJRT_DEVICE": "TPU"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"The runtime did not answer within {timeout_s:g} s{_kill(child)}."
        except BaseException:
            _kill(child)
            raise
        if status == 0:
            return ""
        log.seek(max(0, os.fstat(log.fileno()).st_size - 65536))
        return _reason(log.read().decode(errors="replace"), status)


def _kill(child: subprocess.Popen[bytes]) -> str:
    """Kill the child's process group; returns what to add where it would not die, else an empty text."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(5)
    except ProcessLookupError:
        child.wait(5)
    except subprocess.TimeoutExpired:  # it sits in the driver, where no signal reaches it
        return f", and its process {child.pid} can't be ended"
    return ""


def _reason(log: str, status: int) -> str:
    """The line of a failed start that tells most, with the fix where it is a known one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    checks = [line[line.index("Check failed") :] for line in lines if "Check failed" in line]
    if errors:
        line = errors[-1]
    elif checks:
        line = checks[0]
    elif status < 0:
        line = f"{signal.strsignal(-status)} (signal {-status})"
    else:
        line = lines[-1] if lines else f"status {status}"
    line = line if len(line) <= 300 else line[:297] + "..."
    fix = next((fix for mark, fix in _FIXES.items() if mark in log), "")
    return f"{line.rstrip('.')}. {fix}".rstrip()
