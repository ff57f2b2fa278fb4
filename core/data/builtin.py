"""The data sets that need no network: one that comes with the product, one that comes with scikit-learn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from core.data.exports import Exported, Part, export, open_export
from core.data.progress import Progress, quiet
from core.errors import DataError

_FOLDER = Path(__file__).resolve().parents[1] / "builtin"
BUILTIN: dict[str, str | None] = {"fashion-mnist": "fashion-mnist-1400.zip", "digits": None}
"""Name after `builtin:` to the file in core/builtin, or None where scikit-learn brings the data."""


def locate_builtin(name: str) -> Path | None:
    """The zip of a built-in data set, or None where it is written out from scikit-learn.

    Raises:
        DataError: there is none of that name, or scikit-learn is not installed.
    """
    if name not in BUILTIN:
        raise DataError(f"There is no built-in data set '{name}'.", fix=f"Choose one of {', '.join(BUILTIN)}.")
    file = BUILTIN[name]
    if file is None and find_spec("sklearn") is None:
        raise DataError(f"builtin:{name} needs the package scikit-learn.", fix="Install it: pip install scikit-learn.")
    return _FOLDER / file if file else None


def open_digits(home: Path, progress: Progress = quiet) -> Exported:
    """scikit-learn's handwritten digits, exported below `home`/data: 1,797 greys of 8 x 8, 0..16 made 0..255."""
    folder = home / "data" / "builtin-digits"
    if (before := open_export(folder)) is not None:
        return before
    import numpy as np
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    images = zip(pixels, map(int, digits.target), strict=True)
    about = "1,797 handwritten digits of 8 x 8 pixels from scikit-learn; a larger network sees them much enlarged."
    return export(folder, [str(digit) for digit in range(10)], about, [Part("", images, len(pixels))], progress)
