"""Batches: determinism, last batches, lost images, and the threads that prepare them."""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from core.data.ahead import in_order
from core.data.augment import Recipe
from core.data.loader import BatchLoader, num_workers


class ArrayImages:
    """Images that lie in memory: an array, or a list of arrays of several sizes; those in `lost` can't be read."""

    def __init__(self, images, lost=()):
        self._images, self._lost = images, set(lost)
        self.heights, self.widths = np.array([image.shape[:2] for image in images]).reshape(-1, 2).T

    def pixels(self, number: int):
        return None if number in self._lost else np.ascontiguousarray(self._images[number]).view("V3")[..., 0]


def noise(num: int, height: int = 8, width: int = 8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num, height, width, 3), dtype=np.uint8)


def loader(num: int, batch_size: int, *, geometry="none", train=True, side=8, seed=0, workers=0, lost=(), **recipe):
    return BatchLoader(
        ArrayImages(noise(num, side, side), lost),
        np.arange(num),
        np.arange(num),
        batch_size,
        recipe=Recipe(geometry=geometry, **recipe) if train else None,
        image_size=6,
        seed=seed,
        workers=workers,
    )


def pixels_of(subject: BatchLoader, epoch: int = 1) -> torch.Tensor:
    return torch.cat([batch.images for batch in subject.epoch(epoch)])


@pytest.mark.parametrize("side", [6, 8])
@pytest.mark.parametrize("geometry", ["flip", "crop", "resized_crop"])
def test_an_epoch_is_determined_by_seed_and_number(side: int, geometry: str):
    def pixels(seed: int, epoch: int) -> torch.Tensor:
        return pixels_of(loader(10, 4, geometry=geometry, side=side, seed=seed), epoch)

    assert torch.equal(pixels(1, 2), pixels(1, 2))
    assert not torch.equal(pixels(1, 2), pixels(1, 3))
    assert not torch.equal(pixels(1, 2), pixels(2, 2))


FULL = {"geometry": "crop", "color_jitter": 0.4, "auto_augment": "trivialaugment", "random_erasing": 0.5, "cutmix": 1.0}


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_change_nothing(workers: int):
    alone, together = loader(22, 4, **FULL), loader(22, 4, workers=workers, **FULL)
    for first, second in zip(alone.epoch(1), together.epoch(1), strict=True):
        assert torch.equal(first.images, second.images)
        assert torch.equal(first.labels, second.labels)
        assert torch.equal(first.mix.label_weight, second.mix.label_weight)


def test_an_epoch_taken_up_in_its_middle_goes_on_alike():
    whole = [batch.images for batch in loader(22, 4, **FULL).epoch(3)]
    rest = [batch.images for batch in loader(22, 4, **FULL).epoch(3, first=2)]
    assert len(rest) == len(whole) - 2
    assert all(torch.equal(one, other) for one, other in zip(rest, whole[2:], strict=True))


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
    batches = list(loader(9, 4, train=False).epoch(0))
    assert [batch.num_real for batch in batches] == [4, 4, 1]
    assert batches[2].labels.tolist() == [8, -100, -100, -100]
    assert batches[2].images.shape == (4, 3, 6, 6)
    assert batches[2].images.is_contiguous(memory_format=torch.channels_last)
    assert batches[2].images.dtype == torch.uint8
    assert batches[2].mix is None


def test_a_small_set_is_one_batch_of_its_size():
    [batch] = loader(5, 16).epoch(0)
    assert sorted(batch.labels.tolist()) == list(range(5))


def test_only_the_sets_own_numbers_are_shown():
    images = noise(6)
    subject = BatchLoader(ArrayImages(images), np.array([4, 1]), np.array([0, 1]), 2, recipe=None, image_size=8, seed=0)
    [batch] = subject.epoch(0)
    assert np.array_equal(batch.images.numpy().transpose(0, 2, 3, 1), images[[4, 1]])


@pytest.mark.parametrize(("height", "width"), [(8, 8), (8, 13), (12, 8)])
def test_evaluation_sees_the_centre(height: int, width: int):
    images = noise(2, height, width)
    subject = BatchLoader(ArrayImages(images), np.arange(2), np.arange(2), 2, recipe=None, image_size=6, seed=0)
    [batch] = subject.epoch(0)
    top, left = (height - 6) // 2, (width - 6) // 2
    assert np.array_equal(batch.images.numpy().transpose(0, 2, 3, 1), images[:, top : top + 6, left : left + 6])


