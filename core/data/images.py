"""Any picture that Pillow reads, as upright 8-bit RGB."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from core.errors import DataError

MAX_PIXELS = 100_000_000
Pixels = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]


class UnusableImage(Exception):
    """A file that can't be used; `why` is one word for the report."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def load_rgb(path: Path) -> Pixels:
    """Read a picture as the model sees it before resizing.

    EXIF orientation is applied, transparency lies over white, 16- and 32-bit and float pictures
    keep their gradient, an animation gives its first frame.

    Returns:
        (height, width, 3), uint8.

    Raises:
        UnusableImage: zero_bytes, not_an_image, truncated, damaged or too_large.
    """
    if path.stat().st_size == 0:
        raise UnusableImage("zero_bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            picture = Image.open(path)
    except Image.DecompressionBombError as error:
        raise UnusableImage("too_large") from error
    except (UnidentifiedImageError, ValueError, SyntaxError) as error:
        raise UnusableImage("truncated" if _has_picture_signature(path) else "not_an_image") from error
    except OSError as error:
        raise UnusableImage("truncated") from error
    with picture:
        if picture.width * picture.height > MAX_PIXELS:
            raise UnusableImage("too_large")
        try:
            picture.load()
            return np.asarray(_to_rgb(ImageOps.exif_transpose(picture)))
        except (OSError, EOFError, SyntaxError) as error:
            raise UnusableImage("truncated") from error
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise UnusableImage("damaged") from error


def show_png(spec: str, file: str, out: Path, home: Path) -> None:
    """Write one image of a data set as the loader reads it.

    Raises:
        DataError: no such file in the data, or it can't be used.
    """
    from core.data.sources import open_source

    root = open_source(spec, home).root
    path = (root / file).resolve()
    if not path.is_relative_to(root.resolve()) or not path.is_file():
        raise DataError(f"There is no file '{file}' in '{spec}'.", fix="See python -m core scan SPEC --files.")
    try:
        Image.fromarray(load_rgb(path)).save(out, format="PNG")
    except UnusableImage as error:
        raise DataError(f"'{file}' can't be used: {error.why}.", fix="Choose another file.") from error


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith(("I", "F")):
        return Image.fromarray(_stretched(np.asarray(picture, dtype=np.float64))).convert("RGB")
    has_alpha = picture.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in picture.info
    if has_alpha:
        layer = picture.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return picture.convert("RGB")


def _stretched(values: np.ndarray) -> np.ndarray:
    """Grey values of more than 8 bits as uint8, over the range that the picture uses when it needs one."""
    values = np.nan_to_num(values)
    low, high = float(values.min()), float(values.max())
    if low >= 0 and 1 < high <= 255:
        return values.round().astype(np.uint8)
    if low >= 0 and high <= 1:
        return (values * 255).round().astype(np.uint8)
    if low >= 0 and 255 < high <= 65535:
        return (values / 257).round().astype(np.uint8)
    return ((values - low) / max(high - low, 1e-12) * 255).round().astype(np.uint8)


def _has_picture_signature(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(12)
    signatures = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*")
    return head.startswith(signatures) or (head[:4] == b"RIFF" and head[8:] == b"WEBP")
