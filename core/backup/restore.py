"""From a backup folder back into a home that has no runs; a kill leaves a home that is restored anew."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import Timeout

from core.backup.copying import PIECE, FolderFailsError, Tick, digest_of, of_folder, read_json, write_all, write_json
from core.backup.layout import Entry, Manifest, Shelf, manifest_name, read_shelf
from core.backup.once import check_history, check_place, lock_of
from core.backup.source import OWN, has_runs, history_of, is_state, new_writer, note, opened, read_record, replace_store
from core.errors import BackupError
from core.files import built

MARK = "restoring.json"
"""In the home's own folder while a restore is under way."""
WAIT_S = 600.0
"""Seconds that another process's restore of the same home is waited for."""


@dataclass
class Restored:
    """What a restore came to.

    Attributes:
        number, at: the generation's number and when it was made, Unix time.
        missing: what could not be restored as it was, a sentence each.
    """

    number: int
    at: float
    runs: int
    bytes: int
    seconds: float = 0.0
    missing: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        when = time.strftime("%d %B, %H:%M:%S", time.localtime(self.at))
        return [
            *self.missing,
            f"Restored {self.runs} run{'s' * (self.runs != 1)} as backed up on {when}: "
            f"{self.bytes / 1e6:.1f} MB in {self.seconds:.1f} s.",
        ]


def restore(home: Path, folder: Path, *, tick: Tick = lambda count: None) -> Restored | None:
    """Bring a home that has no runs to where its last backup was, and make sure that both belong together.

    Returns:
        What was restored; None where there was nothing to do.

    Raises:
        BackupError: the folder can't be used, is damaged, or holds the backup of other runs than the home.
    """
    check_place(home, folder)
    with _in_turn(home, tick):
        with of_folder(folder):
            shelf = read_shelf(folder) if _is_folder(folder) else Shelf([], [])
        record, mark = read_record(home), home / OWN / MARK
        if has_runs(home):
            if shelf.whole and mark.exists() and read_json(mark).get("checksum") == shelf.whole[0].checksum:
                # it was killed between its last two steps
                note(home, new_writer(), shelf.whole[0].checksum, folder)
            else:
                with opened(home) as database:
                    check_history(folder, shelf, history_of(database), record)
            mark.unlink(missing_ok=True)
            return None
        if not shelf.whole:
            check_history(folder, shelf, "", record)
            return None
        if record.writer and record.writer == shelf.whole[0].writer:
            # it is the very home, whose runs were all deleted
            return None
        began = time.monotonic()
        was_begun = mark.exists()
        write_json(mark, {"checksum": shelf.whole[0].checksum})
        restored = _Restore(home, folder, shelf, tick, may_replace=was_begun).make()
        note(home, new_writer(), shelf.whole[0].checksum, folder)
        mark.unlink(missing_ok=True)
        restored.seconds = time.monotonic() - began
        return restored


@contextmanager
def _in_turn(home: Path, tick: Tick) -> Iterator[None]:
    """Wait for another process that restores the same home."""
    deadline = time.monotonic() + WAIT_S
    lock = lock_of(home, wait_s=0.5)
    while not lock.is_locked:
        try:
            lock.acquire()
        except Timeout:
            tick(0)
            if time.monotonic() > deadline:
                raise FolderFailsError(
                    f"Another process has been at the backup of '{home}' for {WAIT_S:.0f} s.",
                    fix="See whether the backup folder is still mounted.",
                ) from None
    try:
        yield
    finally:
        lock.release()


def _is_folder(folder: Path) -> bool:
    """False where it isn't there yet and can be made.

    Raises:
        FolderFailsError: what is around it isn't there either.
    """
    if folder.exists():
        return True
    if not folder.parent.is_dir():
        raise FolderFailsError(
            f"The backup folder '{folder}' can't be made: '{folder.parent}' is not there.",
            fix="Mount the disk that it lies on, or make that folder first.",
        )
    return False


class _DamagedError(Exception):
    """What lies there is not what the manifest names."""


