"""Which part of a cached image is seen, and whether mirrored."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from core.config import Augmentation


def reflected(size: int, margin: int) -> NDArray[np.int64]:
    """Indices of `size` pixels continued by reflection for `margin` pixels at both ends."""
    index = np.abs(np.arange(-margin, size + margin))
    last = size - 1
    return np.where(index > last, 2 * last - index, index)


def crop_margin(cached_size: int, image_size: int, augmentation: Augmentation) -> int:
    """Pixels to reflect at each side, so that a random crop has room where the cache has none."""
    return image_size // 8 if augmentation == "crop" and cached_size == image_size else 0


def draw_views(
    generator: np.random.Generator, num: int, room: int, augmentation: Augmentation
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw the top left corners (num, 2), each in 0..room, and who is mirrored (num,)."""
    corners = np.full((num, 2), room // 2, dtype=np.int64)
    if augmentation == "crop":
        corners = generator.integers(0, room + 1, (num, 2))
    mirrored = np.zeros(num, dtype=np.bool_)
    if augmentation != "none":
        mirrored = generator.random(num) < 0.5
    return corners, mirrored
