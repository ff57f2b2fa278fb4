"""Which folders are classes, splits or wrappers, and what is never followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.data.layout import find_layout, split_of
from core.data.tree import find_file, read_tree
from core.errors import DataError


def make(root: Path, *names: str) -> Path:
    """Empty files (names that end in / are folders) below `root`."""
    for name in names:
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return root


def classes_of(root: Path) -> dict[str, dict[str, int]]:
    layout = find_layout(read_tree(root).top, "data")
    return {split: {name: len(files) for name, files in found.items()} for split, found in layout.splits.items()}


@pytest.mark.parametrize(
    "names",
    [["train/1.png", "val/1.png", "labels.csv"], ["images/train/1.png", "images/val/1.png", "labels/val/1.txt"]],
)
def test_splits_without_any_class_folder_are_refused(tmp_path: Path, names: list[str]):
    with pytest.raises(DataError, match="train and val folders, and no folders of classes in them"):
        classes_of(make(tmp_path / "d", *names))


def test_a_folder_of_unbounded_depth_is_read_to_a_depth_and_told(tmp_path: Path):
    path = make(tmp_path / "d", "a/1.png", "b/1.png") / "a"
    for _ in range(150):
        path = path / "x"
    path.mkdir(parents=True)
    (path / "deep.png").touch()
    tree = read_tree(tmp_path / "d")
    assert [file.name for file in tree.top.all_files()] == ["a/1.png", "b/1.png"]
    assert len(tree.broken) == 1


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train", "train"),
        ("Training", "train"),
        ("TRAIN_IMAGES", "train"),
        ("training set", "train"),
        ("train2017", "train"),
        ("train-data", "train"),
        ("学習用データ", "train"),
        ("val", "val"),
        ("Validation", "val"),
        ("valid", "val"),
        ("dev", "val"),
        ("val_imgs", "val"),
        ("test", "test"),
        ("Testing_Data", "test"),
        ("trains", None),
        ("invalid", None),
        ("contest", None),
        ("test1", "test"),
        ("images", None),
        ("data", None),
        ("2017", None),
    ],
)
def test_usual_spellings_of_splits(name: str, split: str | None):
    assert split_of(name) == split


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a/1.png", "b/1.png"], {"train": {"a": 1, "b": 1}}),
        (["w/x/a/1.png", "w/x/b/1.png", "w/readme.txt"], {"train": {"a": 1, "b": 1}}),
        (["images/a/1.png", "images/b/1.png", "notes/1.xml", "cover.jpg"], {"train": {"a": 1, "b": 1}}),
        (["w/train/a/1.png", "w/train/b/1.png", "w/val/a/2.png"], {"train": {"a": 1, "b": 1}, "val": {"a": 1}}),
        (["Train/images/a/1.png", "Train/images/b/1.png", "Valid/images/a/2.png", "Valid/images/b/2.png"],
         {"train": {"a": 1, "b": 1}, "val": {"a": 1, "b": 1}}),
        (["train/a/1.png", "train/b/1.png"], {"train": {"a": 1, "b": 1}}),
        (["train/a/1.png", "train/b/1.png", "val/"], {"train": {"a": 1, "b": 1}, "val": {}}),
        (["train/a/1.png", "train/b/1.png", "test/1.png", "test/2.png"], {"train": {"a": 1, "b": 1}, "test": {}}),
        (["train/1.png", "car/1.png"], {"train": {"car": 1, "train": 1}}),
        (["train/steam/1.png", "train/diesel/1.png", "tram/1.png", "bus/1.png"],
         {"train": {"bus": 1, "train": 2, "tram": 1}}),
        (["train/ant/1.png", "train/bee/1.png", "unlabeled/1.png"], {"train": {"ant": 1, "bee": 1}}),
        (["train/ant/1.png", "train/bee/1.png", "test1/1.png"], {"train": {"ant": 1, "bee": 1}, "test": {}}),
        (["w/images/ant/1.png", "w/images/bee/1.png", "w/docs/LICENSE", "w/scripts/Makefile"],
         {"train": {"ant": 1, "bee": 1}}),
        (["images/ant/1.png", "images/bee/1.png", "docs/figure.png"], {"train": {"ant": 1, "bee": 1}}),
        (["images/ant/1.png", "images/bee/1.png", "annotations/masks/1.png", "annotations/x/2.png"],
         {"train": {"annotations": 2, "images": 2}}),
        (["images/ant/1.png", "images/bee/1.png", "logs/"], {"train": {"ant": 1, "bee": 1}}),
        (["ant/train/1.png", "ant/val/2.png", "bee/train/1.png", "bee/val/2.png", "bee/val/3.png"],
         {"train": {"ant": 1, "bee": 1}, "val": {"ant": 1, "bee": 2}}),
        (["valid/1.png", "invalid/1.png"], {"train": {"invalid": 1, "valid": 1}}),
        (["a/deep/er/1.png", "a/2.png", "b/1.png"], {"train": {"a": 2, "b": 1}}),
        (["full/1.png", "empty/"], {"train": {"full": 1, "empty": 0}}),
        (["full/x/1.png", "full/y/2.png", "empty/"], {"train": {"full": 2, "empty": 0}}),
    ],
)  # fmt: skip
def test_folders_become_classes_and_splits(tmp_path: Path, names: list[str], expected: dict):
    assert classes_of(make(tmp_path / "d", *names)) == expected


def test_a_split_without_class_folders_is_told_and_its_pictures_are_strays(tmp_path: Path):
    root = make(tmp_path / "d", "train/a/1.png", "train/b/1.png", "test/1.png")
    layout = find_layout(read_tree(root).top, "data")
    assert [file.name for file in layout.strays] == ["test/1.png"]
    assert layout.warnings == ["folder 'test' has no class folders, so its images are not used"]


def test_a_folder_beside_the_splits_is_told(tmp_path: Path):
    root = make(tmp_path / "d", "train/a/1.png", "train/b/1.png", "val/a/1.png", "extra/1.png")
    layout = find_layout(read_tree(root).top, "data")
    assert layout.warnings == ["folder 'extra' beside the training folder is not used"]
    assert [file.name for file in layout.strays] == ["extra/1.png"]


def test_validation_and_test_without_training_are_refused(tmp_path: Path):
    root = make(tmp_path / "d", "val/a/1.png", "test/a/1.png")
    with pytest.raises(DataError, match="val and test folders but none for training"):
        find_layout(read_tree(root).top, "data")


def test_hidden_and_system_files_are_no_part_of_the_data(tmp_path: Path):
    names = [
        "a/1.png",
        "a/._1.png",
        "a/Thumbs.db",
        "a/.ipynb_checkpoints/1.png",
        "__MACOSX/a/1.png",
        ".git/x",
        "b/@eaDir/1.png",
    ]
    tree = read_tree(make(tmp_path / "d", *names))
    assert [file.name for file in tree.top.all_files()] == ["a/1.png"]
    assert sorted(tree.hidden) == sorted(names[1:])


def test_both_unicode_spellings_are_one_class(tmp_path: Path):
    composed, decomposed = "\u304c", "\u304b\u3099"
    root = make(tmp_path / "d", f"train/{composed}/1.png", "train/b/1.png", f"val/{decomposed}/1.png")
    assert classes_of(root)["val"] == {composed: 1}
    assert find_file(root, f"val/{decomposed}/1.png") == find_file(root, f"val/{composed}/1.png") is not None


def test_names_that_differ_in_their_unicode_spelling_alone_stay_two(tmp_path: Path):
    root = make(tmp_path / "d", "a/\u304c.png", "a/\u304b\u3099.png", "b/1.png")
    names = [file.name for file in read_tree(root).top.all_files()]
    assert len(set(names)) == 3


def test_names_in_the_bytes_of_a_japanese_windows_are_read(tmp_path: Path):
    for name in ("犬", "猫"):
        folder = os.fsencode(tmp_path / "d") + b"/" + name.encode("cp932")
        os.makedirs(folder)
        with open(folder + b"/1.png", "wb"):
            pass
    assert classes_of(tmp_path / "d") == {"train": {"犬": 1, "猫": 1}}


def test_links_are_followed_inside_alone_and_never_in_a_loop(tmp_path: Path):
    root = make(tmp_path / "d", "a/1.png", "b/1.png")
    make(tmp_path, "outside/secret.png")
    (root / "a" / "out.png").symlink_to(tmp_path / "outside" / "secret.png")
    (root / "c").symlink_to(tmp_path / "outside")
    (root / "a" / "loop").symlink_to(root)
    (root / "b" / "again").symlink_to(root / "b")
    (root / "a" / "inside.png").symlink_to(root / "b" / "1.png")
    (root / "a" / "nowhere.png").symlink_to(root / "gone.png")
    tree = read_tree(root)
    assert sorted(file.name for file in tree.top.all_files()) == ["a/1.png", "a/inside.png", "b/1.png"]
    assert sorted(tree.unsafe_links) == ["a/loop", "a/nowhere.png", "a/out.png", "b/again", "c"]


def test_folders_that_link_to_each_other_end(tmp_path: Path):
    root = make(tmp_path / "d", *(f"{name}/1.png" for name in "abcdefgh"))
    for one in "abcdefgh":
        for other in "abcdefgh":
            if one != other:
                (root / one / other).symlink_to(root / other)
    names = [file.name for file in read_tree(root).top.all_files()]
    assert {f"{name}/1.png" for name in "abcdefgh"} <= set(names)
    assert len(names) <= 16


def test_the_products_own_folder_is_no_part_of_the_data(tmp_path: Path):
    root = make(tmp_path / "d", "a/1.png", "b/1.png", "runs/data/c/1.png")
    assert [folder.name for folder in read_tree(root, without=root / "runs").top.folders] == ["a", "b"]
