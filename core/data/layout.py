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
    r"(images?|imgs?|pictures?|photos?|data|dataset|set|split|folder|dir|samples?|\d{1,4}|用|データ)$"
)
_WRAPPER = re.compile(
    r"(jpeg|jpg|png|raw)?_?(images?|imgs?|pictures?|photos?|data(set)?s?|jpe?gs?|pngs?)", re.IGNORECASE
)
"""Names of folders that hold the classes beside others with documents or masks."""


@dataclass
class Layout:
    """Files by split and class name; `strays` lie in no class."""

    splits: dict[str, dict[str, list[File]]]
    strays: list[File] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def leave_out(self, folder: Folder, beside: str) -> None:
        """The folder is no class; its pictures are strays, and that is told."""
        self.strays += folder.all_files()
        if folder.holds_pictures:
            self.warnings.append(f"folder '{folder.name}' beside {beside} is not used")


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
        DataError: there are folders for splits, but none for training or none of classes.
    """
    layout = Layout({})
    inner = _look_through(top, layout)
    layout.strays += inner.files
    by_split = _split_folders(inner, spec)
    if by_split:
        _take_splits(inner, by_split, layout)
    elif _is_divided_by_class(inner):
        for split in SPLITS:
            if found := _by_name(inner.folders, split):
                layout.splits[split] = found
    else:
        layout.splits["train"] = _by_name(inner.folders)
    return layout


def _take_splits(inner: Folder, by_split: dict[str, list[Folder]], layout: Layout) -> None:
    chosen = [folder for folders in by_split.values() for folder in folders]
    for folder in inner.folders:
        if folder not in chosen:
            layout.leave_out(folder, "the training folder")
    for split in SPLITS:
        if folders := by_split.get(split):
            below = [_look_through(folder, layout) for folder in folders]
            layout.strays += [file for folder in below for file in folder.files]
            layout.splits[split] = _by_name([inner for folder in below for inner in folder.folders])
            if not layout.splits[split] and any(folder.holds_pictures for folder in folders):
                layout.warnings.append(f"folder '{folders[0].name}' has no class folders, so its images are not used")


def _look_through(folder: Folder, layout: Layout) -> Folder:
    """The first folder below that is more than a wrapper of another one."""
    while (inner := _wrapped(folder)) is not None:
        layout.strays += folder.files
        for below in folder.folders:
            if below is not inner:
                layout.leave_out(below, f"'{inner.name}'")
        folder = inner
    return folder


def _wrapped(folder: Folder) -> Folder | None:
    """The folder that `folder` only wraps, if it does."""
    holding = [below for below in folder.folders if below.holds_pictures]
    with_classes = [below for below in holding if _has_class_folders(below)]
    if len(with_classes) != 1:
        return None
    [inner] = with_classes
    if _WRAPPER.fullmatch(inner.name) and sum(below.holds_pictures for below in inner.folders) >= 2:
        return inner
    # an empty folder beside it may be a class, or a split, that nobody filled
    return inner if len(holding) == 1 and not any(below.is_empty for below in folder.folders) else None


def _split_folders(folder: Folder, spec: str) -> dict[str, list[Folder]]:
    found: dict[str, list[Folder]] = {}
    others = []
    for below in folder.folders:
        if split := split_of(below.name):
            found.setdefault(split, []).append(below)
        elif below.holds_pictures:
            others.append(below)
    with_classes = [split for split, below in found.items() if any(map(_has_class_folders, below))]
    if "train" in with_classes:
        # 'train' beside 'car' and 'bus' is a class of vehicles; beside one folder of unlabelled images it is none
        num_classes = sum(inner.holds_pictures for below in found["train"] for inner in below.folders)
        are_flat = not any(map(_has_class_folders, others))
        is_split = not others or len(with_classes) >= 2 or (are_flat and num_classes > len(others))
        return found if is_split else {}
    if others or len(found) < 2:
        return {}
    named = " and ".join(sorted(found, key=SPLITS.index))
    if with_classes:
        raise DataError(f"'{spec}' has {named} folders but none for training.", fix="Add a folder train.")
    if "train" in found and all(folder.holds_pictures for below in found.values() for folder in below):
        raise DataError(
            f"'{spec}' has {named} folders, and no folders of classes in them.",
            fix="Put the images of each class into a folder of its own, such as train/cat.",
        )
    return {}


def _is_divided_by_class(folder: Folder) -> bool:
    """Whether each class has its own folders train and val, instead of the other way round."""
    holding = [below for below in folder.folders if below.holds_pictures]
    splits = [{split_of(inner.name) for inner in below.folders if inner.holds_pictures} for below in holding]
    return len(holding) >= 2 and all(
        "train" in found and len(found) >= 2 and None not in found and not below.files
        for found, below in zip(splits, holding, strict=True)
    )


def _has_class_folders(folder: Folder) -> bool:
    return any(below.holds_pictures for below in folder.folders)


def _by_name(folders: list[Folder], split: str | None = None) -> dict[str, list[File]]:
    """Class name to files; with `split`, those of the class's own folder for that split."""
    found: dict[str, list[File]] = {}
    for folder in folders:
        parts = [folder] if split is None else [below for below in folder.folders if split_of(below.name) == split]
        for part in parts:
            found.setdefault(folder.name, []).extend(part.all_files())
    return found
