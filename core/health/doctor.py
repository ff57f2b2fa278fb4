"""Looks at everything that a run or the dashboard needs, and says what to do about what is wrong."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from core import runtime
from core.health import checks, home_checks
from core.health.findings import Finding, Report, by_state
from core.health.product import Product, ask

if TYPE_CHECKING:
    from core.devices.base import DeviceInfo
    from core.store import Store

PRODUCT_S = 90.0
"""A child needs seconds to load torch, and on a machine that is busy a minute."""
TPU_PRODUCT_S = 150.0
"""The child tries the TPU in a child of its own first, which has a minute."""

Look = Callable[[], list[Finding]]
Tell = Callable[[str, int, int], None]
"""Is told the check that has just ended, how many have, and how many there are."""

_DEVICES = ("cpu", "cuda", "mps", "xla", "tpu")
_log = logging.getLogger(__name__)


def examine(home: Path, store: Store | None = None, tell: Tell = lambda name, done, total: None) -> Report:
    """Look at everything, side by side; a look that fails is a finding too.

    Args:
        home: the folder of runs and caches.
        store: of that folder, where the process has it open; else it is opened here.
        tell: is called in this thread.
    """
    began = time.monotonic()
    here = runtime.find_runtime()
    light: dict[str, Look] = {
        "packages": partial(checks.versions, here.kind),
        "disk": lambda: home_checks.disk(home, shutil.disk_usage(_there(home)).free),
        "database": partial(home_checks.database, home),
        "backup": partial(_backup, home, here.place),
        "network": checks.network,
        "tpu": _tpu,
        "environment": lambda: checks.environment(os.environ, here.kind),
        "tunnel": lambda: checks.tunnels(here.place, os.environ.get("PATH", ""), home / "bin"),
    }
    heavy: dict[str, Look] = {"memory": _memory, "home folder": partial(_home_folder, home)}
    heavy |= {f"device {kind}": partial(_device, kind, here.kind, home, store) for kind in _DEVICES}
    total = len(light) + len(heavy)
    # loading torch holds the interpreter's lock so long that hosts would seem not to answer
    found = _side_by_side(light, tell, 0, total)
    found |= _side_by_side(heavy, tell, len(light), total)
    findings = [finding for name in (*light, *heavy) for finding in found[name]]
    return Report(by_state(findings), here.words, str(home), time.monotonic() - began)


def _side_by_side(looks: dict[str, Look], tell: Tell, done: int, total: int) -> dict[str, list[Finding]]:
    answers: queue.SimpleQueue[tuple[str, list[Finding]]] = queue.SimpleQueue()
    for name, look in looks.items():
        # daemons: a process that ends need not wait for them
        threading.Thread(
            target=lambda name=name, look=look: answers.put((name, _looked(name, look))),
            name=f"doctor-{name}",
            daemon=True,
        ).start()
    found: dict[str, list[Finding]] = {}
    while len(found) < len(looks):
        name, findings = answers.get()
        found[name] = findings
        tell(name, done + len(found), total)
    return found


def _looked(name: str, look: Look) -> list[Finding]:
    try:
        return look()
    except Exception as error:  # whatever is broken on this machine is what the doctor is asked for
        _log.info("The look at %s failed.", name, exc_info=True)
        said = (str(error).strip().splitlines() or [""])[0]
        found = f"It could not be looked at: {type(error).__name__}: {said}".rstrip(": ")
        fix = "Run python -m core.runtime --install." if isinstance(error, ImportError) else "The log says more."
        return [Finding(name, "problem", f"{found.rstrip('.')}.", fix)]


# -- devices --------------------------------------------------------------------------------------------------------


def _device(kind: str, runtime_kind: str, home: Path, store: Store | None) -> list[Finding]:
    from core.devices import list_devices

    info = next((info for info in list_devices() if info.kind == kind), None)
    if info is None:
        return []
    if not info.available:
        return device(info, runtime_kind)
    with _turn(info, home, store) as why:
        return device(info, runtime_kind, why)


def device(
    info: DeviceInfo, runtime_kind: str, in_use: str = "", multiply: Callable[[str, float], Product] | None = None
) -> list[Finding]:
    """What one device kind can do.

    Args:
        runtime_kind: tpu, gpu or cpu: what accelerator shows on this machine.
        in_use: why it must not be tried now, as a sentence; "" where it may.
        multiply: tries it in a child process, within the seconds given.
    """
    check = f"device {info.kind}"
    several = f"{info.count} x " if info.count > 1 else ""
    memory = f", {info.memory_gib:g} GiB" if info.memory_gib else ""
    name = f"{several}{info.name}{memory}"
    is_expected = (runtime_kind, info.kind) in (("gpu", "cuda"), ("tpu", "xla"))
    if not info.available:
        said, _, fix = info.reason.partition(". ")
        if is_expected:
            fix = fix or "Run python -m core.runtime --install, or install a torch that is built for this machine."
            return [Finding(check, "problem", f"It shows on this machine and can't be used: {said.rstrip('.')}.", fix)]
        return [Finding(check, "ok", f"Not here: {said.rstrip('.')}.")]
    if in_use:
        return [Finding(check, "ok", f"{name}. {in_use}")]
    limit_s = TPU_PRODUCT_S if info.kind in ("xla", "tpu") and runtime_kind == "tpu" else PRODUCT_S
    product = (multiply or ask)(info.kind, limit_s)
    if product.problem:
        found = f"{name}: a matrix product fails: {product.problem.rstrip('.')}."
        fix = "Restart the machine, or train on another device." if info.kind != "cpu" else "Install torch anew."
        return [Finding(check, "problem", found, fix)]
    came = (
        f"A matrix product took {1000 * product.seconds:.0f} ms and is right, {product.start_s:.1f} s after the start."
    )
    return [Finding(check, "ok", f"{name}. {came}")]


@contextmanager
def _turn(info: DeviceInfo, home: Path, store: Store | None) -> Iterator[str]:
    """Yields why the device must be left alone, as a sentence; "" where it may be tried meanwhile.

    No two processes can have a TPU, so that its lock is held: a run that begins meanwhile waits for it.
    """
    from core.devices.xla import holds_tpu, wants_tpu
    from core.errors import StoreError
    from core.store import Store

    is_tpu = info.kind in ("xla", "tpu") and wants_tpu()
    if is_tpu and holds_tpu():
        yield "This process has started it, so that no other can try it."
        return
    with ExitStack() as stack:
        used = store
        if used is None and (home / "runs.sqlite").exists():
            # the look at the home folder tells why it can't be opened
            with suppress(StoreError):
                used = stack.enter_context(closing(Store(home)))
        if used is None:
            yield ""
        elif used.is_held(info.kind):
            yield "A run has it, so it was not tried."
        elif not is_tpu:
            yield ""
        elif used.list_runs(active_only=True, with_probes=True):
            yield "Runs are under way or wait, so it was not tried."
        else:
            yield "" if stack.enter_context(_held(used, info.kind)) else "A run has it, so it was not tried."


@contextmanager
def _held(store: Store, kind: str) -> Iterator[bool]:
    """Hold a device as a run does; yields False where a run was faster."""
    from core.config import make_config

    run_id = store.create_run(make_config("quick", device=kind), own=True, purpose="probe", work="doctor")
    try:
        yield store.claim(run_id, kind)
    finally:
        store.end_run(run_id, "stopped")
        store.delete(run_id)


# -- the rest -------------------------------------------------------------------------------------------------------


def _memory() -> list[Finding]:
    from core.trials.host_memory import memory_left

    return home_checks.memory(memory_left())


def _home_folder(home: Path) -> list[Finding]:
    from core.machine.facts import disk_of

    return home_checks.home_folder(home, disk_of)


def _tpu() -> list[Finding]:
    from core.machine.tpu import find_tpu, library_problem

    return checks.tpu(find_tpu(), library_problem())


def _backup(home: Path, place: str) -> list[Finding]:
    from core.backup import BackupStatus, default_backup, status

    named = default_backup()
    return checks.backup(status(home) or (BackupStatus(str(named)) if named else None), place, time.time())


def _there(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())
