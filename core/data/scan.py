"""From a folder to a data set: classes, splits, and every file accounted for.

Found = used + skipped with a reason + not pictures.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.data.images import UnusableImage, load_rgb
from core.data.sources import Skipped, Source
from core.errors import DataError

_SPLITS = {
    "train": "train", "training": "train", "trn": "train", "train_set": "train", "trainset": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val", "eval": "val", "valset": "val",
    "test": "test", "testing": "test", "tst": "test", "testset": "test",
}  # fmt: skip
_PICTURES = {
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".dib", ".webp", ".tif", ".tiff", ".ppm", ".pgm",
    ".pbm", ".pnm", ".tga", ".ico", ".jp2", ".j2k", ".avif", ".pcx", ".sgi", ".im", ".xbm", ".qoi", ".dds",
}  # fmt: skip
_UNREADABLE = {
    ".svg", ".svgz", ".heic", ".heif", ".raw", ".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".rw2", ".raf",
    ".pef", ".srw", ".psd", ".ai", ".eps", ".jxl",
}  # fmt: skip
_SYSTEM = {"__macosx", "thumbs.db", "desktop.ini", "$recycle.bin", "system volume information", "__pycache__"}


@dataclass(frozen=True)
class Item:
    """An image: where it lies, its name relative to the data's root, its class index."""

    path: Path
    file: str
    label: int


@dataclass(frozen=True)
class Dataset:
    """Images by split, with all that was found beside them."""

    classes: list[str]
    train: list[Item]
    val: list[Item]
    test: list[Item]
    skipped: list[Skipped]
    ignored: list[str]
    warnings: list[str]
    duplicates: list[list[str]] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """`ok`, or `report` where something was skipped or is worth a warning."""
        return "report" if self.skipped or self.warnings else "ok"

    def report(self, *, with_files: bool = False) -> dict[str, Any]:
        """The answer of `scan`, as JSON values."""
        splits = {"train": self.train, "val": self.val} | ({"test": self.test} if self.test else {})
        everything = [item for items in splits.values() for item in items]
        counts = Counter(item.label for item in everything)
        answer: dict[str, Any] = {
            "outcome": self.outcome,
            "classes": self.classes,
            "class_counts": {name: counts[label] for label, name in enumerate(self.classes)},
            "splits": {split: self._counts(items) for split, items in splits.items()},
            "usable_images": len(everything),
            "skipped": [{"file": item.file, "why": item.why} for item in self.skipped],
            "ignored": self.ignored,
            "warnings": self.warnings,
            "duplicates": self.duplicates,
        }
        if with_files:
            answer["files"] = [
                {"file": item.file, "label": item.label, "split": split}
                for split, items in splits.items()
                for item in items
            ]
        return answer

    def _counts(self, items: list[Item]) -> dict[str, int]:
        counts = Counter(item.label for item in items)
        return {name: counts[label] for label, name in enumerate(self.classes) if counts[label]}


@dataclass
class _Tree:
    """Files by split and class, before any is opened; split "" where the data bring none."""

    files: dict[str, dict[str, list[Path]]]
    empty: list[str]
    ignored: list[str]


