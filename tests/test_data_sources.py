"""Opening, scanning, splitting and caching."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from core.data.cache import build_or_open
from core.data.images import load_rgb, show_png
from core.data.scan import scan
from core.data.sources import open_source
from core.errors import DataError

CASES = Path(__file__).parent / "data" / "cases"


def write_images(folder: Path, counts: dict[str, int]) -> Path:
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (20, 12), (i, label, 9)).save(folder / name / f"{i}.png")
    return folder


def test_a_zip_writes_nothing_outside_its_own_folder(tmp_path: Path):
    home = tmp_path / "a" / "b" / "home"
    source = open_source(str(CASES / "zip_slip" / "data.zip"), home)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 8
    assert all(path.is_relative_to(source.root) for path in written)
    assert not Path("/tmp/escaped_shared_abs.png").exists()
    assert {item.why for item in source.skipped} == {"unsafe_path"}


def test_links_and_backslashes_in_a_zip(tmp_path: Path):
    link = zipfile.ZipInfo("a/link.png")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
        archive.writestr(r"a\..\..\up.png", b"x")
        archive.writestr(r"a\in.png", b"x")
    source = open_source(str(tmp_path / "x.zip"), tmp_path / "home")
    assert [path.name for path in source.root.rglob("*") if path.is_file()] == ["in.png"]
    assert [item.file for item in source.skipped] == ["a/link.png", r"a\..\..\up.png"]


def test_a_zip_is_unpacked_once(tmp_path: Path):
    spec = str(CASES / "mac_zip" / "data.zip")
    first = open_source(spec, tmp_path)
    (first.root / "mark").touch()
    assert open_source(spec, tmp_path) == first
    assert (first.root / "mark").exists()
    assert [path.name for path in (tmp_path / "data").iterdir()] == [first.root.name]


@pytest.mark.parametrize("spec", ["builtin:nothing", "torchvision:CIFAR10", "imagenetv2", "hf:a/b", "no/such/folder"])
def test_what_is_not_there_is_named(spec: str, tmp_path: Path):
    with pytest.raises(DataError) as caught:
        open_source(spec, tmp_path)
    assert spec.removeprefix("builtin:") in caught.value.problem
    assert caught.value.fix


def test_the_built_in_set_is_whole(tmp_path: Path):
    dataset = scan(open_source("builtin:fashion-mnist", tmp_path), seed=0, val_percent=20)
    assert (len(dataset.classes), len(dataset.train), len(dataset.val), dataset.outcome) == (10, 1000, 400, "ok")


def test_split_is_stratified_and_follows_the_seed(tmp_path: Path):
    source = open_source(str(write_images(tmp_path / "d", {"a": 20, "b": 10})), tmp_path)
    first, again, other = (scan(source, seed=seed, val_percent=20) for seed in (1, 1, 2))
    assert first.report()["splits"] == {"train": {"a": 16, "b": 8}, "val": {"a": 4, "b": 2}}
    assert first == again
    assert first.val != other.val


def test_identical_bytes_are_never_on_both_sides(tmp_path: Path):
    folder = write_images(tmp_path / "d", {"a": 6, "b": 6})
    for i in range(6):
        (folder / "a" / f"copy{i}.png").write_bytes((folder / "a" / f"{i}.png").read_bytes())
    for seed in range(5):
        dataset = scan(open_source(str(folder), tmp_path), seed=seed, val_percent=30)
        train, val = ({item.path.read_bytes() for item in items} for items in (dataset.train, dataset.val))
        assert not train & val
        assert {item.label for item in dataset.val} == {0, 1}


def test_a_pair_of_copies_beside_others_still_gives_a_validation_image(tmp_path: Path):
    folder = write_images(tmp_path / "d", {"a": 2, "b": 6})
    for i in range(2):
        (folder / "a" / f"copy{i}.png").write_bytes((folder / "a" / f"{i}.png").read_bytes())
    dataset = scan(open_source(str(folder), tmp_path), seed=0, val_percent=20)
    assert dataset.report()["splits"]["val"]["a"] == 2


def test_a_test_folder_alone_leaves_validation_to_a_split_of_training(tmp_path: Path):
    write_images(tmp_path / "d" / "Training", {"a": 10, "b": 10})
    write_images(tmp_path / "d" / "Testing", {"a": 300 % 7, "b": 2})
    report = scan(open_source(str(tmp_path / "d"), tmp_path), seed=0, val_percent=10).report()
    assert report["splits"]["train"] == {"a": 9, "b": 9}
    assert report["splits"]["test"] == {"a": 6, "b": 2}


def test_one_class_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="1 class "):
        scan(open_source(str(write_images(tmp_path / "d", {"a": 3})), tmp_path), seed=0, val_percent=20)


def test_cache_is_built_once_and_holds_the_centre_square(tmp_path: Path):
    dataset = scan(open_source(str(write_images(tmp_path / "d", {"a": 4, "b": 4})), tmp_path), seed=0, val_percent=20)
    seen: list[tuple[int, int]] = []
    cache = build_or_open(
        dataset.train, 8, "bicubic", tmp_path, progress=lambda done, total: seen.append((done, total))
    )
    again = build_or_open(dataset.train, 8, "bicubic", tmp_path)
    assert (cache.was_built, again.was_built, seen[-1]) == (True, False, (6, 6))
    assert cache.images.shape == (6, 8, 8, 3)
    assert cache.images[:, 0, 0, 1].tolist() == cache.labels.tolist()
    assert np.array_equal(cache.images, again.images)


def test_show_writes_what_the_loader_sees(tmp_path: Path):
    root = CASES / "exif_rotation" / "data"
    show_png(str(root), "sky_up/phone6.jpg", tmp_path / "out.png", tmp_path)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out.png")), load_rgb(root / "sky_up" / "phone6.jpg"))
    with pytest.raises(DataError):
        show_png(str(root), "../expect.json", tmp_path / "out.png", tmp_path)
