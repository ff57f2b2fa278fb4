"""One image file to 8-bit RGB, whatever its format, mode and orientation."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from core.data.sources import open_source
from core.errors import DataError

MAX_PIXELS = 100_000_000


def load_rgb(path: Path) -> NDArray[np.uint8]:
    """Read an image upright: (height, width, 3), uint8; transparent parts on white, an animation's first frame.

    Raises:
        DataError: the file can't be read whole, or has over `MAX_PIXELS` pixels.
    """
    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels are too many")
            return np.array(to_rgb(ImageOps.exif_transpose(image)))
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"'{path}' can't be read: {error}.", fix="Remove the file or save it anew.") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in mode RGB; 16-bit and float greys keep their gradient."""
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode.startswith("I") or mode == "F":
        return Image.fromarray(_grey_to_uint8(np.asarray(image))).convert("RGB")
    if mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        colour = image.convert("RGBA")
        white = Image.new("RGBA", colour.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, colour).convert("RGB")
    return image.convert("RGB")


def _grey_to_uint8(grey: NDArray[Any]) -> NDArray[np.uint8]:
    values = np.nan_to_num(grey.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    # by the sensor's range where one fits, so that a dark image stays darker than a bright one
    ranges = (1.0, 255.0) if grey.dtype.kind == "f" else (255.0, 1023.0, 4095.0, 16383.0, 65535.0)
    top = next((top for top in ranges if high <= top), None)
    if low < 0 or top is None:
        values, top = values - low, max(high - low, 1e-12)
    return np.rint(values * (255.0 / top)).astype(np.uint8)


def show_png(spec: str, file: str, out: Path, home: Path) -> None:
    """Write `file` of a data set as the loader sees it, before resizing and augmentation, to the PNG `out`.

    Raises:
        DataError: there is no such file in the data set, it can't be read, or `out` can't be written.
    """
    root = open_source(spec, home).root
    path = root / file
    if not path.is_file() or not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"'{spec}' has no file '{file}'.", fix="Give its path relative to the data's root.")
    packed = io.BytesIO()
    Image.fromarray(load_rgb(path)).save(packed, format="PNG")
    try:
        Path(out).write_bytes(packed.getvalue())
    except OSError as error:
        raise DataError(f"'{out}' can't be written: {error.strerror}.", fix="Choose another --out.") from error
