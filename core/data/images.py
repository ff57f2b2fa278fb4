"""One image file to 8-bit RGB, whatever its format, mode and orientation."""

from __future__ import annotations

import io
import threading
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from torch.nn import functional

from core.data.tree import find_file
from core.errors import DataError

MAX_PIXELS = 100_000_000
"""Pictures with more pixels are left out: one would take gigabytes."""
BIG_PIXELS = 20_000_000
"""Of pictures with more pixels, one is decoded at a time."""
_NOT_READ_HERE = {"EPS", "WMF", "PDF", "MPEG", "BUFR", "GRIB", "HDF5", "FITS"}
_RAW_IN_TIFF = {"dng", "cr2", "nef", "nrw", "arw", "srf", "sr2", "orf", "rw2", "pef", "raw"}
_ORIENTATION = 0x0112
_START_OF_SCAN = 0xDA
_big_picture = threading.Lock()


class UnreadableError(Exception):
    """A file that gives no picture.

    Args:
        why: unsupported_format, too_large, truncated, or not_an_image.
        detail: what the decoder said.
    """

    def __init__(self, why: str, detail: str = "") -> None:
        super().__init__(detail or why)
        self.why = why


@dataclass(frozen=True)
class Decoded:
    """A picture, upright: pixels (h, w, 3) uint8, perhaps smaller than the file's own width and height."""

    pixels: NDArray[np.uint8]
    width: int
    height: int


def decode(content: bytes, extension: str = "", at_least: int | None = None) -> Decoded:
    """The picture in a file's bytes, upright, as 8-bit RGB.

    Transparent parts stand on white; an animation gives its first frame; deep greys keep their gradient.

    Args:
        extension: of the file, without its dot; tells a camera's raw file from a TIFF.
        at_least: large JPEGs may be decoded at a half, a quarter or an eighth of their size as long as the short side
            keeps twice this many pixels; None decodes the whole size.

    Raises:
        UnreadableError: the bytes are no picture that can be read here, or not a whole one.
    """
    try:
        if size := _plain_jpeg_size(content):
            with _room_for(*size):
                return _decode_jpeg(content, *size, at_least)
        with Image.open(io.BytesIO(content), formats=_formats()) as image:
            if image.format == "TIFF" and extension.lower() in _RAW_IN_TIFF:
                raise UnreadableError("unsupported_format")
            with _room_for(*image.size):
                pixels = np.array(to_rgb(ImageOps.exif_transpose(image)))
                return Decoded(pixels, pixels.shape[1], pixels.shape[0])
    except UnreadableError:
        raise
    except Image.DecompressionBombError as error:
        raise UnreadableError("too_large", str(error)) from error
    except UnidentifiedImageError as error:
        raise UnreadableError("not_an_image", "no picture format that can be read") from error
    except MemoryError as error:
        raise UnreadableError("too_large", "not enough memory") from error
    except Exception as error:  # decoders meet damaged bytes with errors of many kinds
        raise UnreadableError("truncated", str(error)) from error


