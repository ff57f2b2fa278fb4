"""Decoded, resized images in one memory-mapped file, built once and opened in a millisecond."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from core.data.images import load_rgb
from core.data.scan import Item

_RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@dataclass(frozen=True)
class PackedCache:
    """`images` (n, size, size, 3) uint8, memory-mapped; `labels` (n,) int64, in the items' order."""

    images: np.ndarray[Any, np.dtype[np.uint8]]
    labels: np.ndarray[Any, np.dtype[np.int64]]
    was_built: bool


def build_or_open(
    items: list[Item],
    size: int,
    interpolation: str,
    home: Path,
    progress: Callable[[int, int], None] | None = None,
) -> PackedCache:
    """The items' images with their short side at `size`, cut to the central square.

    Args:
        size: side in pixels.
        interpolation: bilinear or bicubic; both antialias.
        home: where the cache file lies; its name is a digest of files, sizes and times of change.
        progress: told of (images done, images in all).
    """
    key = hashlib.sha256(f"{size}|{interpolation}|2".encode())
    for item in items:
        status = item.path.stat()
        key.update(f"|{item.path}|{status.st_size}|{status.st_mtime_ns}".encode())
    path = home / "cache" / f"{key.hexdigest()[:24]}.npy"
    was_built = not path.exists()
    if was_built:
        _build(path, items, size, interpolation, progress)
    labels = np.fromiter((item.label for item in items), dtype=np.int64, count=len(items))
    return PackedCache(np.load(path, mmap_mode="r"), labels, was_built)


def _build(
    path: Path, items: list[Item], size: int, interpolation: str, progress: Callable[[int, int], None] | None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    packed = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=(len(items), size, size, 3))
    try:

        def fill(index: int) -> None:
            packed[index] = resized(load_rgb(items[index].path), size, interpolation)

        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            for done, _ in enumerate(pool.map(fill, range(len(items))), start=1):
                if progress:
                    progress(done, len(items))
        packed.flush()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def resized(
    pixels: np.ndarray[Any, np.dtype[np.uint8]], size: int, interpolation: str
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """(height, width, 3) to (size, size, 3): short side to `size`, then the central square."""
    height, width = pixels.shape[:2]
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    box = (left, top, left + short, top + short)
    picture = Image.fromarray(pixels).resize((size, size), _RESAMPLING[interpolation], box=box)
    return np.asarray(picture)
