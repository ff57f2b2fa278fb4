"""Devices that run behind the host: the clock, the memory and the lock, without such a device.

There is no GPU here, so a fake one does its work in a time of its own, and a fake clock is the host's.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from core.devices.executions import ExecutionWatch
from core.devices.fair_lock import FairLock
from core.devices.local import CpuDevice, Fetched
from core.engine import fit
from core.errors import MemoryFullError
from core.events import EpochEnded, ProgramCompiled, StepLogged
from core.timing import PhaseTimer
from core.training.compiles import CompileWatch
from core.training.precision import choose_precision
from core.training.step_times import StepTimes
from core.trials.memory import fitting_batch, memory_full
from tests.tiny import FixedLoader, NoWishes, make_task

STEP_S, HOST_S = 10.0, 1.0


class HostClock:
    """Moves only when somebody works or waits."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class LateFetch(Fetched):
    """Figures that are there when the device has done what was sent before they were asked for."""

    def __init__(self, sums: torch.Tensor, clock: HostClock, ready_s: float):
        super().__init__(sums)
        self.clock, self.ready_s = clock, ready_s

    def values(self) -> list[float]:
        self.clock.now = max(self.clock.now, self.ready_s)
        return super().values()


class BehindDevice(CpuDevice):
    """Takes 10 s a step, which the host sends in 1 s."""

    runs_behind = True

    def __init__(self, clock: HostClock):
        super().__init__()
        self.clock, self.done_s, self.idle_s = clock, 0.0, 0.0
        self.ran: list[tuple[float, float]] = []

    def watch_steps(self, clock) -> ExecutionWatch:
        return ExecutionWatch(lambda: (len(self.ran), self.ran[-100:]), lambda: len(self.ran), self.wait, self.clock)

    def flush(self) -> None:
        self.clock.now += HOST_S
        self.idle_s += max(0.0, self.clock.now - self.done_s)
        self.done_s = max(self.done_s, self.clock.now) + STEP_S
        self.ran.append((self.done_s, self.done_s - self.clock.now))

    def wait(self) -> None:
        self.clock.now = max(self.clock.now, self.done_s)

    def fetch(self, sums: torch.Tensor) -> LateFetch:
        return LateFetch(sums, self.clock, self.done_s)


class SlowLoader(FixedLoader):
    """Brings each batch so long after it was asked for."""

    def __init__(self, clock: HostClock, seconds: float, loader: FixedLoader):
        self.clock, self.seconds, self.batches = clock, seconds, loader.batches

    def epoch(self, number: int, first: int = 0):
        for batch in self.batches:
            self.clock.now += self.seconds
            yield batch


def behind_run(steps: int, loader_s: float = 0.0, **changes):
    clock = HostClock()
    device = BehindDevice(clock)
    task = make_task(**changes)
    images = torch.randint(0, 256, (4 * steps, 3, 8, 8), dtype=torch.uint8)
    loader = FixedLoader(images, torch.arange(4 * steps) % 6, 4)
    task.device, task.train = device, SlowLoader(clock, loader_s, loader)
    events = []
    fit(task, emit=events.append, control=NoWishes(), timer=PhaseTimer(clock))
    device.close()
    return device, events, clock


def test_a_step_lasts_as_long_as_the_device_works_at_it_and_not_as_long_as_sending_it():
    _, events, _ = behind_run(steps=8)
    by_step = {event.step: event.seconds for event in events if isinstance(event, StepLogged)}
    # the first of an epoch begins with an idle device, which waits for the host
    assert [by_step[step] for step in range(3, 9)] == [STEP_S] * 6
    assert by_step[1] == STEP_S + HOST_S
    [first, _] = [event for event in events if isinstance(event, EpochEnded)]
    assert first.images_per_s == pytest.approx(4 / STEP_S)


def test_no_figure_that_is_fetched_lets_the_device_stand_idle():
    device, events, clock = behind_run(steps=8)
    assert [event.step for event in events if isinstance(event, StepLogged)] == list(range(1, 17))
    # the first step, whose compiling is told at once, and the ends of epochs and evaluations
    ends = 2 * 2
    assert device.idle_s <= (1 + ends) * HOST_S
    assert clock.now == pytest.approx((16 + 2 * 3) * STEP_S + device.idle_s)


@pytest.mark.parametrize(("loader_s", "wait_s"), [(0.0, 0.0), (6.0, 0.0), (9.0, 0.0), (29.0, 19.0)])
def test_data_wait_is_what_the_device_waited_for_and_not_what_the_host_did(loader_s: float, wait_s: float):
    _, events, _ = behind_run(steps=8, loader_s=loader_s, log_every=4, epochs=1)
    (epoch,) = [event for event in events if isinstance(event, EpochEnded)]
    # the device has nothing to do before the first step, and none after it, since that one is waited for
    assert epoch.phases.data_wait_s == pytest.approx(2 * loader_s + 6 * wait_s)
    assert epoch.phases.total_s() == pytest.approx(epoch.seconds)
    steps = StepTimes([epoch.step_times]).summary()
    assert steps["median_s"] == pytest.approx(max(STEP_S, loader_s + HOST_S), rel=0.006)
    logged = [event for event in events if isinstance(event, StepLogged)]
    assert sum(event.data_wait_s for event in logged) == pytest.approx(epoch.phases.data_wait_s)
    assert [event.steps for event in logged] == [1, 3, 4] and epoch.left_out == {"first steps": 1}


