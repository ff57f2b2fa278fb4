"""Where images come from: a folder, a zip, or a set that ships with the product."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from core.errors import DataError

BUILTIN = {"fashion-mnist": Path(__file__).parents[1] / "builtin" / "fashion-mnist-1400.zip"}
MAX_UNPACKED_BYTES = 100 * 2**30
MAX_RATIO = 1000
_BIG_ENTRY_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Skipped:
    """A file that is not used, and why, as one word."""

    file: str
    why: str


@dataclass(frozen=True)
class Source:
    """A folder of images on this machine.

    `skipped` holds what was left out before it reached the folder, by its name in the archive.
    """

    spec: str
    root: Path
    skipped: list[Skipped] = field(default_factory=list)


def open_source(spec: str, home: Path) -> Source:
    """Find the data, unpacking an archive once under `home`.

    Args:
        spec: a folder, a .zip file, or builtin:NAME.

    Raises:
        DataError: there is nothing of that name, or the archive can't be read.
    """
    if spec.startswith("builtin:"):
        name = spec.removeprefix("builtin:")
        if name not in BUILTIN:
            raise DataError(f"There is no built-in data set '{name}'.", fix=f"Choose one of {', '.join(BUILTIN)}.")
        return _open_zip(spec, BUILTIN[name], home)
    path = Path(spec).expanduser()
    if path.is_dir():
        return Source(spec, path.resolve())
    if path.is_file():
        if zipfile.is_zipfile(path):
            return _open_zip(spec, path.resolve(), home)
        raise DataError(f"'{spec}' is neither a folder nor a zip file.", fix="Give a folder of class folders or a .zip.")
    raise DataError(f"There is no data at '{spec}'.", fix="Give a folder, a .zip file, or builtin:fashion-mnist.")


def _open_zip(spec: str, path: Path, home: Path) -> Source:
    status = path.stat()
    digest = hashlib.sha256(f"{path}|{status.st_size}|{status.st_mtime_ns}".encode()).hexdigest()[:16]
    target = home / "data" / f"{path.stem}-{digest}"
    try:
        with zipfile.ZipFile(path) as archive:
            entries, skipped = _checked_entries(archive)
            if not target.is_dir():
                _unpack(archive, entries, target)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"The zip '{spec}' can't be read: {error}.", fix="Make or download it anew.") from error
    return Source(spec, target, skipped)


def _checked_entries(archive: zipfile.ZipFile) -> tuple[list[tuple[zipfile.ZipInfo, PurePosixPath]], list[Skipped]]:
    entries, skipped, total = [], [], 0
    names = _decoded_names(archive)
    for info in archive.infolist():
        name = names[info.orig_filename]
        path = PurePosixPath(name.replace("\\", "/"))
        is_link = (info.external_attr >> 16) & 0o170000 == 0o120000
        if path.is_absolute() or ".." in path.parts or ":" in (path.parts[0] if path.parts else "") or is_link:
            skipped.append(Skipped(name, "unsafe_path"))
            continue
        if info.is_dir() or name.endswith("\\"):
            continue
        if info.file_size > _BIG_ENTRY_BYTES and info.file_size > MAX_RATIO * max(info.compress_size, 1):
            skipped.append(Skipped(name, "too_large"))
            continue
        total += info.file_size
        entries.append((info, path))
    if total > MAX_UNPACKED_BYTES:
        raise DataError(
            f"The zip would unpack to {total / 2**30:.0f} GiB.", fix="Unpack it yourself and give the folder."
        )
    return entries, skipped


def _decoded_names(archive: zipfile.ZipFile) -> dict[str, str]:
    """Names by their raw form: flagged ones are UTF-8; the others are UTF-8, else cp932, else cp437."""
    infos = archive.infolist()
    raw = [info.orig_filename.encode("cp437") for info in infos if not info.flag_bits & 0x800]
    encoding = next((code for code in ("utf-8", "cp932") if all(_decodes(name, code) for name in raw)), "cp437")
    return {
        info.orig_filename: info.orig_filename
        if info.flag_bits & 0x800
        else info.orig_filename.encode("cp437").decode(encoding)
        for info in infos
    }


def _decodes(name: bytes, encoding: str) -> bool:
    try:
        name.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _unpack(archive: zipfile.ZipFile, entries: list[tuple[zipfile.ZipInfo, PurePosixPath]], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=target.parent))
    try:
        for info, path in entries:
            file = temporary.joinpath(*path.parts)
            file.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as packed, file.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
        try:
            os.rename(temporary, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
