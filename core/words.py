"""Numbers in words, alike wherever they are told."""

from __future__ import annotations


def time_in_words(seconds: float) -> str:
    """0.02 -> "20 ms", 3.2 -> "3.2 s", 74 -> "74 s", 125 -> "2:05 min", 3725 -> "1:02:05 h"."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"


def percent_in_words(percent: float) -> str:
    return f"{percent:.0f} %"


def phase_in_words(phase: str) -> str:
    """ "data_wait" -> "data wait" """
    return "set-up" if phase == "setup" else phase.replace("_", " ")


def counted(number: int, noun: str) -> str:
    """ "1 program", "4 programs" """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(words: list[str]) -> str:
    """ "a, b and c" """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
