"""What it costs to know where the time goes: the same steps with all timing and sampling, and without any.

    python benchmarks/timing_cost.py cpu | xla | empty

With: laps, the device's account of its steps, events, their writing to a store four times a second, and the sampling of
the machine once a second. Without: the same steps and the same looks at the loss. Rounds in turn; threads fixed at 2.
`empty` takes steps that do nothing, so that what is left is the timing: its cost without the noise of real steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# read when torch is loaded, as app.py and the command line do
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torchvision

from benchmarks.loop import CLASSES, LOG_EVERY, MEAN, STD, STEPS, THREADS, Memory, Patient
from core.config import RunConfig, make_config
from core.data.loader import Batch
from core.devices import open_device
from core.devices.base import Device
from core.engine import train_epoch
from core.events import RunPrepared
from core.machine.telemetry import Telemetry
from core.metrics import Sums
from core.optim import build_optimizer
from core.running.pulse import Pulse
from core.schedule import lr_at
from core.store import Store
from core.timing import PhaseTimer
from core.training.compiles import CompileWatch
from core.training.task import Task, place_parts, train_step

ROUNDS = 21


def make_task(config: RunConfig, device: Device, data: Memory) -> Task:
    with device.turn():
        model = device.place_model(torchvision.models.resnet18(num_classes=CLASSES).train())
        optimizer = build_optimizer(config, model, device)
    return Task(
        config=config, device=device, model=model, optimizer=optimizer, train=data, val=data, mean=MEAN, std=STD,
        num_classes=CLASSES, save=lambda which, epoch: None, set_train_mode=lambda: model.train(),
    )  # fmt: skip


def with_timing(task: Task, store: Store) -> Callable[[], float]:
    run_id = store.create_run(task.config)
    watch = CompileWatch(task.device, lambda event: None)

    def epoch() -> float:
        with Pulse(store, run_id, 1, lambda event: None) as pulse, Telemetry(pulse.emit, device_kind=task.device.kind):
            pulse.emit(RunPrepared(task.device.kind, "", [], 0, 0, 10_000, 0, 0, 64))
            started = time.perf_counter()
            train_epoch(task, 1, 1000, PhaseTimer(time.perf_counter), pulse.emit, Patient(), watch)
            return time.perf_counter() - started

    return epoch


def without_timing(task: Task) -> Callable[[], float]:
    device = task.device

    def epoch() -> float:
        started = time.perf_counter()
        with device.turn():
            sums, fetched = Sums(device), None
        for step, batch in enumerate(task.train.epoch(1), start=1001):
            with device.turn():
                train_step(task, place_parts(task, batch), lr_at(task.config, step, STEPS), step, sums)
                if fetched is not None:
                    fetched = fetched.totals() and None
                if step % LOG_EVERY == 0:
                    fetched = sums.cut()
                    if not device.runs_behind:
                        fetched = fetched.totals() and None
        with device.turn():
            if fetched is not None:
                fetched.totals()
            device.wait()
        return time.perf_counter() - started

    return epoch


class Empty(Memory):
    """One batch again and again, many times."""

    def __init__(self) -> None:
        super().__init__()
        self.num_batches = 2000

    def epoch(self, epoch: int, first: int = 0) -> Generator[Batch, None, None]:
        return (self.batches[0] for _ in range(self.num_batches))


def empty() -> dict[str, object]:
    """Microseconds that timing takes of each step, on the host."""
    config, data = make_config(log_every=LOG_EVERY, schedule="constant", epochs=10_000), Empty()
    task = make_task(config, open_device("cpu"), data)
    with (
        mock.patch("core.engine.place_parts"),
        mock.patch("core.engine.train_step", add_nothing),
        tempfile.TemporaryDirectory() as home,
    ):
        epoch = with_timing(task, Store(Path(home)))
        seconds = [epoch() for _ in range(6)][1:]
    return {"microseconds a step": [round(1e6 * each / data.num_batches, 1) for each in seconds]}


def add_nothing(task: Task, parts: object, lr: float, step: int, sums: Sums) -> None:
    sums._images += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["cpu", "xla", "empty"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    if given.kind == "empty":
        print(json.dumps({"torch": torch.__version__, "threads": THREADS, **empty()}, indent=1))
        return
    config = make_config(
        lr=1e-3, weight_decay=0.01, optimizer="adamw", schedule="constant", log_every=LOG_EVERY, epochs=10_000
    )
    device = open_device(given.kind)
    with tempfile.TemporaryDirectory() as home:
        task = make_task(config, device, Memory())
        loops = {"with": with_timing(task, Store(Path(home))), "without": without_timing(task)}
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for round_ in range(given.rounds + 1):
            # each goes first in every other round
            for name in sorted(loops, reverse=bool(round_ % 2)):
                taken = loops[name]()
                if round_:
                    seconds[name].append(taken)
    ratios = sorted(one / other for one, other in zip(seconds["with"], seconds["without"], strict=True))
    found = {
        "torch": torch.__version__,
        "threads": THREADS,
        "device": given.kind,
        "milliseconds a step": {name: round(1000 * statistics.median(t) / STEPS, 2) for name, t in seconds.items()},
        "with / without": {"median": round(statistics.median(ratios), 4), "rounds": [round(r, 3) for r in ratios]},
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
