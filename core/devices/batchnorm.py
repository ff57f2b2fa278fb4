"""BatchNorm's running variance, where a device keeps the biased one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def unbias_running_variance(module: nn.Module) -> None:
    """Have each BatchNorm of a module keep the unbiased variance of a batch, as torch does on the CPU; in place.

    XLA's lowering adds the variance that it normalises with, over n values, to the running one, where
    torch adds n / (n - 1) times as much.
    """
    for part in module.modules():
        # without a momentum the running variance is a plain mean over batches, which no model here asks for
        if isinstance(part, _BatchNorm) and part.track_running_stats and part.momentum is not None:
            correction = _Correction()
            part.register_forward_pre_hook(correction.before)
            part.register_forward_hook(correction.after)


class _Correction:
    """Hooks around one layer's forward; they add three operations to a training step and none to an evaluation."""

    def __init__(self) -> None:
        self._old: Tensor | None = None

    def before(self, layer: Any, _: Any) -> None:
        self._old = layer.running_var.clone() if layer.training else None

    def after(self, layer: Any, inputs: tuple[Tensor, ...], _: Any) -> None:
        if self._old is None:
            return
        n = inputs[0].numel() // inputs[0].shape[1]
        old, self._old = self._old, None
        if n > 1:
            # new = (1 - m) old + m v, and wanted is (1 - m) old + m v n / (n - 1)
            with torch.no_grad():
                # .data: autograd keeps the buffer for the backward, which in training does not read it
                layer.running_var.data.mul_(n / (n - 1)).sub_(old, alpha=(1 - layer.momentum) / (n - 1))
