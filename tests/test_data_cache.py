"""Packed images: made once, shared, bounded, and safe against being killed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from core.data import cache
from core.data.cache import LIMIT_VARIABLE, Fit, PackedImages
from core.data.images import load_rgb
from core.data.scan import scan
from core.data.sources import open_source
from core.data.split import Item
from core.errors import DataError

SQUARE = Fit(16, "bicubic", keeps_shape=False)
ROOT = Path(__file__).parents[1]


def make_images(folder: Path, num: int = 6, size: tuple[int, int] = (40, 30)) -> Path:
    generator = np.random.default_rng(num)
    for label, name in enumerate("ab"):
        (folder / name).mkdir(parents=True)
        for i in range(num):
            noise = generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            noise[0, 0] = i, label, 9
            Image.fromarray(noise).save(folder / name / f"{i}.png")
    return folder


def items_of(folder: Path, home: Path, **options: object) -> list[Item]:
    dataset = scan(open_source(str(folder), home), home=home, seed=0, val_percent=20, **options)
    return sorted([*dataset.train, *dataset.val], key=lambda item: item.file)


def opened(items: list[Item], home: Path, fit: Fit = SQUARE, **options: object) -> PackedImages:
    packed = PackedImages(home, fit)
    packed.choose(items)
    packed.fill(range(len(items)), **options)
    return packed


def pack(items: list[Item], home: Path, **options: object) -> PackedImages:
    """Pack all and close."""
    packed = opened(items, home, **options)
    assert all(packed.pixels(number) is not None for number in range(len(items)))
    packed.close()
    return packed


def colours(packed: PackedImages, number: int) -> np.ndarray:
    pixels = packed.pixels(number)
    assert pixels is not None
    return np.ascontiguousarray(pixels).view(np.uint8).reshape(*pixels.shape, 3)


def segments(home: Path) -> list[Path]:
    return sorted((home / "cache").glob("packed-*/*.npz"))


def test_pictures_are_the_centre_square_of_the_resized_file(tmp_path: Path):
    items = items_of(make_images(tmp_path / "d"), tmp_path)
    packed = opened(items, tmp_path)
    for number, item in enumerate(items):
        image = Image.fromarray(load_rgb(item.path)).resize((21, 16), Image.Resampling.BICUBIC)
        expected = np.asarray(image)[:, 2:18].astype(int)
        assert np.abs(colours(packed, number) - expected).max() <= 1
    packed.close()


def test_a_fit_that_keeps_the_shape_cuts_only_what_is_very_long():
    fit = Fit(16, "bilinear", keeps_shape=True)
    assert fit.shape_of(40, 30) == (16, 21)
    assert fit.shape_of(30, 40) == (21, 16)
    assert fit.shape_of(400, 30) == (16, 32)
    for width, height in ((40, 30), (30, 40), (400, 30), (5000, 3), (3, 5000), (16, 16), (1, 1)):
        for keeps_shape in (True, False):
            fit = Fit(16, "bilinear", keeps_shape)
            pixels = np.zeros((height, width, 3), np.uint8)
            assert fit(pixels, width, height).shape[:2] == fit.shape_of(width, height)


def test_what_is_decoded_by_the_scan_is_not_decoded_again(tmp_path: Path):
    folder = make_images(tmp_path / "d")
    packed = PackedImages(tmp_path, SQUARE)
    items = items_of(folder, tmp_path, sink=packed.add, at_least=16)
    for item in items:
        item.path.unlink()
    packed.choose(items)
    packed.fill(range(len(items)))
    assert [colours(packed, number).shape for number in range(12)] == [(16, 16, 3)] * 12
    packed.close()
    assert packed.was_built


def test_a_later_run_reads_what_an_earlier_one_made(tmp_path: Path):
    items = items_of(make_images(tmp_path / "d"), tmp_path)
    first = opened(items, tmp_path)
    seen = [colours(first, number).copy() for number in range(12)]
    first.close()
    for item in items:
        item.path.unlink()
    again = opened(items[::-1], tmp_path)
    assert not again.was_built
    assert all(np.array_equal(colours(again, 11 - number), seen[number]) for number in range(12))
    again.close()
    assert len(segments(tmp_path)) == 1


def test_only_new_pictures_are_made_when_a_folder_grows(tmp_path: Path):
    folder = make_images(tmp_path / "d")
    pack(items_of(folder, tmp_path), tmp_path)
    Image.new("RGB", (20, 20), (7, 7, 7)).save(folder / "a" / "new.png")
    told: list[tuple[str, int, int]] = []
    pack(items_of(folder, tmp_path), tmp_path, progress=lambda *step: told.append(step))
    assert told == [("packing images", 1, 1)]
    assert len(segments(tmp_path)) == 2


def test_the_same_bytes_elsewhere_are_the_same_picture(tmp_path: Path):
    pack(items_of(make_images(tmp_path / "d"), tmp_path), tmp_path)
    assert not pack(items_of(make_images(tmp_path / "e"), tmp_path), tmp_path).was_built


def test_another_size_has_its_own_pictures(tmp_path: Path):
    items = items_of(make_images(tmp_path / "d"), tmp_path)
    pack(items, tmp_path)
    larger = opened(items, tmp_path, Fit(20, "bicubic", keeps_shape=True))
    assert colours(larger, 0).shape == (20, 26, 3)
    larger.close()


def test_pictures_can_be_used_while_others_are_still_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    items = items_of(make_images(tmp_path / "d"), tmp_path)
    gate, decode = threading.Event(), cache.decode
    held = items[-1].path.read_bytes()

    def slow(content: bytes, *rest: object) -> object:
        if content == held:
            assert gate.wait(10)
        return decode(content, *rest)

    monkeypatch.setattr(cache, "decode", slow)
    packed = opened(items, tmp_path)
    assert colours(packed, 0).shape == (16, 16, 3)
    assert not segments(tmp_path)
    gate.set()
    assert colours(packed, 11).shape == (16, 16, 3)
    packed.close()
    assert len(segments(tmp_path)) == 1


def test_a_file_that_is_gone_or_changed_is_lost_and_told(tmp_path: Path):
    items = items_of(make_images(tmp_path / "d"), tmp_path)
    items[0].path.unlink()
    items[1].path.write_bytes(items[2].path.read_bytes())
    told: list[str] = []
    packed = opened(items, tmp_path, on_lost=lambda file, why: told.append(file))
    assert packed.pixels(0) is None
    assert packed.pixels(1) is None
    assert packed.pixels(2) is not None
    packed.close()
    assert sorted(told) == [items[0].file, items[1].file]


def test_closing_early_keeps_what_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    items = items_of(make_images(tmp_path / "d"), tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    gate, decode, count = threading.Event(), cache.decode, 0

    def slow(content: bytes, *rest: object) -> object:
        nonlocal count
        count += 1
        if count == 3:
            gate.wait(10)
        return decode(content, *rest)

    monkeypatch.setattr(cache, "decode", slow)
    packed = opened(items, tmp_path)
    assert packed.pixels(1) is not None
    closing = threading.Thread(target=packed.close)
    packed._closed = True
    gate.set()
    closing.start()
    closing.join()
    again = PackedImages(tmp_path, SQUARE)
    assert 2 <= sum(item.digest in again._where for item in items) < 12
    again.close()


def test_a_process_killed_while_packing_leaves_nothing_that_is_read(tmp_path: Path):
    folder = make_images(tmp_path / "d")
    program = f"""
        import os, signal, sys
        from pathlib import Path
        from core.data.cache import Fit, PackedImages
        from core.data.scan import scan
        from core.data.sources import open_source
        home = Path({str(tmp_path)!r})
        packed = PackedImages(home, Fit(16, "bicubic", keeps_shape=False))
        scan(open_source({str(folder)!r}, home), home=home, seed=0, val_percent=20, sink=packed.add)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, check=False)
    assert done.returncode == -9
    left = list((tmp_path / "cache" / SQUARE.folder).iterdir())
    assert len(left) == 1 and left[0].name.startswith(".building-")
    packed = opened(items_of(folder, tmp_path), tmp_path)
    assert packed.was_built
    assert colours(packed, 5).shape == (16, 16, 3)
    packed.close()
    assert not left[0].exists()


