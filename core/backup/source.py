"""The home folder as a backup sees it: its history, its runs' files and its database."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sqlite3
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from core.backup.copying import Tick, digest, read_json, write_json
from core.backup.layout import STORE
from core.errors import BackupError
from core.storage.records import ACTIVE_STATES

OWN = "backup"
"""Folder in the home that holds what backups note down."""
LARGEST_OTHER = 16 << 20
"""Bytes of a run's file that is no checkpoint, above which it isn't backed up."""
LOCKED_S = 30.0
_CHECKPOINTS = ("best.safetensors", "last.safetensors")
_STATE = re.compile(r"state-[0-9]{9,}\.pt")


@dataclass(frozen=True)
class Record:
    """What a home notes down of its backups.

    Attributes:
        writer: by which its generations are known; "" before the first.
        follows: checksum of the manifest that it wrote or restored last.
        folder: where that lies.
    """

    writer: str = ""
    follows: str = ""
    folder: str = ""


def read_record(home: Path) -> Record:
    """The home's record; a home that was copied or moved has no writer yet."""
    plain = read_json(home / OWN / "record.json")
    record = Record(*(str(plain.get(name, "")) for name in ("writer", "follows", "folder")))
    return record if plain.get("place") == _place(home) else Record("", record.follows, record.folder)


def note(home: Path, writer: str, follows: str, folder: Path) -> None:
    plain = {"writer": writer, "follows": follows, "folder": str(folder), "place": _place(home)}
    write_json(home / OWN / "record.json", plain)


def _place(home: Path) -> list[int]:
    # two homes that were copied from each other must not pass for one
    status = home.stat()
    return [status.st_dev, status.st_ino]


# -- the database ---------------------------------------------------------------------------------------------------


@contextmanager
def opened(home: Path) -> Iterator[sqlite3.Connection]:
    """The home's database, to look at.

    Raises:
        BackupError: it can't be read.
    """
    try:
        with closing(sqlite3.connect(home / STORE, timeout=LOCKED_S, isolation_level=None)) as database:
            yield database
    except sqlite3.Error as error:
        raise BackupError(
            f"The run store in '{home}' can't be read: {error}.", fix="Look at the disk that holds the home folder."
        ) from error


def has_runs(home: Path) -> bool:
    """Whether the home holds any run, or a probe that goes on."""
    if not (home / STORE).exists():
        return False
    with opened(home) as database:
        found = database.execute(f"SELECT 1 FROM runs WHERE purpose <> 'probe' OR state IN {ACTIVE_STATES} LIMIT 1")
        return found.fetchone() is not None


def history_of(database: sqlite3.Connection) -> str:
    """Which history a database holds that `Store` has opened."""
    return str(database.execute("SELECT id FROM history").fetchone()[0])


def signature(home: Path) -> tuple[str, int]:
    """What makes a backup due at once when it changes, and what makes it due in a while."""
    with opened(home) as database:
        told = database.execute(
            "SELECT run_id, name, state, note, tags, place FROM runs UNION ALL "
            "SELECT group_id, name, '', note, '', 0 FROM groups"
        ).fetchall()
        told += database.execute("SELECT count(*) FROM group_runs").fetchall()
        told += database.execute(
            "SELECT run_id, kind, max(events.id) FROM runs JOIN events INDEXED BY events_of_kind USING (run_id) "
            f"WHERE state IN {ACTIVE_STATES} AND kind IN ('EpochEnded','CheckpointSaved','Tweaked') GROUP BY 1, 2"
        ).fetchall()
        [last] = database.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
    return hashlib.sha256(repr(told).encode()).hexdigest(), int(last)


def copy_store(home: Path, target: Path) -> list[str]:
    """Copy the database as it is at one moment, while others read and write it, and check the copy.

    Returns:
        The ids of its runs.
    """
    target.unlink(missing_ok=True)
    with opened(home) as database, closing(sqlite3.connect(target, isolation_level=None)) as made:
        database.backup(made)
        # one file, with no journal beside it
        made.execute("PRAGMA journal_mode = DELETE")
        check_store(made)
        return [str(run_id) for (run_id,) in made.execute("SELECT run_id FROM runs ORDER BY rowid")]


def check_store(database: sqlite3.Connection) -> None:
    """
    Raises:
        sqlite3.DatabaseError: it is damaged.
    """
    if database.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
        raise sqlite3.DatabaseError("it is damaged")


def replace_store(home: Path, by: Path) -> None:
    """Put a checked database in the place of the home's, which has no runs; all of it or nothing."""
    with closing(sqlite3.connect(by)) as source:
        check_store(source)
        with closing(sqlite3.connect(home / STORE, timeout=LOCKED_S)) as target:
            source.backup(target)


# -- the runs' files ------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    """What of a run's folder is backed up: its checkpoints, its newest whole state, and small files."""
    try:
        found = sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    except OSError:
        return []
    states = [path for path in found if _STATE.fullmatch(path.name)]
    others = [path for path in found if path not in states and not path.name.startswith(".") and path.suffix != ".tmp"]
    kept = [path for path in others if path.name in _CHECKPOINTS or path.stat().st_size <= LARGEST_OTHER]
    newest = next((path for path in sorted(states, key=_step, reverse=True) if _is_whole(path)), None)
    return [*kept, newest] if newest else kept


def is_state(name: str) -> bool:
    return _STATE.fullmatch(name) is not None


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("state-"))


def _is_whole(state: Path) -> bool:
    """Whether a state file has all its parts; torch writes them as an archive whose list comes last."""
    try:
        with zipfile.ZipFile(state):
            return True
    except (OSError, zipfile.BadZipFile):
        return False


class Hashes:
    """Hashes of the home's files, kept so that a file is read once and not at each command."""

    def __init__(self, home: Path) -> None:
        self._path = home / OWN / "hashes.json"
        self._known, self._used = read_json(self._path), dict[str, list[object]]()

    def of(self, name: str, file: BinaryIO, tick: Tick) -> tuple[str, int]:
        """Hash and bytes of an open file, which is known again by its place, size and time."""
        status = os.fstat(file.fileno())
        seen = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]
        known = self._known.get(name)
        if isinstance(known, list) and known[:-1] == seen:
            self._used[name] = known
            return str(known[-1]), status.st_size
        sha256, count = digest(file, tick)
        self._used[name] = self._known[name] = [*seen, sha256]
        return sha256, count

    def keep(self) -> None:
        """Write down those that were asked for."""
        if self._used != self._known or not self._path.exists():
            write_json(self._path, self._used)


def new_writer() -> str:
    return secrets.token_hex(8)
