"""Which models there are, and what a name means."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from core.errors import ModelError
from core.models import weights

Library = Literal["torchvision", "timm"]
COUNT_LIMIT = 40
"""A list of at most this many models tells every model's parameters; counting timm's means building them."""


@dataclass(frozen=True)
class ModelInfo:
    """A line of the catalogue.

    Attributes:
        name: as `resolve` takes it, without its library unless another library has the name too.
        num_params: with the classes the model was published with; None where it wasn't counted.
        default_image_size: side in pixels; None where the model doesn't say.
        weights: "at hand", "download" or "none".
    """

    name: str
    library: Library
    num_params: int | None
    default_image_size: int | None
    weights: str


def list_models(search: str = "") -> list[ModelInfo]:
    """The models whose name contains every word of `search`, torchvision's first, then timm's.

    timm's parameters are counted only where at most `COUNT_LIMIT` models are left.
    """
    words = search.lower().split()
    found = [
        (library, bare)
        for library in ("torchvision", "timm")
        for bare in _names(library)
        if all(word in f"{library}/{bare}" for word in words)
    ]
    should_count = len(found) <= COUNT_LIMIT
    cached = weights.hf_cached_repos()
    return [
        _torchvision_info(bare) if library == "torchvision" else _timm_info(bare, should_count, cached)
        for library, bare in found
    ]


def resolve(name: str) -> tuple[Library, str]:
    """The library and the bare name of a model; a name that both have is torchvision's.

    Raises:
        ModelError: there is no such model; the fix names close ones.
    """
    prefix, _, rest = name.strip().partition("/")
    if prefix in ("torchvision", "timm") and rest:
        libraries: tuple[Library, ...] = ("torchvision",) if prefix == "torchvision" else ("timm",)
        bare, shown = rest, f"{prefix}/"
    else:
        libraries, bare, shown = ("torchvision", "timm"), name.strip(), ""
    for library in libraries:
        if bare in _name_set(library) or (library == "timm" and _is_tagged(bare)):
            return library, bare
    names = [known for library in libraries for known in _names(library)]
    close = list(dict.fromkeys(shown + known for known in difflib.get_close_matches(bare.lower(), names, n=6)))[:3]
    fix = f"Did you mean {' or '.join(close)}?" if close else "See python -m core models --search TEXT."
    raise ModelError(f"There is no model '{name}'.", fix=fix)


@lru_cache(maxsize=4096)
def count_params(name: str) -> int | None:
    """The parameters of a model as published; timm's are counted on the meta device, which costs no memory.

    None where the model can't be built there.

    Raises:
        ModelError: there is no such model.
    """
    library, bare = resolve(name)
    if library == "torchvision":
        return _torchvision_info(bare).num_params
    import timm
    import torch

    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = timm.create_model(bare, pretrained=False)
    except (RuntimeError, NotImplementedError, ValueError, ImportError):
        return None  # a few models compute on real numbers while they are built
    return sum(parameter.numel() for parameter in module.parameters())


@lru_cache(maxsize=1)
def families() -> dict[str, tuple[str, ...]]:
    """The models by family: the library's module that builds them, as `timm/resnet`, sorted.

    The models are named as `resolve` takes them. Those that timm keeps for its own tests are left out.
    """
    import timm
    import torchvision

    found: dict[str, list[str]] = {}
    for module in timm.list_modules():
        for bare in timm.list_models(module=module):
            if not bare.startswith("test_"):
                found.setdefault(f"timm/{module}", []).append(f"timm/{bare}")
    for bare in _names("torchvision"):
        module = torchvision.models.get_model_builder(bare).__module__.rpartition(".")[2]
        found.setdefault(f"torchvision/{module}", []).append(f"torchvision/{bare}")
    return {name: tuple(models) for name, models in sorted(found.items())}


def timm_config(bare_name: str) -> Any:
    """timm's `PretrainedCfg` of a model; None where it has none."""
    from timm.models import get_pretrained_cfg

    return get_pretrained_cfg(bare_name)


def torchvision_weights(bare_name: str) -> Any:
    """torchvision's default weights of a model; None where it has none."""
    import torchvision

    return getattr(torchvision.models.get_model_weights(bare_name), "DEFAULT", None)


@lru_cache(maxsize=2)
def _names(library: Library) -> tuple[str, ...]:
    if library == "timm":
        import timm

        return tuple(timm.list_models())
    import torchvision

    return tuple(torchvision.models.list_models(module=torchvision.models))


@lru_cache(maxsize=2)
def _name_set(library: Library) -> frozenset[str]:
    return frozenset(_names(library))


def _is_tagged(bare: str) -> bool:
    if "." not in bare or bare.split(".")[0] not in _name_set("timm"):
        return False
    try:
        return timm_config(bare) is not None
    except RuntimeError:
        return False  # timm's answer to a tag that it doesn't know


def _torchvision_info(bare: str) -> ModelInfo:
    chosen = torchvision_weights(bare)
    if chosen is None:
        return ModelInfo(bare, "torchvision", None, None, "none")
    transforms = chosen.transforms()
    state = "at hand" if weights.torch_hub_path(chosen.url).is_file() else "download"
    return ModelInfo(bare, "torchvision", int(chosen.meta["num_params"]), int(transforms.crop_size[0]), state)


def _timm_info(bare: str, should_count: bool, cached_repos: set[str]) -> ModelInfo:
    config = timm_config(bare)
    name = f"timm/{bare}" if bare in _name_set("torchvision") else bare
    return ModelInfo(
        name,
        "timm",
        count_params(f"timm/{bare}") if should_count else None,
        int(config.input_size[-1]) if config else None,
        _timm_weights(bare, config, cached_repos),
    )


def _timm_weights(bare: str, config: Any, cached_repos: set[str]) -> str:
    if weights.is_lite0(bare) and weights.lite0_path():
        return "at hand"
    if config is None or not (config.hf_hub_id or config.url):
        return "none"
    if config.hf_hub_id in cached_repos and weights.hf_cached_path(config.hf_hub_id, config.hf_hub_filename):
        return "at hand"
    if not config.hf_hub_id and weights.torch_hub_path(config.url).is_file():
        return "at hand"
    return "download"
