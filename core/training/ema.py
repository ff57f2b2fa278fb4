"""A moving average of the weights.

timm's ModelEmaV3 makes a random generator that XLA refuses, and torch's AveragedModel fetches its counter in
each step.
"""

from __future__ import annotations

import torch
from torch import nn

from core.devices.scalars import apart

FIRST_STEPS = 10
EMA_PLACE = 1001
"""Beyond those of any optimizer's numbers."""


class Ema:
    """The exponential moving average of a model's weights and floating-point buffers.

    Early on the decay is (1 + step) / (10 + step), where that is less than `decay`: a short run would else
    end with little but the weights it began with.

    Args:
        model: the model that is trained, placed.
        module: a copy of it, placed, which gets the averaged weights and stays in evaluation mode.
    """

    def __init__(self, model: nn.Module, module: nn.Module, decay: float) -> None:
        self.module = module.eval().requires_grad_(False)
        self._decay = decay
        self._pairs = [
            *zip(module.parameters(), model.parameters(), strict=True),
            *zip(module.buffers(), model.buffers(), strict=True),
        ]

    def update(self, step: int) -> None:
        """Move towards the model's present weights; `step` counts from 1."""
        weight = apart(1 - min(self._decay, (1 + step) / (FIRST_STEPS + step)), EMA_PLACE)
        with torch.no_grad():
            for mine, latest in self._pairs:
                if mine.is_floating_point():
                    mine.lerp_(latest, weight)
                else:
                    mine.copy_(latest)
