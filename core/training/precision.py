"""Which precision trains fastest on a device."""

from __future__ import annotations

import time

import torch
from torch import nn

from core.devices.base import Device

PROBE_IMAGES = 4
ROUNDS = 2
CLEARLY = 0.85
"""Share of fp32's time that bf16 must stay below: it is not worth its rounding for less."""


def choose_precision(wanted: str, device: Device, model: nn.Module, image_size: int) -> str:
    """What `auto` stands for: what the device says, or else what a few steps of the model say.

    The names of processors don't tell: bf16 is several times as fast with AMX for a ResNet, and slower than
    fp32 for an EfficientNet on the same processor.

    Args:
        wanted: fp32, bf16, fp16 or auto.
        model: placed; it is left as it was, but in evaluation mode.
    """
    if wanted != "auto":
        return wanted
    return device.fast_precision or _faster(device, model, image_size)


def _faster(device: Device, model: nn.Module, image_size: int) -> str:
    model.eval()
    images = torch.zeros(PROBE_IMAGES, 3, image_size, image_size, device=device.torch_device)
    images = images.contiguous(memory_format=torch.channels_last)
    seconds: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for _ in range(1 + ROUNDS):
        for precision, times in seconds.items():
            started = time.perf_counter()
            with device.autocast(precision):
                loss = model(images).float().sum()
            loss.backward()
            device.wait()
            times.append(time.perf_counter() - started)
    model.zero_grad(set_to_none=True)
    # the first round sets things up
    fastest = torch.tensor([min(seconds[name][1:]) for name in ("bf16", "fp32")])
    # processes that share a batch must come to the same answer
    bf16, fp32 = device.add_up(fastest).tolist()
    return "bf16" if bf16 < CLEARLY * fp32 else "fp32"
