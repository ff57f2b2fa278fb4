"""From a config to a task that can be trained: data, model and device, each part timed by name."""

from __future__ import annotations

import copy
import functools
import os
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from core.config import RunConfig
from core.data.augment import Recipe
from core.data.cache import Fit, PackedImages
from core.data.dataset import Dataset
from core.data.loader import BatchLoader, Images, num_workers
from core.data.progress import Progress, throttled
from core.data.sampling import class_weights
from core.data.scan import scan
from core.data.sources import open_source
from core.devices.base import Device
from core.errors import ConfigError
from core.events import (
    CacheBuilt,
    Event,
    HostFallback,
    ImageLost,
    PhaseChanged,
    ProgressMade,
    RunPrepared,
)
from core.files import BUILDING, remove, sweep
from core.machine.facts import environment
from core.models.build import Preprocessing, build_model, preprocessing
from core.models.on_xla import mend_for_xla
from core.models.parts import check_sizes, set_train_mode
from core.optim import build_optimizer
from core.schedule import smaller_sizes
from core.stages import widest
from core.training.ema import Ema
from core.training.precision import choose_precision
from core.training.preflight import preflight
from core.training.saver import Saver, fits_data, restore_optimizer
from core.training.state import Position, SavedState
from core.training.task import Task
from core.trials.auto_batch import find_batch_size

Emit = Callable[[Event], None]


class StoppedInSetupError(Exception):
    """The run was asked to stop before its first step."""


