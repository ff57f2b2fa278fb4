"""Batches of equal shape from a packed cache, and one thread that prepares them ahead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from core.config import Augmentation
from core.data.augment import crop_margin, draw_views, reflected

PADDING_LABEL = -100
T = TypeVar("T")


@dataclass
class Batch:
    """images (batch, 3, height, width) uint8; labels (batch,) int64, `PADDING_LABEL` from `num_real` on."""

    images: torch.Tensor
    labels: torch.Tensor
    num_real: int


class BatchLoader:
    """Hands out a set of images in batches that all have the same shape.

    A short last training batch is filled with images drawn anew; a short last evaluation batch is padded.
    A set smaller than the batch size is one batch of the set's size.

    Args:
        images: (n, side, side, 3) uint8, side at least `image_size`.
        labels: (n,) class indices.
    """

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        batch_size: int,
        *,
        train: bool,
        image_size: int,
        augmentation: Augmentation,
        seed: int,
    ) -> None:
        side = images.shape[1]
        if side < image_size:
            raise ValueError(f"images of {side} px can't be cut to {image_size} px")
        self._augmentation: Augmentation = augmentation if train else "none"
        margin = crop_margin(side, image_size, self._augmentation)
        self._index = reflected(side, margin) if margin else None
        self._room = side + 2 * margin - image_size
        # three bytes as one item, so that a crop or a mirror moves pixels and not bytes
        self._pixels = np.ascontiguousarray(images).view("V3")[..., 0] if len(images) else images
        self._labels = labels
        self._train, self._size, self._seed = train, image_size, seed
        self.batch_size = min(batch_size, len(labels))

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return -(-len(self._labels) // self.batch_size) if self.batch_size else 0

    def epoch(self, n: int) -> Iterator[Batch]:
        """The batches of epoch `n`, fully determined by the seed and `n`; evaluation keeps the set's order."""
        generator = np.random.default_rng([self._seed, n])
        num = len(self._labels)
        order = generator.permutation(num) if self._train else np.arange(num)
        for start in range(0, num, self.batch_size or 1):
            chosen = order[start : start + self.batch_size]
            missing = self.batch_size - len(chosen)
            if missing and self._train:
                chosen = np.concatenate([chosen, generator.choice(order[:start], missing, replace=False)])
            yield self._batch(chosen, generator)

    def _batch(self, chosen: NDArray[np.int64], generator: np.random.Generator) -> Batch:
        size = self._size
        pixels = np.zeros((self.batch_size, size, size), dtype="V3")
        corners, mirrored = draw_views(generator, len(chosen), self._room, self._augmentation)
        for place, (index, (top, left), mirror) in enumerate(zip(chosen, corners, mirrored, strict=True)):
            image = self._pixels[index]
            if self._index is None:
                view = image[top : top + size, left : left + size]
            else:
                view = image[np.ix_(self._index[top : top + size], self._index[left : left + size])]
            pixels[place] = view[:, ::-1] if mirror else view
        labels = np.full(self.batch_size, PADDING_LABEL, dtype=np.int64)
        labels[: len(chosen)] = self._labels[chosen]
        images = torch.from_numpy(pixels.view(np.uint8).reshape(self.batch_size, size, size, 3))
        return Batch(images.permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels), len(chosen))


def prefetch(iterator: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Iterate in one background thread that keeps up to `depth` items ready.

    An error of the iterator is raised here; closing this generator ends the thread before it returns.
    """
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def put(kind: str, value: Any) -> bool:
        while not closed.is_set():
            try:
                ready.put((kind, value), timeout=0.05)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in iterator:
                if not put("item", item):
                    return
            put("end", None)
        except BaseException as error:  # raised again in the consumer
            put("error", error)
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        closed.set()
        thread.join()
