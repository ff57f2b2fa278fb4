"""Checkpoints: weights as safetensors with all that is needed to use them, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn


def save_checkpoint(
    folder: Path, which: str, model: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, Any]
) -> Path:
    """Write `<which>.safetensors` and, for `last`, the optimizer's state beside it.

    Args:
        folder: the run's folder; made where it is missing.
        which: best or last.
        about: class names, normalisation, config, epoch; kept as JSON inside the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    path = folder / f"{which}.safetensors"
    metadata = {name: json.dumps(value) for name, value in about.items()}
    _replace(path, lambda temporary: save_file(weights, temporary, metadata=metadata))
    if which == "last":
        state = {"optimizer": optimizer.state_dict(), "epoch": about["epoch"]}
        _replace(folder / "last.state.pt", lambda temporary: torch.save(_on_cpu(state), temporary))
    return path


def read_about(path: Path) -> dict[str, Any]:
    """Class names, normalisation, config and epoch of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        return {name: json.loads(value) for name, value in (file.metadata() or {}).items()}


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_on_cpu(item) for item in value]
    return value
