"""How long work tells how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done ("reading images"), how much of it is done, and how much there is (0: not known)."""


def quiet(what: str, done: int, total: int) -> None:
    """Tell nobody."""


def throttled(tell: Progress, seconds: float = 0.5) -> Progress:
    """`tell`, called at most once in `seconds` while the same work goes on, and always when it ends."""
    last_what, last_at = "", 0.0

    def tell_at_times(what: str, done: int, total: int) -> None:
        nonlocal last_what, last_at
        now = time.monotonic()
        if what != last_what or now - last_at >= seconds or (total and done >= total):
            last_what, last_at = what, now
            tell(what, done, total)

    return tell_at_times
