"""Where images come from: a SPEC becomes a folder of class folders on disk, fetched and unpacked once.

A SPEC is a folder, a .zip or .tar, the web address of one, or builtin:NAME, torchvision:NAME, imagenetv2[:VARIANT] or
hf:REPO[:CONFIG].
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from core.data.archives import DamagedArchiveError, Skipped, kind_of, stem_of, unpack, unpacked_at
from core.data.builtin import locate_builtin, open_digits
from core.data.download import fetch, name_of
from core.data.exports import Exported
from core.data.huggingface import hf_folders, locate_hf, open_hf
from core.data.imagenet import (
    ABOUT_IMAGENETV2,
    VARIANTS,
    has_numbered_classes,
    imagenet_names,
    imagenetv2_url,
    is_imagenetv2,
)
from core.data.progress import Progress, quiet
from core.data.torchvision_sets import open_torchvision, torchvision_name
from core.errors import DataError
from core.files import remove

__all__ = ["Skipped", "Source", "about", "locate", "open_source", "paths_in"]


@dataclass(frozen=True)
class Source:
    """A folder of images on disk, and what of the original did not get there.

    Attributes:
        skipped: entries of an archive that are not in the folder, and why.
        ignored: entries of an archive that are system files and not in the folder.
        classes: fixed class names; then the class folders are called by their numbers, 0 and up.
        about: what a person should know of these data, "" where nothing.
    """

    spec: str
    root: Path
    skipped: tuple[Skipped, ...] = ()
    ignored: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    about: str = ""


def locate(spec: str) -> None:
    """Check that a data SPEC stands for something; nothing is fetched or unpacked.

    Raises:
        DataError: there is no such path, address or data set, or a package that it needs is not installed.
    """
    kind, name = _divided(spec)
    if kind == "builtin":
        locate_builtin(name)
    elif kind == "torchvision":
        torchvision_name(name)
    elif kind == "hf":
        locate_hf(name)
    elif kind == "url":
        name_of(spec)
    elif kind == "imagenetv2" and _is_variant(name):
        imagenetv2_url(name)
    else:
        _locate_path(spec, name)


def paths_in(spec: str) -> list[str]:
    """What of a data SPEC is or may be read as a path on this machine; empty where it names none."""
    kind, name = _divided(spec)
    if kind == "hf":
        return hf_folders(name)
    if kind == "path" or (kind == "imagenetv2" and name and name not in VARIANTS):
        return [name]
    return []


def about(spec: str) -> str:
    """What a person should know of these data before they are fetched, "" where nothing."""
    return ABOUT_IMAGENETV2 if _divided(spec)[0] == "imagenetv2" else ""


def open_source(spec: str, home: Path, progress: Progress = quiet) -> Source:
    """The folder that a data SPEC stands for; what is fetched, unpacked or written out is kept below `home`.

    Args:
        progress: told of "downloading" (bytes), "unpacking" (files) and "exporting images".

    Raises:
        DataError: there is no such data, they can't be fetched, or they can't be unpacked safely.
    """
    locate(spec)
    try:
        return _open(spec, home.expanduser().resolve(), progress)
    except OSError as error:
        raise DataError(
            f"'{spec}' can't be opened: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}.",
            fix="Check the permissions and the space on the disk.",
        ) from error


def _open(spec: str, home: Path, progress: Progress) -> Source:
    kind, name = _divided(spec)
    if kind == "builtin":
        archive = locate_builtin(name)
        return _unpacked(spec, archive, home, progress) if archive else _exported(spec, open_digits(home, progress))
    if kind == "torchvision":
        return _exported(spec, open_torchvision(name, home, progress))
    if kind == "hf":
        return _exported(spec, open_hf(name, home, progress))
    if kind == "url":
        return _fetched(spec, spec, home, progress)
    if kind == "imagenetv2":
        return _open_imagenetv2(spec, name, home, progress)
    return _opened(spec, Path(name).expanduser(), home, progress)


def _divided(spec: str) -> tuple[str, str]:
    """The kind of source, and the name or path within it."""
    kind, colon, name = spec.partition(":")
    if spec.lower().startswith(("http://", "https://")):
        return "url", spec
    if (colon and kind in ("builtin", "torchvision", "hf", "imagenetv2")) or (
        spec == "imagenetv2" and not _exists(spec)
    ):
        return kind, name
    return "path", spec


def _is_variant(name: str) -> bool:
    return name in VARIANTS or not _exists(name)


def _exists(path: str) -> bool:
    try:
        return bool(path) and Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, an unknown home
        return False


def _locate_path(spec: str, name: str) -> None:
    if not _exists(name):
        raise DataError(
            f"There is no folder, .zip or .tar '{spec}'.",
            fix="Check the path; other data are written builtin:NAME, torchvision:NAME, imagenetv2 or hf:NAME.",
        )
    path = Path(name).expanduser()
    try:
        is_usable = path.is_dir() or (path.is_file() and kind_of(path) is not None)
    except OSError as error:
        raise DataError(f"'{spec}' can't be read: {error.strerror}.", fix="Check its permissions.") from error
    if not is_usable:
        raise DataError(f"'{spec}' is neither a folder nor a .zip or .tar.", fix="Give a folder, a .zip or a .tar.")


def _opened(spec: str, path: Path, home: Path, progress: Progress) -> Source:
    if not path.is_dir():
        return _unpacked(spec, path, home, progress)
    root = path.resolve()
    if (before := unpacked_at(root)) is not None:
        return _recognised(Source(spec, before.root, before.skipped), root.name)
    return _recognised(Source(spec, root), root.name)


def _unpacked(spec: str, path: Path, home: Path, progress: Progress) -> Source:
    unpacked = unpack(spec, path, home, progress)
    return _recognised(Source(spec, unpacked.root, unpacked.skipped), stem_of(path.name))


def _fetched(spec: str, url: str, home: Path, progress: Progress) -> Source:
    path = fetch(url, home / "downloads", progress)
    if kind_of(path) is None:
        remove(path)
        raise DataError(f"What '{url}' gives is neither a .zip nor a .tar.", fix="Give the address of an archive.")
    try:
        return _unpacked(spec, path, home, progress)
    except DamagedArchiveError:
        # so that the next try fetches it anew
        remove(path)
        raise


def _open_imagenetv2(spec: str, name: str, home: Path, progress: Progress) -> Source:
    if _is_variant(name):
        return _named(_fetched(spec, imagenetv2_url(name), home, progress))
    source = _opened(spec, Path(name).expanduser(), home, progress)
    if not has_numbered_classes(source.root):
        raise DataError(
            f"'{name}' is not ImageNetV2: its class folders are not called 0 to 999.",
            fix="Give the folder or archive of ImageNetV2, or leave 'imagenetv2:' away.",
        )
    return _named(source)


def _recognised(source: Source, name: str) -> Source:
    return _named(source) if is_imagenetv2(name, source.root) else source


def _named(source: Source) -> Source:
    return Source(source.spec, source.root, source.skipped, source.ignored, imagenet_names(), ABOUT_IMAGENETV2)


def _exported(spec: str, exported: Exported) -> Source:
    return Source(spec, exported.root, classes=exported.classes, about=exported.about)
