"""Whether a model family trains on a device: a step of a small model there and on the CPU, compared.

Run as `python -m core.trials.trial KIND`, it reads names of families from stdin, a line each, and answers with lines of
JSON: {"done": false, "trial": ...} once the CPU's part is over, then {"done": true, "trial": ...}.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from core.devices import Device, open_device
from core.errors import AppError
from core.models.build import build_model, preprocessing
from core.models.catalogue import count_params, families, resolve
from core.models.on_xla import mend_for_xla
from core.models.parts import set_train_mode
from core.training.preflight import preflight

IMAGE_SIZES = (64, 96, 128, 160, 192, 224, 256)
"""Sides in pixels, tried in turn, before the model's own; below 64 px BatchNorm may see single values."""
NUM_IMAGES, NUM_CLASSES = 4, 5
CANDIDATES = 3
"""So many of a family's models, the smallest ones, are tried until one trains on the CPU."""
STEP_LENGTH = 0.01
"""How far a step moves the weights, whatever the gradient's size."""


@dataclass
class Trial:
    """How one small model of a family fared.

    Attributes:
        family: library and module, as `timm/resnet`.
        model, image_size: what was tried; "" and 0 where no model of the family was built.
        cpu_error, device_error: the error in one line; "" where it trained.
        compiles: programs that two equal steps took on the device; 1 is the least on XLA.
        fallbacks: operations that ran on the host in these steps all the same, and how often.
        foreseen: what the preflight named; mended: what of this is computed in other words.
        cpu_losses, device_losses: of both steps, in nats.
        cpu_norm, device_norm: of all gradients of the first step.
        exact_norm: the CPU's in float64; 0 where the model doesn't compute in it.
        draws: it draws random numbers even without dropout, so that its losses don't compare.
        seconds, compile_s: all of it, and what of this was compiling.
    """

    family: str
    model: str = ""
    image_size: int = 0
    cpu_error: str = ""
    device_error: str = ""
    compiles: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    foreseen: list[str] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)
    cpu_losses: list[float] = field(default_factory=list)
    device_losses: list[float] = field(default_factory=list)
    cpu_norm: float = 0.0
    device_norm: float = 0.0
    exact_norm: float = 0.0
    draws: bool = False
    seconds: float = 0.0
    compile_s: float = 0.0

    @property
    def trains(self) -> bool:
        """Whether it trains on the device."""
        return not self.cpu_error and not self.device_error

    @property
    def loss_difference(self) -> float | None:
        """Of the first step's losses, relative to the CPU's; None where they don't compare."""
        if not self.trains or self.draws:
            return None
        return abs(self.device_losses[0] - self.cpu_losses[0]) / max(abs(self.cpu_losses[0]), 1e-12)

    @property
    def norm_difference(self) -> float | None:
        """Of the first step's gradient norms, relative to the CPU's; None where they don't compare."""
        if not self.trains or self.draws:
            return None
        return abs(self.device_norm - self.cpu_norm) / max(self.cpu_norm, 1e-12)

    @property
    def rounding(self) -> float | None:
        """How far float32 is from float64 on the CPU, of the same norms: what two float32 devices may differ by."""
        return abs(self.cpu_norm - self.exact_norm) / self.exact_norm if self.exact_norm else None


def try_family(family: str, device: Device, tell: Callable[[Trial], None] = lambda _: None) -> Trial:
    """Train two steps of the family's smallest model that trains on the CPU, there and on the device.

    Args:
        family: a name of `catalogue.families`.
        tell: called once the CPU's part is over.
    """
    trial, started = Trial(family), time.perf_counter()
    module = _train_on_cpu(trial)
    tell(trial)
    if module is not None:
        with device.turn():
            try_on_device(trial, module, device, *_batch(trial.image_size))
    trial.seconds = time.perf_counter() - started
    return trial


