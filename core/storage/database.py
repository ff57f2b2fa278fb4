"""The SQLite file of a home folder: two connections, whole transactions, and what is wrong with it in words."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.errors import StoreError, StoreWriteError
from core.files import is_full
from core.migrations import migrate

LOCKED_S = 30.0
"""Seconds that a writer waits for another process's writing to end."""
_WHY = {
    "SQLITE_READONLY": "the folder is read-only",
    "SQLITE_BUSY": "another program holds it locked",
    "SQLITE_CANTOPEN": "its files can't be opened",
}


class Database:
    """The file, at the newest schema; may be shared by threads, and each process opens its own.

    A reader never blocks a writer (WAL), nor does a writer that waits block a reader: there is a connection for each.

    Args:
        home: the folder that holds it; made where it is missing.

    Raises:
        StoreError: the folder can't be used.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lock, self._read_lock = threading.RLock(), threading.Lock()
        self._writes: int | None = None
        self._trouble = ""
        try:
            home.mkdir(parents=True, exist_ok=True)
            self.writer, self.reader = self._connect(), self._connect()
            self.writer.execute("PRAGMA journal_mode = WAL")
            self.writer.execute("PRAGMA synchronous = NORMAL")
            migrate(self.writer)
        except (OSError, sqlite3.Error) as error:
            why = self._why(error) if isinstance(error, sqlite3.Error) else error.strerror or str(error)
            raise StoreError(f"The home folder '{home}' can't be used: {why}.", fix="Choose another --home.") from error

    def close(self) -> None:
        with self.lock, self._read_lock:
            self.reader.close()
            self.writer.close()

    @property
    def trouble(self) -> str:
        """Why the file can't be written now, as far as this process knows; "" where it can."""
        return self._trouble or ("the disk is full" if is_full(self.home) else "")

    def read(self, query: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """All rows of a query.

        Raises:
            StoreError: the file can't be read.
        """
        # who is writing reads what it has written
        is_writer = self._writes == threading.get_ident()
        db, lock = (self.writer, self.lock) if is_writer else (self.reader, self._read_lock)
        try:
            with lock:
                return db.execute(query, values).fetchall()
        except sqlite3.OperationalError as error:
            raise StoreError(
                f"The run store can't be read: {self._why(error)}.", fix="Look at the disk that holds the home folder."
            ) from error

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all that happens in the block is written, or nothing where the block raises.

        Raises:
            StoreWriteError: the file can't be written now.
        """
        with self.lock:
            try:
                self.writer.execute("BEGIN IMMEDIATE")
                self._writes = threading.get_ident()
                yield self.writer
                self.writer.execute("COMMIT")
            except BaseException as error:
                # SQLite ends some transactions by itself where the disk fails
                if self.writer.in_transaction:
                    self.writer.execute("ROLLBACK")
                if not isinstance(error, sqlite3.OperationalError):
                    raise
                self._trouble = self._why(error)
                raise StoreWriteError(
                    f"The run store can't be written: {self._trouble}.",
                    fix=f"Make room in the home folder '{self.home}', or see what holds it.",
                ) from error
            finally:
                self._writes = None
            self._trouble = ""

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.home / "runs.sqlite", check_same_thread=False, isolation_level=None, timeout=LOCKED_S
        )
        connection.row_factory = sqlite3.Row
        return connection

    def _why(self, error: sqlite3.Error) -> str:
        name = getattr(error, "sqlite_errorname", None) or ""
        if name == "SQLITE_FULL" or is_full(self.home):
            return "the disk is full"
        return next((words for begin, words in _WHY.items() if name.startswith(begin)), str(error))
