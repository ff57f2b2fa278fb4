"""How fast images are read, packed and fed, against what is usual and against what is possible.

    python benchmarks/feeding.py [input] [pack] [limit] [devices] [memory] [scan]

Without a name all are measured. Ratios are taken within one run, rounds of both sides in turn, and their median is
given. Threads are fixed: 1 for `input`, 2 for the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks.loop import Patient
from benchmarks.photos import make_photos
from core.config import make_config
from core.data.augment import Recipe
from core.data.cache import Fit, PackedImages
from core.data.loader import Batch, BatchLoader
from core.data.scan import scan
from core.data.sources import open_source
from core.devices.local import CpuDevice
from core.engine import fit
from core.events import EpochEnded, Event
from core.setup import prepare
from core.timing import PhaseTimer

ROUNDS = 3
IMAGE_SIZE, RESIZE_SIZE, BATCH_SIZE = 224, 256, 32
DEVICES = {"T4, mixed precision": 500.0, "TPU v5e chip": 2700.0}
"""Images a second of resnet18 training at 224 px that the sleeping device keeps to; assumed, not measured here."""


def packed_loader(folder: Path, home: Path, geometry: str, workers: int = 0) -> tuple[BatchLoader, PackedImages]:
    images = PackedImages(home, Fit(RESIZE_SIZE, "bilinear", geometry == "resized_crop"))
    source = open_source(str(folder), home)
    dataset = scan(source, home=home, seed=0, val_percent=1, sink=images.add, at_least=RESIZE_SIZE)
    images.choose(dataset.train)
    images.fill(range(len(dataset.train)))
    labels = np.array([item.label for item in dataset.train])
    loader = BatchLoader(
        images, np.arange(len(labels)), labels, BATCH_SIZE,
        recipe=Recipe(geometry=geometry, crop_scale_min=0.08), image_size=IMAGE_SIZE, workers=workers,
    )  # fmt: skip
    for number in range(len(labels)):
        images.pixels(number)
    return loader, images


def usual_loader(folder: Path, workers: int = 0) -> DataLoader:
    """What most training scripts do: ImageFolder and torchvision's transforms on PIL images."""
    normalise = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    steps = [
        transforms.RandomResizedCrop(IMAGE_SIZE),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        normalise,
    ]
    dataset = ImageFolder(folder, transforms.Compose(steps))
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, drop_last=True, num_workers=workers)


def cpu_seconds(batches: Iterable[object]) -> float:
    started = time.process_time()
    for _ in batches:
        pass
    return time.process_time() - started


def measure_input(folder: Path, home: Path) -> dict[str, object]:
    torch.set_num_threads(1)
    num = sum(1 for _ in folder.rglob("*.jpg")) // BATCH_SIZE * BATCH_SIZE
    usual = usual_loader(folder)
    loaders = {name: packed_loader(folder, home, name) for name in ("crop", "resized_crop")}
    ratios: dict[str, list[float]] = {name: [] for name in loaders}
    rates: dict[str, list[float]] = {"usual": [], **{name: [] for name in loaders}}
    for epoch in range(1, ROUNDS + 1):
        base = num / cpu_seconds(usual)
        rates["usual"].append(base)
        for name, (loader, _) in loaders.items():
            shown = loader.num_batches * loader.batch_size
            rate = shown / cpu_seconds(loader.epoch(epoch))
            rates[name].append(rate)
            ratios[name].append(rate / base)
    for _, images in loaders.values():
        images.close()
    medians = {name: round(statistics.median(values)) for name, values in rates.items()}
    return {
        "images per CPU-second": medians,
        "times the usual": {name: round(statistics.median(values), 1) for name, values in ratios.items()},
    }


