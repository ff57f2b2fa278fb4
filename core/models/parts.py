"""The parts of a classifier: its head, its last stages, and what of it stays frozen."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from core.errors import ModelError

HeadLayer = nn.Linear | nn.Conv2d
SECOND_HEADS = ("head_dist", "aux_head")
"""What timm calls a second classifier, whose logits are added to the first one's."""
LAST_SHARE = 0.25
"""Share of the backbone's blocks, counted from the end, that trainable="last" trains."""


def check_trainable(module: nn.Module) -> None:
    """Refuse what can't be trained here.

    Raises:
        ModelError: the module, or a part of it, is a TorchScript module: a scripted part costs XLA an extra
            program, a traced one fails there.
    """
    from torch.jit import ScriptModule

    for name, part in module.named_modules():
        if isinstance(part, ScriptModule):
            where = f"its part '{name}'" if name else "it"
            kind = getattr(part, "original_name", type(part).__name__)
            raise ModelError(
                f"The model {type(module).__name__} can't be trained: {where} is a ScriptModule ({kind}).",
                fix="Give the plain nn.Module that it was scripted or traced from.",
            )


def check_sizes(module: nn.Module, name: str, sizes: Iterable[int]) -> None:
    """Refuse a model that doesn't take images of each of these sizes beside those it was built for.

    Args:
        module: on the CPU; left in training mode.
        name: for the error.
        sizes: sides in pixels.

    Raises:
        ModelError: it is so.
    """
    module.eval()
    for size in sizes:
        try:
            with torch.no_grad():
                module(torch.zeros(1, 3, size, size))
        except (AssertionError, RuntimeError, ValueError) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(
                f"The model {name} doesn't take images of {size} px on its way to the full size: {first_line}",
                fix="Leave --first-image-size out, choose a larger one, or choose a convolutional model.",
            ) from error
    module.train()


def find_head(module: nn.Module) -> dict[str, HeadLayer]:
    """The layers that make logits, by name: what the model calls its classifier, else its last Linear or Conv2d.

    Some models have two: distilled ones, and VOLO, which also classifies patches.

    Raises:
        ModelError: the model has no such layer.
    """
    names = {id(part): name for name, part in module.named_modules()}
    found: list[HeadLayer] = []
    get_classifier: Any = getattr(module, "get_classifier", None)
    if callable(get_classifier):
        answer = get_classifier()
        for part in answer if isinstance(answer, (tuple, list, nn.ModuleList)) else [answer]:
            if isinstance(part, nn.Module):
                found += _head_layers(part)
        for name in SECOND_HEADS:
            second = getattr(module, name, None)
            found += _last_layer(second) if isinstance(second, nn.Module) else []
    found = [layer for layer in found if id(layer) in names] or _last_layer(module)
    if not found:
        raise ModelError(
            f"The model {type(module).__name__} has no linear or convolutional classifier.", fix="Choose another model."
        )
    return {names[id(layer)]: layer for layer in found}


def replace_head(module: nn.Module, num_classes: int) -> None:
    """Put a new layer of `num_classes` outputs, of the same kind and inputs, in the place of the head; in place."""
    for name, old in find_head(module).items():
        new: HeadLayer
        if isinstance(old, nn.Linear):
            new = nn.Linear(old.in_features, num_classes, bias=old.bias is not None)
        else:
            new = nn.Conv2d(
                old.in_channels,
                num_classes,
                _pair(old.kernel_size),
                _pair(old.stride),
                _pair(old.padding) if not isinstance(old.padding, str) else old.padding,
                bias=old.bias is not None,
            )
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, new)


def drop_auxiliary_heads(module: nn.Module) -> None:
    """Take the auxiliary classifiers off GoogLeNet and Inception v3, which then give plain logits in training too."""
    if getattr(module, "aux_logits", False):
        module.aux_logits = False  # type: ignore[assignment]
        for name in AUXILIARY_NAMES:
            if hasattr(module, name):
                setattr(module, name, None)


AUXILIARY_NAMES = ("aux1", "aux2", "AuxLogits")


