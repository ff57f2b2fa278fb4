"""One backup of a home folder: files, then the database, then the manifest, then what is no longer needed goes."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from core.backup.copying import ChangedError, Tick, digest_of, of_folder, put
from core.backup.layout import (
    KEPT,
    STORE,
    Entry,
    Manifest,
    Shelf,
    file_name,
    from_text,
    list_files,
    manifest_name,
    number_of,
    read_shelf,
    to_text,
)
from core.backup.source import (
    OWN,
    Hashes,
    Record,
    copy_store,
    files_of,
    history_of,
    new_writer,
    note,
    opened,
    read_record,
)
from core.errors import BackupError


class BusyError(Exception):
    """Another process is backing this home up."""


@dataclass(frozen=True)
class Outcome:
    """What a backup came to.

    Attributes:
        manifest: the newest generation; None where there is nothing to back up yet.
        copied, copied_bytes: files that were written, 0 where nothing had changed.
    """

    manifest: Manifest | None
    copied: int
    copied_bytes: int
    seconds: float


def check_place(home: Path, folder: Path) -> None:
    """Refuse a backup folder that lies wrong.

    Raises:
        BackupError: it is the home folder, around or inside it, or a home folder itself.
    """
    with of_folder(folder):
        home, folder = home.expanduser().resolve(), folder.expanduser().resolve()
        is_home = (folder / STORE).exists()
    for is_so, words in (
        (folder == home, "is the home folder itself"),
        (home in folder.parents, f"lies inside the home folder '{home}'"),
        (folder in home.parents, f"lies around the home folder '{home}'"),
        (is_home, "is a home folder itself"),
    ):
        if is_so:
            raise BackupError(f"The backup folder '{folder}' {words}.", fix="Choose another --backup folder.")


def lock_of(home: Path, *, wait_s: float = 0.0) -> FileLock:
    """The lock of a home's backups; a process that is killed holds it no more."""
    (home / OWN).mkdir(parents=True, exist_ok=True)
    # it is let go by the thread that took it, which may be given up when the folder hangs
    return FileLock(home / OWN / "lock", timeout=wait_s, thread_local=False)


def back_up(home: Path, folder: Path, *, tick: Tick = lambda count: None, anew: bool = False) -> Outcome:
    """Bring the backup of a home up to date.

    Args:
        tick: told of each piece that was read or written; what it raises breaks off, and the last generation stays.
        anew: also what lies there already is read, and written again where it is damaged.

    Raises:
        BackupError: the folder can't be used, or holds something else.
        BusyError: another process is at it.
    """
    check_place(home, folder)
    try:
        with lock_of(home):
            return _Backup(home, folder, tick, anew).make()
    except Timeout:
        raise BusyError from None


def check_history(folder: Path, shelf: Shelf, history: str, record: Record) -> None:
    """Refuse to go on with a backup that isn't this home's.

    Raises:
        BackupError: it is of another history, or another home went on with this one.
    """
    if not shelf.whole:
        if shelf.damaged and record.folder != str(folder):
            raise BackupError(
                f"No list of files in the backup '{folder}' can be read any more.",
                fix="Choose another --backup folder, or remove what lies there.",
            )
        return
    newest = shelf.whole[0]
    if newest.history != history:
        raise BackupError(
            f"'{folder}' holds the backup of other runs than this home folder.",
            fix="Choose another --backup folder; or take that backup over with a new --home.",
        )
    if newest.writer != record.writer and newest.checksum != record.follows:
        when = time.strftime("%d %B, %H:%M", time.localtime(newest.at))
        raise BackupError(
            f"Another home folder with the same runs was backed up to '{folder}' on {when}.",
            fix="Choose another --backup folder; or go on from that backup with a new --home.",
        )


