"""The image classification sets that torchvision knows, read by its own code and written out as class folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from core.data.download import fetch, md5_of
from core.data.exports import Exported, Part, export, open_export
from core.data.progress import Progress, quiet
from core.errors import DataError
from core.files import built, remove

_TRAIN_TEST = {"train": {"train": True}, "val": {"train": False}}
_SPLIT_TRAIN_TEST = {"train": {"split": "train"}, "val": {"split": "test"}}
_THREE = {name: {"split": name} for name in ("train", "val", "test")}
_DIGITS = tuple(map(str, range(10)))
_TEST_AS_VAL = "The set has no validation images of its own, so its test images serve for validation."


@dataclass(frozen=True)
class _File:
    """What is to be downloaded: one of the addresses, to a place below torchvision's root, with an MD5 if known."""

    urls: Sequence[str]
    place: str
    md5: str


@dataclass(frozen=True)
class _Set:
    """How a set's splits are asked for, and which files they are read from; `files` is given torchvision's class."""

    splits: dict[str, dict[str, Any]]
    files: Callable[[Any], list[_File]]
    classes: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    about: str = ""
    needs_scipy: bool = False


def _one(place: str = "") -> Callable[[Any], list[_File]]:
    def files(kind: Any) -> list[_File]:
        return [_File([kind._URL], place + kind._URL.rsplit("/", 1)[-1], getattr(kind, "_MD5", ""))]

    return files


def _named(kind: Any) -> list[_File]:
    return [_File([kind.url], kind.filename, kind.tgz_md5)]


def _mirrored(kind: Any) -> list[_File]:
    return [
        _File([f"{mirror}{name}" for mirror in kind.mirrors], f"{kind.__name__}/raw/{name}", md5)
        for name, md5 in kind.resources
    ]


def _svhn(kind: Any) -> list[_File]:
    return [_File([url], name, md5) for url, name, md5 in (kind.split_list["train"], kind.split_list["test"])]


def _flowers(kind: Any) -> list[_File]:
    return [
        _File([f"{kind._download_url_prefix}{name}"], f"flowers-102/{name}", md5)
        for name, md5 in kind._file_dict.values()
    ]


def _pets(kind: Any) -> list[_File]:
    return [_File([url], f"oxford-iiit-pet/{url.rsplit('/', 1)[-1]}", md5) for url, md5 in kind._RESOURCES]


def _eurosat(kind: Any) -> list[_File]:
    base = "https://huggingface.co/datasets/torchgeo/eurosat/resolve/c877bcd43f099cd0196738f714544e355477f3fd"
    return [_File([f"{base}/EuroSAT.zip"], "eurosat/EuroSAT.zip", "c8fa014336c82ac7804f0398fcb19387")]


def _gtsrb(kind: Any) -> list[_File]:
    base = "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370"
    names = {
        "GTSRB-Training_fixed.zip": "513f3c79a4c5141765e10e952eaa2478",
        "GTSRB_Final_Test_Images.zip": "c7e4e6327067d32654124b0fe9e82185",
        "GTSRB_Final_Test_GT.zip": "fe31e9c9270bbcd7b84b7f21a9d9d9e5",
    }
    return [_File([f"{base}/{name}"], f"gtsrb/{name}", md5) for name, md5 in names.items()]


def _imagenette(kind: Any) -> list[_File]:
    url, md5 = kind._ARCHIVES["320px"]
    return [_File([url], url.rsplit("/", 1)[-1], md5)]


_SETS = {
    "CIFAR10": _Set(_TRAIN_TEST, _named, about=_TEST_AS_VAL),
    "CIFAR100": _Set(_TRAIN_TEST, _named, about=_TEST_AS_VAL),
    "MNIST": _Set(_TRAIN_TEST, _mirrored, about=_TEST_AS_VAL),
    "FashionMNIST": _Set(_TRAIN_TEST, _mirrored, about=_TEST_AS_VAL),
    "KMNIST": _Set(_TRAIN_TEST, _mirrored, about=_TEST_AS_VAL),
    "SVHN": _Set(_SPLIT_TRAIN_TEST, _svhn, _DIGITS, about=_TEST_AS_VAL, needs_scipy=True),
    "STL10": _Set(_SPLIT_TRAIN_TEST, _named, about=f"{_TEST_AS_VAL} The images without labels are not used."),
    "Flowers102": _Set(_THREE, _flowers, needs_scipy=True),
    "OxfordIIITPet": _Set({"train": {"split": "trainval"}, "val": {"split": "test"}}, _pets, about=_TEST_AS_VAL),
    "Food101": _Set(_SPLIT_TRAIN_TEST, _one(), about=_TEST_AS_VAL),
    "DTD": _Set(_THREE, _one("dtd/"), about="The split is the first of the ten that the set's authors give."),
    "EuroSAT": _Set({"": {}}, _eurosat, about="The set brings no split, so validation images are drawn from all."),
    "GTSRB": _Set(
        _SPLIT_TRAIN_TEST, _gtsrb, tuple(map(str, range(43))), about=f"{_TEST_AS_VAL} Its classes bear numbers only."
    ),
    "FGVCAircraft": _Set(_THREE, _one()),
    "Country211": _Set({**_THREE, "val": {"split": "valid"}}, _one()),
    "RenderedSST2": _Set(_THREE, _one()),
    "Imagenette": _Set(
        {"train": {"split": "train"}, "val": {"split": "val"}},
        _imagenette,
        options={"size": "320px"},
        about="The version whose shorter side has 320 pixels.",
    ),
}
TORCHVISION_SETS = tuple(_SETS)
"""The names after `torchvision:`."""