def measure_pack(folder: Path) -> dict[str, object]:
    """Scanning and packing together, against decoding each file once with Pillow in as many threads."""
    files = sorted(folder.rglob("*.jpg"))
    threads = os.cpu_count() or 1

    def decode(path: Path) -> None:
        with Image.open(path) as image:
            image.load()

    wall: dict[str, list[float]] = {"pillow": [], "square": [], "with shape": []}
    for _ in range(2 * ROUNDS + 1):
        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(decode, files))
        wall["pillow"].append(time.perf_counter() - started)
        for name, keeps_shape in (("square", False), ("with shape", True)):
            with tempfile.TemporaryDirectory() as home:
                started = time.perf_counter()
                images = PackedImages(Path(home), Fit(RESIZE_SIZE, "bilinear", keeps_shape))
                source = open_source(str(folder), Path(home))
                dataset = scan(source, home=Path(home), seed=0, val_percent=20, sink=images.add, at_least=RESIZE_SIZE)
                images.choose([*dataset.train, *dataset.val])
                wall[name].append(time.perf_counter() - started)
                images.close()
    ratio = {
        name: round(statistics.median(a / b for a, b in zip(wall[name], wall["pillow"], strict=True)), 2)
        for name in ("square", "with shape")
    }
    seconds = {name: round(statistics.median(values), 2) for name, values in wall.items()}
    return {"images": len(files), "threads": threads, "seconds": seconds, "times one decoding": ratio}


class FixedLoader:
    """One batch, over and over: what the loop could do if images cost nothing."""

    def __init__(self, batch: Batch, num_batches: int) -> None:
        self._batch, self.num_batches = batch, num_batches

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        yield from (self._batch for _ in range(self.num_batches))


def measure_limit(folder: Path, home: Path) -> dict[str, object]:
    """Epochs of the real loop from the packed cache, and on one batch that is in memory, in turn."""
    torch.set_num_threads(2)
    config = make_config(
        data=str(folder), model="torchvision/resnet18", weights="none", device="cpu", threads=2, epochs=1,
        batch_size=BATCH_SIZE, image_size=IMAGE_SIZE, augmentation="crop", val_percent=2, log_every=5,
    )  # fmt: skip
    seconds: dict[str, list[float]] = {"packed": [], "limit": []}
    waits: list[float] = []
    with ExitStack() as resources:
        run = home / "run"
        run.mkdir(parents=True)
        prepared = prepare(
            config, open_it=CpuDevice, home=home, folder=run, emit=lambda event: None, resources=resources
        )
        task = prepared.task
        task.save = lambda which, epoch: None
        packed, validation = task.train, task.val
        batch = next(iter(packed.epoch(1)))
        fixed = FixedLoader(Batch(batch.images, batch.labels, batch.num_real), packed.num_batches)
        for round_ in range(ROUNDS + 1):
            for name, loader in (("packed", packed), ("limit", fixed)):
                task.train, task.val = loader, FixedLoader(batch, 1)
                ended = _epoch_of(task)
                # the first round fills caches of processor and allocator
                if round_:
                    train_s = ended.seconds - ended.phases.evaluation_s - ended.phases.checkpoint_s
                    seconds[name].append(train_s)
                    if name == "packed":
                        waits.append(100 * ended.phases.data_wait_s / ended.seconds)
        task.train, task.val = packed, validation
    shares = [limit / mine for mine, limit in zip(seconds["packed"], seconds["limit"], strict=True)]
    return {
        "images an epoch": packed.num_batches * BATCH_SIZE,
        "seconds an epoch": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
        "share of the limit": [round(share, 3) for share in shares],
        "median share": round(statistics.median(shares), 3),
        "data wait, percent of the epoch": [round(wait, 2) for wait in waits],
    }


def _epoch_of(task: object) -> EpochEnded:
    events: list[Event] = []
    fit(task, emit=events.append, control=Patient(), timer=PhaseTimer(time.perf_counter))
    return next(event for event in events if isinstance(event, EpochEnded))