def scan(
    source: Source, *, seed: int, val_percent: int, progress: Callable[[int, int], None] | None = None
) -> Dataset:
    """Read the folder, open every picture once, and split it.

    Args:
        seed: of the split, where the data bring none.
        val_percent: share of each class that goes to validation, where the data bring none.
        progress: told of (pictures opened, pictures in all).

    Raises:
        DataError: there are fewer than two classes with images.
    """
    tree = _walk(source.root)
    used, skipped = _usable(source.root, tree, progress)
    skipped = [*source.skipped, *skipped]
    warnings = [f"class '{name}' has no image" for name in tree.empty]
    trained = "train" if "train" in used else ""
    classes = _ordered(name for name, paths in used.get(trained, {}).items() if paths)
    lost = [name for name in _ordered(tree.files.get(trained, {})) if name not in classes]
    warnings += [f"class '{name}' has no usable image" for name in lost]
    if len(classes) < 2:
        found = f"only the class '{classes[0]}'" if classes else "no class folder with images"
        reasons = Counter(item.why for item in skipped)
        left_out = f" ({', '.join(f'{n} {why}' for why, n in reasons.items())})" if reasons else ""
        raise DataError(
            f"In '{source.spec}' there is {found}{left_out}.", fix="Give a folder with a folder of images per class."
        )
    labels = {name: label for label, name in enumerate(classes)}

    def items(split: str) -> list[Item]:
        return [
            Item(path, path.relative_to(source.root).as_posix(), labels[name])
            for name in classes
            for path in used.get(split, {}).get(name, [])
        ]

    for split in ("val", "test"):
        for name in _ordered(used.get(split, {})):
            if name not in labels and used[split][name]:
                skipped += [
                    Skipped(path.relative_to(source.root).as_posix(), "class_not_in_training")
                    for path in used[split][name]
                ]
                warnings.append(f"class '{name}' is in {split} but not in training; its images are left out")
    train, val, test = items(trained), items("val"), items("test")
    digests = _digests([*train, *val])
    if val:
        present = {item.label for item in val}
        warnings += [f"no validation image for {name}" for name in classes if labels[name] not in present]
    else:
        train, val, alone = _split(train, digests, len(classes), seed, val_percent)
        warnings += [
            f"class '{classes[label]}' has one image, so it cannot be in both training and validation"
            for label in alone
        ]
    if not val:
        raise DataError(f"'{source.spec}' leaves no image for validation.", fix="Give at least two images to a class.")
    duplicates = _across(train, val, digests)
    if duplicates:
        are = "image is" if len(duplicates) == 1 else "images are"
        warnings.append(f"{len(duplicates)} validation {are} byte for byte in training")
    warnings += _contradictions([*train, *val], digests, classes)
    return Dataset(classes, train, val, test, skipped, tree.ignored, warnings, duplicates)


def _walk(root: Path) -> _Tree:
    ignored: list[str] = []
    base = root
    while True:
        folders, files = _entries(base, root, ignored)
        splits = _split_folders(folders)
        if splits or not folders:
            break
        if any(path.suffix.lower() in _PICTURES for path in files) or len(folders) > 1:
            break
        inner, _ = _entries(folders[0], root, [])
        if not inner:
            break
        ignored += [_name(path, root) for path in files]
        base = folders[0]
    ignored += [_name(path, root) for path in files]
    found: dict[str, dict[str, list[Path]]] = {}
    empty: list[str] = []
    for split, folder in splits.items() if splits else [("", base)]:
        top = folder
        while True:
            folders, stray = _entries(top, root, ignored)
            if len(folders) != 1 or not splits or not _entries(folders[0], root, [])[0]:
                break
            top = folders[0]
        if splits:
            ignored += [_name(path, root) for path in stray]
        classes: dict[str, list[Path]] = defaultdict(list)
        for child in folders:
            paths = _all_files(child, root, ignored)
            name = unicodedata.normalize("NFC", child.name)
            if paths:
                classes[name] += paths
            elif name not in empty:
                empty.append(name)
        found[split] = dict(classes)
    if splits and "train" not in found:
        found[""] = found.pop("val", None) or found.pop("test")
    return _Tree(found, empty, sorted(set(ignored)))


def _split_folders(folders: Sequence[Path]) -> dict[str, Path]:
    named = {_SPLITS[key]: path for path in folders if (key := path.name.lower().replace("-", "_")) in _SPLITS}
    return named if "train" in named or len(named) > 1 or (named and len(named) == len(folders)) else {}


def _entries(folder: Path, root: Path, ignored: list[str]) -> tuple[list[Path], list[Path]]:
    folders, files = [], []
    for entry in sorted(os.scandir(folder), key=lambda item: item.name):
        path = Path(entry.path)
        if _is_system(entry.name):
            ignored += _files_below(path, root) if entry.is_dir(follow_symlinks=False) else [_name(path, root)]
        elif entry.is_symlink() and not _stays_inside(path, root):
            ignored.append(_name(path, root))
        elif entry.is_dir():
            folders.append(path)
        elif entry.is_file():
            files.append(path)
    return folders, files


def _all_files(folder: Path, root: Path, ignored: list[str]) -> list[Path]:
    folders, files = _entries(folder, root, ignored)
    for child in folders:
        if not child.is_symlink():
            files += _all_files(child, root, ignored)
    pictures = []
    for path in files:
        suffix = path.suffix.lower()
        if suffix in _PICTURES or suffix in _UNREADABLE or _looks_like_picture(path):
            pictures.append(path)
        else:
            ignored.append(_name(path, root))
    return pictures


