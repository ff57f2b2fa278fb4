"""The doctor's looks at this machine in the background: one at a time, shared by all sessions, the last remembered."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.health.findings import Report
    from core.store import Store

_log = logging.getLogger(__name__)


class Checkup:
    """One look at everything.

    Attributes:
        state: running, done or failed.
        progress: the check that ended last, how many have, and how many there are (0: not known yet).
        report: what was found, once it is done.
        problem: why it failed, else "".
        at: when it was over, in Unix seconds.
    """

    def __init__(self) -> None:
        self.state = "running"
        self.progress: tuple[str, int, int] = ("", 0, 0)
        self.report: Report | None = None
        self.problem = ""
        self.at = 0.0
        self._over = threading.Event()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is over within the time."""
        return self._over.wait(timeout_s)

    def run(self, store: Store) -> None:
        """Look, in the calling thread."""
        # this brings torch, which the page that asks need not wait for
        from core.health.doctor import examine

        try:
            self.report = examine(store.home, store, self._tell)
            self.state = "done"
        except Exception as error:
            _log.exception("The look at the system failed")
            self.problem = f"The look failed: {type(error).__name__}: {error}".splitlines()[0]
            self.state = "failed"
        finally:
            self.at = time.time()
            self._over.set()

    def _tell(self, name: str, done: int, total: int) -> None:
        self.progress = name, done, total


class Checkups:
    """All looks of the process; any thread may call it.

    Args:
        store: the process's own.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._last: Checkup | None = None

    @property
    def last(self) -> Checkup | None:
        """The newest look, whatever its state; None before the first."""
        with self._lock:
            return self._last

    def start(self) -> Checkup:
        """Look in a thread of its own, or join the look that goes on."""
        with self._lock:
            if self._last is not None and self._last.state == "running":
                return self._last
            checkup = self._last = Checkup()
        threading.Thread(target=checkup.run, args=(self._store,), name="checkup", daemon=True).start()
        return checkup
