"""What our loop costs beside the barest loop on the same device, and what an optimizer costs the host on XLA.

    python benchmarks/loop.py cpu | xla | host

`cpu` and `xla` train resnet18 in rounds in turn: by our engine, and by a loop written by hand that does the same
work with nothing around it. `host` takes the time in which the host collects the operations of a training step
of wide_resnet50_2 on XLA, before anything runs, with a plain Adam and with ours. Threads are fixed at 2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# read when torch is loaded, as app.py and the command line do
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torchvision
from torch.nn import functional

from core.config import RunConfig, make_config
from core.control import Wish
from core.data.loader import Batch
from core.devices import open_device
from core.devices.base import Device
from core.engine import train_epoch
from core.optim import build_optimizer
from core.timing import PhaseTimer
from core.training.compiles import CompileWatch
from core.training.task import Task

THREADS, ROUNDS, STEPS, BATCH_SIZE, IMAGE_SIZE, CLASSES = 2, 7, 20, 16, 64, 10
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LOG_EVERY = 5


class Memory:
    """The same few batches again and again."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (BATCH_SIZE, IMAGE_SIZE, IMAGE_SIZE, 3)
        self.batches = [
            Batch(
                torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2),
                torch.randint(0, CLASSES, (BATCH_SIZE,), generator=generator),
                BATCH_SIZE,
            )
            for _ in range(4)
        ]
        self.num_batches = STEPS

    def epoch(self, epoch: int, first: int = 0) -> Generator[Batch, None, None]:
        for step in range(first, STEPS):
            yield self.batches[step % len(self.batches)]


class Patient:
    """Asks nothing of a run."""

    def should_stop(self) -> bool:
        return False

    def wishes(self) -> list[Wish]:
        return []

    def is_aborted(self) -> bool:
        return False

    def should_pause(self) -> bool:
        return False

    def should_free(self) -> bool:
        return False

    def wait_while_paused(self) -> None:
        pass


def our_loop(config: RunConfig, device: Device, data: Memory) -> Callable[[], None]:
    with device.turn():
        model = device.place_model(torchvision.models.resnet18(num_classes=CLASSES))
        optimizer = build_optimizer(config, model, device)
    task = Task(
        config=config, device=device, model=model, optimizer=optimizer, train=data, val=data, mean=MEAN, std=STD,
        num_classes=CLASSES, save=lambda which, epoch: None, set_train_mode=lambda: model.train(),
    )  # fmt: skip
    watch = CompileWatch(device, lambda event: None)

    def epoch() -> None:
        # from step 1000 on, so that no step is the first one
        train_epoch(task, 1, 1000, PhaseTimer(time.perf_counter), lambda event: None, Patient(), watch)

    return epoch


def normalised(images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return (images.float() / 255 - mean) / std


def bare_cpu(config: RunConfig, data: Memory) -> Callable[[], None]:
    """What a careful person writes for a CPU: channels last, a fused optimizer, a look at the loss every few steps."""
    model = torchvision.models.resnet18(num_classes=CLASSES).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True)
    mean, std = (torch.tensor(three).reshape(1, 3, 1, 1) for three in (MEAN, STD))

    def epoch() -> None:
        for step, batch in enumerate(data.epoch(1), start=1):
            optimizer.zero_grad(set_to_none=True)
            inputs = normalised(batch.images, mean, std).contiguous(memory_format=torch.channels_last)
            loss = functional.cross_entropy(model(inputs), batch.labels)
            loss.backward()
            optimizer.step()
            if step % LOG_EVERY == 0:
                loss.item()

    return epoch


def bare_xla(config: RunConfig, data: Memory) -> Callable[[], None]:
    """The loop of torch_xla's own guide, with its sync-free optimizer."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.amp import syncfree

    place = torch_xla.device()
    model = torchvision.models.resnet18(num_classes=CLASSES).to(place).train()
    optimizer = syncfree.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    mean, std = (torch.tensor(three).reshape(1, 3, 1, 1).to(place) for three in (MEAN, STD))

    def epoch() -> None:
        for step, batch in enumerate(data.epoch(1), start=1):
            optimizer.zero_grad(set_to_none=True)
            images, labels = batch.images.to(place), batch.labels.to(place)
            loss = functional.cross_entropy(model(normalised(images, mean, std)), labels)
            loss.backward()
            optimizer.step(found_inf=torch.zeros((), device=place))
            torch_xla.sync()
            if step % LOG_EVERY == 0:
                loss.item()
        xm.wait_device_ops()

    return epoch


def compare(kind: str) -> dict[str, object]:
    config = make_config(
        lr=1e-3, weight_decay=0.01, optimizer="adamw", schedule="constant", log_every=LOG_EVERY, epochs=10_000
    )
    data, device = Memory(), open_device(kind)
    loops = {"ours": our_loop(config, device, data), "bare": (bare_cpu if kind == "cpu" else bare_xla)(config, data)}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for round_ in range(ROUNDS + 1):
        for name, loop in loops.items():
            started = time.perf_counter()
            loop()
            # the first round compiles, and fills caches
            if round_:
                seconds[name].append(time.perf_counter() - started)
    shares = [bare / ours for ours, bare in zip(seconds["ours"], seconds["bare"], strict=True)]
    return {
        "steps per second": {name: round(STEPS / statistics.median(times), 2) for name, times in seconds.items()},
        "ours / bare by rounds": [round(share, 3) for share in shares],
        "median": round(statistics.median(shares), 3),
    }


def host_time() -> dict[str, object]:
    """Seconds from the gradients' reset until all operations of a step are collected; nothing of it runs."""
    device = open_device("xla")
    place, images = device.torch_device, torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    labels = torch.tensor([0, 1])

    def tracer(name: str) -> Callable[[], float]:
        model = device.place_model(torchvision.models.wide_resnet50_2(num_classes=CLASSES).train())
        plain = torch.optim.Adam(model.parameters(), lr=1e-5) if name == "plain Adam" else None
        optimizer = plain or device.make_optimizer("adam", model.parameters(), lr=1e-5, weight_decay=0.0)
        device.wait()

        def trace(with_optimizer: bool = True) -> float:
            x, y = device.place_batch(images, labels)
            started = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(model(x.float() / 255), y).backward()
            if plain is not None:
                plain.step()
            elif with_optimizer:
                device.optimizer_step(optimizer)
            seconds = time.perf_counter() - started
            import torch_xla

            # the operations are dropped: this measures the host alone
            torch_xla._XLAC._clear_pending_irs(str(place))
            return seconds

        return trace

    tracers = {name: tracer(name) for name in ("plain Adam", "ours")}
    model_alone = tracers["ours"]
    times: dict[str, list[float]] = {"plain Adam": [], "ours": [], "without an optimizer": []}
    for round_ in range(3 * ROUNDS):
        for name, trace in tracers.items():
            seconds = trace()
            if round_ > 1:
                times[name].append(seconds)
        seconds = model_alone(with_optimizer=False)  # type: ignore[call-arg]
        if round_ > 1:
            times["without an optimizer"].append(seconds)
    medians = {name: round(1000 * statistics.median(values), 1) for name, values in times.items()}
    ratios = [mine / plain for mine, plain in zip(times["ours"], times["plain Adam"], strict=True)]
    return {"milliseconds of the host a step": medians, "ours / plain Adam": round(statistics.median(ratios), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cpu", "xla", "host"])
    what = parser.parse_args().what
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    found = host_time() if what == "host" else compare(what)
    print(json.dumps({"torch": torch.__version__, "threads": THREADS, what: found}, indent=1))


if __name__ == "__main__":
    main()