def test_a_damaged_segment_is_made_anew(tmp_path: Path):
    items = items_of(make_images(tmp_path / "d"), tmp_path)
    pack(items, tmp_path)
    [index] = segments(tmp_path)
    os.truncate(index.with_suffix(".bin"), 100)
    packed = opened(items, tmp_path)
    assert packed.was_built
    assert colours(packed, 11).shape == (16, 16, 3)
    packed.close()


def test_the_cache_stays_within_its_limit_and_loses_what_was_used_longest_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sets = [items_of(make_images(tmp_path / f"d{num}", num), tmp_path) for num in (5, 6, 7)]
    for items in sets[:2]:
        pack(items, tmp_path)
    oldest, newest = segments(tmp_path)
    if oldest.with_suffix(".bin").stat().st_size > newest.with_suffix(".bin").stat().st_size:
        oldest, newest = newest, oldest
    os.utime(oldest, (1, 1))
    bytes_a_set = 14 * 16 * 16 * 3
    monkeypatch.setenv(LIMIT_VARIABLE, str(2 * bytes_a_set / 2**30))
    pack(sets[2], tmp_path)
    assert not oldest.exists() and not oldest.with_suffix(".bin").exists()
    assert newest.exists()
    assert len(segments(tmp_path)) == 2


def test_what_is_in_use_is_never_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    items = items_of(make_images(tmp_path / "d"), tmp_path)
    pack(items, tmp_path)
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    again = opened(items, tmp_path)
    assert not again.was_built
    again.close()


def test_a_disk_without_room_is_told_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The full disk is simulated: filling a real one would harm the machine."""
    items = items_of(make_images(tmp_path / "d"), tmp_path)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100}))
    packed = PackedImages(tmp_path, SQUARE)
    with pytest.raises(DataError, match=r"needs 0\.0 GiB"):
        packed.choose(items)
    packed.close()


def test_a_disk_that_fills_up_meanwhile_ends_the_run_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The full disk is simulated: filling a real one would harm the machine."""
    items = items_of(make_images(tmp_path / "d"), tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    packed = opened(items, tmp_path)
    with pytest.raises(DataError, match="No space left"):
        packed.pixels(0)
    packed.close()
