"""Batches of one shape, fixed by seed and epoch, made ahead of the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

PAD_LABEL = -100
T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """`images` (batch, 3, side, side) uint8, `labels` (batch,) int64; the first `num_real` count."""

    images: Tensor
    labels: Tensor
    num_real: int


class BatchLoader:
    """Batches from a packed cache.

    Every batch has the same shape. In training a short last batch is filled up with images drawn
    anew, since padding would reach BatchNorm, and a set smaller than the batch size is one batch;
    in evaluation it is padded, and padded rows carry the label -100.

    Args:
        images: (n, side, side, 3) uint8.
        labels: (n,) int64.
        train: shuffled and augmented, or in order and plain.
        image_size: side of what is handed out; cut from the middle, or at random with `crop`.
        augmentation: none, flip or crop (which flips too).
        seed: together with the epoch it fixes order and augmentation.
    """

    def __init__(
        self,
        images: np.ndarray[Any, np.dtype[np.uint8]],
        labels: np.ndarray[Any, np.dtype[np.int64]],
        batch_size: int,
        *,
        train: bool,
        image_size: int,
        augmentation: str,
        seed: int,
    ) -> None:
        self._images, self._labels, self._train = images, labels, train
        self._batch_size = min(batch_size, len(labels)) if train else batch_size
        self._image_size, self._seed = image_size, seed
        self._augmentation = augmentation if train else "none"

    @property
    def num_batches(self) -> int:
        return -(-len(self._labels) // self._batch_size)

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of epoch `number`, each image once."""
        rng = np.random.default_rng((self._seed, number))
        count = len(self._labels)
        order = rng.permutation(count) if self._train else np.arange(count)
        missing = self.num_batches * self._batch_size - count
        if self._train and missing:
            order = np.concatenate([order, rng.choice(count, missing)])
        for start in range(0, len(order), self._batch_size):
            yield self._batch(order[start : start + self._batch_size], rng)

    def _batch(self, chosen: np.ndarray[Any, np.dtype[np.int64]], rng: np.random.Generator) -> Batch:
        side, slack = self._image_size, self._images.shape[1] - self._image_size
        size, real = self._batch_size, len(chosen)
        pixels = np.zeros((size, side, side, 3), dtype=np.uint8)
        labels = np.full(size, PAD_LABEL, dtype=np.int64)
        labels[:real] = self._labels[chosen]
        flips = rng.random(real) < 0.5 if self._augmentation != "none" else np.zeros(real, dtype=bool)
        moves = rng.integers(0, slack + 1, (real, 2)) if self._augmentation == "crop" else np.full((real, 2), slack // 2)
        for row, index in enumerate(chosen):
            top, left = moves[row]
            cut = self._images[index, top : top + side, left : left + side]
            pixels[row] = cut[:, ::-1] if flips[row] else cut
        images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))
        return Batch(images, torch.from_numpy(labels), real)


def prefetch(items: Iterator[T], depth: int = 2) -> Iterator[T]:
    """The same items, made up to `depth` ahead by one thread; its errors are raised here.

    Closing the generator ends the thread.
    """
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
    closing = threading.Event()

    def put(entry: tuple[bool, Any]) -> None:
        while not closing.is_set():
            try:
                ready.put(entry, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put((True, item))
                if closing.is_set():
                    return
            put((False, None))
        except BaseException as error:  # handed to the consumer, who raises it
            put((False, error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            has_item, value = ready.get()
            if has_item:
                yield value
            elif value is None:
                return
            else:
                raise value
    finally:
        closing.set()
        thread.join()
