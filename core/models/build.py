"""Make a model ready to train: backbone, weights, a new head, and what of it is trained."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import nn

from core.errors import ModelError
from core.models import parts, weights
from core.models.catalogue import resolve, timm_config, torchvision_weights
from core.models.from_run import PREFIX, find_run_weights
from core.stages import Trainable

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Preprocessing:
    """How a model wants its pictures.

    Attributes:
        image_size: side of the square that the model sees, in pixels.
        resize_size: the short side before the centre is cropped, in pixels; image_size or more.
        mean, std: of RGB values between 0 and 1.
        interpolation: "bilinear" or "bicubic".
    """

    image_size: int
    resize_size: int
    mean: Triple
    std: Triple
    interpolation: str


@dataclass(frozen=True)
class BuiltModel:
    """A model on the CPU, its parameters' `requires_grad` set, and how it wants its pictures.

    Attributes:
        module: (batch, 3, image_size, image_size) -> (batch, num_classes) logits.
        num_params, num_trainable: parameters, and those that are trained.
        weights_s: seconds that fetching, reading and loading weights took; where timm fetches them, building too.
        start: what it starts from in words, where that is another run's weights.
    """

    module: nn.Module
    preprocessing: Preprocessing
    num_params: int
    num_trainable: int
    weights_s: float = 0.0
    start: str = ""


class _Stopwatch:
    """Adds up the seconds spent within it."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


def build_model(
    name: str,
    *,
    num_classes: int,
    weights: str,
    image_size: int | None,
    trainable: Trainable,
    seed: int,
    classes: Sequence[str] = (),
    runs: Path = Path("runs"),
) -> BuiltModel:
    """Build a model with a new head.

    The same arguments give the same model, bit by bit; torch's global random state is left as it was. A weight file
    whose head has `num_classes` outputs brings its head along, a run's weights theirs where its classes are these.

    Args:
        name: as `catalogue.resolve` takes it.
        num_classes: 1 or more.
        weights: default (pretrained), none (random), a .pth, .pt or .safetensors file, or run:RUN_ID as
            `from_run.find_run_weights` takes it.
        image_size: side in pixels; None takes the model's own.
        trainable: head; last (head and the last quarter of the blocks, see `parts.backbone_blocks`); or all.
        seed: fixes the random start of the head, and of all else with weights none.
        classes: names in the order of the outputs, for the head of a run's weights.
        runs: the folder in which runs have theirs.

    Raises:
        ModelError: no such model, its weights can't be had or don't fit, or it doesn't take that image size.
    """
    library, bare = resolve(name)
    construct = _construct_torchvision if library == "torchvision" else _construct_timm
    looks = preprocessing(name, image_size)
    size = looks.image_size if looks.image_size != preprocessing(name, None).image_size else None
    loading, start = _Stopwatch(), ""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = construct(bare, weights == "default", size, loading)
        parts.check_trainable(module)
        parts.drop_auxiliary_heads(module)
        # anew: how many numbers the backbone drew must not reach the head
        torch.manual_seed(seed)
        if library == "timm" and not getattr(module, "num_classes", None):
            _add_head(module, name, num_classes, looks.image_size)
        parts.replace_head(module, num_classes)
        if library == "timm":
            _tell_num_classes(module, num_classes)
        if weights not in ("default", "none"):
            with loading:
                if weights.startswith(PREFIX):
                    start = _load_run(module, weights, runs, name, classes)
                else:
                    _load_file(module, Path(weights).expanduser())
        if size is not None:
            _check_image_size(module, name, size)
    parts.choose_trainable(module, trainable)
    num_params, num_trainable = parts.count_parameters(module)
    return BuiltModel(module, looks, num_params, num_trainable, loading.seconds, start)


def preprocessing(name: str, image_size: int | None) -> Preprocessing:
    """How a model wants its pictures, without building it.

    Args:
        name, image_size: as `build_model` takes them.

    Raises:
        ModelError: there is no such model.
    """
    library, bare = resolve(name)
    return (_torchvision_preprocessing if library == "torchvision" else _timm_preprocessing)(bare, image_size)


