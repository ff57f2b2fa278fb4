"""What of a task goes into its checkpoints, and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.checkpoint import save_checkpoint
from core.control import CHANGEABLE
from core.devices.base import Device
from core.ema import Ema
from core.errors import CheckpointError, DataError
from core.events import CheckpointFailed, CheckpointSaved, Event
from core.state import Position, SavedState, write_state
from core.task import Task


@dataclass
class Saver:
    """Writes a run's checkpoints; one that can't be written is told by an event, and the run goes on.

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

    def save(self, which: str, epoch: int) -> None:
        """Write the weights: the averaged ones where there are such."""
        if self.folder is None:
            return
        shown = self.ema.module if self.ema else self.module
        with self.device.turn():
            weights = self.device.to_host(dict(shown.state_dict()))
        try:
            path = save_checkpoint(self.folder, which, weights, {**self.about, "epoch": epoch})
        except CheckpointError as error:
            self.emit(CheckpointFailed(which, epoch, self.step(), error.problem))
        else:
            self.emit(CheckpointSaved(which, epoch, path.name, self.step()))

    def keep(self, task: Task, position: Position) -> None:
        """Write all that is needed to go on from this position, see `core.state`."""
        if self.folder is None:
            return
        with self.device.turn():
            state = self._state(task, position)
        epoch = position.epoch if position.place else position.epoch - 1
        try:
            path = write_state(self.folder, state)
        except CheckpointError as error:
            self.emit(CheckpointFailed("state", epoch, position.step, error.problem))
        else:
            self.emit(CheckpointSaved("state", epoch, path.name, position.step))

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


def fits_data(state: SavedState, data: dict[str, Any]) -> None:
    """Refuse to go on with other data than the run began with.

    Raises:
        DataError: the numbers of images or the classes differ.
    """
    for name, words in (("classes", "classes"), ("num_train", "training images"), ("num_val", "validation images")):
        before, now = state.data[name], data[name]
        if before != now:
            counts = [len(value) if isinstance(value, list) else value for value in (before, now)]
            told = f"{counts[0]} {words} then, {counts[1]} now" if counts[0] != counts[1] else f"other {words}"
            raise DataError(
                f"The data have changed since the run began: {told}.",
                fix="Bring back the data, or start a new run from this run's weights.",
            )
