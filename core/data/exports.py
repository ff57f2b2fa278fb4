"""Data sets that are no folders of images, written out once as class folders."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from core.data.progress import Progress, quiet
from core.errors import DataError
from core.files import built

if TYPE_CHECKING:
    from numpy.typing import NDArray

Picture: TypeAlias = "Path | bytes | NDArray[Any]"
"""An image file, a file's bytes, or pixels: (height, width) or (height, width, 3), uint8."""
_ABOUT = "about.json"
_AT_ONCE = 256
_EXTENSIONS = {"JPEG": ".jpg", "MPO": ".jpg", "TIFF": ".tif", "JPEG2000": ".jp2"}
_NO_IMAGE_EXTENSION = ".jpg"
"""Bytes that are no image are named like one, so that the scan lists them as unusable."""


@dataclass(frozen=True)
class Exported:
    """Class folders on disk named by their numbers, the names they stand for, and what a person should know."""

    root: Path
    classes: tuple[str, ...]
    about: str = ""


@dataclass(frozen=True)
class Part:
    """The images of one split with their labels, in order; `split` is "" where the set has but one.

    `count` is the number of images, as far as it is known.
    """

    split: str
    images: Iterable[tuple[Picture, int]]
    count: int


def open_export(folder: Path) -> Exported | None:
    """What was exported to `folder` before, or None."""
    try:
        facts = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Exported(folder / "images", tuple(facts["classes"]), facts["about"])


def export(
    folder: Path, classes: Sequence[str], about: str, parts: Sequence[Part], progress: Progress = quiet
) -> Exported:
    """Write `folder`/images/SPLIT/LABEL/NUMBER.EXT for all images: files as they are, pixels as PNG.

    Args:
        folder: is whole when this returns, and not there after an error.
        progress: told of "exporting images".

    Raises:
        DataError: a file of the set is missing, or the disk is full.
    """
    total = sum(part.count for part in parts)
    done = 0
    try:
        with built(folder) as half, ThreadPoolExecutor(min(8, os.cpu_count() or 1), "export") as pool:
            for part in parts:
                target = half / "images" / part.split
                for label in range(len(classes)):
                    (target / str(label)).mkdir(parents=True)
                for jobs in _groups(part.images, target):
                    list(pool.map(_write, *zip(*jobs, strict=True)))
                    done += len(jobs)
                    progress("exporting images", done, total)
            facts = {"classes": unique_names(classes), "about": about}
            (half / _ABOUT).write_text(json.dumps(facts, ensure_ascii=False), encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(
            f"A file of the data set is missing: '{error.filename}'.",
            fix="Remove the data set's downloaded files, so that they are fetched anew.",
        ) from error
    except OSError as error:
        raise DataError(
            f"The images can't be written to '{folder}': {error.strerror or error}.",
            fix="Free some space, or choose another --home.",
        ) from error
    exported = open_export(folder)
    assert exported is not None
    return exported


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, with the class's number behind those that several classes bear."""
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name} ({number})" for number, name in enumerate(names)]


def _groups(images: Iterable[tuple[Picture, int]], target: Path) -> Iterator[list[tuple[Picture, Path]]]:
    jobs = ((picture, target / str(label) / f"{number:06}") for number, (picture, label) in enumerate(images))
    while group := list(islice(jobs, _AT_ONCE)):
        yield group


def _write(picture: Picture, stem: Path) -> None:
    if isinstance(picture, Path):
        target = stem.with_suffix(picture.suffix.lower())
        try:
            os.link(picture, target)
        except OSError:  # another disk, or one without links
            shutil.copyfile(picture, target)
    elif isinstance(picture, bytes):
        stem.with_suffix(_extension(picture)).write_bytes(picture)
    else:
        from PIL import Image

        # a fast level: over a hundred thousand small images, the best one costs minutes
        Image.fromarray(picture).save(stem.with_suffix(".png"), compress_level=1)


def _extension(content: bytes) -> str:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            name = image.format or ""
    except Exception:  # decoders meet damaged bytes with errors of many kinds
        return _NO_IMAGE_EXTENSION
    return _EXTENSIONS.get(name, f".{name.lower()}")
