"""Images to look at before training: thumbnails, and the first batch of a run as its model will see it."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from core.config import RunConfig
from core.data.augment import Mix, Recipe
from core.data.cache import Fit, read_again
from core.data.dataset import Dataset
from core.data.images import UnreadableError, load_rgb, resize
from core.data.loader import PADDING_LABEL, Batch, Pixels
from core.data.split import Item
from core.models.build import preprocessing
from core.setup import fit_for, loader_for
from core.training.task import mix_images

SHOWN = 32
MOST_BYTES = 2**28


@dataclass(frozen=True)
class Preview:
    """What a run's first step sees.

    Attributes:
        images: the first of the batch, each (size, size, 3) uint8 with its label in words.
        batch_size: images of the batch that they were drawn in.
        is_exact: whether the run's first batch begins with exactly these pixels. Where its batches are too large to
            make for a look, or their size is found when it begins, the same files come first in a smaller batch,
            cropped and coloured by other draws.
        lost: files that can't be read any more, and why; the run puts the next ones in their place, too.
    """

    images: list[tuple[NDArray[np.uint8], str]]
    batch_size: int
    is_exact: bool
    lost: list[tuple[str, str]] = field(default_factory=list)


def first_batch(dataset: Dataset, config: RunConfig, most: int = SHOWN) -> Preview:
    """The first batch of epoch 1, up to `most` of its images; MixUp's blend is rounded to whole levels.

    Raises:
        ModelError: there is no such model.
    """
    looks = preprocessing(config.model, config.image_size)
    room = max(most, MOST_BYTES // (3 * looks.image_size**2))
    labels = np.array([item.label for item in dataset.train], dtype=np.int64)
    pictures = _Pictures(dataset.train, fit_for(config, looks))
    # a size that is yet to be found is not known here
    size, numbers = min(config.batch_size or most, room), np.arange(len(labels))
    loader = loader_for(config, looks, pictures, numbers, labels, recipe=Recipe.of(config), batch_size=size)
    order, size = loader.order(1), loader.batch_size
    # the last image is blended with the first
    pictures.leave_blank(order[most : size - 1], except_for=[*order[:most], order[size - 1]])
    batches = loader.epoch(1)
    batch = next(batches)
    batches.close()
    words = [dataset.classes[label] if label != PADDING_LABEL else "" for label in batch.labels.tolist()]
    shown = list(zip(_pixels(batch, most), _labels(words, batch.mix)[:most], strict=True))
    is_exact = bool(config.batch_size) and min(config.batch_size, len(labels)) == size
    return Preview(shown, size, is_exact, pictures.lost)


def recipe_in_words(config: RunConfig) -> list[str]:
    """What is done to a training image, a phrase each; empty where nothing is."""
    geometry = {
        "none": [],
        "flip": ["mirror"],
        "crop": ["mirror", "random crop"],
        "resized_crop": ["mirror", f"random resized crop (from {config.crop_scale_min:.0%} of the area)"],
    }
    automatic = {
        "none": [],
        "randaugment": [f"RandAugment ({config.randaugment_ops} x {config.randaugment_magnitude})"],
        "trivialaugment": ["TrivialAugment"],
    }
    strengths = {
        f"colour jitter ±{config.color_jitter:g}": config.color_jitter,
        f"random erasing ({config.random_erasing:.0%})": config.random_erasing,
        f"MixUp {config.mixup:g}": config.mixup,
        f"CutMix {config.cutmix:g}": config.cutmix,
        "balanced sampling": config.sampling == "balanced",
    }
    on = [words for words, strength in strengths.items() if strength]
    return [*geometry[config.augmentation], *automatic[config.auto_augment], *on]


def thumbnail(path: Path, side: int) -> bytes:
    """A version of an image file that fits a square of `side` pixels; a very small one is enlarged by whole pixels.

    Raises:
        DataError: the file can't be read any more.
    """
    pixels = load_rgb(path, at_least=side)
    height, width = pixels.shape[:2]
    factor = side / max(height, width)
    if factor >= 2:
        pixels = pixels.repeat(int(factor), axis=0).repeat(int(factor), axis=1)
    elif factor < 1:
        pixels = resize(pixels, max(1, round(height * factor)), max(1, round(width * factor)), "bilinear")
    return as_image(pixels)


def as_image(pixels: NDArray[np.uint8]) -> bytes:
    """(h, w, 3) as the bytes of a file: PNG with up to 256 colours, which loses nothing, else JPEG."""
    image, packed = Image.fromarray(pixels), io.BytesIO()
    if image.getcolors(256) is not None:
        image.save(packed, format="PNG")
    else:
        image.save(packed, format="JPEG", quality=88)
    return packed.getvalue()


class _Pictures:
    """The pictures of a training set, decoded and fitted when they are asked for, as the cache holds them."""

    def __init__(self, items: list[Item], fit: Fit) -> None:
        self._items, self._fit = items, fit
        self._blank: set[int] = set()
        self.lost: list[tuple[str, str]] = []
        shapes = [fit.shape_of(item.width, item.height) for item in items]
        self.heights, self.widths = np.array(shapes, dtype=np.int64).reshape(-1, 2).T

    def leave_blank(self, numbers: Iterable[int], *, except_for: Iterable[int]) -> None:
        """Don't decode these: nobody will see them, and what is drawn at random depends on no pixel."""
        self._blank = {int(number) for number in numbers} - {int(number) for number in except_for}

    def pixels(self, number: int) -> Pixels | None:
        if number in self._blank:
            return np.zeros((int(self.heights[number]), int(self.widths[number])), dtype="V3")
        item = self._items[number]
        try:
            picture = read_again(item, self._fit.size)
        except (OSError, UnreadableError) as error:
            self.lost.append((item.file, str(error)))
            # another one will take its place, and may be one of these
            self._blank.clear()
            return None
        fitted = self._fit(picture.pixels, picture.width, picture.height)
        return np.ascontiguousarray(fitted).view("V3")[..., 0]


def _pixels(batch: Batch, most: int) -> list[NDArray[np.uint8]]:
    images = batch.images[:most]
    if batch.mix is not None:
        neighbours = torch.cat([batch.images[-1:], images]).float()
        images = mix_images(neighbours, batch.mix)[1:].round().clamp(0, 255).to(torch.uint8)
    return [image.permute(1, 2, 0).contiguous().numpy() for image in images]


def _labels(words: list[str], mix: Mix | None) -> list[str]:
    """Each label, or its blend with the one before it as "0.7 cat + 0.3 dog"."""
    own = 1.0 if mix is None else round(float(mix.label_weight), 2)
    pairs = zip(words, [words[-1], *words], strict=False)
    return [_blend(own, word, before) for word, before in pairs]


def _blend(own: float, word: str, before: str) -> str:
    if own == 1 or word == before:
        return word
    return f"{own:g} {word} + {round(1 - own, 2):g} {before}" if own else before
