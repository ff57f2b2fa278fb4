"""What uploads are kept below a home, and how many and how large they may be."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from core.data.archives import is_archive_name, unpacked_bytes
from core.errors import AppError, ConfigError
from core.files import BUILDING, remove

SIZE_VARIABLE = "FINETUNE_UPLOAD_GIB"


class UploadError(AppError):
    """A file can't be taken from a browser.

    Attributes:
        status: of the HTTP answer that says so.
        offset: how many bytes of it are here, where that is what the sender got wrong.
        is_end: what has come of the file is of no use.
    """

    def __init__(self, status: int, problem: str, *, fix: str, offset: int | None = None, is_end: bool = False) -> None:
        super().__init__(problem, fix=fix)
        self.status, self.offset, self.is_end = status, offset, is_end


@dataclass(frozen=True)
class Limits:
    """How much may be sent; `free_bytes` of the disk are left alone, `idle_s` seconds are waited for a byte."""

    size_bytes: int = 2 * 2**30
    slice_bytes: int = 8 * 2**20
    under_way: int = 2
    kept: int = 10
    free_bytes: int = 2**30
    idle_s: float = 3600.0


def limits_here() -> Limits:
    """The limits, with the size that the environment gives.

    Raises:
        ConfigError: what it gives is no size.
    """
    given = os.environ.get(SIZE_VARIABLE, "").strip()
    try:
        gib = float(given) if given else Limits.size_bytes / 2**30
        return Limits(size_bytes=int(gib * 2**30))
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"{SIZE_VARIABLE} is '{given}', which is no number.", fix=f"Write GiB, as {SIZE_VARIABLE}=2."
        ) from error


@dataclass(frozen=True)
class Kept:
    """An upload that lies ready: its name in the folder of uploads, where, how large, and since when."""

    name: str
    path: Path
    size_bytes: int
    at: float


class Shelf:
    """The uploads that lie ready in a folder."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder, self.limits = folder, limits

    def kept(self) -> list[Kept]:
        """Those that lie ready, the newest first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                with contextlib.suppress(OSError):
                    if not path.name.startswith(".") and not path.is_symlink():
                        facts = path.stat()
                        size = facts.st_size if path.is_file() else unpacked_bytes(path)
                        found.append(Kept(path.name, path, size, facts.st_mtime))
        return sorted(found, key=lambda kept: (-kept.at, kept.name))

    def remove(self, name: str) -> None:
        """Delete one that lies ready; nothing happens where there is none of this name."""
        for kept in self.kept():
            if kept.name == name:
                # out of sight at once: what is left of a long deletion is swept by the next start
                doomed = self.folder / f"{BUILDING}{os.getpid()}-{secrets.token_hex(4)}"
                os.replace(kept.path, doomed)
                remove(doomed)

    def check_file(self, name: str, size_bytes: int) -> None:
        """Refuse a file by what is said of it.

        Raises:
            UploadError: it is no archive by its name, empty, or too large.
        """
        if not is_archive_name(name):
            raise UploadError(
                415, f"'{name}' is no .zip or .tar.", fix="Pack the folder with the class folders into a .zip or .tar."
            )
        if size_bytes < 1:
            raise UploadError(400, f"'{name}' is empty.", fix="Choose another file.")
        if size_bytes > self.limits.size_bytes:
            raise UploadError(
                413,
                f"'{name}' has {gib(size_bytes)}, and an upload may have {gib(self.limits.size_bytes)}.",
                fix=f"Put it where this machine can reach it and give its path or web address, or set {SIZE_VARIABLE}.",
            )

    def check_room(self, size_bytes: int, missing_bytes: list[int]) -> None:
        """Refuse a file that there is no place or no space for.

        Args:
            missing_bytes: what is still to come of each upload that is under way.

        Raises:
            UploadError: it is so.
        """
        if len(missing_bytes) >= self.limits.under_way:
            raise UploadError(
                429,
                f"{len(missing_bytes)} uploads are under way, and more can't be.",
                fix="Wait for one of them, or cancel it.",
            )
        if len(self.kept()) + len(missing_bytes) >= self.limits.kept:
            raise UploadError(
                409, f"{self.limits.kept} uploads are kept, and more can't be.", fix="Remove one of them first."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free - sum(missing_bytes)
        if free - size_bytes < self.limits.free_bytes:
            raise UploadError(
                507,
                f"There is no space for {gib(size_bytes)}: {gib(max(free, 0))} are free, and "
                f"{gib(self.limits.free_bytes)} must stay so.",
                fix="Remove what is not needed.",
            )


def safe_name(name: str) -> str:
    """The last part of a file's name, with letters of all scripts and none that mean something to a disk or a page."""
    last = re.split(r"[/\\]", name)[-1]
    return re.sub(r"[^\w.()+ -]", "_", last).strip(" .")[-80:].lstrip(" .") or "upload"


def cannot_keep(name: str, error: OSError) -> UploadError:
    """What to say where a file can't be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "Remove what is not needed, and try again."
        return UploadError(507, f"There is no space left for '{name}'.", fix=fix, is_end=True)
    problem = f"'{name}' can't be kept: {error.strerror or error}."
    return UploadError(500, problem, fix="Look at the disk's state.", is_end=True)


def gib(size_bytes: int) -> str:
    """A size as people say it."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**29 else f"{size_bytes / 2**20:.1f} MiB"
