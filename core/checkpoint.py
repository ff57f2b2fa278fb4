"""Checkpoints: weights as safetensors with all that is needed to use them, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.errors import CheckpointError

FULL_BYTES = 1 << 20
"""A disk with less free space than this is called full."""
HALF = ".tmp"
"""How the name of a file ends that is not whole yet."""


def save_checkpoint(folder: Path, which: str, weights: dict[str, Tensor], about: dict[str, Any]) -> Path:
    """Write `<which>.safetensors`.

    Args:
        folder: the run's folder; made where it is missing.
        which: best or last.
        weights: on the CPU, by name.
        about: class names, normalisation, config, epoch; kept as JSON inside the file.

    Raises:
        CheckpointError: it can't be written; what was there stays.
    """
    path = folder / f"{which}.safetensors"
    metadata = {name: json.dumps(value) for name, value in about.items()}
    # safetensors takes no two names for one memory
    whole = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    write_whole(path, lambda temporary: save_file(whole, temporary, metadata=metadata))
    return path


def read_about(path: Path) -> dict[str, Any]:
    """Class names, normalisation, config and epoch of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        return {name: json.loads(value) for name, value in (file.metadata() or {}).items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, on the CPU, by name."""
    weights: dict[str, Tensor] = load_file(path)
    return weights


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make the file, so that `path` holds all of it, on the disk itself, or what it held before.

    Raises:
        CheckpointError: it can't be written.
    """
    temporary = path.with_name(f"{path.name}{HALF}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        _sync(temporary)
        os.replace(temporary, path)
        # the name too
        _sync(path.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        # torch and safetensors don't say why a write failed
        is_full = getattr(error, "errno", None) == errno.ENOSPC or _free_bytes(path.parent) < FULL_BYTES
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = "the disk is full" if is_full else getattr(error, "strerror", None) or line
        raise CheckpointError(f"{path.name} can't be written: {why}.", fix="Make room in the home folder.") from error


def drop_halves(folder: Path) -> None:
    """Remove what killed processes had not written to the end: each state has a name of its own, so it would stay."""
    for half in folder.glob(f"*{HALF}"):
        with contextlib.suppress(OSError):
            half.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return FULL_BYTES
