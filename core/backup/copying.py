"""Reading, copying and comparing files bit by bit, so that a slow folder can be watched and left."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from core.errors import BackupError

PIECE = 1 << 22
"""Bytes that are read or written at a time."""
Tick = Callable[[int], None]
"""Told after each piece how many bytes it had; it may raise to break off."""

_MOUNT = "Mount it again: it is tried again by itself."
_WHY = {
    errno.ENOSPC: ("it is full", "Make room there; on Google Drive empty the trash too."),
    errno.EDQUOT: ("it is full", "Make room there; on Google Drive empty the trash too."),
    errno.EFBIG: ("it takes no file so large", "Choose another --backup folder."),
    errno.EROFS: ("it is read-only", "Make it writable, or choose another --backup folder."),
    errno.EACCES: ("writing there is not allowed", "Make it writable, or choose another --backup folder."),
    errno.EPERM: ("writing there is not allowed", "Make it writable, or choose another --backup folder."),
    errno.ENOENT: ("it is not there any more", _MOUNT),
    errno.ENOTCONN: ("it is no longer mounted", _MOUNT),
    errno.ESTALE: ("it is no longer mounted", _MOUNT),
    errno.EIO: ("it reports an input/output error", _MOUNT),
    errno.ENOTDIR: ("a part of its path is no folder", "Choose another --backup folder."),
    errno.EEXIST: ("a part of its path is no folder", "Choose another --backup folder."),
}


class FolderFailsError(BackupError):
    """The backup folder can't be read or written now, and may be later."""


class ChangedError(Exception):
    """A file holds something else than when it was looked at."""


@contextmanager
def of_folder(folder: Path) -> Iterator[None]:
    """Tell what fails in the backup folder in words.

    Raises:
        FolderFailsError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        why, fix = _WHY.get(error.errno or 0, (error.strerror or str(error), "Look at the disk that holds it."))
        raise FolderFailsError(f"The backup folder '{folder}' can't be used: {why}.", fix=fix) from error


def digest(file: BinaryIO, tick: Tick) -> tuple[str, int]:
    """Hash (SHA-256) and bytes of what is left of an open file."""
    sha, count = hashlib.sha256(), 0
    while piece := file.read(PIECE):
        sha.update(piece)
        count += len(piece)
        tick(len(piece))
    return sha.hexdigest(), count


def digest_of(path: Path, tick: Tick) -> tuple[str, int]:
    """The same of a file by its path."""
    with path.open("rb", buffering=0) as file:
        return digest(file, tick)


def copy(source: BinaryIO, target: Path, count: int, tick: Tick) -> str:
    """Write the first `count` bytes of an open file to `target`, on the disk itself; their hash."""
    source.seek(0)
    sha, left = hashlib.sha256(), count
    with target.open("wb", buffering=0) as file:
        while left and (piece := source.read(min(PIECE, left))):
            write_all(file, piece)
            sha.update(piece)
            left -= len(piece)
            tick(len(piece))
        _sync(file)
    return sha.hexdigest()


def put(source: BinaryIO, target: Path, sha256: str, count: int, tick: Tick) -> None:
    """Copy into a backup folder, read what was written and compare.

    Raises:
        ChangedError: the source isn't what it was when it was hashed.
        OSError: it can't be written, or reads back differently.
    """
    target.parent.mkdir(exist_ok=True)
    if copy(source, target, count, tick) != sha256:
        raise ChangedError(target.name)
    if digest_of(target, tick) != (sha256, count):
        raise OSError(errno.EIO, f"{target.name} reads back differently from what was written")


def write_all(file: BinaryIO, piece: bytes) -> None:
    """Write all of it to a file that was opened without a buffer."""
    # such a write may be short
    rest = memoryview(piece)
    while rest:
        rest = rest[file.write(rest) :]


def _sync(file: BinaryIO) -> None:
    try:
        os.fsync(file.fileno())
    except OSError as error:
        # some file systems in user space have none
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
    # so that it is read back from the disk, and not from this machine's memory, where that can be asked for
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_json(path: Path, value: Any) -> None:
    """Write a small file of the home folder, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        temporary.write_text(json.dumps(value))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """What was written so; empty where it isn't there or can't be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
