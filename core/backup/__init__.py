"""A home folder's backup in another folder, on a mounted Google Drive say: made while runs train, restored at a start.

prepare(home, folder)             restores a home that has no runs yet, and refuses what doesn't belong together
with Backup(home, folder): ...    keeps the backup up to date meanwhile, and makes the last one at the end
status(home)                      how it stands
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from core.backup.copying import FolderFailsError
from core.backup.keep import LAST_S, Backup
from core.backup.restore import Restored, restore
from core.backup.source import has_runs
from core.backup.status import BackupStatus, status
from core.backup.watched import Watched
from core.store import Store

__all__ = [
    "BACKUP_VARIABLE",
    "LAST_S",
    "Backup",
    "BackupStatus",
    "default_backup",
    "prepare",
    "status",
    "tell_on_stderr",
    "warn_of_home",
]

BACKUP_VARIABLE = "FINETUNE_BACKUP"
ANSWER_S = 60.0
"""Seconds without a sign of life after which a folder is not waited for at a start."""

TELL_S = 10.0
"""Seconds between two lines about a restore that takes long."""


def default_backup() -> Path | None:
    """The backup folder that the environment names."""
    named = os.environ.get(BACKUP_VARIABLE, "").strip()
    return Path(named).expanduser() if named else None


def tell_on_stderr(line: str) -> None:
    """For the command line: a line that doesn't tear a progress bar apart."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()


def prepare(
    home: Path, folder: Path, *, tell: Callable[[str], None] = tell_on_stderr, answer_s: float = ANSWER_S
) -> Restored | None:
    """Restore a home that has no runs from its backup, where there is one; before anything opens its store.

    Args:
        tell: is called with a line for people.
        answer_s: seconds without a sign of life after which the folder is not waited for.

    Returns:
        What was restored; None where there was nothing to restore.

    Raises:
        BackupError: the folder lies wrong or holds the backup of other runs, or a home without runs can't be restored
            from it. Where the home has runs, a folder that fails is told and no error: it is tried again later.
        StoreError: the home folder can't be used.
    """
    home, folder = home.expanduser().resolve(), folder.expanduser().absolute()
    # makes its database, or brings it to the schema that is expected here
    Store(home).close()
    work = Watched(lambda tick: restore(home, folder, tick=tick), "restore")
    told = time.monotonic()
    try:
        while not work.wait(0.02):
            if time.monotonic() - told > TELL_S:
                told = time.monotonic()
                tell(f"Restoring from '{folder}': {work.bytes / 1e6:.0f} MB so far.")
            if work.quiet_s > answer_s:
                work.leave()
                raise FolderFailsError(
                    f"The backup folder '{folder}' hasn't answered for {answer_s:.0f} s.",
                    fix="Mount it again, or leave --backup out.",
                )
        restored = work.result()
    except FolderFailsError as error:
        if not has_runs(home):
            raise
        tell(f"{error} Until then nothing is backed up.")
        return None
    if restored:
        for line in restored.lines():
            tell(line)
    return restored


def warn_of_home(home: Path, tell: Callable[[str], None] = tell_on_stderr) -> None:
    """Say where a home lies on a network's disk, which databases and training are not made for."""
    from core.machine.facts import disk_of

    if disk_of(home)["kind"] == "network":
        tell(
            f"The home folder '{home}' lies on a network's disk, which is slow and may damage the database. "
            "Choose a --home on this machine, and that disk for --backup."
        )
