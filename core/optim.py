"""Optimizers, built so that a changing learning rate costs no new XLA program."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from core.config import RunConfig


def build_optimizer(config: RunConfig, parameters: Iterable[nn.Parameter], *, on_xla: bool) -> torch.optim.Optimizer:
    """The run's optimizer over the parameters that train.

    On XLA, Adam's learning rate is a tensor on the device and its state exists before the first
    step: a Python number that reaches 0 or 1, or state born in step 1, would compile again.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if config.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    betas = (config.beta1, config.beta2)
    if not on_xla:
        return kind(trained, lr=config.lr, betas=betas, weight_decay=config.weight_decay)
    lr = torch.full((1,), config.lr).to(trained[0].device)
    optimizer = kind(trained, lr=lr, betas=betas, weight_decay=config.weight_decay, capturable=True, foreach=False)
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros(1).to(parameter.device),
            "exp_avg": torch.zeros(parameter.shape).to(parameter.device),
            "exp_avg_sq": torch.zeros(parameter.shape).to(parameter.device),
        }
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].copy_(torch.full((1,), lr))
        else:
            group["lr"] = lr
