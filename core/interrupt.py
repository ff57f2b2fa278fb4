"""Ctrl-C as a wish to stop and save."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is remembered in place of breaking off; yields what tells whether it came."""
    is_asked = False

    def handler(*_: object) -> None:
        nonlocal is_asked
        is_asked = True

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: is_asked
    finally:
        signal.signal(signal.SIGINT, before)
