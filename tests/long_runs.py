"""Homes with very long runs and very many of them, made by SQL where telling event by event would take minutes."""

from __future__ import annotations

import gc
import time

from core.config import make_config
from core.events import EpochEnded, Event, MachineSampled, Phases, RunEnded, RunPrepared, StepLogged
from core.store import Store

EPOCHS = 20

_STEPS = """
WITH RECURSIVE number (n) AS (SELECT :first UNION ALL SELECT n + 1 FROM number WHERE n < :last)
INSERT INTO events (run_id, kind, at, payload) SELECT :run_id, 'StepLogged', 1e9 + n, json_object(
    'step', n, 'epoch', :epoch, 'loss', 1 + (n * 7919 % 1000) / 1000.0, 'top1', 50 + n % 40 / 2.0,
    'lr', 0.001 / (1 + n / 1000.0), 'images', 32, 'seconds', 0.5, 'data_wait_s', 0.1, 'images_per_s', 60.0 + n % 7,
    'compiles', 0, 'steps', 1, 'left_out', '') FROM number
"""


def prepared() -> RunPrepared:
    return RunPrepared("cpu", "A CPU", ["cat", "dog"], 80, 20, 4, 1000, 10, 64, {"torch": "2"}, {"data_s": 1.0})


def step(number: int, epoch: int = 1) -> StepLogged:
    return StepLogged(number, epoch, 1 + number % 10 / 10, 50.0, 1e-3, 32, 0.5, 0.1, 60.0, 0)


def epoch_ended(number: int, at_step: int) -> EpochEnded:
    times = {str(900 + place): 12 for place in range(40)}
    phases = Phases(compute_s=2.5, other_s=0.5)
    return EpochEnded(number, at_step, 1.0, 50.0, 0.9, 40.0 + number, None, 3.0, 40.0, phases, 0, 1e-3, times)


def ended() -> RunEnded:
    return RunEnded("finished", 2000.0, Phases(setup_s=1.0, compute_s=1999.0), 0, 0.0)


def tell(store: Store, run_id: str, *events: Event, at: float = 1e9) -> None:
    store.append_events(run_id, [(at, event) for event in events])


def add_steps(store: Store, run_id: str, first: int, last: int, epoch: int = 1) -> None:
    """Logged steps from `first` to `last`, packed by the store as if they had been appended."""
    with store.database.write() as db:
        db.execute(_STEPS, {"run_id": run_id, "first": first, "last": last, "epoch": epoch})
        store._blocks.follow(db, run_id, ["StepLogged"] * (last - first + 1))


def begin(store: Store, **changes: object) -> str:
    """A run that trains on the CPU, in this process."""
    run_id = store.create_run(make_config("quick", epochs=EPOCHS, device="cpu", **changes))
    store.claim(run_id, "cpu")
    tell(store, run_id, prepared())
    store.beat(run_id, {"phase": "training", "epoch": 1, "epochs": EPOCHS, "step": 1, "steps": 100, "progress": 0.5})
    return run_id


def long_run(store: Store, steps: int, *, samples: int = 0) -> str:
    """A run that goes on, with so many logged steps in 20 epochs, and so many looks at the machine in each."""
    run_id = begin(store)
    looks = [MachineSampled(cpu_percent=50.0 + look % 7, own_cpu_percent=40.0) for look in range(samples)]
    for epoch in range(1, EPOCHS + 1):
        last = epoch * steps // EPOCHS
        add_steps(store, run_id, (epoch - 1) * steps // EPOCHS + 1, last, epoch)
        tell(store, run_id, *looks, epoch_ended(epoch, last))
    return run_id


def many_runs(store: Store, count: int, *, steps: int = 100, samples: int = 20) -> list[str]:
    """So many finished runs of 20 epochs, with so many logged steps and looks at the machine each."""
    first = long_run(store, steps, samples=samples // EPOCHS)
    tell(store, first, ended())
    store.end_run(first, "finished")
    others = [store.create_run(make_config("quick", lr=1e-3 * (1 + number / count))) for number in range(1, count)]
    with store.database.write() as db:
        for run_id in others:
            db.execute(
                "INSERT INTO events (run_id, kind, at, payload) "
                "SELECT ?, kind, at, payload FROM events WHERE run_id = ? ORDER BY id",
                (run_id, first),
            )
            store._blocks.finish(db, run_id)
        db.execute(
            "UPDATE runs SET state = 'finished', device_kind = 'cpu', started = created, ended = created + 2000 "
            "WHERE state = 'queued'"
        )
    return [first, *others]


class ServerTime:
    """Seconds of processor that the block took in this process: as on a machine that has nothing else to do.

    A collection of garbage falls into it now and then, and takes as long as there are objects to walk through. What
    tests before left in this process is kept out of it, as the dashboard keeps its libraries out (`ui.registry`).
    """

    def __enter__(self) -> ServerTime:
        gc.collect()
        gc.freeze()
        self.seconds = 0.0
        self._began = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self._began
        gc.unfreeze()