def load_rgb(path: Path, at_least: int | None = None) -> NDArray[np.uint8]:
    """Read an image file as `decode` does: (h, w, 3) uint8.

    Raises:
        DataError: the file can't be read, or not whole, or has over `MAX_PIXELS` pixels.
    """
    try:
        return decode(path.read_bytes(), path.suffix[1:], at_least).pixels
    except (OSError, UnreadableError) as error:
        raise DataError(f"'{path}' can't be read: {error}.", fix="Remove the file or save it anew.") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in mode RGB; 16-bit, 32-bit and float greys keep their gradient."""
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode.startswith("I") or mode == "F":
        return Image.fromarray(_grey_to_uint8(np.asarray(image))).convert("RGB")
    if mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        colour = image.convert("RGBA")
        white = Image.new("RGB", colour.size, (255, 255, 255))
        white.paste(colour, mask=colour.getchannel("A"))
        return white
    if mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        return ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB") or image
    return image.convert("RGB")


def resize(image: NDArray[np.uint8], height: int, width: int, interpolation: str) -> NDArray[np.uint8]:
    """Resize (h, w, 3) with antialias, within one grey level of Pillow and four times faster.

    Args:
        interpolation: bilinear or bicubic.
    """
    if image.shape[:2] == (height, width):
        return image
    # torch warns of arrays that it could write to and must not
    whole = np.ascontiguousarray(image) if image.flags.writeable else image.copy()
    # numpy's own new axis has a stride of 0, in which torch would not see channels last and would transpose the result
    tensor = torch.from_numpy(whole).unsqueeze(0).permute(0, 3, 1, 2)
    resized = functional.interpolate(tensor, (height, width), mode=interpolation, antialias=True)
    return resized.permute(0, 2, 3, 1)[0].contiguous().numpy()


def show_png(root: Path, file: str, out: Path) -> None:
    """Write `file` of a data set as the loader sees it, before resizing and augmentation, to the PNG `out`.

    Args:
        file: relative to `root`, in either Unicode spelling.

    Raises:
        DataError: there is no such file in the data set, it can't be read, or `out` can't be written.
    """
    path = find_file(root, file)
    if path is None:
        raise DataError(f"'{root}' has no file '{file}'.", fix="Give its path relative to the data's root.")
    packed = io.BytesIO()
    Image.fromarray(load_rgb(Path(path))).save(packed, format="PNG")
    try:
        Path(out).write_bytes(packed.getvalue())
    except OSError as error:
        raise DataError(f"'{out}' can't be written: {error.strerror}.", fix="Choose another --out.") from error


@cache
def _formats() -> list[str]:
    # our own limit is told in a report, not on stderr
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    Image.init()
    return [name for name in Image.OPEN if name not in _NOT_READ_HERE]


def _room_for(width: int, height: int) -> AbstractContextManager[Any]:
    """What to hold while a picture of this size is decoded.

    Raises:
        UnreadableError: it has over `MAX_PIXELS` pixels.
    """
    if width * height > MAX_PIXELS:
        raise UnreadableError("too_large", f"{width} x {height} pixels are too many")
    return _big_picture if width * height > BIG_PIXELS else nullcontext()


def _plain_jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Width and height of a grey or colour JPEG as it lies in the file; None for anything else."""
    if content[:3] != b"\xff\xd8\xff":
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content, strict=False)
    except ValueError:
        return None
    return (width, height) if colours in ("YCbCr", "Gray") else None


def _decode_jpeg(content: bytes, width: int, height: int, at_least: int | None) -> Decoded:
    orientation = _orientation(content)
    short = min(width, height)
    options: dict[str, Any] = {}
    if at_least is not None and short >= 4 * at_least:
        # the smallest of libjpeg's scales that keeps twice the pixels, so that the antialiased resize still decides
        scale = next(scale for scale in (8, 4, 2) if short >= 2 * scale * at_least or scale == 2)
        options = {"min_height": height // scale, "min_width": width // scale}
    try:
        pixels = simplejpeg.decode_jpeg(content, "RGB", strict=True, **options)
    except ValueError as error:
        # bytes between two markers harm nothing; what else libjpeg warns of is a part that it filled with grey
        if "extraneous" not in str(error):
            raise
        pixels = simplejpeg.decode_jpeg(content, "RGB", strict=False, **options)
    if orientation > 4:
        width, height = height, width
    return Decoded(_upright(pixels, orientation), width, height)


def _orientation(content: bytes) -> int:
    # most JPEGs have no EXIF block, and reading one takes a twentieth of the time of decoding
    if not _has_exif(content):
        return 1
    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # a damaged EXIF block is no damage to the picture
        return 1


def _has_exif(content: bytes) -> bool:
    """Whether a segment with EXIF data comes before a JPEG's image data; other segments are stepped over."""
    place = 2
    while content[place : place + 1] == b"\xff" and content[place + 1] != _START_OF_SCAN:
        if content[place + 4 : place + 10] == b"Exif\0\0":
            return True
        place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")
    return False


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Undo an EXIF orientation, 1 to 8, as `ImageOps.exif_transpose` does."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _grey_to_uint8(grey: NDArray[Any]) -> NDArray[np.uint8]:
    values = np.nan_to_num(grey.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    # by the sensor's range where one fits, so that a dark image stays darker than a bright one
    ranges = (1.0, 255.0) if grey.dtype.kind == "f" else (255.0, 1023.0, 4095.0, 16383.0, 65535.0)
    top = next((top for top in ranges if high <= top), None)
    if low < 0 or top is None:
        values, top = values - low, max(high - low, 1e-12)
    scaled: NDArray[np.uint8] = np.rint(values * (255.0 / top)).astype(np.uint8)
    return scaled