def measure_devices(folder: Path, small: Path, home: Path) -> dict[str, object]:
    """A device that sleeps as long as a real one would work, fed by each loader in turn."""
    torch.set_num_threads(2)
    found: dict[str, object] = {}
    for device, speed in DEVICES.items():
        pause = BATCH_SIZE / speed
        shares: dict[str, list[float]] = {}
        for geometry in ("crop", "resized_crop"):
            loader, images = packed_loader(folder, home, geometry, workers=2)
            batch = next(iter(loader.epoch(1)))
            for epoch in range(1, ROUNDS + 1):
                num = loader.num_batches
                limit = _sleeping(lambda num=num, batch=batch: (batch.images for _ in range(num)), pause)
                mine = _sleeping(
                    lambda epoch=epoch, loader=loader: (batch.images for batch in loader.epoch(epoch)), pause
                )
                shares.setdefault(f"packed, {geometry}", []).append(limit / mine)
            images.close()
        for workers in (0, 2):
            usual = usual_loader(small, workers)
            num = len(usual)
            limit = _sleeping(lambda num=num, batch=batch: (batch.images for _ in range(num)), pause)
            mine = _sleeping(lambda usual=usual: (images for images, _ in usual), pause)
            shares[f"usual, {workers} workers"] = [limit / mine]
        found[f"{device} ({speed:.0f} images/s)"] = {
            name: round(statistics.median(values), 3) for name, values in shares.items()
        }
    return found


def _sleeping(batches: Callable[[], Iterator[torch.Tensor]], pause: float) -> float:
    """Seconds of an epoch on a device that works for `pause` a batch, behind a host that runs two batches ahead.

    The copy of a batch stands for its transfer.
    """
    started = busy_until = time.perf_counter()
    for images in batches():
        images.clone()
        busy_until = max(time.perf_counter(), busy_until) + pause
        time.sleep(max(0.0, busy_until - 2 * pause - time.perf_counter()))
    time.sleep(max(0.0, busy_until - time.perf_counter()))
    return time.perf_counter() - started


_MEMORY_PROGRAM = """
import json, resource, sys, threading, time
from pathlib import Path
import psutil, torch
from benchmarks.feeding import packed_loader
torch.set_num_threads(2)
process, highest, done = psutil.Process(), 0, threading.Event()
def watch():
    global highest
    while not done.wait(0.05):
        highest = max(highest, process.memory_info().rss)
base = process.memory_info().rss
thread = threading.Thread(target=watch, daemon=True); thread.start()
loader, images = packed_loader(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], workers=2)
packed = highest
for epoch in (1, 2):
    for batch in loader.epoch(epoch):
        pass
done.set(); thread.join(); images.close()
gib = {"scanning and packing": (packed - base) / 2**30, "with two epochs": (highest - base) / 2**30}
print(json.dumps({"GiB above the imports": {name: round(value, 2) for name, value in gib.items()}}))
"""


def measure_memory(folder: Path, home: Path) -> dict[str, object]:
    """Highest resident memory of a process of its own, sampled 20 times a second."""
    found: dict[str, object] = {}
    for geometry in ("crop", "resized_crop"):
        command = [sys.executable, "-c", _MEMORY_PROGRAM, str(folder), str(home / geometry), geometry]
        root = Path(__file__).resolve().parents[1]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        found[geometry] = json.loads(done.stdout)
    return found


def measure_scan(folder: Path, home: Path) -> dict[str, object]:
    """A scan without packing: the first time, again, and after the memory was dropped."""
    seconds = {}
    for name in ("first time", "second time"):
        started = time.perf_counter()
        dataset = scan(open_source(str(folder), home), home=home, seed=0, val_percent=20)
        seconds[name] = round(time.perf_counter() - started, 2)
    return {"files": len(dataset.train) + len(dataset.val), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    names = ("input", "pack", "limit", "devices", "memory", "scan")
    parser.add_argument("names", nargs="*", default=names, choices=names)
    chosen = parser.parse_args().names
    with tempfile.TemporaryDirectory() as work:
        small = make_photos(Path(work) / "small", 1000)
        for name in chosen:
            home = Path(work) / f"home-{name}"
            started = time.perf_counter()
            if name == "input":
                found = measure_input(small, home)
            elif name == "pack":
                found = measure_pack(small)
            elif name == "limit":
                found = measure_limit(make_photos(Path(work) / "few", 330), home)
            elif name == "devices":
                found = measure_devices(make_photos(Path(work) / "more", 4000), small, home)
            elif name == "memory":
                found = measure_memory(make_photos(Path(work) / "many", 10_000), home)
            else:
                found = measure_scan(make_photos(Path(work) / "twenty", 20_000), home)
            print(json.dumps({name: found, "took_s": round(time.perf_counter() - started)}, indent=1), flush=True)


if __name__ == "__main__":
    main()
