"""Batches of equal shape from packed images, and threads that prepare them ahead."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from core.config import Sampling
from core.data.ahead import in_order
from core.data.augment import (
    Mix,
    Recipe,
    augment_pixels,
    crop_margin,
    draw_resized_crops,
    draw_views,
    reflected,
)
from core.data.images import resize
from core.data.sampling import epoch_order
from core.errors import ConfigError

PADDING_LABEL = -100
MAX_WORKERS = 8
Pixels = NDArray[np.void]
"""(height, width) items of three bytes, so that a crop or a mirror moves pixels and not bytes."""


class Images(Protocol):
    """Pictures by number; `heights` and `widths` hold their sizes in pixels."""

    heights: NDArray[np.int64]
    widths: NDArray[np.int64]

    def pixels(self, number: int) -> Pixels | None: ...


@dataclass
class Batch:
    """A batch on the host.

    Attributes:
        images: (batch, 3, height, width) uint8, channels last in memory unless pixels were augmented.
        labels: (batch,) int64, `PADDING_LABEL` where an image is padding or lost.
        num_real: images that count.
        mix: how images and labels are blended, the same for a whole run: always there, or never.
    """

    images: torch.Tensor
    labels: torch.Tensor
    num_real: int
    mix: Mix | None = None


class BatchLoader:
    """Hands out a set of images in batches that all have the same shape.

    A short last training batch is filled with images drawn anew; a short last evaluation batch is padded.
    A set smaller than the batch size is one batch of the set's size. A batch is fully determined by seed, epoch and
    its place in the epoch, however many threads prepare it and wherever a run is taken up again.

    Args:
        images: the pictures of the whole data set.
        numbers: (n,) which of them are in this set.
        labels: (n,) their class indices.
        recipe: what training images go through; None for evaluation, which has no randomness and keeps the order.
        image_size: side of the square that the model sees; no picture's side is shorter.
        interpolation: bilinear or bicubic, for random resized crops.
        fill: the colour of erased parts.
        workers: threads that prepare batches ahead; 0 prepares each when it is asked for.
        multiple_of: what the batch's size must be a multiple of, since it is shared: a set smaller than the batch
            size gives a smaller batch in training, and a padded one in evaluation.
        parts: equal parts of a batch that mix (MixUp, CutMix) each within itself.
        stage: done to images and labels of a batch in the thread that prepared it.

    Raises:
        ConfigError: the training set is too small to be shared.
    """

    def __init__(
        self,
        images: Images,
        numbers: NDArray[np.int64],
        labels: NDArray[np.int64],
        batch_size: int,
        *,
        recipe: Recipe | None,
        image_size: int,
        interpolation: str = "bilinear",
        sampling: Sampling = "shuffle",
        fill: tuple[int, int, int] = (0, 0, 0),
        seed: int = 0,
        workers: int = 0,
        multiple_of: int = 1,
        parts: int = 1,
        stage: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self._images, self._numbers, self._labels = images, numbers, labels
        self._parts, self._stage = parts, stage
        self._recipe, self._size, self._interpolation = recipe, image_size, interpolation
        self._sampling, self._fill, self._seed, self._workers = sampling, fill, seed, workers
        heights, widths = images.heights[numbers], images.widths[numbers]
        side = int(min(heights.min(), widths.min())) if len(numbers) else image_size
        if side < image_size:
            raise ValueError(f"images of {side} px can't be cut to {image_size} px")
        margin = crop_margin(side, image_size, recipe.geometry) if recipe else 0
        self._reflected = reflected(side, margin) if margin else None
        self._side = side + 2 * margin
        self._batch_side = image_size
        self.batch_size = _shared(min(batch_size, len(labels)), multiple_of, is_training=recipe is not None)

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return -(-len(self._labels) // self.batch_size) if self.batch_size else 0

    def resize(self, side: int) -> None:
        """Make the images of epochs that begin from now on squares of `side` pixels, which show what they would else.

        It is `image_size` where nobody sets it.
        """
        self._batch_side = side

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Places in the set of the images that an epoch shows, in order."""
        if self._recipe is None:
            return np.arange(len(self._labels))
        return epoch_order(self._labels, np.random.default_rng([self._seed, epoch]), self._sampling)

    def epoch(self, epoch: int, first: int = 0) -> Generator[Batch, None, None]:
        """The batches of an epoch from the place `first` on, prepared ahead; closing it ends the threads.

        Raises:
            DataError: the images can't be read any more.
        """
        order, side = self.order(epoch), self._batch_side
        jobs = (partial(self._batch, order, epoch, place, side) for place in range(first, self.num_batches))
        return in_order(jobs, self._workers, ahead=2 * self._workers)

    def _batch(self, order: NDArray[np.int64], epoch: int, place: int, side: int) -> Batch:
        generator = np.random.default_rng([self._seed, epoch, place])
        start = place * self.batch_size
        chosen = order[start : start + self.batch_size]
        missing = self.batch_size - len(chosen)
        if missing and self._recipe is not None:
            chosen = np.concatenate([chosen, generator.choice(order[:start], missing, replace=False)])
        labels = np.full(self.batch_size, PADDING_LABEL, dtype=np.int64)
        # a random part of a picture is resized in any case, so at once to the right side
        size = side if self._resizes else self._size
        pixels = np.empty((self.batch_size, size, size), dtype="V3")
        views = self._views(chosen, generator, size)
        for row, index in enumerate(chosen):
            label = self._labels[index]
            picture = self._images.pixels(int(self._numbers[index]))
            if picture is None and self._recipe is not None:
                picture, label = self._other(order, start + row)
            if picture is not None:
                pixels[row], labels[row] = views(row, picture), label
        pixels[labels == PADDING_LABEL] = np.zeros((), "V3")
        images = torch.from_numpy(pixels.view(np.uint8).reshape(self.batch_size, size, size, 3))
        images, mix = images.permute(0, 3, 1, 2), None
        if size != side:
            images = functional.interpolate(images, (side, side), mode=self._interpolation, antialias=True)
        if self._recipe is not None and not self._recipe.is_plain:
            images, mix = augment_pixels(images, self._recipe, generator, self._fill, self._parts)
        num_real = int((labels != PADDING_LABEL).sum())
        return Batch(self._stage(images), self._stage(torch.from_numpy(labels)), num_real, mix)

    def _other(self, order: NDArray[np.int64], place: int) -> tuple[Pixels | None, int]:
        """The next image of the order that is not lost, in place of one that is."""
        for step in range(1, len(order)):
            index = order[(place + step) % len(order)]
            picture = self._images.pixels(int(self._numbers[index]))
            if picture is not None:
                return picture, int(self._labels[index])
        return None, PADDING_LABEL

    @property
    def _resizes(self) -> bool:
        return self._recipe is not None and self._recipe.geometry == "resized_crop"

    def _views(
        self, chosen: NDArray[np.int64], generator: np.random.Generator, size: int
    ) -> Callable[[int, Pixels], Pixels]:
        """What is seen of each picture: a function of its row in the batch and its pixels, to a square of `size`."""
        recipe = self._recipe
        if recipe is not None and self._resizes:
            numbers = self._numbers[chosen]
            boxes = draw_resized_crops(
                generator, self._images.heights[numbers], self._images.widths[numbers], recipe.crop_scale_min
            )
            flips = generator.random(len(chosen)) < 0.5
            return lambda row, picture: _mirrored(self._resized(picture, boxes[row], size), bool(flips[row]))
        corners, mirrored = draw_views(generator, len(chosen), self._side - size, recipe.geometry if recipe else "none")
        if recipe is not None and recipe.geometry == "crop":
            return lambda row, picture: _mirrored(self._cropped(picture, corners[row]), bool(mirrored[row]))
        return lambda row, picture: _mirrored(_centre(picture, size), bool(mirrored[row]))

    def _cropped(self, picture: Pixels, corner: NDArray[np.int64]) -> Pixels:
        top, left = corner
        if self._reflected is not None:
            return picture[np.ix_(self._reflected[top : top + self._size], self._reflected[left : left + self._size])]
        return picture[top : top + self._size, left : left + self._size]

    def _resized(self, picture: Pixels, box: NDArray[np.int64], size: int) -> Pixels:
        # a substitute for a lost image may be smaller than the box that was drawn for it
        height, width = min(int(box[2]), picture.shape[0]), min(int(box[3]), picture.shape[1])
        top, left = min(int(box[0]), picture.shape[0] - height), min(int(box[1]), picture.shape[1] - width)
        part = np.ascontiguousarray(picture[top : top + height, left : left + width])
        colours = part.view(np.uint8).reshape(height, width, 3)
        resized = resize(colours, size, size, self._interpolation)
        return resized.view("V3")[..., 0]


