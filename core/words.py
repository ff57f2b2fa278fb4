"""Numbers in words, alike wherever they are told."""

from __future__ import annotations

import re

from core.events import ForecastMade

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()<>#+\-!|~$:.&])")
_UNSEEN = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What steers a terminal, or turns the direction of all that is written behind it."""


def visible(text: str) -> str:
    """A line in which such characters are written out, as "\\x1b" and "\\n"; tabs and letters of all scripts stay."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def escaped(text: str) -> str:
    """Text in one line that markdown leaves as it is."""
    return _MARKDOWN.sub(r"\\\1", visible(" ".join(text.split())))


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


def forecast_in_words(forecast: ForecastMade) -> str:
    """ "About 1:02 min in all, 18 s an epoch (95 %: 58 s to 66 s in all), from 4 runs like this one." """
    bounds = ""
    if forecast.total_low_s is not None and forecast.total_high_s is not None:
        low, high = time_in_words(forecast.total_low_s), time_in_words(forecast.total_high_s)
        bounds = f" (95 %: {low} to {high} in all)" if low != high else ""
    about = f"About {time_in_words(forecast.total_s)} in all, {time_in_words(forecast.epoch_s)} an epoch"
    return f"{about}{bounds}, from {forecast.basis}."


def lr_in_words(lr: float) -> str:
    """0.0003 -> "3e-4", 0.00032 -> "3.2e-4", 0.012 -> "0.012"."""
    if lr >= 1e-3:
        return f"{lr:.2g}"
    digits, exponent = f"{lr:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def stage_in_words(changes: list[str]) -> str:
    """["what is trained changed to all layers", "the size of images changed to 192 px"] -> "all layers, 192 px" """
    return ", ".join(change.rpartition(" changed to ")[2] for change in changes)


def tweak_in_words(what: str, after: float) -> str:
    """ "learning rate 0.0003", "epochs 10" """
    return f"{'learning rate' if what == 'lr' else what.replace('_', ' ')} {after:.3g}"