def test_the_host_does_not_run_ahead_without_end():
    clock = HostClock()
    task = make_task(epochs=1)
    device = BehindDevice(clock)
    ahead: list[float] = []
    flush = device.flush

    def watched() -> None:
        flush()
        ahead.append((device.done_s - clock.now) / STEP_S)

    device.flush = watched
    images = torch.zeros(4 * 100, 3, 8, 8, dtype=torch.uint8)
    task.config = task.config.model_copy(update={"log_every": 10_000, "epochs": 1})
    task.device, task.train = device, FixedLoader(images, torch.zeros(400, dtype=torch.long), 4)
    fit(task, emit=lambda event: None, control=NoWishes(), timer=PhaseTimer(clock))
    device.close()
    assert max(ahead) <= 33


def test_phases_add_up_behind_the_host_too():
    _, events, clock = behind_run(steps=5)
    epochs = [event for event in events if isinstance(event, EpochEnded)]
    assert sum(epoch.phases.total_s() for epoch in epochs) == pytest.approx(clock.now)


class CompilingDevice(CpuDevice):
    """Says that it compiled whenever it is told so."""

    def __init__(self):
        super().__init__()
        self.count = 1
        self.compiled = 0

    def compile_count(self) -> int:
        return self.compiled

    def compile_seconds(self) -> float:
        return 2.0 * self.compiled


def test_a_program_that_was_not_to_be_expected_is_told_with_the_shape_that_changed():
    device, told = CompilingDevice(), []
    watch = CompileWatch(device, told.append)
    shapes = {"images": (4, 3, 8, 8), "labels": (4,)}
    device.compiled = 1
    assert watch.look("training", 1, 1, shapes) == (1, 2.0)
    assert watch.look("training", 2, 1, shapes) == (0, 0.0)
    device.compiled = 3
    watch.look("training", 3, 1, {"images": (2, 3, 8, 8), "labels": (4,)})
    device.compiled = 4
    watch.look("training", 4, 1, {"images": (2, 3, 8, 8), "labels": (4,)})
    device.close()
    assert told == [
        ProgramCompiled("training", 1, 1, 1, 2.0, ""),
        ProgramCompiled("training", 3, 1, 2, 4.0, "the shape of images changed from 4 x 3 x 8 x 8 to 2 x 3 x 8 x 8"),
        ProgramCompiled(
            "training", 4, 1, 1, 2.0, "no shape changed: an operation of the model depends on the numbers themselves"
        ),
    ]


class SmallDevice(CpuDevice):
    """Has room for 5 images."""

    def place_batch(self, images: torch.Tensor, labels: torch.Tensor):
        if len(images) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().place_batch(images, labels)


def test_a_batch_that_does_not_fit_is_told_with_one_that_does():
    task = make_task()
    task.device = SmallDevice()
    assert fitting_batch(task, 32, 8) == 4
    error = memory_full(task, 32, 8)
    assert isinstance(error, MemoryFullError)
    assert error.problem.startswith("A batch of 32 does not fit into the memory of")
    assert error.fix == "4 fits: --batch-size 4, or --accumulate 8 for the same steps."
    task.device.close()


def test_where_no_batch_fits_another_way_out_is_named():
    class NoRoom(CpuDevice):
        def place_batch(self, images: torch.Tensor, labels: torch.Tensor):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    task = make_task()
    task.device = NoRoom()
    assert "smaller image size" in memory_full(task, 8, 8).fix
    task.device.close()


class SlowIn(CpuDevice):
    """Computes slowly in one precision."""

    def __init__(self, precision: str):
        super().__init__()
        self.slow = precision

    def autocast(self, precision: str):
        if precision == self.slow:
            time.sleep(0.05)
        return super().autocast("fp32")


@pytest.mark.parametrize(("slow", "expected"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_the_precision_is_that_in_which_the_model_is_faster(slow: str, expected: str):
    device, model = SlowIn(slow), nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    mean = model[1].running_mean.clone()
    assert choose_precision("auto", device, model, 8) == expected
    assert torch.equal(model[1].running_mean, mean) and model[0].weight.grad is None
    assert choose_precision("fp32", device, model, 8) == "fp32"
    device.close()


def test_a_fair_lock_lets_everybody_in_though_one_takes_it_again_at_once():
    lock, entered, stop = FairLock(), [], threading.Event()

    def again_and_again() -> None:
        while not stop.is_set():
            with lock:
                time.sleep(0.001)

    def once(name: int) -> None:
        with lock:
            entered.append(name)

    greedy = threading.Thread(target=again_and_again)
    greedy.start()
    others = [threading.Thread(target=once, args=(name,)) for name in range(3)]
    for thread in others:
        thread.start()
        thread.join(5)
    stop.set()
    greedy.join(5)
    assert entered == [0, 1, 2]
