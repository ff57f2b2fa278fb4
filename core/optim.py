"""Optimizers as the config says, and the learning rates of their groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from core.config import RunConfig
from core.devices.base import Device
from core.models.parts import layer_numbers


def build_optimizer(config: RunConfig, module: nn.Module, device: Device) -> torch.optim.Optimizer:
    """The run's optimizer over the parameters that train, in the device's fastest form.

    Where layers learn at different rates, it has a group a layer, the lowest first, whose `lr_scale` multiplies the
    learning rate; all have the same weight decay.

    Args:
        module: placed, with the names of its parameters as they were built.
    """
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        options["momentum"] = config.momentum
    else:
        options["betas"] = (config.beta1, config.beta2)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = trained if config.layer_decay == 1 else _groups(module, config.layer_decay)
    return device.make_optimizer(config.optimizer, groups, **options)


def _groups(module: nn.Module, layer_decay: float) -> list[dict[str, Any]]:
    numbers = layer_numbers(module)
    layers: dict[int, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(numbers[name], []).append(parameter)
    last = max(numbers.values())
    return [{"params": layers[number], "lr_scale": layer_decay ** (last - number)} for number in sorted(layers)]


def make_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that are trained for the first time the momentum of standing still.

    That is what the first step of SGD takes it to be, but torch's fused one wants all of a group to have it, or none.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter] if group.get("momentum") and parameter.requires_grad else None
            if state is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step, of each layer its share."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
