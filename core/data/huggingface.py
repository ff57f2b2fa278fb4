"""Image classification sets that the package `datasets` reads, from the Hugging Face Hub or a folder."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from core.data.exports import Exported, Part, Picture, export, open_export
from core.data.progress import Progress, quiet
from core.errors import DataError

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_HUB = re.compile(_REPO.pattern + r":[\w.-]+", re.ASCII)
_LABEL_NAMES = {"label", "labels", "class", "classes", "class_name", "category", "target", "y"}
_SPLITS = {
    "train": ("train", "training"),
    "val": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}
_BATCH = 64


@dataclass(frozen=True)
class _Labels:
    """The label column, the classes by number, and which number a value of the column stands for."""

    column: str
    classes: list[str]
    numbers: dict[Any, int]


def locate_hf(name: str) -> tuple[str, str | None]:
    """REPO and CONFIG of what follows `hf:`; nothing is imported or fetched.

    Raises:
        DataError: it is no name of a repository, or `datasets` is not installed.
    """
    repo, config = (name, None) if _folder_of(name) else _divided(name)
    if not _folder_of(repo) and not _REPO.fullmatch(repo):
        raise DataError(f"'hf:{name}' names no data set.", fix="Write it as hf:OWNER/NAME or hf:OWNER/NAME:CONFIG.")
    if find_spec("datasets") is None:
        raise DataError(f"'hf:{name}' needs the package datasets.", fix="Install it: pip install datasets.")
    return repo, config


def hf_folders(name: str) -> list[str]:
    """What of a name after `hf:` may be read as a folder of this machine; empty where it can only be of the Hub."""
    repo = _divided(name)[0]
    may_be = {name, repo} if _folder_of(name) or _folder_of(repo) else set()
    return sorted(may_be) if may_be or _REPO.fullmatch(name) or _HUB.fullmatch(name) else [name, repo]


def open_hf(name: str, home: Path, progress: Progress = quiet) -> Exported:
    """Export a set below `home`/data; a Hub set is fetched the first time only, a folder again when it changes.

    Raises:
        DataError: there is no such set or no network, or its columns tell no images and labels.
    """
    repo, config = locate_hf(name)
    local = _folder_of(repo)
    safe = re.sub(r"[^\w.-]+", "-", local.name if local else name)[:50]
    folder = home / "data" / f"hf-{safe}-{_digest(repo, config)}"
    if (before := open_export(folder)) is not None:
        return before
    progress("downloading", 0, 0)
    splits = _load(repo, config, home / "downloads" / "huggingface")
    first = next(iter(splits.values()))
    image_column, label_column = _columns(name, first.features)
    labels = _read_labels(label_column, splits)
    wanted, notes = _chosen(splits)
    counts = {split: _count(data, labels) for split, data in wanted.items()}
    left_out = sum(len(data) - counts[split] for split, data in wanted.items())
    if left_out:
        notes.append(f"{left_out:,} images without a label are left out.")
    wanted = {split: data for split, data in wanted.items() if counts[split]}
    parts = [
        Part("" if len(wanted) == 1 else split, _images(data, image_column, labels), counts[split])
        for split, data in wanted.items()
    ]
    return export(folder, labels.classes, " ".join(notes), parts, progress)


def _folder_of(repo: str) -> Path | None:
    try:
        path = Path(repo).expanduser().resolve()
        return path if repo and path.is_dir() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, an unknown home
        return None


def _divided(name: str) -> tuple[str, str | None]:
    repo, _, config = name.rpartition(":")
    return (repo, config) if repo and config else (name, None)


def _digest(repo: str, config: str | None) -> str:
    facts = [repo, config or ""]
    if folder := _folder_of(repo):
        facts[0] = str(folder)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            stat = path.stat()
            facts.append(f"{path.relative_to(folder)} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(facts).encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _load(repo: str, config: str | None, cache: Path) -> dict[str, Any]:
    import datasets  # type: ignore[import-untyped]
    from datasets.exceptions import DatasetsError  # type: ignore[import-untyped]

    folder = _folder_of(repo)
    try:
        if folder and any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
            loaded = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(str(folder or repo), config, cache_dir=str(cache))
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise DataError(
            f"'hf:{repo}' can't be loaded: {reason}.", fix="Check the name and the network, or add :CONFIG to the name."
        ) from error
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if not splits:
        raise DataError(f"'hf:{repo}' is empty.", fix="Choose another set.")
    return splits


def _columns(name: str, features: Any) -> tuple[str, str]:
    import datasets

    def of(kind: Any) -> list[str]:
        return [column for column, feature in features.items() if isinstance(feature, kind)]

    images, labels = of(datasets.Image), of(datasets.ClassLabel)
    plain = [column for column in of(datasets.Value) if re.match(r"u?int|(large_)?string", features[column].dtype)]
    labels = labels or [column for column in plain if column.lower() in _LABEL_NAMES]
    if len(labels) > 1:
        labels = [_best_label(features, labels)]
    for found, what in ((images, "images"), (labels, "labels")):
        if len(found) != 1:
            problem = "has no column" if not found else f"has {len(found)} columns"
            raise DataError(
                f"'hf:{name}' {problem} of {what} (its columns: {', '.join(features)}).",
                fix="Choose a set of images with one label each.",
            )
    return images[0], labels[0]


def _best_label(features: Any, labels: list[str]) -> str:
    """Of several label columns the one that is called label, else the one with the most classes."""

    def rank(name: str) -> tuple[bool, int]:
        return name.lower() in ("label", "labels"), getattr(features[name], "num_classes", 0)

    return max(labels, key=rank)


def _read_labels(column: str, splits: dict[str, Any]) -> _Labels:
    import datasets

    feature = next(iter(splits.values())).features[column]
    if isinstance(feature, datasets.ClassLabel):
        return _Labels(column, list(feature.names), {number: number for number in range(len(feature.names))})
    values = {value for data in splits.values() for value in _values(data, column)} - {None, -1, ""}
    ordered = sorted(values)
    return _Labels(column, [str(value) for value in ordered], {value: i for i, value in enumerate(ordered)})


def _values(data: Any, column: str) -> Sequence[Any]:
    values: Sequence[Any] = data.select_columns([column])[:][column]
    return values


def _count(data: Any, labels: _Labels) -> int:
    return sum(value in labels.numbers for value in _values(data, labels.column))


def _chosen(splits: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """train, val and test by their usual names, and what is to be said about the others."""
    if len(splits) == 1:
        return {"train": next(iter(splits.values()))}, []
    chosen: dict[str, Any] = {}
    used: set[str] = set()
    for split, names in _SPLITS.items():
        name = next((name for name in splits if name.lower() in names), None)
        if name is not None:
            chosen[split] = splits[name]
            used.add(name)
    notes = []
    if "test" in chosen and "val" not in chosen:
        chosen = {"val" if split == "test" else split: data for split, data in chosen.items()}
        notes.append("The set has no validation images of its own, so its test images serve for validation.")
    if rest := [name for name in splits if name not in used]:
        notes.append(f"Not used: {', '.join(rest)}.")
    if "train" not in chosen:
        raise DataError(
            f"The set has the splits {', '.join(splits)} but none for training.", fix="Choose a set with a split train."
        )
    return chosen, notes


def _images(data: Any, image_column: str, labels: _Labels) -> Iterator[tuple[Picture, int]]:
    import datasets

    encoded = data.select_columns([image_column, labels.column]).cast_column(image_column, datasets.Image(decode=False))
    for batch in encoded.iter(batch_size=_BATCH):
        for image, value in zip(batch[image_column], batch[labels.column], strict=True):
            if value in labels.numbers:
                yield _content(image), labels.numbers[value]


def _content(image: dict[str, Any] | None) -> Picture:
    if image is None:
        # an empty file, so that the scan lists it
        return b""
    if image["bytes"] is not None:
        return bytes(image["bytes"])
    return Path(image["path"])
