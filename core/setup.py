"""From a config to a task that can be trained: data, model and device, each part timed by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from core.checkpoint import save_checkpoint
from core.config import RunConfig
from core.data.cache import build_or_open
from core.data.loader import BatchLoader, prefetch
from core.data.scan import scan
from core.data.sources import open_source
from core.devices import open_device
from core.engine import Task
from core.events import CheckpointSaved, Event, PhaseChanged, RunPrepared
from core.machine import environment
from core.models.build import build_model
from core.models.parts import set_train_mode
from core.optim import build_optimizer


def prepare(config: RunConfig, *, device_kind: str, home: Path, folder: Path, emit: Callable[[Event], None]) -> Task:
    """Open the device in this thread, read the data, build the model, and tell of each.

    Args:
        device_kind: a kind that is available; never auto.
        home: where unpacked data and caches lie.
        folder: the run's own folder, for its checkpoints.

    Raises:
        AppError: something of the config can't be had here.
    """
    parts: dict[str, float] = {}
    last = time.perf_counter()

    def part(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        parts[f"{name}_s"] = now - last
        last = now

    emit(PhaseChanged("starting_device"))
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    device = open_device(device_kind)
    part("device_start")

    emit(PhaseChanged("loading_data"))
    dataset = scan(open_source(config.data, home), seed=config.seed, val_percent=config.val_percent)
    part("scan")

    emit(PhaseChanged("building_model"))
    built = build_model(
        config.model,
        num_classes=len(dataset.classes),
        weights=config.weights,
        image_size=config.image_size,
        trainable=config.trainable,
        seed=config.seed,
    )
    looks = built.preprocessing
    part("model")

    emit(PhaseChanged("loading_data", detail="building the image cache"))
    caches = [
        build_or_open(items, looks.resize_size, looks.interpolation, home) for items in (dataset.train, dataset.val)
    ]
    part("cache_build" if any(cache.was_built for cache in caches) else "cache_open")
    train, val = (
        BatchLoader(
            cache.images,
            cache.labels,
            config.batch_size,
            train=is_train,
            image_size=looks.image_size,
            augmentation=config.augmentation,
            seed=config.seed,
        )
        for cache, is_train in zip(caches, (True, False), strict=True)
    )
    emit(PhaseChanged("building_model", detail="moving it to the device"))
    model = device.place_model(built.module)
    optimizer = build_optimizer(config, model.parameters(), on_xla=device.kind == "xla")
    device.wait()
    part("placement")

    about: dict[str, Any] = {
        "classes": dataset.classes,
        **asdict(looks),
        "config": config.model_dump(),
    }

    def save(which: str, epoch: int) -> None:
        path = save_checkpoint(folder, which, model, optimizer, {**about, "epoch": epoch})
        emit(CheckpointSaved(which, epoch, path.name))

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
            environment=environment(),
            setup_parts=parts,
        )
    )
    return Task(
        config=config,
        device=device,
        model=model,
        optimizer=optimizer,
        train=train,
        val=val,
        mean=looks.mean,
        std=looks.std,
        num_classes=len(dataset.classes),
        save=save,
        set_train_mode=set_train_mode,
        prefetch=prefetch,
    )
