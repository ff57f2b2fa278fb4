"""What the machine does while a run goes on: a thread that looks about once a second, and what its looks come to."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import numpy as np
import psutil
from numpy.typing import ArrayLike

from core.events import Event, MachineSampled
from core.machine.accelerators import Reader, accelerator_readers

LEAVE_S = 0.15
"""How long leaving waits for a look that is under way."""

_COLUMNS = [field.name for field in fields(MachineSampled)]
_log = logging.getLogger(__name__)


class Telemetry:
    """Emits a `MachineSampled` at each interval from a thread of its own, from entering until leaving.

    It never fails a run: what can't be read is None, a reader that fails twice in a row is dropped, and an `emit` that
    fails ends the looks. Looks are reckoned from the first one, so that they don't drift; where one takes too long,
    the next are left out.

    Processor figures are the host's: in a container `cpu_percent` and `other_cpu_percent` count what is outside it
    too. This process and its descendants are "own"; what other guests took from a virtual machine is others'.

    Args:
        emit: is called in that thread, never after leaving.
        interval_s: seconds from a look to the next.
        device_kind: whose figures are read besides: cuda (of torch's cuda:0), xla or tpu.
        readers: what to read, in place of all that is known of this machine.
    """

    def __init__(
        self,
        emit: Callable[[Event], None],
        *,
        interval_s: float = 1.0,
        device_kind: str = "cpu",
        readers: Sequence[Reader] | None = None,
    ) -> None:
        self._emit, self._interval_s, self._device_kind, self._readers = emit, interval_s, device_kind, readers
        self._failures: dict[Reader, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="telemetry", daemon=True)

    def __enter__(self) -> Telemetry:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        # a driver that hangs must not hold up the run's end
        self._thread.join(LEAVE_S)

    def _look_on(self) -> None:
        due = time.monotonic() + self._interval_s
        try:
            with ExitStack() as resources:
                readers = self._readers
                if readers is None:
                    readers = [*host_readers(), *accelerator_readers(self._device_kind, resources)]
                self._failures = dict.fromkeys(readers, 0)
                while not self._stop.wait(max(0.0, due - time.monotonic())):
                    sample = self._look()
                    if not self._stop.is_set():
                        self._emit(sample)
                    due += self._interval_s * max(1, math.ceil((time.monotonic() - due) / self._interval_s))
        except Exception:  # whatever it is, the run goes on
            _log.warning("The machine is no longer sampled.", exc_info=True)

    def _look(self) -> MachineSampled:
        values: dict[str, float] = {}
        for reader, failures in list(self._failures.items()):
            try:
                values |= reader()
                self._failures[reader] = 0
            except Exception:  # drivers and kernels answer with errors of many kinds
                self._failures[reader] += 1
                if failures:
                    _log.info("A figure of the machine is no longer read.", exc_info=True)
                    del self._failures[reader]
        return MachineSampled(**values)


def summary_of(samples: Mapping[str, ArrayLike]) -> dict[str, Any] | None:
    """What a run's samples come to.

    Args:
        samples: `at` (Unix time, growing) and fields of `MachineSampled`, as many values for each, NaN for none.

    Returns:
        `samples`: how many; `interval_s`: the median time between two, None of one sample; and for each column that has
        values {"mean", "min", "max"}. None where there are no samples.
    """
    times = np.asarray(samples["at"])
    if not times.size:
        return None
    summary: dict[str, Any] = {
        "samples": len(times),
        "interval_s": float(np.median(np.diff(times))) if len(times) > 1 else None,
    }
    for name in _COLUMNS:
        column = np.asarray(samples.get(name, []))
        known = column[np.isfinite(column)]
        if known.size:
            summary[name] = {"mean": float(known.mean()), "min": float(known.min()), "max": float(known.max())}
    return summary


# -- the host -------------------------------------------------------------------------------------------------------


def host_readers() -> list[Reader]:
    """Readers of processor and memory."""
    family = Family()
    return [
        CpuReader(family),
        lambda: {"memory_percent": float(psutil.virtual_memory().percent)},
        lambda: {"own_memory_gib": family.memory_gib()},
    ]


class Family:
    """This process and its descendants.

    psutil finds them by asking every process for its parent, each time, which is too dear for each look where there
    are thousands; here only those that are new are asked.
    """

    def __init__(self) -> None:
        head = psutil.Process()
        self._members = {head.pid: head}
        self._seen = {head.pid}

    def cpu_s(self) -> float:
        """Processor time used so far; children that have ended count in their parent."""
        return self._sum(lambda process: sum(process.cpu_times()[:4]))

    def memory_gib(self) -> float:
        """Memory in use; what processes share counts in each."""
        return self._sum(lambda process: process.memory_info().rss) / 2**30

    def _sum(self, read: Callable[[psutil.Process], float]) -> float:
        self._follow()
        total = 0.0
        for process in self._members.values():
            with contextlib.suppress(psutil.Error):  # it has ended just now
                total += read(process)
        return total

    def _follow(self) -> None:
        pids = set(psutil.pids())
        for pid in sorted(pids - self._seen):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.ppid() in self._members:
                    self._members[pid] = process
        self._members = {pid: process for pid, process in self._members.items() if pid in pids}
        self._seen = pids


class CpuReader:
    """Processor use since the call before, in percent of the whole machine: of all, of `family`, and of all others."""

    def __init__(self, family: Family) -> None:
        self._family, self._cores = family, psutil.cpu_count() or 1
        self._last = self._now()

    def __call__(self) -> dict[str, float]:
        now = self._now()
        wall_s, own_s, busy_s, total_s = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        own = _percent(own_s, wall_s * self._cores)
        if total_s <= 0:  # some sandboxes tell nothing of the host
            return {"own_cpu_percent": own}
        busy = _percent(busy_s, total_s)
        return {"cpu_percent": busy, "own_cpu_percent": own, "other_cpu_percent": max(0.0, busy - own)}

    def _now(self) -> tuple[float, float, float, float]:
        times = psutil.cpu_times()._asdict()
        # Linux counts the time of guests in that of users too
        total_s = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
        busy_s = total_s - times["idle"] - times.get("iowait", 0.0)
        return time.monotonic(), self._family.cpu_s(), busy_s, total_s


def _percent(part: float, whole: float) -> float:
    return min(100.0, max(0.0, 100 * part / whole)) if whole > 0 else 0.0
