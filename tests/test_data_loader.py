"""Batches: determinism, last batches, and the thread that prepares them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from core.data.loader import BatchLoader, prefetch


def loader(num: int, batch_size: int, *, train: bool = True, augmentation="none", side: int = 8, seed: int = 0):
    images = np.random.default_rng(0).integers(0, 256, (num, side, side, 3), dtype=np.uint8)
    return BatchLoader(
        images, np.arange(num), batch_size, train=train, image_size=6, augmentation=augmentation, seed=seed
    )


@pytest.mark.parametrize("side", [6, 8])
def test_an_epoch_is_determined_by_seed_and_number(side: int):
    def pixels(seed: int, epoch: int) -> torch.Tensor:
        batches = loader(10, 4, augmentation="crop", side=side, seed=seed).epoch(epoch)
        return torch.cat([batch.images for batch in batches])

    assert torch.equal(pixels(1, 2), pixels(1, 2))
    assert not torch.equal(pixels(1, 2), pixels(1, 3))
    assert not torch.equal(pixels(1, 2), pixels(2, 2))


def test_every_image_comes_once_an_epoch_and_the_last_training_batch_is_filled():
    subject = loader(17, 16)
    batches = list(subject.epoch(0))
    assert [len(batch.labels) for batch in batches] == [16, 16]
    assert [batch.num_real for batch in batches] == [16, 16]
    assert subject.num_batches == 2
    labels = torch.cat([batch.labels for batch in batches])
    assert sorted(labels[:17].tolist()) == list(range(17))
    assert len(set(batches[1].labels.tolist())) == 16


def test_the_last_evaluation_batch_is_padded():
    batches = list(loader(9, 4, train=False, augmentation="crop").epoch(0))
    assert [batch.num_real for batch in batches] == [4, 4, 1]
    assert batches[2].labels.tolist() == [8, -100, -100, -100]
    assert batches[2].images.shape == (4, 3, 6, 6)
    assert batches[2].images.is_contiguous()
    assert batches[2].images.dtype == torch.uint8


def test_a_small_set_is_one_batch_of_its_size():
    [batch] = loader(5, 16).epoch(0)
    assert sorted(batch.labels.tolist()) == list(range(5))


def test_evaluation_sees_the_centre():
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    [batch] = BatchLoader(images, np.arange(2), 2, train=False, image_size=6, augmentation="crop", seed=0).epoch(0)
    assert np.array_equal(batch.images.numpy().transpose(0, 2, 3, 1), images[:, 1:7, 1:7])


def test_flip_mirrors_some_images():
    images = np.random.default_rng(0).integers(0, 256, (64, 6, 6, 3), dtype=np.uint8)
    [batch] = BatchLoader(images, np.arange(64), 64, train=True, image_size=6, augmentation="flip", seed=0).epoch(0)
    seen = batch.images.numpy().transpose(0, 2, 3, 1)
    mirrored = [np.array_equal(view, images[label][:, ::-1]) for view, label in zip(seen, batch.labels, strict=True)]
    straight = [np.array_equal(view, images[label]) for view, label in zip(seen, batch.labels, strict=True)]
    assert sum(mirrored) + sum(straight) == 64
    assert 16 < sum(mirrored) < 48


def test_prefetch_keeps_the_order_and_ends_its_thread():
    before = threading.active_count()
    assert list(prefetch(iter(range(20)))) == list(range(20))
    assert threading.active_count() == before


def test_prefetch_carries_an_error_after_the_items_before_it():
    def items():
        yield 1
        raise ValueError("broken")

    ahead = prefetch(items())
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="broken"):
        next(ahead)


def test_closing_prefetch_ends_its_thread_and_the_iterator():
    closed = []

    def items():
        try:
            while True:
                yield 0
        finally:
            closed.append(True)

    before = threading.active_count()
    ahead = prefetch(items())
    next(ahead)
    ahead.close()
    assert (threading.active_count(), closed) == (before, [True])
