"""Backups on the command line: `backup DIR`, and `--backup DIR` of the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.backup import Backup, BackupStatus, prepare, status, tell_on_stderr, warn_of_home
from core.backup.copying import digest_of, of_folder
from core.backup.layout import Entry, Manifest, read_shelf
from core.backup.once import BusyError, back_up
from core.backup.status import write_status
from core.errors import BackupError


@contextmanager
def backed_up(home: Path, folder: Path | None, *, is_kept: bool) -> Iterator[None]:
    """What goes around a command: first a restore where the home has no runs, then backups while it goes on.

    Args:
        folder: of the backup; None where none is wanted.
        is_kept: the command changes what should be backed up.
    """
    if folder is None:
        yield
        return
    prepare(home, folder)
    if not is_kept:
        yield
        return
    warn_of_home(home)
    backup = Backup(home, folder, tell=tell_on_stderr)
    with backup:
        yield
    made = backup.status
    if made.at and not made.problem:
        tell_on_stderr(f"Backed up to '{folder}': {_runs(made.runs)}, {made.bytes / 1e6:.1f} MB.")


def backup_command(home: Path, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Make one backup now; also what lies there already is read, and written again where it is damaged.

    Raises:
        BackupError: it can't be made.
    """
    home, folder = home.expanduser().resolve(), folder.absolute()
    prepare(home, folder)
    try:
        outcome = back_up(home, folder, anew=True)
    except BusyError:
        raise BackupError("Another process backs this home up now.", fix="Try again in a minute.") from None
    made = outcome.manifest
    if made is None:
        return {"folder": str(folder), "number": 0, "runs": 0}, ["There are no runs to back up yet."]
    known = status(home)
    if known is None or not known.is_kept:
        now = BackupStatus(
            str(folder), time.time(), len(made.run_ids), len(made.files) + 1, made.bytes, outcome.seconds
        )
        write_status(home, now)
    told: dict[str, Any] = {
        "folder": str(folder),
        "number": made.number,
        "at": made.at,
        "runs": len(made.run_ids),
        "files": len(made.files) + 1,
        "bytes": made.bytes,
        "copied": outcome.copied,
        "copied_bytes": outcome.copied_bytes,
        "seconds": outcome.seconds,
    }
    return told, [
        f"{_runs(told['runs'])}, {told['files']} files, {made.bytes / 1e6:.1f} MB are in '{folder}'; "
        f"{outcome.copied} files, {outcome.copied_bytes / 1e6:.1f} MB of them were written in {outcome.seconds:.1f} s."
    ]


def verify_command(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Read all that a backup folder's generations name, and compare; nothing is changed.

    Returns:
        The JSON object, whose `is_whole` says whether all is as it was written, and the lines to print.

    Raises:
        BackupError: there is no backup, or the folder can't be read.
    """
    with of_folder(folder):
        shelf = read_shelf(folder)
    if not shelf.whole and not shelf.damaged:
        raise BackupError(f"There is no backup in '{folder}'.", fix=f"Make one with python -m core backup {folder}.")
    seen: dict[str, str] = {}
    generations = [_generation(folder, manifest, seen) for manifest in shelf.whole]
    told = {
        "folder": str(folder),
        "is_whole": not shelf.damaged and not any(each["damaged"] for each in generations),
        "generations": generations,
        "damaged_manifests": shelf.damaged,
    }
    lines = [f"{name}: damaged" for name in shelf.damaged]
    for each in generations:
        when = time.strftime("%d %B %Y, %H:%M:%S", time.localtime(each["at"]))
        words = f"{len(each['damaged'])} damaged" if each["damaged"] else "all whole"
        lines.append(f"{when}: {_runs(each['runs'])}, {each['files']} files, {each['bytes'] / 1e6:.1f} MB, {words}")
        lines += [f"  {one['path']} ({one['file']}): {one['why']}" for one in each["damaged"]]
    return told, lines


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}"


def _generation(folder: Path, manifest: Manifest, seen: dict[str, str]) -> dict[str, Any]:
    damaged = []
    for entry in manifest.entries():
        if entry.file not in seen:
            seen[entry.file] = _what_is_wrong(folder, entry)
        if seen[entry.file]:
            damaged.append({"path": entry.path, "file": entry.file, "why": seen[entry.file]})
    return {
        "number": manifest.number,
        "at": manifest.at,
        "runs": len(manifest.run_ids),
        "files": len(manifest.files) + 1,
        "bytes": manifest.bytes,
        "damaged": damaged,
    }


def _what_is_wrong(folder: Path, entry: Entry) -> str:
    try:
        sha256, count = digest_of(folder / entry.file, lambda count: None)
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it can't be read: {error.strerror or error}"
    if count != entry.bytes:
        return f"it has {count} of {entry.bytes} bytes"
    return "" if sha256 == entry.sha256 else "it holds something else than was written"
