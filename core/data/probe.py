"""Whether a file can be used, found by decoding it once, and remembered until it changes."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from core.data.ahead import in_order
from core.data.images import Decoded, UnreadableError, decode, one_big_picture
from core.data.progress import Progress, quiet
from core.data.tree import MAGIC, PICTURE_EXTENSIONS, UNSUPPORTED_EXTENSIONS, File, spell

NOT_A_PICTURE = "not_a_picture"
MAX_FILE_BYTES = 200_000_000
_BIG_FILE_BYTES = 2**25
_LOOK_SIZE = 64
Sink = Callable[[str, Decoded], None]
"""Called with the digest of each picture that was decoded, and the picture, in whichever thread decoded it."""

_VERSION = 1
_BATCH = 512
_A_JOB, _AHEAD = 8, 16
_CERTAIN = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n|GIF8[79]a|RIFF.{4}WEBP", re.DOTALL)
"""Beginnings that hold whatever the name says; a camera's raw file begins as a TIFF does."""
_HEIF = re.compile(rb".{4}ftyp(heic|heix|heim|heis|hevc|hevx|mif1|msf1)", re.DOTALL)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Probe:
    """What a file is.

    Attributes:
        why: "" where it can be used, `NOT_A_PICTURE` where that is no matter, else the reason it is skipped.
        digest: SHA-256 of a usable picture's bytes, in hexadecimal.
        width, height: of a usable picture, upright, in pixels.
    """

    why: str
    digest: str = ""
    width: int = 0
    height: int = 0


def probe_file(file: File, sink: Sink | None = None, at_least: int | None = None) -> Probe:
    """Read and decode a file.

    Args:
        sink, at_least: whom to hand the picture, and how small it may be, see `decode`.
    """
    extension = file.extension
    try:
        with open(file.path, "rb") as opened:
            head = opened.read(32)
            if why := _known_from(head, extension):
                return Probe(why)
            if file.size > MAX_FILE_BYTES:
                return Probe("too_large")
            opened.seek(0)
            with one_big_picture if file.size > _BIG_FILE_BYTES else nullcontext():
                return _decoded(opened.read(), sink, at_least)
    except OSError:
        return Probe("unreadable")
    except UnreadableError as error:
        if error.why == "not_an_image" and _HEIF.match(head):
            return Probe("unsupported_format")
        # bytes that begin as a picture and can't be identified are the rest of one
        return Probe("truncated" if error.why == "not_an_image" and MAGIC.match(head) else error.why)


def _known_from(head: bytes, extension: str) -> str:
    """What the first bytes and the extension alone tell of a file; "" where it must be decoded."""
    is_unsupported = extension in UNSUPPORTED_EXTENSIONS
    if not head:
        return "zero_bytes" if is_unsupported or extension in PICTURE_EXTENSIONS else NOT_A_PICTURE
    if is_unsupported and not _CERTAIN.match(head):
        return "unsupported_format"
    if extension not in PICTURE_EXTENSIONS and not MAGIC.match(head):
        return "unsupported_format" if _HEIF.match(head) else NOT_A_PICTURE
    return ""


def _decoded(content: bytes, sink: Sink | None, at_least: int | None) -> Probe:
    # a look need not keep a large picture's pixels
    picture = decode(content, at_least if sink else _LOOK_SIZE)
    digest = hashlib.sha256(content).hexdigest()
    if sink is not None:
        sink(digest, picture)
    return Probe("", digest, picture.width, picture.height)


def probe_files(
    root: Path,
    files: Sequence[File],
    home: Path,
    *,
    sink: Sink | None = None,
    at_least: int | None = None,
    progress: Progress = quiet,
    anew: bool = False,
) -> list[Probe]:
    """Probe files with as many threads as there are cores; what is remembered and unchanged is not read again.

    Args:
        root: the data's root, under which results are remembered.
        home: where the memory lies.
        sink, at_least: as `probe_file` takes them; called for files that are read now.
        anew: forget what is remembered of these files.

    Returns:
        One probe a file, in the order of `files`.
    """
    with closing(_Memory(home, spell(str(root)))) as memory:
        known = {} if anew else memory.recall()
        results = [known.get((file.name, file.size, file.mtime_ns, file.ctime_ns)) for file in files]
        missing = [index for index, probe in enumerate(results) if probe is None]
        progress("reading images", len(files) - len(missing), len(files))
        # some files a job, since handing each over by itself costs a twentieth of the time
        pieces = [missing[start : start + _A_JOB] for start in range(0, len(missing), _A_JOB)]
        jobs = (partial(_probe_some, [files[index] for index in piece], sink, at_least) for piece in pieces)
        fresh: list[tuple[File, Probe]] = []
        done = len(files) - len(missing)
        for piece, probes in zip(pieces, in_order(jobs, os.cpu_count() or 1, ahead=_AHEAD, name="probe"), strict=True):
            for index, probe in zip(piece, probes, strict=True):
                results[index] = probe
                fresh.append((files[index], probe))
            if len(fresh) >= _BATCH or piece is pieces[-1]:
                memory.remember(fresh)
                fresh = []
            done += len(piece)
            progress("reading images", done, len(files))
    return [probe for probe in results if probe is not None]


def _probe_some(files: Sequence[File], sink: Sink | None, at_least: int | None) -> list[Probe]:
    return [probe_file(file, sink, at_least) for file in files]


class _Memory:
    """What earlier scans found below one root; without a writable home nothing is remembered."""

    def __init__(self, home: Path, root: str) -> None:
        self._root = root
        self._connection: sqlite3.Connection | None = None
        try:
            (home / "cache").mkdir(parents=True, exist_ok=True)
            self._connection = _open(home / "cache" / f"files-{_VERSION}.sqlite3")
        except (OSError, sqlite3.Error) as error:
            _log.warning("What the scan finds can't be remembered: %s", error)

    def recall(self) -> dict[tuple[str, int, int, int], Probe]:
        if self._connection is None:
            return {}
        try:
            return self._rows(self._connection)
        except sqlite3.Error as error:
            _log.warning("What an earlier scan found can't be recalled: %s", error)
            return {}

    def _rows(self, connection: sqlite3.Connection) -> dict[tuple[str, int, int, int], Probe]:
        rows = connection.execute(
            "SELECT name, size, mtime_ns, ctime_ns, why, digest, width, height FROM probes WHERE root = ?",
            (self._root,),
        )
        return {tuple(row[:4]): Probe(*row[4:]) for row in rows}

    def remember(self, found: list[tuple[File, Probe]]) -> None:
        # what could not be opened may have been a matter of rights, which change without the file's change
        rows = [
            (self._root, f.name, f.size, f.mtime_ns, f.ctime_ns, p.why, p.digest, p.width, p.height)
            for f, p in found
            if p.why != "unreadable"
        ]
        if self._connection is None:
            return
        try:
            with self._connection:
                self._connection.executemany("INSERT OR REPLACE INTO probes VALUES (?,?,?,?,?,?,?,?,?)", rows)
        except sqlite3.Error as error:
            _log.warning("What the scan found can't be remembered: %s", error)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=10)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(
        """
        CREATE TABLE IF NOT EXISTS probes (
            root TEXT NOT NULL, name TEXT NOT NULL,
            size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL,
            why TEXT NOT NULL, digest TEXT NOT NULL, width INTEGER NOT NULL, height INTEGER NOT NULL,
            PRIMARY KEY (root, name)
        ) STRICT, WITHOUT ROWID
        """
    )
    return connection
