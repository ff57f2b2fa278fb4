"""Ctrl-C, and what else asks a process to end, as a wish to stop and save."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

WISHES = ("SIGINT", "SIGTERM", "SIGHUP")
"""Ctrl-C; kill, a container or a queue of jobs that ends; a terminal that is closed. Not all systems know each."""


class Interrupt:
    """Whether the process was asked to end.

    Attributes:
        status: of which the process ends then, as shells tell signals; 0 where it was not asked.
    """

    def __init__(self) -> None:
        self.status = 0

    def __call__(self) -> bool:
        return bool(self.status)


@contextmanager
def stop_on_interrupt() -> Iterator[Interrupt]:
    """What asks the process to end is remembered in place of ending it; yields what tells whether it came."""
    asked = Interrupt()

    def handler(number: int, _: object) -> None:
        asked.status = 128 + number

    before = {}
    for name in WISHES:
        number = getattr(signal, name, None)
        # whoever started it may want it to outlive the terminal (nohup)
        if number is not None and (name == "SIGINT" or signal.getsignal(number) is not signal.SIG_IGN):
            before[number] = signal.signal(number, handler)
    try:
        yield asked
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