class _Backup:
    def __init__(self, home: Path, folder: Path, tick: Tick, anew: bool) -> None:
        self._home, self._folder, self._tick, self._anew = home, folder, tick, anew
        self._began, self._copied, self._copied_bytes = time.monotonic(), 0, 0
        self._hashes = Hashes(home)
        self._there, self._known = dict[str, int](), set[str]()

    def make(self) -> Outcome:
        for left in (self._home / OWN).glob("store-*.sqlite*"):
            left.unlink(missing_ok=True)
        with opened(self._home) as database:
            history = history_of(database)
            run_ids = [str(run_id) for (run_id,) in database.execute("SELECT run_id FROM runs ORDER BY rowid")]
        with of_folder(self._folder):
            # only its last part is made: what is around it may be a disk that isn't mounted
            self._folder.mkdir(exist_ok=True)
            shelf = read_shelf(self._folder)
        if not run_ids and not shelf.whole:
            return self._outcome(None)
        record = read_record(self._home)
        writer = record.writer or new_writer()
        made = self._home / OWN / f"store-{os.getpid()}.sqlite"
        try:
            check_history(self._folder, shelf, history, record)
            if record.writer != writer:
                note(self._home, writer, record.follows, self._folder)
            with of_folder(self._folder):
                self._there = list_files(self._folder)
                (self._folder / "runs").mkdir(exist_ok=True)
            self._known = {entry.file for manifest in shelf.whole for entry in manifest.entries()}
            files = [entry for run_id in run_ids for entry in self._files(run_id)]
            # the database after the files: a run is taken up from what was kept, wherever its events go on to
            run_ids = copy_store(self._home, made)
            store = self._put(made, STORE)
        finally:
            made.unlink(missing_ok=True)
        assert store
        files = [entry for entry in files if entry.run_id in set(run_ids)]
        manifest = Manifest(shelf.next_number, history, writer, time.time(), run_ids, store, files)
        if not shelf.whole or not _is_same(shelf.whole[0], manifest) or self._is_damaged(shelf):
            manifest = self._write(manifest)
            note(self._home, writer, manifest.checksum, self._folder)
            shelf = Shelf([manifest, *shelf.whole], shelf.damaged)
        self._hashes.keep()
        self._prune(shelf)
        return self._outcome(shelf.whole[0])

    def _outcome(self, manifest: Manifest | None) -> Outcome:
        return Outcome(manifest, self._copied, self._copied_bytes, time.monotonic() - self._began)

    def _is_damaged(self, shelf: Shelf) -> bool:
        """Whether a manifest newer than the newest whole one is damaged, so that it should have a successor."""
        return any((number_of(name) or 0) > shelf.whole[0].number for name in shelf.damaged)

    def _files(self, run_id: str) -> list[Entry]:
        found = []
        for path in files_of(self._home / "runs" / run_id):
            name = path.relative_to(self._home).as_posix()
            try:
                entry = self._put(path, name) or self._put(path, name)
            except FileNotFoundError:
                # a newer one took its place; the next backup has it
                continue
            found += [entry] if entry else []
        return found

    def _put(self, path: Path, name: str) -> Entry | None:
        """Have the file in the backup folder; None where it changed meanwhile."""
        with path.open("rb", buffering=0) as source:
            sha256, count = self._hashes.of(name, source, self._tick)
            entry = Entry(name, file_name(name, sha256), sha256, count)
            target = self._folder / entry.file
            if self._is_there(entry):
                return entry
            try:
                with of_folder(self._folder):
                    put(source, target, sha256, count, self._tick)
            except ChangedError:
                return None
        self._copied, self._copied_bytes = self._copied + 1, self._copied_bytes + count
        # its like may come again in this backup
        self._known.add(entry.file)
        self._there[entry.file] = count
        return entry

    def _is_there(self, entry: Entry) -> bool:
        """Whether it lies there whole; what no manifest names may have been cut by a kill."""
        if entry.file not in self._known or self._there.get(entry.file) != entry.bytes:
            return False
        if not self._anew:
            return True
        with contextlib.suppress(OSError):
            return digest_of(self._folder / entry.file, self._tick) == (entry.sha256, entry.bytes)
        return False

    def _write(self, manifest: Manifest) -> Manifest:
        text = to_text(manifest)
        path = self._folder / manifest_name(manifest.number)
        with of_folder(self._folder):
            with path.open("wb", buffering=0) as file:
                file.write(text.encode())
                with contextlib.suppress(OSError):
                    os.fsync(file.fileno())
            written = from_text(path.read_bytes().decode(errors="replace"))
        if written is None:
            raise BackupError(
                f"'{path}' reads back differently from what was written.", fix="Look at the disk that holds it."
            )
        self._tick(len(text))
        assert replace(written, checksum="") == manifest
        return written

    def _prune(self, shelf: Shelf) -> None:
        """Remove what the last generations don't name; what can't be removed now is removed later."""
        kept = shelf.whole[:KEPT]
        named = {entry.file for manifest in kept for entry in manifest.entries()}
        old = [manifest_name(manifest.number) for manifest in shelf.whole[KEPT:]] + shelf.damaged
        for name in [*old, *(name for name in self._there if name not in named)]:
            with contextlib.suppress(OSError):
                # Google Drive keeps what is removed in its trash for 30 days, and counts it
                os.truncate(self._folder / name, 0)
                (self._folder / name).unlink()
                if name.startswith("runs/"):
                    (self._folder / name).parent.rmdir()
            self._tick(0)


def _is_same(one: Manifest, other: Manifest) -> bool:
    return one.store == other.store and one.files == other.files