class _Parts:
    """Seconds of each part of set-up, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        """What was done since the last call was this."""
        now = time.perf_counter()
        self.seconds[f"{name}_s"] = now - self._last
        self._last = now

    def name_part(self, name: str, of: str, seconds: float) -> None:
        """So much of a part that has ended has a name of its own."""
        self.seconds[f"{name}_s"] = seconds
        self.seconds[f"{of}_s"] -= seconds


@dataclass(frozen=True)
class Prepared:
    """A task to be trained.

    Attributes:
        image_size: side in pixels that the model sees.
        batch_size: of training, which a small set makes smaller than the config's.
        was_packed: images were decoded and packed for this run, which the next one need not do.
        kept_size: the file that holds the batch size for later runs, where it was found.
        insist: see `Saver.insist`.
    """

    task: Task
    image_size: int
    batch_size: int
    was_packed: bool
    kept_size: Path | None = None
    insist: Callable[[Callable[[], bool]], None] = lambda is_leaving: None


def prepare(
    config: RunConfig,
    *,
    open_it: Callable[[], Device],
    home: Path,
    folder: Path | None,
    emit: Emit,
    resources: ExitStack,
    should_stop: Callable[[], bool] = lambda: False,
    one_by_one: Callable[[], AbstractContextManager[object]] = nullcontext,
    state: SavedState | None = None,
) -> Prepared:
    """Open the device in this thread, read the data, build the model, and tell of each.

    Args:
        open_it: starts the device.
        home: where unpacked data and caches lie.
        folder: the run's own folder, for its checkpoints and its split; None writes neither.
        resources: closes device and image cache when the run is over.
        should_stop: asked while data are fetched and scanned, which may take long.
        one_by_one: entered twice, for what is fetched and cached: where processes prepare the same run, the second
            is let in when the first is through.
        state: where the run is taken up again; its options have precedence over the config's.

    Raises:
        StoppedInSetupError: `should_stop` said so.
        AppError: something of the config can't be had here.
    """
    parts = _Parts()
    if state:
        config = config.model_copy(update={**state.config, "batch_size": state.batch_size})
    emit(PhaseChanged("starting_device"))
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    looks = preprocessing(config.model, config.image_size)
    check_first_size(config, looks.image_size)
    device = open_it()
    resources.callback(device.close)
    matmul_precision = device.set_matmul_precision(config.matmul_precision)
    check_batch(config, device.count, device.num_processes)
    parts.end("device_start")

    emit(PhaseChanged("loading_data"))
    progress = _progress(emit, should_stop)
    with one_by_one():
        dataset, images = _read(config, looks, home, progress, resources, parts)
        # which images come first is the same for any batch size
        train, val = _loaders(_with_some_batch(config, device), looks, dataset, images, device)
        order = np.concatenate([train.order(1), len(dataset.train) + val.order(1)])
        images.fill(
            order.tolist(),
            lambda file, why: emit(ImageLost(file, why)),
            _progress(emit),
            lambda count, seconds: emit(CacheBuilt(count, seconds)),
        )
        if device.num_processes > 1:
            images.settle()
    data = {
        "classes": dataset.classes,
        "num_train": len(dataset.train),
        "num_val": len(dataset.val),
        "pictures": dataset.digest(),
    }
    if state:
        fits_data(state, data)
    if folder:
        dataset.save_split(folder / "split.csv")
    parts.end("cache_open")

    emit(PhaseChanged("building_model"))
    with one_by_one():
        built = build_model(
            config.model,
            num_classes=len(dataset.classes),
            weights="none" if state else config.weights,
            image_size=config.image_size,
            # all that is trained at any time, which the optimizer must know
            trainable=widest(config.trainable, config.trainable_from),
            seed=config.seed,
            classes=dataset.classes,
            runs=home / "runs",
        )
    if state:
        built.module.load_state_dict(state.model)
        if hasattr(built.module, "transform_input"):
            built.module.transform_input = state.data["transform_input"]
    check_sizes(built.module, config.model, smaller_sizes(config, looks.image_size))
    parts.end("model")
    parts.name_part("weights", "model", built.weights_s)

    with device.turn():
        left = _trace(config, device, built.module, looks.image_size, len(dataset.classes))
    if left:
        emit(HostFallback(left))
    parts.end("preflight")

    emit(PhaseChanged("building_model", detail="moving it to the device"))
    with device.turn():
        placed = _place(config, device, built.module, looks.image_size, state)
    parts.end("placement")

    task_of = functools.partial(
        Task,
        device=device,
        model=placed.module,
        optimizer=placed.optimizer,
        mean=looks.mean,
        std=looks.std,
        num_classes=len(dataset.classes),
        set_train_mode=lambda: set_train_mode(placed.module),
        precision=placed.precision,
        ema=placed.ema,
        image_size=looks.image_size,
    )
    found = None
    if not config.batch_size:
        cache = home / "cache" if config.caches == "use" else None
        trial = task_of(config=config, train=train, val=val, save=lambda which, epoch: None)
        found = find_batch_size(trial, len(dataset.train), cache, tell=_trying(emit, should_stop))
        config = config.model_copy(update={"batch_size": found.batch_size})
        train, val = _loaders(config, looks, dataset, images, device)
        parts.end("batch_size")

    about: dict[str, Any] = {"classes": dataset.classes, **asdict(looks), "config": config.model_dump()}
    # googlenet and inception_v3 take pictures otherwise where they began with published weights
    about["transform_input"] = bool(getattr(built.module, "transform_input", False))
    emit(
        RunPrepared(
            device_kind=device.kind,
            device_name=device.name,
            classes=dataset.classes,
            num_train=len(dataset.train),
            num_val=len(dataset.val),
            steps_per_epoch=train.num_batches,
            num_params=built.num_params,
            num_trainable=built.num_trainable,
            image_size=looks.image_size,
            environment={
                **environment(home),
                "workers": workers_of(config, device),
                "cached_images": "cold" if images.was_built else "warm",
                "precision": placed.precision,
                "matmul_precision": matmul_precision,
                "devices": device.count,
                **({"started_from": built.start} if built.start else {}),
                **({"batch_size": found.batch_size, "batch_size_is": found.how} if found else {}),
                **device.facts(),
            },
            setup_parts=parts.seconds,
            data=dataset.summary(),
        )
    )
    weights = None
    if config.class_weights == "balanced":
        weights = class_weights(_labels(dataset)[: len(dataset.train)], len(dataset.classes))
    saver = Saver(
        device,
        placed.module,
        placed.ema,
        placed.optimizer,
        folder,
        about,
        {**data, "transform_input": about["transform_input"]},
        train.batch_size,
        emit,
    )
    task = task_of(
        config=config,
        train=train,
        val=val,
        save=saver.save,
        class_weights=weights,
        is_packing=images.is_filling,
        lr_factor=state.lr_factor if state else 1.0,
        position=state.position if state else Position(),
        resize=train.resize,
    )
    task.keep = functools.partial(saver.keep, task)
    saver.step = lambda: task.position.step
    if state:
        task.scaler.load_state_dict(state.scaler)
        with device.turn():
            device.set_random_state(state.random)
    kept_size = found.file if found else None
    return Prepared(task, looks.image_size, train.batch_size, images.was_built, kept_size, saver.insist)


def check_batch(config: RunConfig, count: int, num_processes: int = 1) -> None:
    """Refuse a batch that `count` devices can't share evenly, or whose size can't be found.

    Args:
        num_processes: of these devices, those that train in a process of their own.

    Raises:
        ConfigError: it is so.
    """
    if not config.batch_size and num_processes > 1:
        raise ConfigError(
            f"A batch size is not found where {num_processes} processes share each batch.",
            fix="Choose one, as --batch-size 32, or train on one device.",
        )
    if config.batch_size % (count * config.accumulate):
        raise ConfigError(
            f"A batch of {config.batch_size} can't be shared evenly by {count} devices"
            + (f" in {config.accumulate} parts." if config.accumulate > 1 else "."),
            fix=f"Choose a batch size that {count * config.accumulate} divides.",
        )


def _with_some_batch(config: RunConfig, device: Device) -> RunConfig:
    """With the smallest batch size there can be, where it is yet to be found."""
    return config if config.batch_size else config.model_copy(update={"batch_size": device.count * config.accumulate})


def _trying(emit: Emit, should_stop: Callable[[], bool]) -> Callable[[int], None]:
    def tell(batch_size: int) -> None:
        if should_stop():
            raise StoppedInSetupError
        emit(PhaseChanged("building_model", detail=f"trying batches of {batch_size}"))

    return tell


def check_first_size(config: RunConfig, image_size: int) -> None:
    """Refuse a first image size that is not below the run's.

    Raises:
        ConfigError: it is so.
    """
    if config.first_image_size and config.first_image_size >= image_size:
        raise ConfigError(
            f"The first image size, {config.first_image_size} px, is not below the image size, {image_size} px.",
            fix="Choose a smaller --first-image-size, or leave it out.",
        )


def _trace(config: RunConfig, device: Device, module: nn.Module, image_size: int, num_classes: int) -> list[str]:
    """What the device would leave to the host in each step, after mending what can be mended; in place."""
    precision = device.fast_precision if config.precision == "auto" else config.precision

    def trace() -> list[str]:
        found: set[str] = set()
        for size in (*smaller_sizes(config, image_size), image_size):
            found.update(
                preflight(
                    module,
                    device,
                    image_size=size,
                    num_classes=num_classes,
                    # what falls back does so for any batch, and BatchNorm takes no single value
                    batch_size=2 * device.count,
                    precision="bf16" if precision == "bf16" else "fp32",
                )
            )
        return sorted(found)

    found = trace()
    if found and mend_for_xla(module, found):
        found = trace()
    return found


@dataclass(frozen=True)
class _Placed:
    """A model on its device, and what belongs to it."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    precision: str