class _Restore:
    def __init__(self, home: Path, folder: Path, shelf: Shelf, tick: Tick, may_replace: bool) -> None:
        self._home, self._folder, self._shelf, self._tick, self._may_replace = home, folder, shelf, tick, may_replace
        self._missing: list[str] = [f"The backup's '{name}' is damaged." for name in shelf.damaged]

    def make(self) -> Restored:
        made = self._home / OWN / "restored.sqlite"
        try:
            chosen = self._choose(made)
            for entry in self._shelf.whole[chosen].files:
                self._bring(entry, self._shelf.whole[chosen + 1 :])
            replace_store(self._home, made)
        except (OSError, sqlite3.Error) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise BackupError(
                f"The home folder '{self._home}' can't be restored: {why}.",
                fix="Make room on its disk, or choose another --home.",
            ) from error
        finally:
            made.unlink(missing_ok=True)
        manifest = self._shelf.whole[chosen]
        return Restored(manifest.number, manifest.at, len(manifest.run_ids), manifest.bytes, missing=self._missing)

    def _choose(self, made: Path) -> int:
        """Bring the database of the newest generation that has a whole one; which that is."""
        for number, manifest in enumerate(self._shelf.whole):
            try:
                self._copy(manifest.store, made)
            except _DamagedError:
                continue
            if number:
                self._tell_what_is_lost(self._shelf.whole[0], manifest)
            return number
        raise BackupError(
            f"The database is damaged in all that is kept in the backup '{self._folder}'.",
            fix="Choose another --backup folder; what is whole there can be seen with python -m core backup --verify.",
        )

    def _tell_what_is_lost(self, newest: Manifest, chosen: Manifest) -> None:
        lost = [run_id for run_id in newest.run_ids if run_id not in set(chosen.run_ids)]
        what = f"not in it: {_listed(lost)}" if lost else "no run is missing, but what runs told since"
        when = [time.strftime("%H:%M:%S", time.localtime(manifest.at)) for manifest in (newest, chosen)]
        self._missing.append(
            f"The database of the newest backup ({when[0]}) is damaged, so the one before ({when[1]}) is taken; {what}."
        )

    def _bring(self, entry: Entry, older: Sequence[Manifest]) -> None:
        """Bring a run's file, or else one like it of an older generation."""
        for number, candidate in enumerate([entry, *_like(entry, older)]):
            target = self._home / candidate.path
            if target.exists() and (not self._may_replace or self._holds(target, candidate)):
                return
            try:
                with built(target) as temporary:
                    self._copy(candidate, temporary)
            except _DamagedError:
                continue
            if number:
                self._missing.append(f"'{entry.path}' is damaged in the backup; an older one is taken.")
            return
        self._missing.append(f"'{entry.path}' is damaged in the backup; run {entry.run_id} is listed without it.")

    def _holds(self, path: Path, entry: Entry) -> bool:
        return digest_of(path, self._tick) == (entry.sha256, entry.bytes)

    def _copy(self, entry: Entry, target: Path) -> None:
        """
        Raises:
            _DamagedError: it is not there, or holds something else.
            BackupError: the folder itself can't be read.
            OSError: the home can't be written.
        """
        sha, count = hashlib.sha256(), 0
        with target.open("wb", buffering=0) as file:
            for piece in self._pieces(entry):
                write_all(file, piece)
                sha.update(piece)
                count += len(piece)
            os.fsync(file.fileno())
        if (sha.hexdigest(), count) != (entry.sha256, entry.bytes):
            raise _DamagedError(entry.file)

    def _pieces(self, entry: Entry) -> Iterator[bytes]:
        with of_folder(self._folder):
            try:
                file = (self._folder / entry.file).open("rb", buffering=0)
            except FileNotFoundError:
                # where all has vanished, the disk did, and not this file
                os.stat(self._folder / manifest_name(self._shelf.whole[0].number))
                raise _DamagedError(entry.file) from None
            with file:
                while piece := file.read(PIECE):
                    self._tick(len(piece))
                    yield piece


def _listed(run_ids: Sequence[str]) -> str:
    return ", ".join(run_ids[:5]) + (f" and {len(run_ids) - 5} more" if len(run_ids) > 5 else "")


def _like(entry: Entry, older: Sequence[Manifest]) -> list[Entry]:
    """What may stand for a file that is damaged: its former self, or the run's former state."""
    former = [other for manifest in older for other in manifest.files if other.run_id == entry.run_id]
    name = Path(entry.path).name
    return [
        other
        for other in former
        if other.sha256 != entry.sha256
        and (other.path == entry.path or (is_state(name) and is_state(Path(other.path).name)))
    ]
