"""Where images come from: a folder, a zip that is unpacked once, or a built-in data set."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from core.data.builtin import BUILTIN, builtin_zip
from core.errors import DataError

MAX_UNPACKED_BYTES = 50 * 2**30
MAX_RATIO = 200
"""A zip that unpacks to over 1 GiB may grow by this factor at most."""
_UTF8_FLAG, _ENCRYPTED_FLAG = 0x800, 0x1
_REMOTE = re.compile(r"(torchvision|imagenetv2|hf)(:|$)")


@dataclass(frozen=True)
class Skipped:
    """A file that is not used, by its name relative to the data's root (or in the zip), and why."""

    file: str
    why: str


@dataclass(frozen=True)
class Source:
    """A folder of images on disk, and what of the original did not get there."""

    spec: str
    root: Path
    skipped: tuple[Skipped, ...] = ()


def locate(spec: str) -> Path:
    """The folder or zip that a data SPEC stands for; nothing is read or unpacked.

    Raises:
        DataError: there is no such folder, zip or data set.
    """
    if spec.startswith("builtin:"):
        return builtin_zip(spec.removeprefix("builtin:"))
    path = Path(spec).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        if zipfile.is_zipfile(path):
            return path
        raise DataError(f"'{spec}' is neither a folder nor a readable .zip.", fix="Give a folder or a .zip file.")
    if _REMOTE.match(spec):
        raise DataError(
            f"'{spec}' can't be fetched by this version.",
            fix=f"Download it and give its folder or .zip, or choose builtin:{next(iter(BUILTIN))}.",
        )
    raise DataError(
        f"There is no folder or .zip '{spec}'.", fix="Check the path; a built-in set is written builtin:NAME."
    )


def open_source(spec: str, home: Path) -> Source:
    """The folder that a data SPEC stands for; a zip is unpacked below `home` the first time.

    Raises:
        DataError: there is no such folder, zip or data set, or the zip can't be unpacked safely.
    """
    path = locate(spec)
    return Source(spec, path) if path.is_dir() else _open_zip(spec, path, home)


def _open_zip(spec: str, path: Path, home: Path) -> Source:
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
            digest = hashlib.file_digest(raw, "sha256").hexdigest()[:16]
            entries, skipped = _plan(archive)
            folder = home.resolve() / "data" / f"{path.stem}-{digest}"
            if not folder.is_dir():
                _check_size(spec, path, entries, home)
                _unpack(archive, entries, folder)
    except (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError) as error:
        raise DataError(f"'{spec}' can't be unpacked: {error}.", fix="Make the .zip anew, or give a folder.") from error
    return Source(spec, folder, tuple(skipped))


def _plan(archive: zipfile.ZipFile) -> tuple[list[tuple[zipfile.ZipInfo, str]], list[Skipped]]:
    infos = archive.infolist()
    encoding = _name_encoding([info for info in infos if not info.flag_bits & _UTF8_FLAG])
    entries, skipped = [], []
    for info in infos:
        name = info.orig_filename
        if not info.flag_bits & _UTF8_FLAG:
            name = name.encode("cp437").decode(encoding)
        target = _safe_name(name)
        if target is None or stat.S_ISLNK(info.external_attr >> 16):
            skipped.append(Skipped(name, "unsafe_path"))
        elif info.flag_bits & _ENCRYPTED_FLAG:
            skipped.append(Skipped(name, "encrypted"))
        elif target:
            entries.append((info, target + "/" * name.endswith(("/", "\\"))))
    return entries, skipped


def _name_encoding(infos: list[zipfile.ZipInfo]) -> str:
    # macOS writes UTF-8 without the flag, a Japanese Windows writes cp932; cp437 is what the format says
    names = [info.orig_filename.encode("cp437") for info in infos]
    for encoding in ("utf-8", "cp932"):
        try:
            for name in names:
                name.decode(encoding)
        except UnicodeDecodeError:
            continue
        return encoding
    return "cp437"


def _safe_name(name: str) -> str | None:
    name = name.replace("\\", "/")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name or re.match(r"[A-Za-z]:", name):
        return None
    return "/".join(parts)


def _check_size(spec: str, path: Path, entries: list[tuple[zipfile.ZipInfo, str]], home: Path) -> None:
    total = sum(info.file_size for info, _ in entries)
    if total > MAX_UNPACKED_BYTES or (total > 2**30 and total > MAX_RATIO * path.stat().st_size):
        raise DataError(
            f"'{spec}' would unpack to {total / 2**30:.1f} GiB, which is over the limit.",
            fix="Unpack it yourself and give the folder.",
        )
    home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home).free
    if total > free:
        raise DataError(
            f"'{spec}' unpacks to {total / 2**30:.1f} GiB, and {home} has {free / 2**30:.1f} GiB left.",
            fix="Free some space, or choose another --home.",
        )


def _unpack(archive: zipfile.ZipFile, entries: list[tuple[zipfile.ZipInfo, str]], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unpacking-"))
    try:
        for info, name in entries:
            target = temporary / name
            if name.endswith("/"):
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as packed, target.open("wb") as out:
                shutil.copyfileobj(packed, out, 2**20)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
