"""A lock that serves those who wait in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """As `threading.Lock` in a `with` statement, but first come, first served.

    A training loop frees a lock and takes it again at once; with a plain lock another thread might never get it.
    """

    def __init__(self) -> None:
        self._guard, self._is_held = threading.Lock(), False
        self._gates: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._is_held:
                self._is_held = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._gates.append(gate)
        try:
            gate.acquire()
        except BaseException:
            self._give_up(gate)
            raise

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._gates:
                # it stays held: the next one has it now
                self._gates.popleft().release()
            else:
                self._is_held = False

    def _give_up(self, gate: threading.Lock) -> None:
        with self._guard:
            is_waiting = gate in self._gates
            if is_waiting:
                self._gates.remove(gate)
        if not is_waiting:
            self.__exit__()
