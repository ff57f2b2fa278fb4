"""A data set as the scan found it, and the report of it."""

from __future__ import annotations

import csv
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from core.data.sources import Skipped
from core.data.split import Item, groups_of_equal
from core.files import built

FEW_IMAGES = 10
"""A class with fewer training images is pointed out."""
UNBALANCED = 5
"""A largest class with more than this many times the training images of the smallest is pointed out."""
SKIP_WORDS = {
    "truncated": "damaged or cut off",
    "not_an_image": "not an image, whatever the name says",
    "zero_bytes": "empty file",
    "unsupported_format": "a format that can't be read here",
    "too_large": "too many pixels or bytes",
    "unreadable": "the system doesn't let it be read",
    "unsafe_path": "a path or link that leads outside, or round in a loop",
    "encrypted": "protected by a password",
    "unknown_compression": "packed by a method that can't be read here",
    "duplicate_name": "the same name a second time",
    "name_too_long": "a name too long for this disk, or in over 100 folders",
    "outside_class": "a picture in no class folder",
    "unknown_class": "of a class that training doesn't have",
    "also_in_training": "held back no longer: the same bytes are in training",
}
"""Reasons in words."""


@dataclass(frozen=True)
class Dataset:
    """A scanned data set.

    Attributes:
        root: the folder that the files' names are relative to.
        classes: by index.
        skipped, ignored: pictures that are not used and why; files that are no pictures, or hidden.
        warnings: what a person should mend or know; with `skipped` it makes the outcome `report`.
        about: what to know of these data, where they are well known.
    """

    root: Path
    classes: list[str]
    train: list[Item]
    val: list[Item]
    test: list[Item]
    skipped: list[Skipped] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    about: str = ""

    @property
    def outcome(self) -> str:
        """ok, or report where something was skipped or warned of."""
        return "report" if self.skipped or self.warnings else "ok"

    @property
    def splits(self) -> dict[str, list[Item]]:
        """train and val, and test where the data have one."""
        return {"train": self.train, "val": self.val} | ({"test": self.test} if self.test else {})

    @property
    def used(self) -> int:
        """Images of all splits."""
        return sum(map(len, self.splits.values()))

    @property
    def found(self) -> int:
        """All files: used, skipped and ignored."""
        return self.used + len(self.skipped) + len(self.ignored)

    @property
    def duplicates(self) -> list[list[Item]]:
        """Groups of files with equal bytes, training first."""
        return groups_of_equal([*self.train, *self.val, *self.test])

    def digest(self) -> str:
        """Of which pictures there are, by name and bytes, in which order, split and class; in hexadecimal."""
        whole = hashlib.sha256()
        for split, items in self.splits.items():
            for item in items:
                whole.update(f"{split}\0{item.label}\0{item.file}\0{item.digest}\n".encode("utf-8", "surrogateescape"))
        return whole.hexdigest()

    def counts(self) -> dict[str, Counter[int]]:
        """Split to the number of images of each class index."""
        return {split: Counter(item.label for item in items) for split, items in self.splits.items()}

    def skipped_by_reason(self) -> dict[str, int]:
        """Reason to number of files, most frequent first."""
        return dict(Counter(item.why for item in self.skipped).most_common())

    def hints(self) -> list[str]:
        """What is worth knowing and no fault: few images, imbalance, formats that can't be read."""
        counts = self.counts()["train"]
        return [*_few(self.classes, counts), *_imbalance(self.classes, counts), *_formats(self.skipped)]

    def summary(self) -> dict[str, Any]:
        """What a run keeps of the report: counts and sentences, no file names."""
        return {
            "found": self.found,
            "used": {split: len(items) for split, items in self.splits.items()},
            "skipped_by_reason": self.skipped_by_reason(),
            "ignored": len(self.ignored),
            "warnings": self.warnings,
            "hints": self.hints(),
        }

    def save_split(self, path: Path) -> None:
        """Write which image went where, one row a file, whole or not at all."""
        with built(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as out:
            rows = csv.writer(out)
            rows.writerow(["split", "class", "file", "sha256"])
            for split, items in self.splits.items():
                rows.writerows((split, self.classes[item.label], item.file, item.digest) for item in items)

    def report(self, with_files: bool = False) -> dict[str, Any]:
        """The answer of the command `scan` as plain JSON values."""
        splits, counts = self.splits, self.counts()
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
            "found": self.found,
            "usable_images": self.used,
            "skipped": [asdict(skipped) for skipped in self.skipped],
            "skipped_by_reason": self.skipped_by_reason(),
            "ignored": self.ignored,
            "duplicates": [[item.file for item in group] for group in self.duplicates],
            "warnings": self.warnings,
            "hints": self.hints(),
            "about": self.about,
        }
        if with_files:
            answer["files"] = [
                {"file": item.file, "label": item.label, "split": split}
                for split, items in splits.items()
                for item in items
            ]
        return answer


def shortened(sentences: Sequence[str], what: str, most: int = 20) -> list[str]:
    """The sentences, or the first `most` and how many more `what` there are."""
    if len(sentences) <= most:
        return list(sentences)
    return [*sentences[:most], f"and {len(sentences) - most:,} more {what}"]


def named(names: Iterable[str], most: int = 5) -> str:
    """'a', 'b' and 3 more."""
    quoted = [f"'{name}'" for name in names]
    if len(quoted) > most:
        return f"{', '.join(quoted[:most])} and {len(quoted) - most:,} more"
    return " and ".join(filter(None, [", ".join(quoted[:-1]), quoted[-1]]))


def _few(classes: Sequence[str], counts: Counter[int]) -> list[str]:
    few = sorted((count, label) for label, count in counts.items() if count < FEW_IMAGES)
    if not few:
        return []
    who = "1 class has" if len(few) == 1 else f"{len(few):,} classes have"
    return [f"{who} fewer than {FEW_IMAGES} training images: {named(classes[label] for _, label in few)}"]


def _imbalance(classes: Sequence[str], counts: Counter[int]) -> list[str]:
    ranked = counts.most_common()
    if not ranked or ranked[0][1] <= UNBALANCED * ranked[-1][1]:
        return []
    (most, high), (least, low) = ranked[0], ranked[-1]
    return [
        f"the classes are unbalanced: '{classes[most]}' has {high:,} training images, '{classes[least]}' has {low:,}; "
        "balanced sampling or class weights make up for it"
    ]


def _formats(skipped: Sequence[Skipped]) -> list[str]:
    endings = Counter(item.file.rpartition(".")[2].upper() for item in skipped if item.why == "unsupported_format")
    if not endings:
        return []
    total = sum(endings.values())
    kinds = ", ".join(f"{count:,} {ending}" for ending, count in endings.most_common(6))
    verb = "1 picture is" if total == 1 else f"{total:,} pictures are"
    return [f"{verb} in a format that can't be read here ({kinds}): save as JPEG or PNG"]