def _shared(batch_size: int, multiple_of: int, *, is_training: bool) -> int:
    if multiple_of == 1:
        return batch_size
    if not is_training:
        return -(-batch_size // multiple_of) * multiple_of
    if batch_size < multiple_of:
        raise ConfigError(
            f"A batch of {batch_size} training images can't be shared by {multiple_of} parts or devices.",
            fix="Choose a larger batch size, a smaller accumulation or fewer devices, or bring more images.",
        )
    return batch_size // multiple_of * multiple_of


def _mirrored(picture: Pixels, is_mirrored: bool) -> Pixels:
    if not is_mirrored:
        return picture
    height, width = picture.shape
    colours = np.array(picture, order="C").view(np.uint8).reshape(1, height, width, 3)
    # three times as fast as numpy's negative stride over items of three bytes
    mirrored = torch.from_numpy(colours).permute(0, 3, 1, 2).flip(-1).permute(0, 2, 3, 1)
    return mirrored.contiguous().numpy().view("V3")[0, ..., 0]


def _centre(picture: Pixels, size: int) -> Pixels:
    top, left = (picture.shape[0] - size) // 2, (picture.shape[1] - size) // 2
    return picture[top : top + size, left : left + size]


def num_workers(wanted: int, device_kind: str, processes: int = 1) -> int:
    """Threads that prepare batches: as wanted, else one beside a CPU that trains, and more beside another device.

    Args:
        processes: that share this machine's cores, each with as many threads.
    """
    if wanted:
        return wanted
    return 1 if device_kind == "cpu" else min(MAX_WORKERS, max(1, (os.cpu_count() or 1) // processes - 1))
