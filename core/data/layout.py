"""Which folders are classes, which are splits, and which only wrap others."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from core.data.tree import File, Folder
from core.errors import DataError

SPLITS = ("train", "val", "test")
_SPLIT_WORDS = {
    "train": {"train", "training", "trn", "訓練", "学習"},
    "val": {"val", "valid", "validation", "validate", "dev", "devel", "development", "eval", "evaluation", "検証"},
    "test": {"test", "testing", "tst", "テスト"},
}
_SPLIT_ADDITIONS = re.compile(
    r"(images?|imgs?|pictures?|photos?|data|dataset|set|split|folder|dir|samples?|\d{4}|用|データ)$"
)


@dataclass
class Layout:
    """Files by split and class name; `strays` lie in no class."""

    splits: dict[str, dict[str, list[File]]]
    strays: list[File] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def split_of(name: str) -> str | None:
    """train, val or test where a folder's name says so in one of its usual spellings, else None.

    Case, blanks and signs don't count, nor do additions: "Train_Images", "validation set" and "test2017" are splits.
    """
    word = re.sub(r"[\W_]+", "", name.lower())
    while word:
        for split, words in _SPLIT_WORDS.items():
            if word in words:
                return split
        shorter = _SPLIT_ADDITIONS.sub("", word)
        if shorter == word:
            return None
        word = shorter
    return None


def find_layout(top: Folder, spec: str) -> Layout:
    """Look through wrappers, tell splits from classes, and take what lies below a class folder as its images.

    Raises:
        DataError: there are folders for validation or test but none for training.
    """
    strays: list[File] = []
    warnings: list[str] = []
    inner = _look_through(top, strays)
    by_split = _split_folders(inner, spec, warnings)
    strays += inner.files
    if not by_split:
        return Layout({"train": _by_name(inner.folders)}, strays, warnings)
    chosen = [folder for folders in by_split.values() for folder in folders]
    for folder in inner.folders:
        if folder not in chosen:
            strays += folder.all_files()
            if folder.holds_pictures:
                warnings.append(f"folder '{folder.name}' beside the training folder is not used")
    splits = {}
    for split in SPLITS:
        if folders := by_split.get(split):
            splits[split] = _classes(folders, strays)
            if not splits[split] and any(folder.holds_pictures for folder in folders):
                warnings.append(f"folder '{folders[0].name}' has no class folders, so its images are not used")
    return Layout(splits, strays, warnings)


def _look_through(folder: Folder, strays: list[File]) -> Folder:
    """The first folder below that is more than a wrapper of a single one."""
    while True:
        holding = [below for below in folder.folders if below.holds_pictures]
        others = [below for below in folder.folders if not below.holds_pictures]
        is_wrapper = len(holding) == 1 and any(inner.holds_pictures for inner in holding[0].folders)
        # an empty folder beside it may be a class, or a split, that nobody filled
        if not is_wrapper or any(below.is_empty for below in others):
            return folder
        strays += folder.files
        for below in others:
            strays += below.all_files()
        folder = holding[0]


def _split_folders(folder: Folder, spec: str, warnings: list[str]) -> dict[str, list[Folder]]:
    found: dict[str, list[Folder]] = {}
    others = []
    for below in folder.folders:
        if split := split_of(below.name):
            found.setdefault(split, []).append(below)
        elif below.holds_pictures:
            others.append(below)
    with_classes = [split for split, below in found.items() if any(map(_has_class_folders, below))]
    if "train" in with_classes:
        # 'train' beside 'car' is a class of vehicles
        return found if not others or len(with_classes) >= 2 else {}
    if len(with_classes) >= 2 and not others:
        named = " and ".join(sorted(with_classes, key=SPLITS.index))
        raise DataError(f"'{spec}' has {named} folders but none for training.", fix="Add a folder train.")
    return {}


def _has_class_folders(folder: Folder) -> bool:
    return any(below.holds_pictures for below in folder.folders)


def _classes(folders: list[Folder], strays: list[File]) -> dict[str, list[File]]:
    inner = [_look_through(folder, strays) for folder in folders]
    for folder in inner:
        strays += folder.files
    return _by_name([below for folder in inner for below in folder.folders])


def _by_name(folders: list[Folder]) -> dict[str, list[File]]:
    found: dict[str, list[File]] = {}
    for folder in folders:
        found.setdefault(folder.name, []).extend(folder.all_files())
    return found
