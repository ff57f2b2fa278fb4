"""JPEG photographs to measure with: real ones, cut and scaled at random from those that scikit-image ships."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image
from skimage import data

WIDTH, HEIGHT, QUALITY = 500, 375, 96
"""With the grain below, 126 kB a picture, as in ImageNetV2 (1.26 GB for 10,000 pictures of up to 500 pixels)."""
NUM_CUTS = 60


def make_photos(folder: Path, num: int, num_classes: int = 10) -> Path:
    """Write `num` photographs of 500 x 375 pixels, all of different bytes, into class folders.

    There are `NUM_CUTS` different cuts; a comment in each file makes the copies differ in their bytes.
    """
    cuts = _cuts()
    for number in range(num):
        path = folder / f"class{number % num_classes:04d}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        content, comment = cuts[number % len(cuts)], f"{number:08d}".encode()
        path.write_bytes(content[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + content[2:])
    return folder


def _cuts() -> list[bytes]:
    generator = np.random.default_rng(0)
    photos = [Image.fromarray(photo) for photo in (data.astronaut(), data.coffee(), data.cat())]
    cuts = []
    for number in range(NUM_CUTS):
        photo = photos[number % len(photos)]
        widest = min(photo.width, photo.height * 4 // 3)
        width = int(generator.integers(widest // 2, widest))
        height = width * 3 // 4
        left, top = generator.integers(0, [photo.width - width + 1, photo.height - height + 1])
        cut = photo.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
        # an enlarged cut lacks a camera's grain, which costs decoders most
        grain = generator.normal(0, 10, (HEIGHT, WIDTH, 1))
        noisy = np.clip(np.asarray(cut) + grain, 0, 255).astype(np.uint8)
        out = io.BytesIO()
        Image.fromarray(noisy).save(out, "JPEG", quality=QUALITY)
        cuts.append(out.getvalue())
    return cuts
