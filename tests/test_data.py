"""Awkward collections are read right or named, and batches keep their promises."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import numpy as np
import pytest

from core.data.cache import build_or_open
from core.data.images import load_rgb
from core.data.loader import PAD_LABEL, BatchLoader, prefetch
from core.data.scan import scan
from core.data.sources import open_source
from core.errors import DataError

CASES = sorted((Path(__file__).parent / "data" / "cases").glob("*/expect.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.parent.name)
def test_an_awkward_collection_is_read_as_expected(path: Path, tmp_path: Path):
    expect = json.loads(path.read_text())
    source = open_source(str(path.parent / expect["input"]), tmp_path)
    report = scan(source, seed=0, val_percent=20).report(with_files=True)
    assert report["outcome"] == expect["outcome"]
    ours, theirs = report["classes"], expect["classes"]
    assert (sorted(ours), sorted(theirs)) == (sorted(theirs), sorted(ours))
    if not expect.get("classes_any_order"):
        assert ours == theirs
    assert report["class_counts"] == expect["class_counts"]
    assert report["usable_images"] == expect["usable_images"]
    key = lambda item: item["file"]  # noqa: E731
    assert sorted(report["skipped"], key=key) == sorted(expect.get("skipped", []), key=key)
    for split, counts in expect.get("splits", {}).items():
        assert report["splits"][split] == counts
    for pattern in expect.get("ignored", []):
        assert any(fnmatch.fnmatch(name, pattern) for name in report["ignored"]), pattern
    assert set(expect.get("warn", [])) <= set(report["warnings"])
    assert report["duplicates"] == expect.get("duplicates", [])
    labels = {item["file"]: item["label"] for item in report["files"]}
    for check in expect.get("label_checks", []):
        assert labels[check["file"]] == check["label"]
    for check in expect.get("pixel_checks", []):
        pixels = load_rgb(source.root / check["file"]).astype(float)
        if "mean_rgb" in check:
            assert np.abs(pixels.mean((0, 1)) - check["mean_rgb"]).max() <= check["tol"]
        if "min_std" in check:
            assert pixels.std() >= check["min_std"]
        if "size" in check:
            assert [pixels.shape[1], pixels.shape[0]] == check["size"]
        if "same_as" in check:
            assert np.abs(pixels - load_rgb(source.root / check["same_as"])).mean() <= check["tol"]


def test_nothing_of_an_unsafe_zip_lands_outside(tmp_path: Path):
    case = Path(__file__).parent / "data" / "cases" / "zip_slip" / "data.zip"
    home = tmp_path / "deep" / "home"
    open_source(str(case), home)
    assert [path.name for path in tmp_path.rglob("*escaped*")] == []
    assert not Path("/tmp/escaped_shared_abs.png").exists()


def test_one_class_is_refused(tmp_path: Path):
    (tmp_path / "data" / "only").mkdir(parents=True)
    with pytest.raises(DataError, match="no class folder"):
        scan(open_source(str(tmp_path / "data"), tmp_path), seed=0, val_percent=20)


def test_the_automatic_split_is_fixed_by_its_seed(tmp_path: Path):
    source = open_source(str(CASES[0].parent / "data"), tmp_path)
    one, two, other = (
        {item.file for item in scan(source, seed=seed, val_percent=40).val} for seed in (1, 1, 2)
    )
    assert one == two != other


def test_a_cache_is_built_once(tmp_path: Path):
    dataset = scan(open_source("builtin:fashion-mnist", tmp_path), seed=0, val_percent=20)
    first = build_or_open(dataset.val, 32, "bicubic", tmp_path)
    second = build_or_open(dataset.val, 32, "bicubic", tmp_path)
    assert (first.was_built, second.was_built) == (True, False)
    assert first.images.shape == (400, 32, 32, 3) and np.array_equal(first.images, second.images)


def make_loader(count: int = 10, size: int = 4, **changes) -> BatchLoader:
    images = np.arange(count, dtype=np.uint8)[:, None, None, None] * np.ones((1, 6, 6, 3), dtype=np.uint8)
    options = {"train": True, "image_size": 4, "augmentation": "crop", "seed": 0, **changes}
    return BatchLoader(images, np.arange(count), size, **options)


def seen(loader: BatchLoader, epoch: int) -> list[int]:
    return [int(label) for batch in loader.epoch(epoch) for label in batch.labels]


def test_an_epoch_shows_each_image_once_and_fills_the_last_batch_with_images():
    labels = seen(make_loader(), 1)
    assert sorted(labels[:10]) == list(range(10)) and len(labels) == 12
    assert PAD_LABEL not in labels


def test_seed_and_epoch_fix_the_order():
    assert seen(make_loader(), 1) == seen(make_loader(), 1) != seen(make_loader(), 2)


def test_a_set_smaller_than_the_batch_size_is_one_batch():
    [batch] = make_loader(count=3, size=8).epoch(1)
    assert len(batch.labels) == 3


def test_evaluation_pads_with_rows_that_do_not_count():
    batches = list(make_loader(train=False, augmentation="none").epoch(0))
    assert [batch.num_real for batch in batches] == [4, 4, 2]
    assert batches[-1].labels.tolist() == [8, 9, PAD_LABEL, PAD_LABEL]
    assert {tuple(batch.images.shape) for batch in batches} == {(4, 3, 4, 4)}


def test_prefetch_carries_errors_to_the_consumer():
    def broken():
        yield 1
        raise ValueError("no picture")

    items = prefetch(broken())
    assert next(items) == 1
    with pytest.raises(ValueError, match="no picture"):
        next(items)


def test_closing_prefetch_ends_its_thread():
    items = prefetch(iter(range(1000)))
    next(items)
    items.close()
