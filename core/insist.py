"""What must be written at a run's end is tried again and again, since disks become full, and free again."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from core.errors import AppError

LAST_WRITE_S = 3600.0
"""Seconds for which something is tried to be written before it is given up."""
LEAVING_S = 5.0
"""As many where it is asked to end."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0
"""The pause after a write that failed, which doubles with each one, and how long it grows."""

Written = TypeVar("Written")
Failure = TypeVar("Failure", bound=AppError)


def insist(
    write: Callable[[], Written],
    failure: type[Failure],
    *,
    began: float,
    is_leaving: Callable[[], bool],
    tell: Callable[[Failure, float], None],
    leaving_s: float = LEAVING_S,
) -> Written:
    """Write, however often it must be tried.

    Args:
        failure: raised by `write` where it can't be done now.
        began: when it was tried first, as `time.monotonic` tells.
        is_leaving: whether all is about to end, so that nothing can wait for longer than `leaving_s`.
        tell: called with each failure and the seconds that are left.

    Returns:
        What `write` returns.

    Raises:
        Failure: the last one; it could not be written for `LAST_WRITE_S`.
    """
    for number in count(1):
        try:
            return write()
        except failure as error:
            left_s = began + (leaving_s if is_leaving() else LAST_WRITE_S) - time.monotonic()
            if left_s <= 0:
                raise
            tell(error, left_s)
        _pause(min(pause_after(number), left_s), is_leaving)
    raise AssertionError("count has no end")


def pause_after(failures: int) -> float:
    """Seconds to wait after so many writes that failed, from 1."""
    return min(FIRST_PAUSE_S * 2.0 ** (failures - 1), LONGEST_PAUSE_S)


def _pause(seconds: float, is_leaving: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    was_leaving = is_leaving()
    # whoever ends the process need not wait for the pause to end
    while time.monotonic() < until and is_leaving() == was_leaving:
        time.sleep(0.05)
