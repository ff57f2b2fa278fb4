"""The same training in one process and in several: figures to be compared.

`python -m tests.rank_cases FOLDER` runs it in one of the processes, which RANK and WORLD_SIZE number.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from core.config import make_config
from core.data.sampling import class_weights
from core.devices import Device
from core.devices.ranks import open_rank
from core.engine import fit
from core.events import EpochEnded, StepLogged
from core.models.build import build_model
from core.models.parts import set_train_mode
from core.setup import _place
from core.timing import PhaseTimer
from core.training.task import Task
from tests.tiny import FixedLoader, NoWishes, StopAfter, TickClock

LABELS = torch.tensor([0, 0, 0, 0, 1, 0, 2, 1, 0, 3, 0, 0, 4, 0, 5, 0])
"""Of 16 images; seldom classes fall to one of two processes or the other."""


def plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 6))


def with_batchnorm() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 30 * 30, 6))


class OneLayerUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = plain(), nn.Linear(3, 3)

    def forward(self, images):
        return self.used(images)


def built(name: str, trainable: str) -> nn.Module:
    return build_model(name, num_classes=6, weights="none", image_size=32, trainable=trainable, seed=0).module


def train(device: Device, module: nn.Module, control=None, weighs: bool = False, num_train: int = 16, **changes):
    """Two epochs of batches of 8, and the figures of each step and epoch; 11 validation images, so the last are 3."""
    config = make_config(
        **{"epochs": 2, "batch_size": 8, "log_every": 1, "schedule": "constant", "lr": 1e-3, **changes}
    )
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8, generator=generator)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    placed = _place(config, device, module, 32)
    task = Task(
        config=config,
        device=device,
        model=placed.module,
        optimizer=placed.optimizer,
        train=FixedLoader(images[:num_train], LABELS[:num_train], 8),
        val=FixedLoader(images[:11], LABELS[:11], 8),
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        num_classes=6,
        save=lambda which, epoch: None,
        set_train_mode=lambda: set_train_mode(placed.module),
        class_weights=class_weights(LABELS.numpy().astype(np.int64), 6) if weighs else None,
        precision=placed.precision,
        ema=placed.ema,
    )
    events: list = []
    state = fit(task, emit=events.append, control=control or NoWishes(), timer=PhaseTimer(TickClock()))
    shown = placed.ema.module if placed.ema else placed.module
    return {
        "state": state,
        "losses": [event.loss for event in events if isinstance(event, StepLogged)],
        "epochs": [asdict(event) for event in events if isinstance(event, EpochEnded)],
        "buffers": torch.cat([torch.zeros(1), *(b.flatten().float() for b in shown.buffers())]).tolist(),
        "moved": [name for name, buffer in placed.module.named_buffers() if not torch.equal(buffer, before[name])],
        "weights": float(torch.cat([w.detach().flatten() for w in shown.parameters()]).double().norm()),
    }


CASES: dict[str, Callable[[Device], dict]] = {
    "plain": lambda device: train(device, plain()),
    "head": lambda device: train(device, built("tf_efficientnet_lite0", "head")),
    "vit": lambda device: train(device, built("timm/test_vit", "all"), lr=1e-4),
    "sgd": lambda device: train(device, plain(), optimizer="sgd", label_smoothing=0.1),
    "accumulate": lambda device: train(device, plain(), accumulate=2),
    "clip": lambda device: train(device, plain(), clip_grad_norm=0.05),
    "ema": lambda device: train(device, plain(), ema_decay=0.9),
    "weights": lambda device: train(device, plain(), weighs=True, label_smoothing=0.1),
    "weights_accumulate": lambda device: train(device, plain(), weighs=True, accumulate=2),
    "stages": lambda device: train(device, plain(), trainable="head", trainable_from="2:all,3:head,4:all", epochs=4),
    "stages_accumulate": lambda device: train(
        device,
        built("timm/test_vit", "all"),
        trainable="head",
        trainable_from="2:last,3:all",
        epochs=3,
        accumulate=2,
        layer_decay=0.5,
        lr=1e-4,
    ),
    "unused": lambda device: train(device, OneLayerUnused()),
    "batchnorm": lambda device: train(device, with_batchnorm(), ema_decay=0.9),
    "batchnorm_one_step": lambda device: train(device, with_batchnorm(), num_train=8, epochs=1),
    "last": lambda device: train(device, built("tf_efficientnet_lite0", "last"), epochs=1),
    "auto": lambda device: train(device, plain(), precision="auto", epochs=1),
}


def results(device: Device) -> dict[str, dict]:
    return {name: case(device) for name, case in CASES.items()}


def main(folder: Path) -> None:
    import torch.distributed as dist

    from core.running.ranks import CommonControl

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    device = open_rank("cpu", folder / "meeting")
    # only the first is ever asked to stop
    control = CommonControl(StopAfter(2) if rank == 0 else NoWishes())
    figures = results(device)
    figures["stop"] = train(device, plain(), control)
    figures["device"] = {"name": device.name, "count": device.count, "num_processes": device.num_processes}
    (folder / f"{rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
