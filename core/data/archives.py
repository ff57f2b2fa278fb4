"""Archives that are unpacked once: names read right, nothing outside their folder, nothing without a limit."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import io
import json
import lzma
import re
import shutil
import stat
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from core.data.entry_names import HonestFlags, safe_parts, tar_name, zip_names
from core.data.progress import Progress, quiet
from core.errors import DataError
from core.files import built

MAX_UNPACKED_BYTES = 50 * 2**30
MAX_RATIO = 200
"""An archive, or an entry of a zip, that unpacks to over `RATIO_FROM_BYTES` may grow by this factor at most."""
RATIO_FROM_BYTES = 2**28
MAX_ENTRIES = 2_000_000
MAX_DEPTH = 100
"""How many folders an entry may lie in."""
_MAX_TAR_HEADER_BYTES = 2**24
_CHUNK_BYTES = 2**20
_SETTLED_S = 2.0
"""A file that changed less long ago may change again without its times telling."""
_ENCRYPTED_FLAG = 0x1
_CONTENTS = "contents.json"
_SUFFIX = re.compile(r"\.(zip|tar|tgz|tbz2?|txz|tar\.(gz|bz2|xz))$", re.IGNORECASE)
_COMPRESSED: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
# what the standard library raises on bytes that make no sense; an OSError counts where it carries no errno
_DAMAGES = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    struct.error,
    ValueError,
    OverflowError,
    NotImplementedError,
)


@dataclass(frozen=True)
class Skipped:
    """A file that is not used, by its name relative to the data's root (or in the archive), and why."""

    file: str
    why: str


@dataclass(frozen=True)
class Unpacked:
    """The folder of an archive's files, and the entries that did not get there."""

    root: Path
    skipped: tuple[Skipped, ...]


class DamagedArchiveError(DataError):
    """The archive's bytes are not whole; another copy of it may be."""


def kind_of(path: Path) -> Literal["zip", "tar"] | None:
    """What a file is by its content; only its first and last bytes are read.

    Raises:
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        head = file.read(512)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    # before is_zipfile, which finds a zip that is stored as a tar's last file
    if head.startswith(tuple(_COMPRESSED)) or head[257:262] == b"ustar":
        return "tar"
    if zipfile.is_zipfile(path):
        return "zip"
    return "tar" if tarfile.is_tarfile(path) else None


def is_archive_name(name: str) -> bool:
    """Whether a file of this name is called an archive that can be unpacked."""
    return _SUFFIX.search(name) is not None


def stem_of(name: str) -> str:
    """A file's name without the endings of archives."""
    return _SUFFIX.sub("", name)


def unpack(spec: str, path: Path, home: Path, progress: Progress = quiet) -> Unpacked:
    """Unpack a .zip or .tar below `home`/data, unless the same bytes were unpacked there before.

    Args:
        spec: what errors call the archive.
        progress: told of "unpacking" with the entries done and their number (0 for a tar, which doesn't say).

    Raises:
        DamagedArchiveError: the archive is cut off, or can't be read at all.
        DataError: it is none, needs a password, is too large, or can't be written.
    """
    try:
        kind = kind_of(path)
        if kind is None:
            raise DataError(f"'{spec}' is neither a .zip nor a .tar.", fix="Give a folder, a .zip or a .tar.")
        # 50 characters are at most 200 bytes, which leaves room for the digest in a file name
        folder = home / "data" / f"{stem_of(path.name)[:50]}-{_digest(path, home)}"
        if not (folder / _CONTENTS).is_file():
            unpack_into(folder, spec, path, kind, progress)
    except OSError as error:
        raise DataError(
            f"'{spec}' can't be unpacked: {error.strerror or error}.", fix="Check its permissions and the disk's space."
        ) from error
    return Unpacked(folder / "images", _skipped_in(_told_in(folder)))


