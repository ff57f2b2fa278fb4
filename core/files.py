"""Files and folders that are either whole or not there, whenever the process is killed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

FULL_BYTES = 1 << 20
"""A disk with less free space than this is called full."""
BUILDING = ".building-"
"""How the names of what is not whole yet begin; the process id follows."""


@contextmanager
def built(target: Path) -> Iterator[Path]:
    """Yield a path beside `target` to write a file or make a folder at; it becomes `target` when the block ends well.

    Where another process made `target` meanwhile, theirs stays. What is left at the yielded path after an error is
    removed; what a killed process left is removed by the next call in the same folder.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent)
    temporary = target.parent / f"{BUILDING}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        yield temporary
        try:
            os.replace(temporary, target)
        except OSError:
            if not target.exists():
                raise
    finally:
        remove(temporary)


def sweep(folder: Path) -> None:
    """Remove what processes that are no more left half-built in `folder`."""
    for path in folder.glob(f"{BUILDING}*"):
        pid = path.name.removeprefix(BUILDING).partition("-")[0]
        if not pid.isdecimal() or not psutil.pid_exists(int(pid)):
            remove(path)


def is_full(folder: Path) -> bool:
    """Whether the folder's disk has no room left, as far as it tells."""
    try:
        return shutil.disk_usage(folder).free < FULL_BYTES
    except OSError:
        return False


def remove(path: Path) -> None:
    """Remove a file or a folder with all it holds, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def try_lock(file: IO[bytes]) -> bool:
    """Take a file's lock, which lasts until the file is closed or the process ends; False where another one has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
