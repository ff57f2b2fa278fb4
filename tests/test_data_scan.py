"""What a scan says of a data set: splits, copies, counts and words."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

from core.__main__ import main
from core.data.dataset import Dataset
from core.data.scan import scan
from core.data.sources import Source, open_source
from core.errors import DataError

CASES = Path(__file__).parent / "data" / "cases"


def write_images(folder: Path, counts: dict[str, int], shade: int = 9) -> Path:
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (20, 12), (i, label, shade)).save(folder / name / f"{i}.png")
    return folder


def scanned(folder: Path, home: Path, seed: int = 0, val_percent: int = 20, **options: object) -> Dataset:
    return scan(open_source(str(folder), home), home=home, seed=seed, val_percent=val_percent, **options)


def copy(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())


def test_the_built_in_set_is_whole(tmp_path: Path):
    dataset = scan(open_source("builtin:fashion-mnist", tmp_path), home=tmp_path, seed=0, val_percent=20)
    assert (len(dataset.classes), len(dataset.train), len(dataset.val), dataset.outcome) == (10, 1000, 400, "ok")


def test_split_is_stratified_and_follows_the_seed(tmp_path: Path):
    folder = write_images(tmp_path / "d", {"a": 20, "b": 10})
    first, again, other = (scanned(folder, tmp_path, seed=seed) for seed in (1, 1, 2))
    assert first.report()["splits"] == {"train": {"a": 16, "b": 8}, "val": {"a": 4, "b": 2}}
    assert first == again
    assert first.val != other.val


def test_the_split_is_stored_by_file_and_bytes(tmp_path: Path):
    dataset = scanned(write_images(tmp_path / "d", {"a": 5, "b": 5}), tmp_path)
    dataset.save_split(tmp_path / "split.csv")
    with (tmp_path / "split.csv").open(encoding="utf-8") as rows:
        stored = list(csv.DictReader(rows))
    assert [row["file"] for row in stored if row["split"] == "val"] == [item.file for item in dataset.val]
    assert {row["class"] for row in stored} == {"a", "b"}
    assert {row["sha256"] for row in stored} == {item.digest for item in [*dataset.train, *dataset.val]}


def test_identical_bytes_are_never_on_both_sides(tmp_path: Path):
    folder = write_images(tmp_path / "d", {"a": 6, "b": 6})
    for i in range(6):
        copy(folder / "a" / f"{i}.png", folder / "a" / f"copy{i}.png")
    for seed in range(5):
        dataset = scanned(folder, tmp_path, seed=seed, val_percent=30)
        train, val = ({item.path.read_bytes() for item in items} for items in (dataset.train, dataset.val))
        assert not train & val
        assert {item.label for item in dataset.val} == {0, 1}


def test_a_pair_of_copies_beside_others_still_gives_a_validation_image(tmp_path: Path):
    folder = write_images(tmp_path / "d", {"a": 2, "b": 6})
    for i in range(2):
        copy(folder / "a" / f"{i}.png", folder / "a" / f"copy{i}.png")
    assert scanned(folder, tmp_path).report()["splits"]["val"]["a"] == 2


def test_copies_under_two_labels_are_named_and_stay_in_training(tmp_path: Path):
    folder = write_images(tmp_path / "d", {"a": 6, "b": 6})
    copy(folder / "a" / "0.png", folder / "b" / "same.png")
    for seed in range(5):
        dataset = scanned(folder, tmp_path, seed=seed, val_percent=40)
        assert "1 image lies in several classes: a/0.png, b/same.png" in dataset.warnings
        assert {"a/0.png", "b/same.png"} <= {item.file for item in dataset.train}
    assert dataset.report()["duplicates"] == [["a/0.png", "b/same.png"]]


def test_validation_images_that_are_in_training_are_kept_or_dropped(tmp_path: Path):
    folder = CASES / "leak_between_splits" / "data"
    case = json.loads((CASES / "leak_between_splits" / "expect.json").read_text())
    kept, dropped = scanned(folder, tmp_path), scanned(folder, tmp_path, val_duplicates="drop")
    assert kept.report()["duplicates"] == case["duplicates"]
    assert (len(kept.val), len(dropped.val)) == (8, 6)
    assert dropped.skipped_by_reason() == {"also_in_training": 2}
    assert "2 validation images are byte for byte in training; left out" in dropped.warnings[0]
    assert dropped.report()["found"] == kept.report()["found"] == 20


def test_a_test_folder_alone_leaves_validation_to_a_split_of_training(tmp_path: Path):
    write_images(tmp_path / "d" / "Training", {"a": 10, "b": 10})
    write_images(tmp_path / "d" / "Testing", {"a": 6, "b": 2}, shade=8)
    report = scanned(tmp_path / "d", tmp_path, val_percent=10).report()
    assert report["splits"]["train"] == {"a": 9, "b": 9}
    assert report["splits"]["test"] == {"a": 6, "b": 2}


def test_validation_classes_are_matched_by_name_also_in_another_case(tmp_path: Path):
    write_images(tmp_path / "d" / "train", {"Cat": 4, "Dog": 4, "dog": 4})
    write_images(tmp_path / "d" / "val", {"cat": 2, "dog": 3, "cow": 1}, shade=8)
    dataset = scanned(tmp_path / "d", tmp_path)
    assert dataset.report()["splits"]["val"] == {"Cat": 2, "dog": 3}
    assert dataset.skipped_by_reason() == {"unknown_class": 1}
    assert "class 'cow' has no training image, so its val images are left out" in dataset.warnings


@pytest.mark.parametrize(
    ("names", "ordered"),
    [
        (["10", "9", "1"], ["1", "9", "10"]),
        (["010", "9", "001"], ["001", "9", "010"]),
        (["-1", "0.5", "10", "2"], ["-1", "0.5", "2", "10"]),
        (["10", "9", "b"], ["10", "9", "b"]),
        (["nan", "1"], ["1", "nan"]),
    ],
)
def test_classes_that_are_all_numbers_are_ordered_by_value(tmp_path: Path, names: list[str], ordered: list[str]):
    assert scanned(write_images(tmp_path / "d", dict.fromkeys(names, 3)), tmp_path).classes == ordered


@pytest.mark.parametrize(
    ("counts", "words"),
    [({}, "no class with images"), ({"a": 3}, r"1 class with images \('a'\)"), ({"a": 3, "b": 0}, r"1 class .*'a'")],
)
def test_fewer_than_two_classes_are_refused(tmp_path: Path, counts: dict[str, int], words: str):
    (tmp_path / "d").mkdir()
    with pytest.raises(DataError, match=words):
        scanned(write_images(tmp_path / "d", counts), tmp_path)


def test_classes_of_one_image_each_leave_nothing_to_validate(tmp_path: Path):
    with pytest.raises(DataError, match="leaves no image for validation"):
        scanned(write_images(tmp_path / "d", {"a": 1, "b": 1}), tmp_path)


def test_every_file_is_counted_once(tmp_path: Path):
    folder = write_images(tmp_path / "d", {"a": 4, "b": 4})
    (folder / "a" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    (folder / "a" / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))
    (folder / "a" / "notes.txt").write_text("words")
    (folder / "a" / ".hidden.png").write_bytes(b"x")
    (folder / "cover.png").write_bytes((folder / "a" / "0.png").read_bytes())
    (folder / "list.csv").write_text("1,2")
    (folder / "b" / "out.png").symlink_to(tmp_path / "nowhere.png")
    report = scanned(folder, tmp_path).report(with_files=True)
    on_disk = sum(len(files) for _, _, files in folder.walk()) if hasattr(folder, "walk") else 15
    assert report["found"] == on_disk == 15
    assert report["usable_images"] == len(report["files"]) == 8
    assert {item["file"]: item["why"] for item in report["skipped"]} == {
        "a/broken.jpg": "truncated",
        "a/photo.heic": "unsupported_format",
        "cover.png": "outside_class",
        "b/out.png": "unsafe_path",
    }
    assert report["ignored"] == ["a/.hidden.png", "a/notes.txt", "list.csv"]
    assert report["hints"][-1] == "1 picture is in a format that can't be read here (1 HEIC): save as JPEG or PNG"


def test_few_images_and_imbalance_are_pointed_out_and_are_no_fault(tmp_path: Path):
    dataset = scanned(write_images(tmp_path / "d", {"many": 100, "few": 5}), tmp_path)
    assert dataset.outcome == "ok"
    few, unbalanced = dataset.hints()
    assert few == "1 class has fewer than 10 training images: 'few'"
    assert "'many' has 80 training images, 'few' has 4" in unbalanced


def test_a_source_with_fixed_classes_keeps_their_numbers(tmp_path: Path):
    folder = write_images(tmp_path / "d", {"0": 3, "02": 3, "10": 3, "11": 2})
    names = tuple(f"name {number}" for number in range(11))
    source = Source("spec", folder, classes=names)
    dataset = scan(source, home=tmp_path, seed=0, val_percent=30)
    assert dataset.classes == list(names)
    assert {item.file.partition("/")[0]: item.label for item in dataset.train} == {"0": 0, "02": 2, "10": 10}
    assert "8 of 11 classes have no image" in dataset.warnings
    assert dataset.skipped_by_reason() == {"unknown_class": 2}


def test_many_warnings_of_a_kind_are_shortened(tmp_path: Path):
    counts = {f"c{number:03d}": 1 for number in range(30)} | {"z": 5}
    warnings = scanned(write_images(tmp_path / "d", counts), tmp_path).warnings
    assert warnings[0] == "class 'c000' has one image, so it cannot be in both training and validation"
    assert "and 10 more classes like these" in warnings
    assert len(warnings) == 21


def test_a_file_with_a_strange_name_goes_all_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_images(tmp_path / "d", {"a b,c": 3, '"quoted"\n': 3, "犬 🐕": 3})
    assert main(["--home", str(tmp_path / "home"), "scan", str(folder), "--files", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["classes"] == ['"quoted"\n', "a b,c", "犬 🐕"]
    for item in report["files"]:
        assert (
            main(
                ["--home", str(tmp_path / "home"), "show", str(folder), item["file"], "--out", str(tmp_path / "x.png")]
            )
            == 0
        )


def test_the_command_line_tells_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = str(CASES / "truncated_jpeg" / "data")
    assert main(["--home", str(tmp_path), "scan", folder]) == 0
    told = capsys.readouterr().out
    assert "skipped apple/cut_half.jpg: damaged or cut off" in told
    assert "14 files found = 12 used + 2 skipped + 0 not pictures" in told
    assert main(["--home", str(tmp_path), "scan", str(tmp_path / "nowhere")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