def _torchvision_preprocessing(bare: str, image_size: int | None) -> Preprocessing:
    chosen = torchvision_weights(bare)
    if chosen is None:
        return _scaled(224, 256, image_size, IMAGENET_MEAN, IMAGENET_STD, "bilinear")
    transforms = chosen.transforms()
    return _scaled(
        transforms.crop_size[0],
        transforms.resize_size[0],
        image_size,
        transforms.mean,
        transforms.std,
        transforms.interpolation.value,
    )


def _timm_preprocessing(bare: str, image_size: int | None) -> Preprocessing:
    config = timm_config(bare)
    if config is None:
        return _scaled(224, 256, image_size, IMAGENET_MEAN, IMAGENET_STD, "bilinear")
    size = config.input_size[-1]
    return _scaled(size, int(size / config.crop_pct), image_size, config.mean, config.std, config.interpolation)


def _scaled(size: int, resize: int, wanted: int | None, mean: Any, std: Any, interpolation: str) -> Preprocessing:
    side = wanted or int(size)
    three_means, three_stds = tuple(float(x) for x in mean), tuple(float(x) for x in std)
    if len(three_means) != 3 or len(three_stds) != 3:
        three_means, three_stds = IMAGENET_MEAN, IMAGENET_STD
    return Preprocessing(
        side,
        max(side, round(side * int(resize) / int(size))),
        three_means[:3],
        three_stds[:3],
        interpolation if interpolation in ("bilinear", "bicubic") else "bicubic",
    )


def _construct_torchvision(bare: str, pretrained: bool, image_size: int | None, loading: _Stopwatch) -> nn.Module:
    import torchvision

    builder = torchvision.models.get_model_builder(bare)
    options: dict[str, Any] = {}
    if bare in ("googlenet", "inception_v3"):
        options["init_weights"] = True
    if image_size is not None and bare.startswith("vit_"):
        options["image_size"] = image_size
    if image_size is not None and bare.startswith("maxvit"):
        options["input_size"] = (image_size, image_size)
    chosen = torchvision_weights(bare) if pretrained else None
    if pretrained and chosen is None:
        raise _unpublished(bare)
    if chosen is not None:
        # the published pictures were normalised otherwise in these two
        if bare in ("googlenet", "inception_v3"):
            options |= {"transform_input": True, "init_weights": False}
        with loading:
            state = _fetched(bare, chosen.url, lambda: chosen.get_state_dict(progress=False, check_hash=True))
    module: nn.Module = _constructed(bare, image_size, lambda: builder(weights=None, **options))
    if chosen is not None:
        if "image_size" in options:
            from torchvision.models.vision_transformer import interpolate_embeddings

            state = interpolate_embeddings(image_size, module.get_parameter("conv_proj.weight").shape[-1], state)
        if bare.startswith("densenet"):
            state = _modern_densenet(state)
        with loading:
            weights.load_tensors(module, dict(state), head_names=parts.find_head(module), source=f"of {bare}")
    return module


def _construct_timm(bare: str, pretrained: bool, image_size: int | None, loading: _Stopwatch) -> nn.Module:
    import timm

    options: dict[str, Any] = {}
    is_installed = weights.is_lite0(bare) and weights.lite0_path() is not None
    config = timm_config(bare)
    if pretrained and not is_installed:
        if config is None or not (config.hf_hub_id or config.url):
            raise _unpublished(bare)
        options["pretrained"] = True
        cached = weights.hf_cached_path(config.hf_hub_id, config.hf_hub_filename) if config.hf_hub_id else None
        if cached is not None:
            options["pretrained_cfg_overlay"] = {"file": str(cached)}

    def create(**more: Any) -> nn.Module:
        return timm.create_model(bare, **options, **more)

    def create_sized() -> nn.Module:
        if image_size is None:
            return create()
        try:
            return create(img_size=image_size)
        except TypeError:
            return create()  # convolutions take any size and know no img_size

    if "pretrained" in options:
        url = "https://huggingface.co" if config.hf_hub_id else config.url
        at_hand = "pretrained_cfg_overlay" in options
        with loading:
            module: nn.Module = _fetched(bare, "" if at_hand else url, create_sized)
    else:
        module = _constructed(bare, image_size, create_sized)
    if pretrained and is_installed:
        with loading:
            weights.load_lite0(module)
    return module