def _place(
    config: RunConfig, device: Device, module: nn.Module, image_size: int, state: SavedState | None = None
) -> _Placed:
    averaged = copy.deepcopy(module) if config.ema_decay else None
    if averaged is not None and state and state.ema:
        averaged.load_state_dict(state.ema)
    module = device.place_model(module)
    ema = Ema(module, device.place_model(averaged), config.ema_decay) if averaged is not None else None
    if state and state.device_kind == device.kind:
        # what `auto` found may be another precision now
        precision = state.precision
    else:
        precision = choose_precision(config.precision, device, module, image_size)
    if config.torch_compile == "on":
        device.compile_model(module)
    optimizer = build_optimizer(config, module, device)
    if state:
        restore_optimizer(optimizer, module, state.optimizer, device)
    device.wait()
    return _Placed(module, optimizer, ema, precision)


def _read(
    config: RunConfig, looks: Preprocessing, home: Path, progress: Progress, resources: ExitStack, parts: _Parts
) -> tuple[Dataset, PackedImages]:
    """Scan the data and pack what is decoded on the way, so that each file is decoded once."""
    source = open_source(config.data, home, progress)
    parts.end("source")
    images = PackedImages(_cache_home(config, home, resources), fit_for(config, looks))
    resources.callback(images.close)
    dataset = scan(
        source,
        home=home,
        seed=config.seed,
        val_percent=config.val_percent,
        val_duplicates=config.val_duplicates,
        sink=images.add,
        at_least=images.fit.size,
        progress=progress,
        anew=config.caches == "anew",
    )
    images.choose([*dataset.train, *dataset.val])
    parts.end("cache_build" if images.was_built else "scan")
    return dataset, images


