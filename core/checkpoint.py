"""Checkpoints: weights as safetensors with all that is needed to use them, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


def save_checkpoint(
    folder: Path, which: str, weights: dict[str, Tensor], about: dict[str, Any], state: dict[str, Any] | None = None
) -> Path:
    """Write `<which>.safetensors` and, where there is one, the state to go on from beside it.

    Args:
        folder: the run's folder; made where it is missing.
        which: best or last.
        weights: on the CPU, by name.
        about: class names, normalisation, config, epoch; kept as JSON inside the file.
        state: tensors and numbers, on the CPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{which}.safetensors"
    metadata = {name: json.dumps(value) for name, value in about.items()}
    # safetensors takes no two names for one memory
    whole = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    _replace(path, lambda temporary: save_file(whole, temporary, metadata=metadata))
    if state is not None:
        _replace(folder / f"{which}.state.pt", lambda temporary: torch.save(state, temporary))
    return path


def read_about(path: Path) -> dict[str, Any]:
    """Class names, normalisation, config and epoch of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        return {name: json.loads(value) for name, value in (file.metadata() or {}).items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, on the CPU, by name."""
    weights: dict[str, Tensor] = load_file(path)
    return weights


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
