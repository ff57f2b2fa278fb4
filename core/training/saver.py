"""What of a task goes into its checkpoints, and back."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.checkpoint import save_checkpoint
from core.control import CHANGEABLE
from core.devices.base import Device
from core.errors import CheckpointError, DataError
from core.events import CheckpointFailed, CheckpointSaved, Event, PhaseChanged
from core.insist import insist
from core.training.ema import Ema
from core.training.state import Position, SavedState, write_state
from core.training.task import Task
from core.words import time_in_words

LEAVING_S = 2.0
"""Seconds for which a checkpoint is tried again where the run is asked to end: its last events wait, too."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Owed:
    """A checkpoint that could not be written; `write` tries it again."""

    which: str
    epoch: int
    step: int
    write: Callable[[], Path]


@dataclass
class Saver:
    """Writes a run's checkpoints; one that can't be written is told by an event and tried again, and the run goes on.

    Attributes:
        module, ema, optimizer: placed; the module without what wraps it on its device.
        folder: the run's own; None writes nothing.
        about: what is kept beside the weights, see `save_checkpoint`.
        data: see `SavedState`.
    """

    device: Device
    module: nn.Module
    ema: Ema | None
    optimizer: torch.optim.Optimizer
    folder: Path | None
    about: dict[str, Any]
    data: dict[str, Any]
    batch_size: int
    emit: Callable[[Event], None]
    step: Callable[[], int] = lambda: 0
    _owed: dict[str, _Owed] = field(default_factory=dict, init=False)

    def save(self, which: str, epoch: int) -> None:
        """Write the weights: the averaged ones where there are such."""
        if self.folder is None:
            return
        self._owed.pop(which, None)
        # the best ones are not made anew with each epoch
        if best := self._owed.get("best"):
            with contextlib.suppress(CheckpointError):
                self._pay(best, best.write())
        shown = self.ema.module if self.ema else self.module
        with self.device.turn():
            weights = self.device.to_host(dict(shown.state_dict()))
        about = {**self.about, "epoch": epoch}
        try:
            path = save_checkpoint(self.folder, which, weights, about)
        except CheckpointError as error:
            # on the CPU they are the model's own, which is trained on
            weights = {name: tensor.clone() for name, tensor in weights.items()}
            again = functools.partial(save_checkpoint, self.folder, which, weights, about)
            self._owe(_Owed(which, epoch, self.step(), again), error)
        else:
            self.emit(CheckpointSaved(which, epoch, path.name, self.step()))

    def keep(self, task: Task, position: Position) -> None:
        """Write all that is needed to go on from this position, see `core.training.state`."""
        if self.folder is None:
            return
        self._owed.pop("state", None)
        with self.device.turn():
            state = self._state(task, position)
        epoch = position.epoch if position.place else position.epoch - 1
        try:
            path = write_state(self.folder, state)
        except CheckpointError as error:
            # nothing is trained before another one is kept, or the run has ended
            self._owe(_Owed("state", epoch, position.step, functools.partial(write_state, self.folder, state)), error)
        else:
            self.emit(CheckpointSaved("state", epoch, path.name, position.step))

    def insist(self, is_leaving: Callable[[], bool]) -> None:
        """Write at a run's end what could not be written before, however often it must be tried, see `core.insist`."""
        began = time.monotonic()
        for owed in list(self._owed.values()):
            self.emit(PhaseChanged("saving", owed.epoch, "tried again until there is room"))
            try:
                path = insist(
                    owed.write, CheckpointError, began=began, is_leaving=is_leaving, tell=_warn, leaving_s=LEAVING_S
                )
                self._pay(owed, path)
            except CheckpointError as error:
                _log.warning("%s It is given up.", error.problem)

    def _owe(self, owed: _Owed, error: CheckpointError) -> None:
        self._owed[owed.which] = owed
        self.emit(CheckpointFailed(owed.which, owed.epoch, owed.step, error.problem))

    def _pay(self, owed: _Owed, path: Path) -> None:
        del self._owed[owed.which]
        self.emit(CheckpointSaved(owed.which, owed.epoch, path.name, owed.step))

    def _state(self, task: Task, position: Position) -> SavedState:
        on_device = {
            "model": dict(self.module.state_dict()),
            "ema": dict(self.ema.module.state_dict()) if self.ema else None,
            "optimizer": _optimizer_tensors(self.optimizer, self.module),
        }
        return SavedState(
            position=position,
            **self.device.to_host(on_device),
            scaler=task.scaler.state_dict(),
            random=self.device.random_state(),
            config={name: getattr(task.config, name) for name in CHANGEABLE if name not in ("lr", "lr_factor")},
            lr_factor=task.lr_factor,
            precision=task.precision,
            device_kind=self.device.kind,
            batch_size=self.batch_size,
            data=self.data,
            at=time.time(),
        )


def _warn(error: CheckpointError, left_s: float) -> None:
    _log.warning("%s It is tried again for another %s. %s", error.problem, time_in_words(left_s), error.fix)


def _optimizer_tensors(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
        for name, parameter in module.named_parameters()
        if parameter in optimizer.state
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module, saved: dict[str, dict[str, Any]], device: Device
) -> None:
    """Give each trained parameter the optimizer's tensors that were saved of it, maybe by another device kind.

    torch's own `load_state_dict` goes by numbers, and would move single numbers in a way for which XLA compiles anew.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept, state = saved.get(names[id(parameter)]), optimizer.state[parameter]
            if not kept:
                continue
            # where there is a state before the first step, it has all that this optimizer knows
            known = set(state) or set(kept)
            # in the order in which the device makes them: XLA tells programs apart by the age of what they give back
            for key in sorted(known & set(kept)):
                if kept[key].numel():
                    state[key] = device.place(_laid_out(kept[key], parameter))
            if "step" in known - set(kept):
                # torch's SGD counts none; all that matters is whether there was one
                state["step"] = device.place(torch.ones(()))


def _laid_out(tensor: Tensor, parameter: Tensor) -> Tensor:
    """In the parameter's memory format, which torch's fused optimizers rely upon and another device loses."""
    if tensor.shape != parameter.shape:
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device="cpu").copy_(tensor)


_OF_DATA = {
    "classes": "classes",
    "num_train": "training images",
    "num_val": "validation images",
    "pictures": "pictures or other names of them, though as many",
}


def fits_data(state: SavedState, data: dict[str, Any]) -> None:
    """Refuse to go on with other data than the run began with.

    Raises:
        DataError: the classes or the images differ.
    """
    for name, words in _OF_DATA.items():
        # a state of an earlier version doesn't tell all
        before, now = state.data.get(name, data[name]), data[name]
        if before != now:
            counts = [len(value) if isinstance(value, list) else value for value in (before, now)]
            told = f"{counts[0]} {words} then, {counts[1]} now"
            if counts[0] == counts[1] or isinstance(now, str):
                told = f"other {words}"
            raise DataError(
                f"The data have changed since the run began: {told}.",
                fix="Bring back the data, or start a new run from this run's weights.",
            )
