"""What of a step a device would leave to the host, found by tracing a step without running it.

An operation that XLA has no kernel for runs on the host: all that it needs is computed and fetched, and the step
falls into several programs. That is right but slow, and on a TPU it is the difference between fast and useless, so
it is named before the first step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from core.devices import Device
from core.errors import ModelError
from core.models.parts import set_train_mode

ONLY_OFF_TPU = frozenset({"upsample_bilinear2d_backward", "upsample_nearest2d_backward"})
"""What runs on a TPU and falls back on every other XLA device; source: torch_xla 2.9.0, its table of kernels, where
these two alone ask for the kind of device. (The third place that asks, a dot product of 64-bit integers, falls back
on TPUs alone, and no classifier has one.)"""
_HOST_READ = "_to_copy"


class Traceable(Device, Protocol):
    """What tracing asks of an XLA device beside what every device has."""

    def keep_random_state(self) -> AbstractContextManager[None]:
        """The device's random numbers go on afterwards as if none had been drawn within."""


def preflight(
    module: nn.Module, device: Device, *, image_size: int, num_classes: int, batch_size: int, precision: str = "fp32"
) -> list[str]:
    """Trace a training step (forward, loss, backward) and an evaluation of a model, on a hollow copy of it.

    Nothing of the module is changed, no weights are moved to the device, and its random state is kept. An operation
    that falls back runs once on zeros of its inputs' shapes, so that the trace can go on; nothing else runs.

    Args:
        module: (batch, 3, image_size, image_size) -> (batch, num_classes), on any device.
        device: as opened in this thread, and held by the caller (`turn`); on all but XLA nothing is traced.
        precision: as the run's: fp32 or bf16.

    Returns:
        The names of the operations that would run on the host, sorted, as `im2col`.

    Raises:
        ModelError: the step would fail, or be wrong; names the operation and the part of the model.
    """
    if device.kind != "xla":
        return []
    watch, place = _Watch(device), device.torch_device
    with torch.random.fork_rng(devices=[]), cast(Traceable, device).keep_random_state():
        hollow = hollow_copy(module, place)
        parts = _names_of_entered(hollow)
        images = torch.empty(batch_size, 3, image_size, image_size, device=place)
        labels = torch.empty(batch_size, dtype=torch.long, device=place)
        try:
            set_train_mode(hollow)
            with watch:
                with device.autocast(precision):
                    logits = _checked(hollow(images), (batch_size, num_classes))
                torch.autograd.backward(functional.cross_entropy(logits.float(), labels))
                hollow.eval()
                with torch.no_grad(), device.autocast(precision):
                    hollow(images)
        except ModelError:
            raise
        except Exception as error:  # what an operation raises on a device that lacks it is anything
            raise _failure(module, error, watch.running, parts) from error
    return sorted(watch.found)


def hollow_copy(module: nn.Module, place: torch.device) -> nn.Module:
    """The same model with parameters and buffers that hold nothing in particular, on another device.

    Tensors that are neither parameter nor buffer are copied as they are, and stay where they are.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=place)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=place)
    return copy.deepcopy(module, memo)


class _Watch(TorchDispatchMode):
    """Sees every operation below autograd, in backward too, and runs it on stand-ins first.

    The stand-ins are new tensors, which depend on nothing: where the operation turns out to run on the host, the
    collected work before it isn't compiled and run for its inputs, and its result stands in for the real one.

    Attributes:
        found: what fell back or was read by the host.
        running: the operation at work, which is the culprit after an exception.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._clean = device, set[str]()
        self.found: set[str] = set()
        self.running = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.running = func.name()
        _refuse_wrong_numbers(self.running, args)
        if not any(map(self._is_ours, tree_leaves((args, kwargs)))):
            return self._counted(lambda: func(*args, **kwargs))[0]
        signature = repr((func, tree_map(_looks, (args, kwargs))))
        if signature not in self._clean:
            spare_args, spare_kwargs = tree_map(self._stand_in, (args, kwargs))
            outcome, names = self._counted(lambda: func(*spare_args, **spare_kwargs))
            if not names and any(map(self._is_read, tree_leaves(outcome))):
                self.found.add(_HOST_READ)
                return outcome
            if names:
                return outcome
            self._clean.add(signature)
        return func(*args, **kwargs)

    def _counted(self, run: Callable[[], Any]) -> tuple[Any, set[str]]:
        before = self._device.host_fallbacks()
        outcome = run()
        names = {name for name, count in self._device.host_fallbacks().items() if count > before.get(name, 0)}
        self.found |= names
        return outcome, names

    def _is_ours(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self._device.torch_device.type

    def _is_read(self, value: Any) -> bool:
        return isinstance(value, Tensor) and not self._is_ours(value)

    def _stand_in(self, value: Any) -> Any:
        return torch.empty(value.shape, dtype=value.dtype, device=value.device) if self._is_ours(value) else value


def _refuse_wrong_numbers(operation: str, args: tuple[Any, ...]) -> None:
    """Refuse what torch_xla 2.9.0 computes wrongly without a word; found by comparing 130 operations with the CPU's.

    Its gradient of ELU, CELU and SELU takes the input for the output, which is right only for layers that work in
    place; and its CELU is off where alpha isn't 1.
    """
    # grad_output, alpha, scale, input_scale, is_result, ...; and input, alpha
    is_wrong = (operation == "aten::elu_backward" and not args[4]) or (
        operation == "aten::celu" and len(args) > 1 and args[1] != 1
    )
    if is_wrong:
        raise ModelError(
            "The model has ELU, CELU or SELU layers, whose gradients are wrong on XLA unless they work in place.",
            fix="Give them inplace=True and, for CELU, alpha=1, or train on another device.",
        )


def _looks(value: Any) -> Any:
    return (tuple(value.shape), value.dtype, value.device.type) if isinstance(value, Tensor) else value


def _checked(logits: Any, shape: tuple[int, int]) -> Tensor:
    if not isinstance(logits, Tensor) or tuple(logits.shape) != shape:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ModelError(f"The model gives {got} in training, not logits {shape}.", fix="Choose another model.")
    return logits


def _names_of_entered(module: nn.Module) -> list[str]:
    """A list that holds the names of the parts at work, outermost first, while the module's forward runs."""
    stack: list[str] = []
    for name, part in module.named_modules():
        part.register_forward_pre_hook(lambda *_, name=name: stack.append(name))
        part.register_forward_hook(lambda *_: _drop_last(stack))
    return stack


def _drop_last(stack: list[str]) -> None:
    stack.pop()


def _failure(module: nn.Module, error: Exception, operation: str, entered: list[str]) -> ModelError:
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    where = f"in its part '{entered[-1]}'" if entered and entered[-1] else "in forward" if entered else "in backward"
    name, operation = type(module).__name__, operation.removeprefix("aten::") or "an operation"
    return ModelError(
        f"The model {name} can't be trained on XLA: {operation} fails {where}: {line}",
        fix="Choose another model or image size, or train on another device.",
    )
