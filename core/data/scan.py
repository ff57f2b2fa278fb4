"""What a folder holds: classes, splits, and which files can't be used, found before the first epoch."""

from __future__ import annotations

import hashlib
import io
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from core.data.images import MAX_PIXELS
from core.data.sources import Skipped, Source
from core.errors import DataError

_SPLIT_NAMES = {
    "train": {"train", "training", "trainset", "train_set"},
    "val": {"val", "valid", "validation", "dev", "eval", "valset", "val_set", "validation_set"},
    "test": {"test", "testing", "testset", "test_set"},
}
_SYSTEM = {"__macosx", "__pycache__", "@eadir", "$recycle.bin", "system volume information", "thumbs.db", "desktop.ini"}
# fmt: off
_UNSUPPORTED = {
    "svg", "svgz", "heic", "heif", "raw", "dng", "cr2", "cr3", "nef", "nrw", "arw", "srf", "sr2", "orf", "rw2",
    "raf", "pef", "psd", "psb", "xcf", "ai", "eps", "wmf", "emf", "jxl", "pdf",
}
_PICTURES = {
    "jpg", "jpeg", "jpe", "jfif", "png", "apng", "gif", "bmp", "dib", "tif", "tiff", "webp", "avif", "jp2",
    "j2k", "ico", "ppm", "pgm", "pbm", "pnm", "tga",
}
# fmt: on
_NEEDS_A_PROGRAM = {"EPS", "WMF", "PDF"}
_MAGIC = re.compile(rb"\xff\xd8\xff|\x89PNG|GIF8|BM|II\*\0|MM\0\*|RIFF....WEBP", re.DOTALL)


@dataclass(frozen=True)
class Item:
    """One usable image: where it lies, its name relative to the data's root, its class index."""

    path: Path
    file: str
    label: int


@dataclass(frozen=True)
class Dataset:
    """A scanned data set; `outcome` is ok, or report where something was skipped or warned of."""

    classes: list[str]
    train: list[Item]
    val: list[Item]
    test: list[Item]
    skipped: list[Skipped]
    ignored: list[str]
    warnings: list[str]
    outcome: str

    def report(self, with_files: bool = False) -> dict[str, Any]:
        """The answer of the command `scan` as plain JSON values."""
        splits = {"train": self.train, "val": self.val} | ({"test": self.test} if self.test else {})
        counts = {name: Counter(item.label for item in items) for name, items in splits.items()}
        answer: dict[str, Any] = {
            "outcome": self.outcome,
            "classes": self.classes,
            "class_counts": {
                name: sum(count[label] for count in counts.values()) for label, name in enumerate(self.classes)
            },
            "splits": {
                split: {name: count[label] for label, name in enumerate(self.classes) if count[label]}
                for split, count in counts.items()
            },
            "usable_images": sum(map(len, splits.values())),
            "skipped": [asdict(skipped) for skipped in self.skipped],
            "ignored": self.ignored,
            "warnings": self.warnings,
        }
        if with_files:
            answer["files"] = [
                {"file": item.file, "label": item.label, "split": split}
                for split, items in splits.items()
                for item in items
            ]
        return answer


@dataclass(frozen=True)
class _Found:
    path: Path
    file: str
    class_name: str
    digest: str


