"""A run's events on their way to the store: none is lost while the store can't be written."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from core.errors import GivenUpError, StoreWriteError
from core.events import Event
from core.insist import insist
from core.store import Store
from core.words import time_in_words

AT_ONCE = 1000
"""Events in one write: where it fails, no more were made ready in vain."""

_log = logging.getLogger(__name__)


class Outbox:
    """Keeps a run's events until they are written, in the order in which they came; any thread may add some.

    Args:
        is_leaving: whether the process is about to end, so that nothing can wait for long.
    """

    def __init__(self, store: Store, run_id: str, is_leaving: Callable[[], bool] = lambda: False) -> None:
        self._store, self._run_id, self._is_leaving = store, run_id, is_leaving
        self._waiting: list[tuple[float, Event]] = []
        self._lock = threading.Lock()
        self._trouble = ""
        self._ended: float | None = None

    def add(self, at: float, event: Event) -> None:
        """Keep an event; `at` is Unix time."""
        with self._lock:
            self._waiting.append((at, event))

    def send(self) -> None:
        """Write all that waits; what can't be written stays.

        Raises:
            StoreWriteError: the store can't be written now.
        """
        while True:
            with self._lock:
                batch = self._waiting[:AT_ONCE]
            if not batch:
                return
            self._store.append_events(self._run_id, batch)
            with self._lock:
                del self._waiting[: len(batch)]

    def tried(self, error: Exception | None) -> None:
        """Say so when writing begins to fail, and when it goes well again."""
        trouble = str(error or "")
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if error is None:
            _log.warning("Run %s is written again; nothing was lost.", self._run_id)
        else:
            _log.warning("Run %s goes on, and its events are kept in memory: %s", self._run_id, error)

    def insist(self, write: Callable[[], None]) -> None:
        """Have something written at the run's end, however often it must be tried.

        Raises:
            GivenUpError: it could not be written for `LAST_WRITE_S` after the first call.
        """
        self._ended = self._ended or time.monotonic()

        def words(error: StoreWriteError) -> str:
            return f"Run {self._run_id} has ended. {error.problem} Its end and {len(self._waiting)} events"

        def tell(error: StoreWriteError, left_s: float) -> None:
            _log.warning("%s wait in memory for another %s. %s", words(error), time_in_words(left_s), error.fix)

        try:
            insist(write, StoreWriteError, began=self._ended, is_leaving=self._is_leaving, tell=tell)
        except StoreWriteError as error:
            raise GivenUpError(f"{words(error)} are given up.", fix=error.fix) from error