def unpacked_at(folder: Path) -> Unpacked | None:
    """What `unpack_into` made, where this folder was made by it; else None."""
    try:
        if {path.name for path in folder.iterdir()} == {_CONTENTS, "images"}:
            return Unpacked(folder / "images", _skipped_in(_told_in(folder)))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def unpacked_bytes(folder: Path) -> int:
    """The bytes of the files in a folder that `unpack_into` made; 0 where it was not it."""
    try:
        return int(_told_in(folder)["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _told_in(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / _CONTENTS).read_text(encoding="utf-8"))
    return told


def _skipped_in(told: dict[str, Any]) -> tuple[Skipped, ...]:
    return tuple(Skipped(file, why) for file, why in told["skipped"])


def unpack_into(
    folder: Path, spec: str, path: Path, kind: str, progress: Progress = quiet, *, leave_bytes: int = 0
) -> None:
    """Make a folder of an archive: its files, and a note of the entries that did not get there.

    Args:
        kind: as `kind_of` tells it.
        leave_bytes: of the disk's free space that must stay free.

    Raises:
        DamagedArchiveError, DataError: as `unpack`.
        OSError: the folder can't be written.
    """
    with built(folder) as half:
        images = half / "images"
        images.mkdir(parents=True)
        limit = _Limit(spec, path.stat().st_size, home=folder.parent, leave_bytes=leave_bytes)
        writer = _Writer(images, limit)
        try:
            (_read_zip if kind == "zip" else _read_tar)(path, writer, progress)
        except (*_DAMAGES, OSError) as error:
            if not _is_damage(error):
                raise
            raise DamagedArchiveError(
                f"'{spec}' can't be unpacked: it is cut off or damaged ({str(error).rstrip('.') or 'its data end'}).",
                fix="Download or make it anew, or give a folder.",
            ) from error
        listed = [(item.file, item.why) for item in writer.skipped]
        told = {"skipped": listed, "bytes": writer.written_bytes}
        (half / _CONTENTS).write_text(json.dumps(told), encoding="utf-8")


def _is_damage(error: BaseException) -> bool:
    return isinstance(error, _DAMAGES) or (isinstance(error, OSError) and error.errno is None)


def _digest(path: Path, home: Path) -> str:
    """The content's digest, remembered by the file's place, size and times so that a large one is read once."""
    facts = path.stat()
    key = f"{path.resolve()}\n{facts.st_size}\n{facts.st_mtime_ns}\n{facts.st_ctime_ns}"
    known = home / "data" / ".digests" / hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:20]
    if known.is_file():
        return known.read_text(encoding="ascii")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:20]
    if time.time() - max(facts.st_mtime, facts.st_ctime) > _SETTLED_S:
        with built(known) as half:
            half.write_text(digest, encoding="ascii")
    return digest


def _is_bomb(size_bytes: int, packed_bytes: int) -> bool:
    return size_bytes > RATIO_FROM_BYTES and size_bytes > MAX_RATIO * packed_bytes


class _Limit:
    """How much an archive may unpack to; what its headers declare is checked, and what is really written."""

    def __init__(self, spec: str, packed_bytes: int, home: Path, leave_bytes: int = 0) -> None:
        self.spec = spec
        self._packed_bytes = packed_bytes
        self._home = home
        self._free_bytes = max(0, shutil.disk_usage(home).free - leave_bytes)

    def check(self, total_bytes: int) -> None:
        if total_bytes > MAX_UNPACKED_BYTES or _is_bomb(total_bytes, self._packed_bytes):
            raise DataError(
                f"'{self.spec}' would unpack to {total_bytes / 2**30:.1f} GiB or more, which is over the limit.",
                fix="Unpack it yourself and give the folder.",
            )
        if total_bytes > self._free_bytes:
            raise DataError(
                f"'{self.spec}' unpacks to {total_bytes / 2**30:.1f} GiB or more, and {self._home} has "
                f"{self._free_bytes / 2**30:.1f} GiB left.",
                fix="Free some space, or choose another --home.",
            )

    def check_count(self, entries: int) -> None:
        if entries > MAX_ENTRIES:
            raise DataError(
                f"'{self.spec}' has over {MAX_ENTRIES} entries, which is over the limit.",
                fix="Unpack it yourself and give the folder.",
            )


