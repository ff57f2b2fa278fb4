"""The doctor's looks at memory and disk: is there room, and does the home folder keep what it gets."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from core.health.findings import Finding

GIB = 2**30
LEAST_MEMORY_GIB, GOOD_MEMORY_GIB = 1.0, 2.0
"""The quick start takes 0.9 GiB on the CPU (measured), so that twice as much leaves room for little more."""
LEAST_DISK_GIB, GOOD_DISK_GIB = 1.0, 5.0
"""wide_resnet50_2 has 69 million weights, which with Adam's state and the best checkpoint are 1.0 GiB on disk; 10,000
images packed at 256 px are 1.8 GiB."""
SLOW_SYNC_S = 1.0


def memory(left: int) -> list[Finding]:
    """Whether there is room to train.

    Args:
        left: bytes that this process may still take.
    """
    gib = left / GIB
    found = f"{gib:.1f} GiB are free."
    fix = "End other programs, or take a smaller model, batch or image size."
    if gib < LEAST_MEMORY_GIB:
        return [Finding("memory", "problem", f"{found} Even the quick start takes about 0.9 GiB.", fix)]
    if gib < GOOD_MEMORY_GIB:
        return [Finding("memory", "warning", f"{found} It is enough for the quick start, not for big models.", fix)]
    return [Finding("memory", "ok", found)]


def disk(home: Path, free: int) -> list[Finding]:
    """Whether runs and caches have room.

    Args:
        free: bytes on the home folder's disk.
    """
    gib = free / GIB
    found = f"{gib:.1f} GiB are free where {home} lies."
    fix = "Delete runs, or choose another folder with --home or FINETUNE_HOME."
    if gib < LEAST_DISK_GIB:
        return [Finding("disk", "problem", f"{found} The checkpoints of one big run take as much.", fix)]
    if gib < GOOD_DISK_GIB:
        why = "Checkpoints of a big run take about 1 GiB, and 10,000 packed images 2 GiB."
        return [Finding("disk", "warning", f"{found} {why}", fix)]
    return [Finding("disk", "ok", found)]


# -- the home folder ------------------------------------------------------------------------------------------------


def home_folder(home: Path, disk_of: Callable[[Path], Mapping[str, str]]) -> list[Finding]:
    """Whether the home folder keeps what is written to it, and on what it lies.

    Args:
        disk_of: as `core.machine.facts.disk_of`.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        took_s = _write_and_read(home)
    except OSError as error:
        return [Finding("home folder", "problem", f"{home} can't be written: {error.strerror or error}.", _mend(error))]
    kind, filesystem = (disk_of(home)[name] for name in ("kind", "filesystem"))
    on = {"unknown": f"a disk of unknown kind ({filesystem or 'no file system told'})", "memory": "memory"}
    found = (
        f"{home} lies on {on.get(kind, f'{kind} ({filesystem})')}; 1 MiB was on it for good in {1000 * took_s:.0f} ms."
    )
    if kind == "network" or home.is_relative_to("/content/drive"):
        why = "A network folder is slow, and SQLite can't guard its database on one."
        fix = "Keep the home folder on a local disk, and name the network folder with --backup."
        return [Finding("home folder", "warning", f"{found} {why}", fix)]
    if kind == "memory":
        fix = "Choose a folder on a disk with --home or FINETUNE_HOME."
        return [Finding("home folder", "warning", f"{found} Runs are gone when the machine is switched off.", fix)]
    if took_s > SLOW_SYNC_S:
        return [
            Finding("home folder", "warning", f"{found} That is slow: saving will hold runs up.", "Take another disk.")
        ]
    return [Finding("home folder", "ok", found)]


def _write_and_read(home: Path) -> float:
    """Seconds until a MiB was written, synced and read back alike.

    Raises:
        OSError: it could not be done, or other bytes came back.
    """
    written = os.urandom(1 << 20)
    began = time.monotonic()
    with tempfile.NamedTemporaryFile(dir=home, prefix=".doctor-") as file:
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
        took_s = time.monotonic() - began
        if Path(file.name).read_bytes() != written:
            raise OSError(errno.EIO, "other bytes came back than were written")
    return took_s


def _mend(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space, or choose another folder with --home or FINETUNE_HOME."
    return "Choose a folder that can be written with --home or FINETUNE_HOME."


def database(home: Path) -> list[Finding]:
    """Whether SQLite can write in the home folder while another reads, as trainer and pages do."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix=".doctor-") as folder:
            problem = _write_beside_reader(Path(folder) / "try.db")
    except (OSError, sqlite3.Error) as error:
        problem = f"SQLite fails there: {error}"
    if problem:
        return [
            Finding(
                "database", "problem", f"{problem}.", "Choose a folder on a local disk with --home or FINETUNE_HOME."
            )
        ]
    return [Finding("database", "ok", f"SQLite {sqlite3.sqlite_version} writes there while another reads (WAL).")]


def _write_beside_reader(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path)) as writer, contextlib.closing(sqlite3.connect(path)) as reader:
        mode = writer.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            return f"SQLite can't write while another reads: its journal is '{mode}' there and not 'wal'"
        writer.execute("CREATE TABLE numbers (number INTEGER) STRICT")
        writer.commit()
        writer.execute("INSERT INTO numbers VALUES (1)")
        before = reader.execute("SELECT count(*) FROM numbers").fetchone()[0]
        writer.commit()
        after = reader.execute("SELECT count(*) FROM numbers").fetchone()[0]
    return "" if (before, after) == (0, 1) else "SQLite shows another connection something else than was written"
