"""All that is needed to take up a run again, as files of which the last two are kept.

Written whole or not at all; read with `weights_only`, so that no code in a file is run.
"""

from __future__ import annotations

import re
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from core.checkpoint import write_whole
from core.errors import CheckpointError
from core.events import EpochEnded, Phases, Tweaked

KEPT = 2
VERSION = 1
_NAME = re.compile(r"state-(\d{9,})\.pt")


@dataclass
class Position:
    """Where a run stands between two steps.

    Attributes:
        epoch, place: the epoch that is trained, from 1, and how many of its batches are done.
        step: the last one that was done.
        best, best_epoch: the highest validation top-1 so far (percent), -1 before the first epoch's end.
        log: what the epoch's log holds by then, see `StepLog.state`; None at an epoch's beginning.
        earlier: where the time of this epoch went in earlier parts of the run.
        earlier_compiles: programs that were compiled for it then.
        told: the epochs and changes told so far, since events that were not written yet die with a process.
    """

    epoch: int = 1
    place: int = 0
    step: int = 0
    best: float = -1.0
    best_epoch: int = 0
    log: dict[str, Any] | None = None
    earlier: Phases = field(default_factory=Phases)
    earlier_compiles: int = 0
    told: list[EpochEnded | Tweaked] = field(default_factory=list)


@dataclass
class SavedState:
    """A run as it stood after a step; all tensors are on the CPU.

    Attributes:
        model, ema: state dicts; `ema` is None where no average is kept.
        optimizer: tensors of each trained parameter, by its name and theirs.
        scaler: of the gradient scaler, empty where it is off.
        random: states of the random generators, by name.
        config: options that may have been changed since the run was queued.
        lr_factor: multiplies the schedule's learning rates.
        precision, device_kind, batch_size: as the run used them.
        data: `num_train`, `num_val`, `classes` and `pictures`, by which another data set is noticed.
        at: when it was kept, Unix time.
    """

    position: Position
    model: dict[str, Any]
    ema: dict[str, Any] | None
    optimizer: dict[str, dict[str, Any]]
    scaler: dict[str, Any]
    random: dict[str, Any]
    config: dict[str, Any]
    lr_factor: float
    precision: str
    device_kind: str
    batch_size: int
    data: dict[str, Any]
    at: float


def write_state(folder: Path, state: SavedState) -> Path:
    """Write the state beside the one before, and remove older ones.

    Raises:
        CheckpointError: it can't be written; what was there stays.
    """
    path = folder / f"state-{state.position.step:09d}.pt"
    plain = {**{name: getattr(state, name) for name in SavedState.__dataclass_fields__}, "version": VERSION}
    plain["position"] = _plain(state.position)
    write_whole(path, lambda temporary: torch.save(plain, temporary))
    for old in state_files(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def state_files(folder: Path) -> list[Path]:
    """The states of a run, the newest first."""
    found = [(int(match[1]), path) for path in folder.glob("state-*.pt") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def read_state(folder: Path) -> SavedState | None:
    """The newest state that is as it was written; None where none was kept.

    Args:
        folder: the run's own, which bears its id.

    Raises:
        CheckpointError: some were kept, and none can be read.
    """
    files = state_files(folder)
    for path in files:
        if state := _read(path):
            return state
    if files:
        raise CheckpointError(
            f"What run {folder.name} kept can't be read any more.",
            fix=f"Start a new run from its best weights: --weights run:{folder.name}.",
        )
    return None


def _read(path: Path) -> SavedState | None:
    try:
        with zipfile.ZipFile(path) as file:
            # torch writes checksums and doesn't look at them: it would take weights in which bits have flipped
            if file.testzip():
                return None
        plain = torch.load(path, map_location="cpu", weights_only=True)
        if plain.pop("version") != VERSION:
            return None
        return SavedState(**{**plain, "position": _position(plain["position"])})
    except Exception:  # a file that was cut raises nearly anything, and the one before it serves
        return None


def drop_after(folder: Path, step: int) -> None:
    """Remove the states of later steps: what could not be read any more."""
    for path in state_files(folder):
        if path > folder / f"state-{step:09d}.pt":
            path.unlink(missing_ok=True)


def _plain(position: Position) -> dict[str, Any]:
    told = [{"kind": type(event).__name__, **asdict(event)} for event in position.told]
    return {**asdict(position), "told": told}


def _position(plain: dict[str, Any]) -> Position:
    told: list[EpochEnded | Tweaked] = []
    for event in plain["told"]:
        kind = event.pop("kind")
        if kind == "EpochEnded":
            phases = {name: Phases(**event[name]) for name in ("phases", "earlier")}
            told.append(EpochEnded(**{**event, **phases}))
        else:
            told.append(Tweaked(**event))
    return Position(**{**plain, "earlier": Phases(**plain["earlier"]), "told": told})