def backbone_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The backbone's blocks in the order of their definition, head left out.

    The model's children, where plain containers, and whatever holds more than half of the backbone's
    parameters, are opened into their own children; parts without parameters are left out.
    """
    head = {id(parameter) for layer in find_head(module).values() for parameter in layer.parameters()}

    def size(part: nn.Module) -> int:
        return sum(parameter.numel() for parameter in part.parameters() if id(parameter) not in head)

    half = size(module) / 2

    def opened(prefix: str, part: nn.Module) -> list[tuple[str, nn.Module]]:
        blocks: list[tuple[str, nn.Module]] = []
        for name, child in part.named_children():
            if not size(child):
                continue
            has_children = any(size(grandchild) for grandchild in child.children())
            if has_children and (type(child) in (nn.Sequential, nn.ModuleList) or size(child) > half):
                blocks += opened(f"{prefix}{name}.", child)
            else:
                blocks.append((f"{prefix}{name}", child))
        return blocks

    return opened("", module)


def layer_numbers(module: nn.Module) -> dict[str, int]:
    """The layer of each parameter, by its name: 0 is the first, and the head is in the last one.

    They are timm's own where it says how a model is layered; else the backbone's blocks in the order of their
    definition, and the head. A norm that is a block of its own goes with the block before it, and what belongs to no
    block with the first one.
    """
    group_matcher: Any = getattr(module, "group_matcher", None)
    if callable(group_matcher):
        from timm.models import group_parameters

        return dict(group_parameters(module, group_matcher(coarse=False), reverse=True))
    layers: dict[str, int] = {}
    for name, block in backbone_blocks(module):
        is_layer = not layers or any(parameter.dim() > 1 for parameter in block.parameters())
        layers[name] = max(layers.values(), default=-1) + is_layer
    # after the blocks, one of which may be the head's parent
    layers |= dict.fromkeys(find_head(module), max(layers.values(), default=-1) + 1)
    numbers = {}
    for name, _ in module.named_parameters():
        inside = [number for part, number in layers.items() if name.startswith(f"{part}.")]
        numbers[name] = inside[-1] if inside else 0
    return numbers


def choose_trainable(module: nn.Module, trainable: str) -> None:
    """Set `requires_grad` of all parameters: head, last (head and the last quarter of the blocks), or all; in place."""
    for parameter in module.parameters():
        parameter.requires_grad_(trainable == "all")
    chosen: list[nn.Module] = list(find_head(module).values())
    if trainable == "last":
        blocks = backbone_blocks(module)
        count = math.ceil(len(blocks) * LAST_SHARE)
        chosen += [block for _, block in blocks[len(blocks) - count :]]
    for part in chosen:
        for parameter in part.parameters():
            parameter.requires_grad_(True)


def frozen_modules(module: nn.Module) -> list[nn.Module]:
    """The BatchNorm layers, and others with running statistics, that have parameters, none of which is trained."""
    return [
        part
        for part in module.modules()
        if (isinstance(part, _BatchNorm) or hasattr(part, "running_var")) and _is_frozen(part)
    ]


def set_train_mode(module: nn.Module) -> None:
    """Put the module into training mode, save for what is frozen.

    Frozen BatchNorm layers stay in evaluation mode, so that their statistics don't move. Where the head alone is
    trained, so does the whole backbone, dropout included.
    """
    head = list(find_head(module).values())
    head_parameters = {id(parameter) for layer in head for parameter in layer.parameters()}
    if {id(parameter) for parameter in module.parameters() if parameter.requires_grad} <= head_parameters:
        module.eval()
        for layer in head:
            layer.train()
        return
    module.train()
    for part in frozen_modules(module):
        part.eval()


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """All parameters and those that are trained."""
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return sum(parameter.numel() for parameter in parameters), sum(parameter.numel() for parameter in trained)


def _is_frozen(part: nn.Module) -> bool:
    parameters = list(part.parameters(recurse=False))
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _layers(part: nn.Module) -> list[HeadLayer]:
    return [layer for layer in part.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]


def _head_layers(part: nn.Module) -> list[HeadLayer]:
    if isinstance(part, nn.ModuleList):
        return _layers(part)
    if any(hasattr(part, name) for name in SECOND_HEADS):
        return [layer for child in part.children() for layer in _last_layer(child)]
    return _last_layer(part)


def _last_layer(part: nn.Module) -> list[HeadLayer]:
    return _layers(part)[-1:]


def _pair(values: tuple[int, ...]) -> tuple[int, int]:
    return values[0], values[1]