def torchvision_name(name: str) -> str:
    """A set's name as torchvision spells it, from any spelling in capital and small letters.

    Raises:
        DataError: torchvision has no such set, or what it needs is not installed.
    """
    names = {known.lower(): known for known in TORCHVISION_SETS}
    if name.lower() not in names:
        raise DataError(
            f"There is no torchvision data set '{name}'.", fix=f"Choose one of {', '.join(TORCHVISION_SETS)}."
        )
    found = names[name.lower()]
    if _SETS[found].needs_scipy and find_spec("scipy") is None:
        raise DataError(f"torchvision:{found} needs the package scipy.", fix="Install it: pip install scipy.")
    return found


def open_torchvision(name: str, home: Path, progress: Progress = quiet) -> Exported:
    """Export a set of torchvision below `home`/data, downloaded before to `home`/downloads.

    What lies in `home`/downloads/torchvision as torchvision itself would have put it there is used.

    Raises:
        DataError: there is no such set, no network, or no space.
    """
    name = torchvision_name(name)
    folder = home / "data" / f"torchvision-{name}"
    if (before := open_export(folder)) is not None:
        return before
    wanted = _SETS[name]
    root = home / "downloads" / "torchvision"
    try:
        splits = _load(name, root)
    except (RuntimeError, FileNotFoundError):
        _download(name, root, progress)
        splits = _load(name, root)
    classes = wanted.classes or _class_names(splits)
    parts = [Part(split, _images(data), len(data)) for split, data in splits.items()]
    return export(folder, classes, wanted.about, parts, progress)


def _load(name: str, root: Path, *, download: bool = False) -> dict[str, Any]:
    from torchvision import datasets

    wanted, kind = _SETS[name], getattr(datasets, name)
    splits = wanted.splits.items()
    return {split: kind(str(root), download=download, **wanted.options, **options) for split, options in splits}


def _download(name: str, root: Path, progress: Progress) -> None:
    """Fetch the set's files, and let torchvision check and unpack them below `root`.

    torchvision takes a folder that it began to unpack for a whole one, so it unpacks elsewhere, and what came out is
    moved in place; and its own downloads have no time limit, so it finds the files already there.
    """
    from torchvision import datasets

    files = [(file, _fetch_one(file, root, progress)) for file in _SETS[name].files(getattr(datasets, name))]
    progress("unpacking", 0, 0)
    with built(root / f".{name}-unpacked") as half:
        for file, path in files:
            place = half / file.place
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, place)
            except OSError:  # a disk without links
                shutil.copyfile(path, place)
        try:
            _load(name, half, download=True)
        except (RuntimeError, OSError, ValueError, EOFError) as error:
            raise DataError(
                f"torchvision can't unpack {name}: {str(error).splitlines()[0] if str(error) else 'its files end'}.",
                fix=f"Remove {root.parent} and try again.",
            ) from error
        # files before folders: by the folders torchvision tells whether a set is there
        for child in sorted(half.iterdir(), key=lambda child: child.is_dir()):
            remove(root / child.name)
            os.replace(child, root / child.name)
    # by now it is empty
    remove(root / f".{name}-unpacked")


def _fetch_one(file: _File, root: Path, progress: Progress) -> Path:
    present = root / file.place
    if present.is_file() and (not file.md5 or md5_of(present) == file.md5):
        return present
    for url in file.urls:
        try:
            return fetch(url, root.parent, progress, md5=file.md5)
        except DataError as error:
            last = error
    raise DataError(last.problem, fix=f"Check the network, or put the file at {present}.")


def _class_names(splits: dict[str, Any]) -> list[str]:
    names = next(iter(splits.values())).classes
    return [name if isinstance(name, str) else name[0] for name in names]


def _images(data: Any) -> Iterator[tuple[Any, int]]:
    """A set's images as it keeps them: files, or pixels; which of its attributes they are in depends on the set."""
    for name in ("samples", "_samples"):
        if hasattr(data, name):
            return ((Path(path), int(label)) for path, label in getattr(data, name))
    for name in ("_image_files", "_images"):
        if hasattr(data, name):
            return ((Path(path), int(label)) for path, label in zip(getattr(data, name), data._labels, strict=True))
    labels = data.targets if hasattr(data, "targets") else data.labels
    return ((_pixels(data.data[i]), int(labels[i])) for i in range(len(data)))


def _pixels(pixels: Any) -> Any:
    """(height, width[, 3]) from one of torchvision's arrays, where colours may come first."""
    import numpy as np

    array = np.asarray(pixels)
    return array.transpose(1, 2, 0) if array.ndim == 3 and array.shape[0] == 3 else array
