"""Scans of data sets in the background: one at a time a SPEC, shared by all sessions, the last few remembered."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from core.data.dataset import Dataset
from core.errors import AppError

REMEMBERED = 4
T = TypeVar("T")
_log = logging.getLogger(__name__)
_numbers = itertools.count(1)


class ScanKey(NamedTuple):
    """What a scan's result depends on, beside the files."""

    spec: str
    seed: int
    val_percent: int
    val_duplicates: str


class _StoppedError(Exception):
    """Somebody stopped the scan."""


class ScanJob:
    """One scan.

    Attributes:
        number: its own, in this process.
        state: running, done or failed.
        progress: what is being done, how much of it is done, and how much there is (0: not known).
        dataset: what was found, once it is done.
        problem, fix: why it failed, else "".
    """

    def __init__(self, key: ScanKey) -> None:
        self.key, self.number = key, next(_numbers)
        self.state = "running"
        self.progress: tuple[str, int, int] = ("opening the data", 0, 0)
        self.dataset: Dataset | None = None
        self.problem = self.fix = ""
        self._stopped, self._over = threading.Event(), threading.Event()
        self._made: dict[str, Any] = {}
        self._lock = threading.RLock()

    def once(self, make: Callable[[Dataset], T]) -> T:
        """What a named function makes of the data set, made at the first call and then remembered."""
        assert self.dataset is not None, "asked before the scan was done"
        name = f"{make.__module__}.{make.__qualname__}"
        with self._lock:
            if name not in self._made:
                self._made[name] = make(self.dataset)
            found: T = self._made[name]
        return found

    def stop(self) -> None:
        """Ask it to end; what it has read is remembered for the next one."""
        self._stopped.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is over within the time."""
        return self._over.wait(timeout_s)

    def tell(self, what: str, done: int, total: int) -> None:
        """The scan's progress; ends a scan that was stopped."""
        if self._stopped.is_set():
            raise _StoppedError
        self.progress = (what, done, total)

    def run(self, home: Path, anew: bool) -> None:
        """Open the source and scan it, in the calling thread."""
        # these bring torch, which the page that starts a scan need not wait for
        from core.data.scan import scan
        from core.data.sources import open_source

        spec, seed, val_percent, val_duplicates = self.key
        source = open_source(spec, home, self.tell)
        self.dataset = scan(
            source,
            home=home,
            seed=seed,
            val_percent=val_percent,
            val_duplicates=val_duplicates,
            progress=self.tell,
            anew=anew,
        )
        self.state = "done"

    def fail(self, problem: str, fix: str) -> None:
        """It gives no data set, and this is why."""
        self.problem, self.fix = problem, fix
        self.state = "failed"

    def end(self) -> None:
        """Nobody need wait for it any more."""
        self._over.set()


class Scans:
    """All scans of the process; any thread may call it.

    Args:
        home: where unpacked data and what is known of files lie.
        admit: is shown each SPEC before anything of it is looked at, and raises where it must not be.
    """

    def __init__(self, home: Path, admit: Callable[[str], None] = lambda spec: None) -> None:
        self._home, self._admit = home, admit
        self._jobs: OrderedDict[ScanKey, ScanJob] = OrderedDict()
        self._busy: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def find(self, key: ScanKey) -> ScanJob | None:
        """The last scan of these settings, whatever its state, where it is still remembered."""
        with self._lock:
            if key in self._jobs:
                self._jobs.move_to_end(key)
            return self._jobs.get(key)

    def scan(self, key: ScanKey, *, anew: bool = False) -> ScanJob:
        """Start a scan in a thread of its own, or join the one of these settings that runs.

        Args:
            anew: decode all images again, whether or not they are known.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is not None and job.state == "running":
                return job
            job = self._jobs[key] = ScanJob(key)
            self._jobs.move_to_end(key)
            self._forget()
            busy = self._busy.setdefault(key.spec, threading.Lock())
        threading.Thread(target=self._run, args=(job, anew, busy), name=f"scan-{job.number}", daemon=True).start()
        return job

    def is_reading(self, spec: str) -> bool:
        """Whether a scan of these data runs."""
        with self._lock:
            return any(job.key.spec == spec and job.state == "running" for job in self._jobs.values())

    def close(self) -> None:
        """Stop all that run; none is waited for."""
        with self._lock:
            for job in self._jobs.values():
                job.stop()

    def _forget(self) -> None:
        over = [key for key, job in self._jobs.items() if job.state != "running"]
        for key in over[: max(0, len(self._jobs) - REMEMBERED)]:
            del self._jobs[key]

    def _run(self, job: ScanJob, anew: bool, busy: threading.Lock) -> None:
        try:
            self._admit(job.key.spec)
            with busy:
                job.run(self._home, anew)
        except _StoppedError:
            job.fail("The scan was stopped.", "Look at the data again to go on from there.")
        except AppError as error:
            job.fail(error.problem, error.fix)
        except Exception as error:
            _log.exception("The scan of %s failed", job.key.spec)
            job.fail(f"The scan failed: {type(error).__name__}: {error}".splitlines()[0], "The server's log says more.")
        finally:
            job.end()
