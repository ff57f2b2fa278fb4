"""The data sets that come with the product."""

from __future__ import annotations

from pathlib import Path

from core.errors import DataError

_FOLDER = Path(__file__).resolve().parents[1] / "builtin"
BUILTIN = {"fashion-mnist": "fashion-mnist-1400.zip"}
"""Name after `builtin:` to the file in core/builtin."""


def builtin_zip(name: str) -> Path:
    """The zip of a built-in data set.

    Raises:
        DataError: there is none of that name.
    """
    if name not in BUILTIN:
        raise DataError(f"There is no built-in data set '{name}'.", fix=f"Choose one of {', '.join(BUILTIN)}.")
    return _FOLDER / BUILTIN[name]