class _Writer:
    """Writes entries below a folder, and lists those that have no place there."""

    def __init__(self, root: Path, limit: _Limit) -> None:
        self.limit = limit
        self.skipped: list[Skipped] = []
        self.written_bytes = 0
        self._root = root
        self._links: set[tuple[str, ...]] = set()

    def skip(self, name: str, why: str) -> None:
        self.skipped.append(Skipped(name, why))

    def skip_link(self, name: str) -> None:
        """Skip a link or a device, and from now on what lies below it; what came before it was written to no link."""
        self._links.add(safe_parts(name) or ())
        self.skip(name, "unsafe_path")

    def add(self, name: str, opened: Callable[[], AbstractContextManager[IO[bytes]]] | None) -> None:
        """Write a file from `opened`, or make a folder where that is None.

        Raises:
            Exception: whatever reading raises; the file is not there then.
        """
        parts = safe_parts(name)
        if parts is None:
            return self.skip(name, "unsafe_path")
        folders = parts if opened is None else parts[:-1]
        if self._is_below_link(folders):
            return self.skip(name, "unsafe_path")
        if len(folders) > MAX_DEPTH:
            return self.skip(name, "name_too_long")
        target = self._root.joinpath(*parts)
        try:
            if opened is None:
                return target.mkdir(parents=True, exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            out = target.open("xb")
        except (FileExistsError, NotADirectoryError):
            is_twice = opened is not None and target.is_file()
            return self.skip(name, "duplicate_name" if is_twice else "unsafe_path")
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            return self.skip(name, "name_too_long")
        try:
            with out, opened() as packed:
                self._copy(packed, out)
        except BaseException:
            target.unlink()
            raise

    def _is_below_link(self, folders: tuple[str, ...]) -> bool:
        return bool(self._links) and any(folders[:depth] in self._links for depth in range(1, len(folders) + 1))

    def _copy(self, packed: IO[bytes], out: IO[bytes]) -> None:
        while chunk := packed.read(_CHUNK_BYTES):
            self.written_bytes += len(chunk)
            self.limit.check(self.written_bytes)
            out.write(chunk)


def _read_zip(path: Path, writer: _Writer, progress: Progress) -> None:
    with HonestFlags(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        writer.limit.check_count(len(infos))
        files = [info for info in infos if not info.orig_filename.endswith(("/", "\\"))]
        if files and all(info.flag_bits & _ENCRYPTED_FLAG for info in files):
            raise DataError(
                f"'{writer.limit.spec}' is protected by a password.", fix="Unpack it yourself and give the folder."
            )
        writer.limit.check(sum(info.file_size for info in files))
        for done, (info, name) in enumerate(zip(infos, zip_names(infos), strict=True), 1):
            _read_zip_entry(archive, info, name, writer)
            progress("unpacking", done, len(infos))


def _read_zip_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, writer: _Writer) -> None:
    file_type = stat.S_IFMT(info.external_attr >> 16)
    if file_type not in (0, stat.S_IFREG, stat.S_IFDIR):
        writer.skip_link(name)
    elif safe_parts(name) is None:
        writer.skip(name, "unsafe_path")
    elif name.endswith(("/", "\\")):
        writer.add(name, None)
    elif info.flag_bits & _ENCRYPTED_FLAG:
        writer.skip(name, "encrypted")
    elif _is_bomb(info.file_size, info.compress_size):
        writer.skip(name, "too_large")
    else:
        try:
            writer.add(name, lambda: archive.open(info))
        except NotImplementedError:
            writer.skip(name, "unknown_compression")
        except (*_DAMAGES, OSError) as error:
            if not _is_damage(error):
                raise
            writer.skip(name, "truncated")


class _Stream:
    """A tar's decompressed bytes, which end the reading where a header or the whole is too large."""

    def __init__(self, raw: IO[bytes], limit: _Limit) -> None:
        self.last = b""
        self._raw = raw
        self._limit = limit

    def read(self, size: int) -> bytes:
        if size > _MAX_TAR_HEADER_BYTES:
            raise tarfile.ReadError("a header is too large")
        self.last = self._raw.read(size)
        return self.last

    def seek(self, position: int) -> int:
        self._limit.check(position)
        return self._raw.seek(position)

    def tell(self) -> int:
        return self._raw.tell()


def _read_tar(path: Path, writer: _Writer, progress: Progress) -> None:
    with path.open("rb") as file:
        head = file.read(8)
    opener = next((opener for magic, opener in _COMPRESSED.items() if head.startswith(magic)), None)
    with opener(path) if opener else path.open("rb") as raw:
        stream = _Stream(raw, writer.limit)
        try:
            _read_tar_entries(stream, writer, progress)
        except RecursionError as error:
            # tarfile calls itself for the header after each that holds a long name
            raise tarfile.ReadError("too many headers before one entry") from error
        # tarfile ends quietly at a missing or a garbled header; a whole tar ends in zeros
        if stream.last.strip(b"\0") or len(stream.last) != tarfile.BLOCKSIZE:
            raise tarfile.ReadError("its end is missing")


def _read_tar_entries(stream: Any, writer: _Writer, progress: Progress) -> None:
    with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
        done = 0
        while (member := archive.next()) is not None:
            # else tarfile keeps every header it has met
            archive.members = []  # type: ignore[attr-defined]
            _read_tar_entry(archive, member, writer)
            done += 1
            writer.limit.check_count(done)
            progress("unpacking", done, 0)


def _read_tar_entry(archive: tarfile.TarFile, member: tarfile.TarInfo, writer: _Writer) -> None:
    name = tar_name(member)
    if member.isdir():
        writer.add(name, None)
    elif not member.isreg():
        writer.skip_link(name)
    else:
        writer.limit.check(writer.written_bytes + member.size)
        writer.add(name, lambda: _member_file(archive, member))


def _member_file(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    file = archive.extractfile(member)
    assert file is not None
    return file