def scan(source: Source, *, seed: int, val_percent: int) -> Dataset:
    """Find classes, splits and unusable files; each image is decoded once.

    Where the data bring no validation folder, `val_percent` of each class is drawn by `seed`; images with
    identical bytes are never on both sides.

    Raises:
        DataError: fewer than two classes, or no image for validation.
    """
    reading = _Reading(source)
    folders = _split_folders(reading.top)
    if folders and "train" not in folders:
        raise DataError(
            f"'{source.spec}' has {' and '.join(folders)} folders but none for training.", fix="Add a folder train."
        )
    found = {split: reading.read_classes(folder) for split, folder in (folders or {"train": reading.top}).items()}
    warnings: list[str] = []
    classes = _class_names(found["train"], warnings)
    if len(classes) < 2:
        named = f" ('{classes[0]}')" if classes else ""
        raise DataError(
            f"'{source.spec}' has {len(classes)} class{'es' * (len(classes) != 1)} with images{named}; "
            "training needs two or more.",
            fix="Give a folder with one folder of images for each class.",
        )
    known = {split: reading.keep_known(split, by_class, classes, warnings) for split, by_class in found.items()}
    train, val, test = known["train"], known.get("val", []), known.get("test", [])
    if "val" in found and not val:
        warnings.append("the validation folder has no usable image, so a share of the training images is used")
    if val:
        warnings += _missing(val, classes)
    else:
        train, val = _split(train, classes, seed, val_percent, warnings)
    if not val:
        raise DataError(f"'{source.spec}' leaves no image for validation.", fix="Add images to its classes.")
    for word, items in (("validation", val), ("test", test)):
        warnings += _duplicates(word, items, train)
    labels = {name: label for label, name in enumerate(classes)}

    def items_of(files: Sequence[_Found]) -> list[Item]:
        return [Item(f.path, f.file, labels[f.class_name]) for f in sorted(files, key=lambda f: f.file)]

    skipped = sorted([*source.skipped, *reading.skip_strays()], key=lambda item: item.file)
    return Dataset(
        classes,
        items_of(train),
        items_of(val),
        items_of(test),
        skipped,
        sorted(reading.ignored),
        warnings,
        "report" if skipped or warnings else "ok",
    )


class _Reading:
    """One pass over a folder: what was skipped and ignored so far, and what no class has claimed."""

    def __init__(self, source: Source) -> None:
        self.root = source.root
        self.top = _look_through(source.root)
        self.skipped: list[Skipped] = []
        self.ignored: list[str] = []
        self._unclaimed = set()
        for path, is_hidden in _walk(source.root):
            if is_hidden:
                self.ignored.append(self._name(path))
            else:
                self._unclaimed.add(path)

    def read_classes(self, folder: Path) -> dict[str, list[_Found]]:
        """Class name to its usable images, for each class folder below `folder` (wrappers looked through)."""
        folder = _look_through(folder)
        names = {child: child.name for child in _subfolders(folder)}
        paths = [(path, name) for child, name in names.items() for path, hidden in _walk(child) if not hidden]
        self._unclaimed.difference_update(path for path, _ in paths)
        found: dict[str, list[_Found]] = {name: [] for name in names.values()}
        with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="scan") as pool:
            probed = pool.map(_probe, [path for path, _ in paths])
            for (path, name), (why, digest) in zip(paths, probed, strict=True):
                if why == "":
                    found[name].append(_Found(path, self._name(path), name, digest))
                elif why == "not_a_picture":
                    self.ignored.append(self._name(path))
                else:
                    self.skipped.append(Skipped(self._name(path), why))
        return found

    def keep_known(
        self, split: str, by_class: dict[str, list[_Found]], classes: list[str], warnings: list[str]
    ) -> list[_Found]:
        """The images of the training classes; those of other classes are skipped with a warning."""
        kept = []
        for name, files in by_class.items():
            if name in classes:
                kept += files
            elif files:
                warnings.append(f"class '{name}' has no training image, so its {split} images are left out")
                self.skipped += [Skipped(file.file, "unknown_class") for file in files]
        return kept

    def skip_strays(self) -> list[Skipped]:
        """All that was skipped, with the pictures that lie in no class folder; other strays are ignored."""
        for path in self._unclaimed:
            if path.suffix[1:].lower() in _PICTURES | _UNSUPPORTED:
                self.skipped.append(Skipped(self._name(path), "outside_class"))
            else:
                self.ignored.append(self._name(path))
        self._unclaimed.clear()
        return self.skipped

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in _SYSTEM


def _subfolders(folder: Path) -> list[Path]:
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"'{folder}' can't be read: {error.strerror}.", fix="Check its permissions.") from error
    return [c for c in children if not _is_hidden(c.name) and c.is_dir() and not c.is_symlink()]


def _walk(folder: Path) -> Iterator[tuple[Path, bool]]:
    for parent, folders, files in os.walk(folder):
        folders.sort()
        below = Path(parent).relative_to(folder).parts
        hidden = any(map(_is_hidden, below))
        for name in sorted(files):
            yield Path(parent) / name, hidden or _is_hidden(name)


