"""One image file to 8-bit RGB, whatever its format, mode and orientation."""

from __future__ import annotations

import io
import logging
import re
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

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
one_big_picture = threading.RLock()
"""Held while a big picture is in memory."""
_NOT_READ_HERE = {"EPS", "WMF", "PDF", "MPEG", "BUFR", "GRIB", "HDF5", "FITS"}
_REDUCIBLE = {"RGB", "RGBA", "L", "LA", "CMYK"}
_ORIENTATION = 0x0112
_TIFF_BITS, _TIFF_PHOTOMETRIC, _TIFF_PLANES = 258, 262, 284
_FRAME_MARKERS = {0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
_START_OF_SCAN = 0xDA
_DAMAGE = re.compile("premature end|bad arithmetic|bad Huffman|instead of RST", re.IGNORECASE)
"""libjpeg's warnings of pixels that it had to invent; it warns of harmless oddities too."""
_EXTRANEOUS = re.compile(r"(\d+) extraneous bytes")
_HOLE = bytes(512)
"""A run of zeros of this length in a JPEG that libjpeg warns of is a part that was never written."""


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


def decode(content: bytes, at_least: int | None = None) -> Decoded:
    """The picture in a file's bytes, upright, as 8-bit RGB.

    Transparent parts stand on white; an animation gives its first frame; deep greys keep their gradient.

    Args:
        at_least: large pictures may be made smaller on the way as long as the short side keeps twice this many pixels;
            None keeps the whole size.

    Raises:
        UnreadableError: the bytes are no picture that can be read here, or not a whole one.
    """
    try:
        if size := _plain_jpeg_size(content):
            with _room_for(*size):
                return _decode_jpeg(content, *size, at_least)
        with Image.open(io.BytesIO(content), formats=_formats()) as image, _room_for(*image.size):
            _refuse_what_is_read_wrong(image)
            return _decode_other(image, content, at_least)
    except UnreadableError:
        raise
    except Image.DecompressionBombError as error:
        raise UnreadableError("too_large", str(error)) from error
    except UnidentifiedImageError as error:
        is_of_other_kind = _is_unknown_kind(content) or _is_deep_jpeg(content)
        why = "unsupported_format" if is_of_other_kind else "not_an_image"
        raise UnreadableError(why, "no picture format that can be read") from error
    except MemoryError as error:
        raise UnreadableError("too_large", "not enough memory") from error
    except Exception as error:  # decoders meet damaged bytes with errors of many kinds
        raise UnreadableError("unsupported_format" if _is_deep_jpeg(content) else "truncated", str(error)) from error


def load_rgb(path: Path, at_least: int | None = None) -> NDArray[np.uint8]:
    """Read an image file as `decode` does: (h, w, 3) uint8.

    Raises:
        DataError: the file can't be read, or not whole, or has over `MAX_PIXELS` pixels.
    """
    try:
        return decode(path.read_bytes(), at_least).pixels
    except (OSError, UnreadableError) as error:
        raise DataError(f"'{path}' can't be read: {error}.", fix="Remove the file or save it anew.") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in mode RGB; 16-bit, 32-bit and float greys keep their gradient."""
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode.startswith("I") or mode == "F":
        return Image.fromarray(_grey_to_uint8(image)).convert("RGB")
    if mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        colour = image if mode == "RGBA" else image.convert("RGBA")
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
    # what is wrong with a file is told in a report, not on stderr
    warnings.filterwarnings("ignore", module=r"PIL\.")
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    Image.init()
    return [name for name in Image.OPEN if name not in _NOT_READ_HERE]


def _room_for(width: int, height: int) -> AbstractContextManager[Any]:
    """What to hold while a picture of this size is decoded.

    Raises:
        UnreadableError: it has over `MAX_PIXELS` pixels.
    """
    if width * height > MAX_PIXELS:
        raise UnreadableError("too_large", f"{width} x {height} pixels are too many")
    return one_big_picture if width * height > BIG_PIXELS else nullcontext()


def _plain_jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Width and height of a grey or colour JPEG of 8 bits as it lies in the file; None for anything else."""
    frame = _frame(content)
    if frame is None or frame[0] != 8 or frame[3] not in (1, 3) or not frame[1] * frame[2]:
        return None
    return frame[2], frame[1]


def _frame(content: bytes) -> tuple[int, int, int, int] | None:
    """Bits, height, width and number of colours that a JPEG declares; None where it is none, or is cut before."""
    if content[:2] != b"\xff\xd8":
        return None
    place = next((place for marker, place in _segments(content) if marker in _FRAME_MARKERS), None)
    if place is None or place + 10 > len(content):
        return None
    bits, height, width, colours = struct.unpack(">BHHB", content[place + 4 : place + 10])
    return bits, height, width, colours


def _decode_other(image: Image.Image, content: bytes, at_least: int | None) -> Decoded:
    image.load()
    if image.format == "PNG":
        # loading stops at the last pixel and leaves the checksums of the image data alone
        with Image.open(io.BytesIO(content), formats=["PNG"]) as again:
            again.verify()
    if image.format == "JPEG" and image.mode == "CMYK":
        # Pillow does not hand on what libjpeg warns of
        _checked_jpeg(content, "CMYK")
    ImageOps.exif_transpose(image, in_place=True)
    width, height = image.size
    if at_least is not None and min(image.size) >= 8 * at_least and image.mode in _REDUCIBLE:
        image = image.reduce(min(image.size) // (4 * at_least))
    return Decoded(np.array(to_rgb(image)), width, height)


def _refuse_what_is_read_wrong(image: Image.Image) -> None:
    """Pillow mixes up the colours of TIFFs that keep 16-bit planes apart."""
    tags = getattr(image, "tag_v2", {})
    if tags.get(_TIFF_PLANES, 1) == 2 and 16 in np.atleast_1d(tags.get(_TIFF_BITS, 8)):
        raise UnreadableError("unsupported_format", "a TIFF with separate planes of 16 bits")


def _is_unknown_kind(content: bytes) -> bool:
    """Whether bytes that Pillow does not know are a TIFF whose directory is there, of a kind that it can't read."""
    order: Literal["little", "big"] = "little" if content[:2] == b"II" else "big"
    is_tiff = content[:4] in (b"II*\0", b"MM\0*")
    return is_tiff and 8 <= int.from_bytes(content[4:8], order) < len(content) - 2


def _decode_jpeg(content: bytes, width: int, height: int, at_least: int | None) -> Decoded:
    orientation = _orientation(content)
    short = min(width, height)
    options: dict[str, Any] = {}
    if at_least is not None and 4 * short >= 5 * at_least:
        # colours at half resolution are spread without interpolation: a tenth faster, and of a picture that is then
        # made smaller it leaves 51 dB
        options = {"fastupsample": True}
    if at_least is not None and short >= 4 * at_least:
        # the smallest of libjpeg's scales that keeps twice the pixels, so that the antialiased resize still decides
        scale = next(scale for scale in (8, 4, 2) if short >= 2 * scale * at_least or scale == 2)
        options |= {"min_height": height // scale, "min_width": width // scale}
    pixels = _checked_jpeg(content, "RGB", **options)
    if orientation > 4:
        width, height = height, width
    return Decoded(_upright(pixels, orientation), width, height)


def _checked_jpeg(content: bytes, colours: str, **options: Any) -> NDArray[np.uint8]:
    """The pixels of a JPEG that is whole.

    Raises:
        ValueError: it is damaged, or a part of it was never written.
    """
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(content, colours, strict=True, **options)
    except ValueError as error:
        told = str(error)
        extraneous = _EXTRANEOUS.search(told)
        # a few bytes between two markers harm nothing; many are the rest of a picture that went wrong
        is_much = extraneous is not None and int(extraneous[1]) > max(64, min(4096, len(content) // 10))
        if _DAMAGE.search(told) or is_much or content.find(_HOLE, _image_data(content)) >= 0:
            raise
        pixels = _leniently(content, colours, **options)
    return pixels


def _leniently(content: bytes, colours: str, **options: Any) -> NDArray[np.uint8]:
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(content, colours, strict=False, **options)
    except ValueError:
        # an oddity before the image data, such as a colour profile in pieces that don't fit
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            pixels = np.array(image.convert(colours))
    return pixels


def _image_data(content: bytes) -> int:
    """Where the segments of a JPEG end and its image data begin."""
    ends = [place + 2 + int.from_bytes(content[place + 2 : place + 4], "big") for _, place in _segments(content)]
    return ends[-1] if ends else 2


def _segments(content: bytes) -> Iterator[tuple[int, int]]:
    """Marker and place of each segment of a JPEG before its image data."""
    place = 2
    while content[place : place + 1] == b"\xff" and place + 4 <= len(content):
        marker = content[place + 1]
        if marker == _START_OF_SCAN:
            return
        yield marker, place
        place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")


def _is_deep_jpeg(content: bytes) -> bool:
    """Whether the bytes are a JPEG of other than 8 bits, which is whole and can't be read here."""
    frame = _frame(content)
    return frame is not None and frame[0] != 8


def _orientation(content: bytes) -> int:
    # most JPEGs have no EXIF block, and reading one takes a twentieth of the time of decoding
    if not any(content[place + 4 : place + 10] == b"Exif\0\0" for _, place in _segments(content)):
        return 1
    try:
        _formats()
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # a damaged EXIF block is no damage to the picture
        return 1


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Undo an EXIF orientation, 1 to 8, as `ImageOps.exif_transpose` does."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _grey_to_uint8(image: Image.Image) -> NDArray[np.uint8]:
    """A grey of 16 or 32 bits or floats in 256 levels; what is transparent in it is white."""
    grey = np.asarray(image)
    values = grey.astype(np.float32)
    if grey.dtype.kind == "f":
        np.nan_to_num(values, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    # by the sensor's range where one fits, so that a dark image stays darker than a bright one
    ranges = (1.0, 255.0) if grey.dtype.kind == "f" else (255.0, 1023.0, 4095.0, 16383.0, 65535.0)
    top = next((top for top in ranges if high <= top), None)
    if low < 0 or top is None:
        # halved first: the range of extreme floats is more than a float holds
        np.multiply(values, 0.5, out=values)
        np.subtract(values, low / 2, out=values)
        top = max(high / 2 - low / 2, 1e-12)
    np.multiply(values, 255.0 / top, out=values)
    np.rint(values, out=values)
    scaled: NDArray[np.uint8] = values.astype(np.uint8)
    if getattr(image, "tag_v2", {}).get(_TIFF_PHOTOMETRIC) == 0 and image.mode.startswith("I;16"):
        scaled = 255 - scaled  # white is zero, which Pillow leaves to us in this mode
    if isinstance(clear := image.info.get("transparency"), int):
        scaled[grey == clear] = 255
    return scaled
