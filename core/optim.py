"""Optimizers as the config says, and how far a learning rate is from the schedule's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from core.config import RunConfig
from core.devices.base import Device


def build_optimizer(config: RunConfig, parameters: Iterable[nn.Parameter], device: Device) -> torch.optim.Optimizer:
    """The run's optimizer over the parameters that train, in the device's fastest form; they are placed already."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        options["momentum"] = config.momentum
    else:
        options["betas"] = (config.beta1, config.beta2)
    return device.make_optimizer(config.optimizer, trained, **options)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