def _look_through(folder: Path) -> Path:
    while len(below := _subfolders(folder)) == 1 and _subfolders(below[0]):
        folder = below[0]
    return folder


def _split_folders(top: Path) -> dict[str, Path]:
    folders = _subfolders(top)
    found: dict[str, Path] = {}
    for split, names in _SPLIT_NAMES.items():
        for folder in folders:
            if folder.name.lower() in names and _subfolders(folder):
                found.setdefault(split, folder)
    # 'train' beside 'car' is a class of vehicles
    if len(found) >= 2 and ("train" in found or len(found) == len(folders)):
        return found
    return {}


def _class_names(by_class: dict[str, list[_Found]], warnings: list[str]) -> list[str]:
    warnings += [f"class '{name}' has no image" for name in sorted(by_class) if not by_class[name]]
    names = sorted(name for name, files in by_class.items() if files)
    if all(name.isascii() and name.isdecimal() for name in names):
        names.sort(key=int)
    return names


def _missing(files: Sequence[_Found], classes: list[str]) -> list[str]:
    present = {file.class_name for file in files}
    return [f"no validation image for {name}" for name in classes if name not in present]


def _duplicates(word: str, files: Sequence[_Found], train: Sequence[_Found]) -> list[str]:
    first = {file.digest: file.file for file in reversed(train)}
    pairs = [f"{file.file} is {first[file.digest]}" for file in files if file.digest in first]
    if not pairs:
        return []
    shown = ", ".join(pairs[:10]) + (f" and {len(pairs) - 10} more" if len(pairs) > 10 else "")
    subject = f"1 {word} image is" if len(pairs) == 1 else f"{len(pairs)} {word} images are"
    return [f"{subject} byte for byte in training: {shown}"]


def _split(
    files: Sequence[_Found], classes: list[str], seed: int, val_percent: int, warnings: list[str]
) -> tuple[list[_Found], list[_Found]]:
    groups: dict[str, list[_Found]] = defaultdict(list)
    for file in sorted(files, key=lambda file: file.file):
        groups[file.digest].append(file)
    val: list[_Found] = []
    for name in classes:
        total = sum(file.class_name == name for file in files)
        if total == 1:
            warnings.append(f"class '{name}' has one image, so it cannot be in both training and validation")
            continue
        # bytes that two classes share stay in training
        own = [group for group in groups.values() if all(file.class_name == name for file in group)]
        random.Random(f"{seed} {name}").shuffle(own)
        wanted = min(max(round(total * val_percent / 100), 1), total - 1)
        chosen: list[_Found] = []
        for group in own:
            if len(chosen) + len(group) <= wanted or (not chosen and len(group) < total and group is own[-1]):
                chosen += group
        if not chosen:
            warnings.append(f"no validation image for {name}")
        val += chosen
    in_val = {file.file for file in val}
    return [file for file in files if file.file not in in_val], val


def _probe(path: Path) -> tuple[str, str]:
    """Why the file can't be used ("" where it can, not_a_picture where it is no matter), and its digest."""
    extension = path.suffix[1:].lower()
    try:
        content = path.read_bytes()
    except OSError:
        return "unreadable", ""
    if not content:
        return ("zero_bytes" if extension in _PICTURES | _UNSUPPORTED else "not_a_picture"), ""
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > MAX_PIXELS:
                return "too_large", ""
            if image.format in _NEEDS_A_PROGRAM:
                return "unsupported_format", ""
            image.load()
    except Image.DecompressionBombError:
        return "too_large", ""
    except UnidentifiedImageError:
        return _unidentified(content, extension), ""
    except Exception:  # decoders meet damaged bytes with errors of many kinds
        return ("truncated" if extension in _PICTURES or _MAGIC.match(content) else "not_a_picture"), ""
    return "", hashlib.sha256(content).hexdigest()


def _unidentified(content: bytes, extension: str) -> str:
    if extension in _UNSUPPORTED or content[4:12] in (b"ftypheic", b"ftypheix", b"ftypmif1"):
        return "unsupported_format"
    if extension in _PICTURES:
        return "truncated" if _MAGIC.match(content) else "not_an_image"
    return "not_a_picture"