def zero_dropout(module: nn.Module) -> None:
    """Set every probability of dropping something to 0; in place."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) or type(part).__name__ == "StochasticDepth":
            part.p = 0.0  # type: ignore[assignment]
        for name in ("drop_prob", "drop_rate", "dropout", "attention_dropout", "attn_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def take_steps(model: nn.Module, images: Tensor, labels: Tensor, device: Device, count: int = 2) -> list[list[float]]:
    """Train some equal steps; the loss and the gradients' norm of each.

    A step is a fixed length against the gradient, so that random weights don't blow up.
    """
    figures = []
    set_train_mode(model)
    optimizer = device.make_optimizer("sgd", model.parameters(), lr=STEP_LENGTH, momentum=0.0, weight_decay=0.0)
    device.wait()
    for _ in range(count):
        loss = functional.cross_entropy(model(images), labels)
        torch.autograd.backward(loss)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient.div_(norm)
        device.optimizer_step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        figures.append(torch.stack([loss.detach(), norm]))
        device.wait()
    return [figure.tolist() for figure in figures]


def _batch(image_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_IMAGES, 3, image_size, image_size, generator=generator)
    return images, torch.arange(NUM_IMAGES) % NUM_CLASSES


def _train_on_cpu(trial: Trial) -> nn.Module | None:
    """Find a model and size that train on the CPU, and fill in the CPU's figures; the model as it was before."""
    cpu = open_device("cpu")
    for name in sorted(families()[trial.family], key=_cost)[:CANDIDATES]:
        own = preprocessing(name, None).image_size
        for size in sorted({size for size in IMAGE_SIZES if size < own} | {own}):
            trial.model, trial.image_size = name, size
            try:
                module = build_model(
                    name, num_classes=NUM_CLASSES, weights="none", image_size=size, trainable="all", seed=0
                ).module
                zero_dropout(module)
                images, labels = _batch(size)
                steps = take_steps(copy.deepcopy(module), images, labels, cpu)
                trial.cpu_losses, trial.cpu_norm, trial.cpu_error = [loss for loss, _ in steps], steps[0][1], ""
                trial.draws, trial.exact_norm = _draws(module, images), _exact_norm(module, images, labels, cpu)
                return module
            except Exception as error:  # whatever a library's model raises: it is what is asked
                trial.cpu_error = _one_line(error)
    return None


def _cost(name: str) -> float:
    """What orders a family's models: parameters, in timm times layers, of which each has to be compiled."""
    library, bare = resolve(name)
    if library == "torchvision":
        return count_params(name) or math.inf
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            module = timm.create_model(bare)
        except (RuntimeError, NotImplementedError, ValueError, ImportError):
            return math.inf  # a few models compute on real numbers while they are built
    sizes = [parameter.numel() for parameter in module.parameters()]
    return len(sizes) * sum(sizes)


def _draws(module: nn.Module, images: Tensor) -> bool:
    outputs = []
    for seed in (1, 2):
        twin = copy.deepcopy(module)
        set_train_mode(twin)
        torch.manual_seed(seed)
        with torch.no_grad():
            outputs.append(twin(images))
    return not torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-6)


def _exact_norm(module: nn.Module, images: Tensor, labels: Tensor, cpu: Device) -> float:
    try:
        [(_, norm)] = take_steps(copy.deepcopy(module).double(), images.double(), labels, cpu, count=1)
    except RuntimeError:
        return 0.0  # some make float32 tensors of their own
    return norm


def try_on_device(trial: Trial, module: nn.Module, device: Device, images: Tensor, labels: Tensor) -> None:
    """Fill in the device's figures, with a module that is moved there."""
    compile_s = device.compile_seconds()
    try:
        trial.foreseen = preflight(
            module, device, image_size=images.shape[-1], num_classes=NUM_CLASSES, batch_size=len(images)
        )
        trial.mended = mend_for_xla(module, trial.foreseen)
        model = device.place_model(module)
        images, labels = device.place_batch(images, labels)
        device.wait()
        compiles, before = device.compile_count(), device.host_fallbacks()
        figures = take_steps(model, images, labels, device)
        after = device.host_fallbacks()
        trial.device_losses, trial.device_norm = [loss for loss, _ in figures], figures[0][1]
        trial.compiles = device.compile_count() - compiles
        trial.fallbacks = {
            name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)
        }
        if not all(map(torch.isfinite, torch.tensor(trial.device_losses))):
            trial.device_error = f"The loss is {trial.device_losses}, on the CPU {trial.cpu_losses}."
    except Exception as error:  # whatever the device raises: it is what is asked
        trial.device_error = _one_line(error)
    trial.compile_s = device.compile_seconds() - compile_s


def _one_line(error: Exception) -> str:
    problem = error.problem if isinstance(error, AppError) else str(error)
    return f"{type(error).__name__}: {' '.join(problem.split())[:300]}"


def _serve(requests: Iterator[str], answers: IO[str], kind: str) -> None:
    # of all processes this one is the first that may die where memory runs out
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900")
    device = open_device(kind)
    # TPUs multiply in bfloat16 by themselves, and then nothing could be compared
    device.set_matmul_precision("highest")

    def answer(trial: Trial, done: bool) -> None:
        print(json.dumps({"done": done, "trial": asdict(trial)}), file=answers, flush=True)

    for line in requests:
        answer(try_family(line.strip(), device, lambda trial: answer(trial, False)), True)
        gc.collect()


if __name__ == "__main__":
    # what libraries print must not get between the answers
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(iter(sys.stdin.readline, ""), private, sys.argv[1])