def _cache_home(config: RunConfig, home: Path, resources: ExitStack) -> Path:
    """Below which folder packed pictures lie; for a run that makes them anew, one that goes with the run."""
    if config.caches == "use":
        return home
    own = home / "cache" / f"{BUILDING}{os.getpid()}-{secrets.token_hex(4)}"
    sweep(own.parent)
    resources.callback(remove, own)
    return own


def fit_for(config: RunConfig, looks: Preprocessing) -> Fit:
    """How the cache holds pictures for this run; a random resized crop sees more than the central square."""
    return Fit(looks.resize_size, looks.interpolation, config.augmentation == "resized_crop")


def _loaders(
    config: RunConfig, looks: Preprocessing, dataset: Dataset, images: PackedImages, device: Device
) -> tuple[BatchLoader, BatchLoader]:
    labels, num_train = _labels(dataset), len(dataset.train)
    numbers = np.arange(len(labels))

    def loader(part: slice, recipe: Recipe | None) -> BatchLoader:
        return loader_for(
            config,
            looks,
            images,
            numbers[part],
            labels[part],
            recipe=recipe,
            workers=workers_of(config, device),
            multiple_of=device.count * config.accumulate,
            parts=device.num_processes * config.accumulate,
            stage=device.stage,
        )

    return loader(slice(num_train), Recipe.of(config)), loader(slice(num_train, None), None)


def loader_for(
    config: RunConfig,
    looks: Preprocessing,
    images: Images,
    numbers: NDArray[np.int64],
    labels: NDArray[np.int64],
    *,
    recipe: Recipe | None,
    batch_size: int | None = None,
    **more: Any,
) -> BatchLoader:
    """The loader of a run's images, see `BatchLoader`, which takes `more`; `batch_size` is the config's where None."""
    red, green, blue = (round(255 * mean) for mean in looks.mean)
    return BatchLoader(
        images,
        numbers,
        labels,
        batch_size or config.batch_size,
        recipe=recipe,
        image_size=looks.image_size,
        interpolation=looks.interpolation,
        sampling=config.sampling,
        fill=(red, green, blue),
        seed=config.seed,
        **more,
    )


def workers_of(config: RunConfig, device: Device) -> int:
    """Threads that prepare batches."""
    return num_workers(config.workers, device.kind, device.num_processes)


def _labels(dataset: Dataset) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([item.label for item in (*dataset.train, *dataset.val)], dtype=np.int64)


def _progress(emit: Emit, should_stop: Callable[[], bool] = lambda: False) -> Progress:
    tell = throttled(lambda what, done, total: emit(ProgressMade(what, done, total)))

    def tell_or_stop(what: str, done: int, total: int) -> None:
        if should_stop():
            raise StoppedInSetupError
        tell(what, done, total)

    return tell_or_stop
