"""Keeping a home's backup up to date while this process lives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from core.backup.copying import Tick, of_folder
from core.backup.layout import STORE
from core.backup.once import BusyError, Outcome, back_up
from core.backup.source import signature
from core.backup.status import BackupStatus, status, write_status
from core.backup.watched import LeftError, Watched
from core.errors import AppError, BackupError

PAUSE_S = 30.0
"""Least seconds between two backups; three times as long as one takes, where that is more."""
LATE_S = 300.0
"""Most seconds until what runs tell between two epochs is backed up."""
LOOK_S = 2.0
QUIET_S = 60.0
"""Seconds without a sign of life after which the folder is said to hang."""
LONGEST_S = 600.0
"""Most seconds between two tries."""
LAST_S = 120.0
"""Seconds that the last backup may take, when the command ends."""

_log = logging.getLogger(__name__)


class Backup:
    """Backs a home up soon after something changed, from a daemon thread that training never waits for.

    What goes wrong is told in words, kept as the home's status, and tried again after pauses that grow.

    Args:
        home, folder: what is backed up, and where to; see `core.backup.prepare` for what must be done before.
        tell: is called with a line for people, from that thread.
    """

    def __init__(
        self,
        home: Path,
        folder: Path,
        *,
        tell: Callable[[str], None] = _log.warning,
        pause_s: float = PAUSE_S,
        look_s: float = LOOK_S,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._home, self._folder = home.expanduser().resolve(), folder.expanduser().absolute()
        self._tell, self._pause_s, self._look_s, self._quiet_s = tell, pause_s, look_s, quiet_s
        self._closing, self._given_up = threading.Event(), threading.Event()
        self._seen: tuple[str, int] = ("", 0)
        self._next, self._late, self._tries = 0.0, 0.0, 0
        self._device: int | None = None
        self._hangs, self._busy_since = False, 0.0
        known = status(self._home)
        self._status = replace(known, problem="", fix="", since=0.0) if known else BackupStatus("")
        if self._status.folder != str(self._folder):
            self._status = BackupStatus(str(self._folder))
        self._thread = threading.Thread(target=self._watch, name="backup", daemon=True)

    def start(self) -> None:
        self._show(is_kept=True)
        self._thread.start()

    def stop(self, timeout_s: float = LAST_S) -> bool:
        """Make the last backup, where something changed since the one before.

        Returns:
            Whether all is backed up; after `timeout_s` at the latest, and then the one before stays.
        """
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._given_up.set()
            self._thread.join(1.0)
            self._trouble(BackupError("The last backup was not made in time.", fix="It is made at the next start."))
        self._show(is_kept=False, is_busy=False, next_try=0.0)
        return not self._status.problem

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def status(self) -> BackupStatus:
        return self._status

    def _watch(self) -> None:
        while not self._closing.wait(self._look_s):
            if time.monotonic() >= self._next:
                self._look()
        # also what failed a moment ago is tried once more
        self._look(is_last=True)

    def _look(self, *, is_last: bool = False) -> None:
        """Make a backup where one is due."""
        while True:
            try:
                if (self._home / STORE).exists():
                    self._make_if_due(is_last)
                self._busy_since = 0.0
            except LeftError:
                pass
            except BusyError:
                self._busy_since = self._busy_since or time.monotonic()
                busy_s = time.monotonic() - self._busy_since
                if busy_s > self._quiet_s and not self._hangs:
                    self._hangs = True
                    self._trouble(
                        BackupError(
                            f"Another process has been at the backup of '{self._home}' for {busy_s:.0f} s.",
                            fix="See whether the backup folder is still mounted.",
                        )
                    )
                # at the end that one may have begun before the last that this process did
                elif is_last and not self._hangs and not self._given_up.wait(0.5):
                    continue
                _log.info("Another process backs up '%s' now.", self._home)
            except Exception as error:  # whatever it was, training goes on and the next try may do better
                self._hangs = False
                self._trouble(error)
            self._show(is_busy=False)
            return

    def _make_if_due(self, is_last: bool) -> None:
        known = status(self._home)
        if known is None or not known.is_kept:
            # another process that has ended wrote so
            self._show(is_kept=True, anew=True)
        elif known.folder == self._status.folder and 0 <= time.time() - known.at < self._pause_s and not is_last:
            # it may be another process's
            return
        now = signature(self._home)
        is_late = is_last or time.monotonic() >= self._late
        if now[0] == self._seen[0] and (now[1] == self._seen[1] or not is_late):
            return
        began = time.monotonic()
        self._show(is_busy=True)
        outcome = self._watched()
        took_s = time.monotonic() - began
        self._seen, self._tries, self._hangs = now, 0, False
        self._next = time.monotonic() + max(self._pause_s, 3 * took_s)
        self._late = time.monotonic() + LATE_S
        if self._status.problem:
            self._tell(f"The backup folder '{self._folder}' can be used again, and all is backed up.")
        made = outcome.manifest
        if made:
            figures: dict[str, Any] = {
                "at": time.time(),
                "runs": len(made.run_ids),
                "files": len(made.files) + 1,
                "bytes": made.bytes,
            }
            self._show(**figures, seconds=outcome.seconds)
        self._show(problem="", fix="", since=0.0, next_try=0.0)

    def _watched(self) -> Outcome:
        work = Watched(self._once, "backup-files")
        while not work.wait(0.2):
            is_hanging = work.quiet_s > self._quiet_s
            if is_hanging and not self._hangs:
                self._hangs = True
                self._trouble(
                    BackupError(
                        f"The backup folder '{self._folder}' hasn't answered for {work.quiet_s:.0f} s.",
                        fix="See whether it is still mounted; training goes on.",
                    )
                )
            if self._given_up.is_set() or (is_hanging and self._closing.is_set()):
                work.leave()
                raise LeftError
        return work.result()

    def _once(self, tick: Tick) -> Outcome:
        with of_folder(self._folder):
            place = self._folder if self._folder.exists() else self._folder.parent
            device = place.stat().st_dev
        if self._device not in (None, device):
            # where a disk was unmounted, a folder of this machine's own shows up
            raise BackupError(
                f"At the backup folder '{self._folder}' lies another disk than before.", fix="Mount it again."
            )
        outcome = back_up(self._home, self._folder, tick=tick)
        self._device = device
        return outcome

    def _trouble(self, error: Exception) -> None:
        """Keep what went wrong, tell it once, and wait longer for the next try."""
        if isinstance(error, AppError):
            problem, fix = error.problem, error.fix
        else:
            line = (str(error).strip().splitlines() or [""])[0]
            problem, fix = f"It failed ({type(error).__name__}: {line}).", "It is tried again; training goes on."
        pause_s = min(LONGEST_S, self._pause_s * 2**self._tries)
        self._tries += 1
        self._next = time.monotonic() + pause_s
        if _without_numbers(problem) != _without_numbers(self._status.problem):
            self._tell(f"Not backed up: {problem} {fix}")
        since = self._status.since or time.time()
        self._show(problem=problem, fix=fix, since=since, next_try=time.time() + pause_s)

    def _show(self, *, anew: bool = False, **changes: Any) -> None:
        told = replace(self._status, **changes)
        if told == self._status and not anew:
            return
        known = status(self._home)
        if known and known.folder == told.folder and known.at > told.at:
            # another process made the last one
            told = replace(told, at=known.at, runs=known.runs, files=known.files, bytes=known.bytes)
        self._status = told
        write_status(self._home, told)


def _without_numbers(words: str) -> str:
    return "".join(character for character in words if not character.isdigit())