def test_flip_mirrors_some_images():
    images = noise(64, 6, 6)
    subject = BatchLoader(
        ArrayImages(images), np.arange(64), np.arange(64), 64, recipe=Recipe(geometry="flip"), image_size=6, seed=0
    )
    [batch] = subject.epoch(0)
    seen = batch.images.numpy().transpose(0, 2, 3, 1)
    mirrored = [np.array_equal(view, images[label][:, ::-1]) for view, label in zip(seen, batch.labels, strict=True)]
    straight = [np.array_equal(view, images[label]) for view, label in zip(seen, batch.labels, strict=True)]
    assert sum(mirrored) + sum(straight) == 64
    assert 16 < sum(mirrored) < 48


def test_a_random_resized_crop_shows_parts_of_pictures_of_any_shape():
    """Each picture is one colour gradient from left to right, so that what is seen tells which columns were cut."""
    widths = [8, 16, 30, 9] * 8
    pictures = [np.repeat(np.linspace(0, 250, w).astype(np.uint8)[None, :, None], 8, 0).repeat(3, 2) for w in widths]
    subject = BatchLoader(
        ArrayImages(pictures), np.arange(32), np.arange(32), 32,
        recipe=Recipe(geometry="resized_crop", crop_scale_min=0.2), image_size=6, seed=0,
    )  # fmt: skip
    [batch] = subject.epoch(1)
    ends = batch.images[:, 0, 0, [0, -1]].int()
    spans = (ends[:, 0] - ends[:, 1]).abs()
    assert spans.float().std() > 20
    assert (ends[:, 0] < ends[:, 1]).sum() not in (0, 32)


def test_balanced_sampling_shows_a_rare_class_as_often_as_others():
    labels = np.array([0] * 190 + [1] * 10)
    subject = BatchLoader(
        ArrayImages(noise(200)), np.arange(200), labels, 50, recipe=Recipe(), image_size=8, sampling="balanced", seed=0
    )
    seen = torch.cat([batch.labels for epoch in range(5) for batch in subject.epoch(epoch)])
    assert len(seen) == 1000
    assert 430 < (seen == 1).sum() < 570


def test_a_lost_training_image_is_replaced_by_another():
    batches = list(loader(10, 5, lost=[3, 7]).epoch(1))
    labels = torch.cat([batch.labels for batch in batches]).tolist()
    assert [batch.num_real for batch in batches] == [5, 5]
    assert not {3, 7} & set(labels)
    assert set(labels) == set(range(10)) - {3, 7}


def test_a_lost_validation_image_does_not_count():
    [batch] = loader(5, 8, train=False, lost=[1]).epoch(0)
    assert batch.labels.tolist() == [0, -100, 2, 3, 4]
    assert batch.num_real == 4


def test_a_set_that_is_lost_as_a_whole_counts_nothing():
    [batch] = loader(3, 8, lost=[0, 1, 2]).epoch(1)
    assert batch.num_real == 0


def test_images_smaller_than_the_models_are_a_mistake_of_ours():
    with pytest.raises(ValueError, match="4 px can't be cut to 6 px"):
        loader(4, 2, side=4)


def test_results_come_in_order_and_the_threads_end():
    before = threading.active_count()

    def job(number: int) -> int:
        time.sleep(0.01 * (number % 3))
        return number

    assert list(in_order([partial(job, number) for number in range(20)], 3, ahead=6)) == list(range(20))
    assert threading.active_count() == before


def test_an_error_comes_after_the_results_before_it():
    def broken() -> int:
        raise ValueError("broken")

    ahead = in_order([lambda: 1, broken, lambda: 3], 2, ahead=4)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="broken"):
        next(ahead)


def test_work_is_done_ahead_and_not_without_bound():
    done: list[int] = []
    ahead = in_order((partial(done.append, number) for number in range(100)), 2, ahead=4)
    next(ahead)
    deadline = time.monotonic() + 5
    while len(done) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(done) == 5
    ahead.close()


def test_closing_early_ends_the_threads():
    before = threading.active_count()
    ahead = loader(100, 4, workers=2).epoch(1)
    next(ahead)
    ahead.close()
    assert threading.active_count() == before


def test_the_number_of_threads_is_as_wanted_or_fits_the_device():
    assert num_workers(5, "cpu") == 5
    assert num_workers(0, "cpu") == 1
    assert 1 <= num_workers(0, "cuda") <= 8