def _fetched(name: str, url: str, fetch: Callable[[], Any]) -> Any:
    """What `fetch` gives, asked for only where `url` ("": nothing is downloaded) lies in torch's cache or answers."""
    if url and not weights.torch_hub_path(url).is_file() and not weights.can_reach(urlparse(url).netloc):
        raise weights.no_weights_error(name)
    try:
        return fetch()
    except (AssertionError, ValueError, TypeError) as error:
        raise ModelError(
            f"The model {name} can't be built so: {error}", fix="Choose the model's own image size, or another model."
        ) from error
    except Exception as error:  # each download library has errors of its own
        raise weights.no_weights_error(name) from error


def _constructed(name: str, image_size: int | None, construct: Callable[[], Any]) -> Any:
    try:
        return construct()
    except (AssertionError, RuntimeError, ValueError, TypeError, ImportError) as error:
        at = f" for pictures of {image_size} px" if image_size else ""
        raise ModelError(
            f"The model {name} can't be built{at}: {error or type(error).__name__}",
            fix="Choose the model's own image size, or another model.",
        ) from error


def _load_file(module: nn.Module, path: Path) -> None:
    weights.load_tensors(
        module, weights.read_weight_file(path), head_names=parts.find_head(module), source=f"in '{path}'"
    )


def _load_run(module: nn.Module, weights_of: str, runs: Path, name: str, classes: Sequence[str]) -> str:
    """Load a run's checkpoint, and say in words what was loaded; in place."""
    found = find_run_weights(weights_of, runs, name)
    keeps_head = found.classes == list(classes)
    weights.load_tensors(
        module,
        weights.read_weight_file(found.path),
        head_names=parts.find_head(module),
        source=f"of run {found.run_id}",
        keep_head=keeps_head,
    )
    if hasattr(module, "transform_input"):
        # set where published weights were loaded, which this model was not built with
        module.transform_input = found.is_shifted  # type: ignore[assignment]
    return found.in_words(keeps_head=keeps_head)


def _check_image_size(module: nn.Module, name: str, image_size: int) -> Any:
    """What the module makes of a picture of this size; left in training mode."""
    module.eval()
    try:
        with torch.no_grad():
            output = module(torch.zeros(1, 3, image_size, image_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"The model {name} doesn't take pictures of {image_size} px: {first_line}",
            fix="Leave --image-size out, or choose a larger one.",
        ) from error
    module.train()
    return output


def _add_head(module: nn.Module, name: str, num_classes: int, image_size: int) -> None:
    """Give a head to a model that was published without one, such as DINOv2, MAE or SigLIP; in place."""
    # None is the model's own way to make one vector of all places; where it has none, their mean is taken
    for pooling in (None, "avg"):
        try:
            module.reset_classifier(num_classes, pooling)  # type: ignore[operator]
        except (AssertionError, AttributeError, TypeError, ValueError, NotImplementedError):
            continue
        output = _check_image_size(module, name, image_size)
        if isinstance(output, torch.Tensor) and output.shape == (1, num_classes):
            return
    raise ModelError(f"The model {name} was published without a classifier and takes none.", fix="Choose another one.")


def _tell_num_classes(module: nn.Module, num_classes: int) -> None:
    for part in module.modules():
        if isinstance(getattr(part, "num_classes", None), int):
            part.num_classes = num_classes  # type: ignore[assignment]


def _modern_densenet(state: dict[str, Any]) -> dict[str, Any]:
    # the published files are older than the present names: norm.1 -> norm1
    pattern = re.compile(r"^(.*denselayer\d+\.(?:norm|relu|conv))\.((?:[12])\.(?:.*))$")
    return {(f"{match[1]}{match[2]}" if (match := pattern.match(key)) else key): value for key, value in state.items()}


def _unpublished(name: str) -> ModelError:
    return ModelError(
        f"No pretrained weights of {name} are published.",
        fix="Choose --weights none (random start), or give a weight file.",
    )
