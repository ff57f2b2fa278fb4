"""Resized images in one memory-mapped file, built once for a set of files, a size and an interpolation."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from core.data.images import load_rgb
from core.data.scan import Item
from core.errors import DataError

_VERSION = 1
_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


@dataclass(frozen=True)
class PackedCache:
    """images (n, size, size, 3) uint8, read-only and memory-mapped; labels (n,) int64."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    was_built: bool


def build_or_open(
    items: Sequence[Item],
    size: int,
    interpolation: str,
    home: Path,
    progress: Callable[[int, int], None] | None = None,
) -> PackedCache:
    """Open the cache of these images, or build it with as many threads as there are cores.

    Args:
        size: side in pixels: the short side is resized to it with antialias, then the centre square is kept.
        interpolation: bicubic or bilinear.
        progress: called with images done and images in all while it is built.

    Raises:
        DataError: an image can't be read any more, or the disk is full.
    """
    labels = np.array([item.label for item in items], dtype=np.int64)
    if not items:
        return PackedCache(np.zeros((0, size, size, 3), np.uint8), labels, was_built=False)
    try:
        path = home / "cache" / f"{_digest(items, size, interpolation)}.npy"
        was_built = not path.exists()
        if was_built:
            _build(path, items, size, interpolation, progress)
        return PackedCache(np.load(path, mmap_mode="r"), labels, was_built)
    except OSError as error:
        raise DataError(
            f"The image cache can't be built or opened: {error}.", fix="Free some space, or choose another --home."
        ) from error


def square(image: NDArray[np.uint8], size: int, interpolation: str) -> NDArray[np.uint8]:
    """Resize the short side of (h, w, 3) to `size` with antialias and keep the centre: (size, size, 3)."""
    height, width = image.shape[:2]
    picture, resample = Image.fromarray(image), _FILTERS[interpolation]
    short, long = min(height, width), max(height, width)
    if long > 16 * short:
        # the whole of a thin strip could be enlarged beyond memory
        left, top = (width - short) // 2, (height - short) // 2
        return np.asarray(picture.resize((size, size), resample, box=(left, top, left + short, top + short)))
    wide, high = (size, size * height // width) if width <= height else (size * width // height, size)
    if (wide, high) != (width, height):
        picture = picture.resize((wide, high), resample)
    left, top = round((wide - size) / 2), round((high - size) / 2)
    return np.asarray(picture.crop((left, top, left + size, top + size)))


def _digest(items: Sequence[Item], size: int, interpolation: str) -> str:
    digest = hashlib.sha256(f"{_VERSION} {size} {interpolation}".encode())
    for item in items:
        stat = item.path.stat()
        digest.update(f"\n{item.path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _build(
    path: Path, items: Sequence[Item], size: int, interpolation: str, progress: Callable[[int, int], None] | None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".building-", suffix=".npy")
    os.close(handle)
    try:
        packed = np.lib.format.open_memmap(name, mode="w+", dtype=np.uint8, shape=(len(items), size, size, 3))

        def pack(place: int) -> None:
            packed[place] = square(load_rgb(items[place].path), size, interpolation)

        with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="pack") as pool:
            try:
                for done, _ in enumerate(pool.map(pack, range(len(items))), start=1):
                    if progress is not None:
                        progress(done, len(items))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        packed.flush()
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