def _looks_like_picture(path: Path) -> bool:
    try:
        load_rgb(path)
    except UnusableImage as error:
        return error.why in ("truncated", "too_large", "damaged") and path.suffix == ""
    return True


def _is_system(name: str) -> bool:
    return name.startswith(".") or name.lower() in _SYSTEM


def _stays_inside(path: Path, root: Path) -> bool:
    target = path.resolve()
    return target.is_relative_to(root.resolve()) and not path.absolute().is_relative_to(target)


def _files_below(folder: Path, root: Path) -> list[str]:
    return [_name(path, root) for path in sorted(folder.rglob("*")) if path.is_file()]


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _usable(
    root: Path, tree: _Tree, progress: Callable[[int, int], None] | None
) -> tuple[dict[str, dict[str, list[Path]]], list[Skipped]]:
    paths = [path for classes in tree.files.values() for files in classes.values() for path in files]
    reasons: dict[Path, str | None] = {}
    with ThreadPoolExecutor(max_workers=min(8, (os.cpu_count() or 1) + 1)) as pool:
        for count, (path, why) in enumerate(zip(paths, pool.map(_reason, paths), strict=True), start=1):
            reasons[path] = why
            if progress:
                progress(count, len(paths))
    skipped = [Skipped(_name(path, root), why) for path, why in reasons.items() if why]
    used = {
        split: {name: [path for path in files if not reasons[path]] for name, files in classes.items()}
        for split, classes in tree.files.items()
    }
    return used, skipped


def _reason(path: Path) -> str | None:
    if path.suffix.lower() in _UNREADABLE:
        return "unsupported_format"
    try:
        load_rgb(path)
    except UnusableImage as error:
        return error.why
    except OSError:
        return "not_readable"
    return None


def _ordered(names: Any) -> list[str]:
    """By number where all names are numbers, else by text."""
    names = list(names)
    if all(re.fullmatch(r"\d+", name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def _digests(items: list[Item]) -> dict[Path, str]:
    """Content digests of the files that share their size with another; the rest are unique by size."""
    sizes = {item.path: item.path.stat().st_size for item in items}
    shared = Counter(sizes.values())
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest() if shared[size] > 1 else f"size-{size}"
        for path, size in sizes.items()
    }


def _split(
    items: list[Item], digests: dict[Path, str], num_classes: int, seed: int, val_percent: int
) -> tuple[list[Item], list[Item], list[int]]:
    """Stratified by class; identical files stay on one side; a class with one image is in training."""
    rng = random.Random(seed)
    labels_of: dict[str, set[int]] = defaultdict(set)
    for item in items:
        labels_of[digests[item.path]].add(item.label)
    train: list[Item] = []
    val: list[Item] = []
    alone = []
    for label in range(num_classes):
        groups: dict[str, list[Item]] = defaultdict(list)
        count = 0
        for item in items:
            if item.label == label:
                groups[digests[item.path]].append(item)
                count += 1
        if count == 1:
            alone.append(label)
        wanted = max(1, round(count * val_percent / 100)) if len(groups) > 1 else 0
        order = sorted(groups)
        rng.shuffle(order)
        taken: list[Item] = []
        for digest in order:
            group = groups[digest]
            fits = len(taken) + len(group) <= wanted and len(taken) + len(group) < count
            if fits and len(labels_of[digest]) == 1:
                taken += group
            else:
                train += group
        val += taken
    return sorted(train, key=lambda item: (item.label, item.file)), val, alone


def _across(train: list[Item], val: list[Item], digests: dict[Path, str]) -> list[list[str]]:
    trained = {digests[item.path]: item.file for item in reversed(train)}
    return [[trained[digests[item.path]], item.file] for item in val if digests[item.path] in trained]


def _contradictions(items: list[Item], digests: dict[Path, str], classes: list[str]) -> list[str]:
    by_digest: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_digest[digests[item.path]].append(item)
    return [
        f"the same picture has different labels: {', '.join(f'{item.file} ({classes[item.label]})' for item in group)}"
        for group in by_digest.values()
        if len({item.label for item in group}) > 1
    ]
