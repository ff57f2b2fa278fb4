"""Which images are held back for validation, and which files are the same picture."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Item:
    """A usable image.

    Attributes:
        path, file: where it lies, and its name relative to the data's root.
        label: its class index.
        digest: SHA-256 of its bytes, in hexadecimal.
        width, height: upright, in pixels.
    """

    path: Path
    file: str
    label: int
    digest: str
    width: int
    height: int


def split_by_class(
    items: Sequence[Item], classes: Sequence[str], *, seed: int, val_percent: int
) -> tuple[list[Item], list[Item], list[str]]:
    """Hold back `val_percent` of each class, drawn by `seed`; files of equal bytes stay on one side.

    A class of one image goes to training, as do bytes that two classes share.

    Returns:
        Training items, validation items, and warnings.
    """
    by_label: dict[int, list[Item]] = defaultdict(list)
    labels_of: dict[str, set[int]] = defaultdict(set)
    for item in sorted(items, key=lambda item: item.file):
        by_label[item.label].append(item)
        labels_of[item.digest].add(item.label)
    val: set[str] = set()
    warnings = []
    for label, members in sorted(by_label.items()):
        name = classes[label]
        if len(members) == 1:
            warnings.append(f"class '{name}' has one image, so it cannot be in both training and validation")
            continue
        groups: dict[str, list[Item]] = defaultdict(list)
        for item in members:
            if len(labels_of[item.digest]) == 1:
                groups[item.digest].append(item)
        own = list(groups.values())
        random.Random(f"{seed} {name}").shuffle(own)
        wanted = min(max(round(len(members) * val_percent / 100), 1), len(members) - 1)
        chosen = _fill(own, wanted, len(members))
        if not chosen:
            warnings.append(f"no validation image for {name}")
        val.update(item.file for item in chosen)
    train = [item for item in items if item.file not in val]
    return train, [item for item in items if item.file in val], warnings


def _fill(groups: list[list[Item]], wanted: int, total: int) -> list[Item]:
    chosen: list[Item] = []
    for group in groups:
        is_last_chance = not chosen and len(group) < total and group is groups[-1]
        if len(chosen) + len(group) <= wanted or is_last_chance:
            chosen += group
    return chosen


def groups_of_equal(items: Iterable[Item]) -> list[list[Item]]:
    """Groups of two or more items with equal bytes, each in the order given."""
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[item.digest].append(item)
    return [group for group in groups.values() if len(group) > 1]
