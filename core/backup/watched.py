"""Work on a folder that may hang, in a thread of its own that can be left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from core.backup.copying import Tick

T = TypeVar("T")


class LeftError(Exception):
    """The work was broken off."""


class Watched(Generic[T]):
    """Does the work in a daemon thread.

    Args:
        work: is handed what it calls after each piece, and breaks off where that raises.

    Attributes:
        bytes: that it has moved so far.
    """

    def __init__(self, work: Callable[[Tick], T], name: str) -> None:
        self._work, self._is_left = work, threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._moved = time.monotonic()
        self.bytes = 0
        self._thread = threading.Thread(target=self._do, name=name, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether it ended within so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def quiet_s(self) -> float:
        """Seconds since its last sign of life."""
        return time.monotonic() - self._moved

    def leave(self) -> None:
        """Have it end at its next piece; where it hangs, it goes with the process."""
        self._is_left.set()

    def result(self) -> T:
        """What the work came to, once it has ended; its error is raised here."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _do(self) -> None:
        try:
            self._result = self._work(self._tick)
        except BaseException as error:  # it is raised where the result is asked for
            self._error = error

    def _tick(self, count: int) -> None:
        self._moved = time.monotonic()
        self.bytes += count
        if self._is_left.is_set():
            raise LeftError
