"""A run's figures in bounded memory, and what is new in them since a cursor.

The charts of a live run see at most 2,048 buckets, however long it trains; when the run has ended, longer
series are thinned from the raw figures instead, and extremes are kept.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from core.events import EpochEnded
from core.records import ENDED_STATES, StoredEvent
from core.store import Store
from core.words import tweak_in_words

CAPACITY = 2048
_KINDS = ("StepLogged", "EpochEnded", "Tweaked")
STEP_FIELDS = {"loss": "loss", "top1": "top1", "lr": "lr", "throughput": "images_per_s"}
_NO_CURVE = ("phases", "compile_count", "step_times", "left_out", "device_idle_s")
EPOCH_FIELDS = tuple(item.name for item in fields(EpochEnded) if item.name not in _NO_CURVE)
_SHARES = {"loss": 0.45, "top1": 0.25, "throughput": 0.15, "lr": 0.1}

Number = float | int | None


@dataclass
class Bucket:
    """Neighbouring points: `points` of them, of which `count` have a finite value; `x` is the last one's."""

    x: float
    points: int = 0
    count: int = 0
    sum: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def add(self, x: float, y: float | None) -> None:
        self.x = x
        self.points += 1
        if y is not None:
            self.count += 1
            self.sum += y
            self.min, self.max = min(self.min, y), max(self.max, y)

    def absorb(self, other: Bucket) -> None:
        self.x = other.x
        self.points += other.points
        self.count += other.count
        self.sum += other.sum
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)


class BoundedSeries:
    """Points in at most `capacity` buckets of equal width; the width doubles when all are full.

    Args:
        capacity: the most buckets, an even number.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        assert capacity >= 2 and capacity % 2 == 0, capacity
        self.capacity = capacity
        self.width = 1
        self.generation = 0
        self.buckets: list[Bucket] = []

    def add(self, x: float, y: float | None) -> None:
        """Add a point; NaN, infinity and None count as a point without a value."""
        value = finite(y)
        if not self.buckets or self.buckets[-1].points >= self.width:
            if len(self.buckets) == self.capacity:
                self._double()
            self.buckets.append(Bucket(x))
        self.buckets[-1].add(x, value)

    def cut(self, x: float) -> None:
        """Drop the buckets that reach `x` or go beyond it."""
        kept = [bucket for bucket in self.buckets if bucket.x < x]
        if len(kept) < len(self.buckets):
            self.buckets = kept
            self.generation += 1

    def xs(self) -> list[float]:
        return [bucket.x for bucket in self.buckets]

    def means(self) -> list[float | None]:
        return [bucket.mean for bucket in self.buckets]

    def _double(self) -> None:
        for left, right in zip(self.buckets[::2], self.buckets[1::2], strict=True):
            left.absorb(right)
        self.buckets = self.buckets[::2]
        self.width *= 2
        self.generation += 1


class RunSeries:
    """A run's figures, read from its events as they come; may be shared by threads.

    Args:
        store: where the events lie.
        run_id: the run; it need not exist before `update`.
        capacity: the most points of a step series.
    """

    def __init__(self, store: Store, run_id: str, capacity: int = CAPACITY) -> None:
        self.run_id = run_id
        self._store = store
        self._capacity = capacity
        self._lock = threading.RLock()
        self._restarts = 0
        self._state = ""
        self._reset()

    @property
    def state(self) -> str:
        """The run's state at the last `update`."""
        return self._state

    @property
    def has_top5(self) -> bool:
        return any(value is not None for value in self.epochs["val_top5"])

    @property
    def marks(self) -> list[dict[str, Any]]:
        """What was changed while the run went on: `step` and `text` of each."""
        with self._lock:
            return list(self._marks)

    @property
    def steps(self) -> dict[str, list[Any]]:
        """`step`, `loss`, `top1` (percent), `lr`, `throughput` (images/s) as lists of one length."""
        with self._lock:
            if self._thinned is not None:
                return self._thinned
            return self._columns(0)

    @property
    def epochs(self) -> dict[str, list[Any]]:
        """The fields of `EpochEnded` that are numbers, as lists of one length."""
        with self._lock:
            return {name: list(values) for name, values in self._epochs.items()}

    def update(self) -> None:
        """Read what the run told since the last call.

        Raises:
            StoreError: there is no such run.
        """
        with self._lock:
            # the state before the events: what is told after it is read by the next call
            state = self._store.get_run(self.run_id).state
            if self._thinned is not None and state not in ENDED_STATES:
                self._restart()
            events = self._store.events(self.run_id, after=self._cursor, kinds=_KINDS)
            if events and self._thinned is not None:
                self._restart()
                events = self._store.events(self.run_id, kinds=_KINDS)
            self._take(events)
            self._state = state
            if state in ENDED_STATES and self._thinned is None and self._bounded["loss"].width > 1:
                self._thin()

    def since(self, cursor: str = "") -> dict[str, Any]:
        """What is new since `cursor`, ready for JSON; everything where the cursor is empty or out of date.

        Returns:
            `cursor` for the next call, `whole` (forget what was held), `state`, and for `steps` and `epochs`
            `from` (the index that the sent `values` begin at; what was held from there on is replaced), and all
            `marks`.
        """
        with self._lock:
            generation = self._generation()
            known, _, place = cursor.rpartition("|")
            step_from, epoch_from = _two_numbers(place)
            is_whole = known != generation
            if is_whole:
                step_from = epoch_from = 0
            steps = self._columns(step_from) if self._thinned is None else _tail(self._thinned, step_from)
            epochs = _tail(self._epochs, epoch_from)
            num_steps = len(self._bounded["loss"].buckets)
            # the last bucket of a live run still grows, so it is sent again
            is_open = self._thinned is None and bool(num_steps) and self._bounded["loss"].width > 1
            next_step = num_steps - is_open if self._thinned is None else len(self._thinned["step"])
            return {
                "cursor": f"{generation}|{next_step}.{len(self._epochs['epoch'])}",
                "whole": is_whole,
                "state": self._state,
                "steps": {"from": step_from, "values": steps},
                "epochs": {"from": epoch_from, "values": epochs},
                "marks": list(self._marks),
            }

    def best_epoch(self) -> dict[str, Any] | None:
        """The epoch with the highest validation top-1 (the first of equals); None before the first."""
        with self._lock:
            index = best_index(self._epochs["val_top1"])
            return None if index is None else {name: values[index] for name, values in self._epochs.items()}

    def last(self, name: str) -> float | None:
        """The newest value of the step series `name`, None where it has none."""
        with self._lock:
            for bucket in reversed(self._bounded[name].buckets):
                if bucket.mean is not None:
                    return bucket.mean
            return None

    def _reset(self) -> None:
        self._cursor = 0
        self._bounded = {name: BoundedSeries(self._capacity) for name in STEP_FIELDS}
        self._epochs: dict[str, list[Any]] = {name: [] for name in EPOCH_FIELDS}
        self._marks: list[dict[str, Any]] = []
        self._thinned: dict[str, list[Any]] | None = None

    def _restart(self) -> None:
        self._reset()
        self._restarts += 1

    def _generation(self) -> str:
        return f"{self._restarts}.{self._bounded['loss'].generation}.{int(self._thinned is not None)}"

    def _take(self, events: Sequence[StoredEvent]) -> None:
        for event in events:
            self._cursor = event.id
            payload = event.payload
            if event.kind == "StepLogged":
                step = int(payload["step"])
                for name, source in STEP_FIELDS.items():
                    series = self._bounded[name]
                    # a resumed run goes over some steps again
                    if series.buckets and series.buckets[-1].x >= step:
                        series.cut(step)
                    series.add(step, payload[source])
            elif event.kind == "Tweaked":
                self._marks.append(
                    {"step": int(payload["step"]), "text": tweak_in_words(payload["what"], payload["after"])}
                )
            else:
                self._take_epoch(payload)

    def _take_epoch(self, payload: dict[str, Any]) -> None:
        epochs = self._epochs["epoch"]
        if epochs and epochs[-1] >= payload["epoch"]:
            kept = sum(epoch < payload["epoch"] for epoch in epochs)
            for values in self._epochs.values():
                del values[kept:]
            self._restarts += 1
        for name in EPOCH_FIELDS:
            self._epochs[name].append(payload[name])

    def _columns(self, start: int) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {"step": [bucket.x for bucket in self._bounded["loss"].buckets[start:]]}
        for name, series in self._bounded.items():
            columns[name] = [_short(bucket.mean) for bucket in series.buckets[start:]]
        return columns

    def _thin(self) -> None:
        rows: dict[int, list[Number]] = {}
        for event in self._store.events(self.run_id, kinds=("StepLogged",)):
            rows[int(event.payload["step"])] = [event.payload[source] for source in STEP_FIELDS.values()]
        order = sorted(rows)
        columns = {name: [rows[step][place] for step in order] for place, name in enumerate(STEP_FIELDS)}
        best = self.best_epoch()
        keep = thin_indices(order, columns, self._capacity, also=[int(best["step"])] if best else [])
        self._thinned = {"step": [order[index] for index in keep]}
        for name, values in columns.items():
            self._thinned[name] = [_short(values[index]) for index in keep]


def thin_indices(
    xs: Sequence[int], columns: dict[str, list[Number]], capacity: int, *, also: Sequence[int] = ()
) -> list[int]:
    """Which points to keep so that all columns keep their shape: MinMaxLTTB, first, last, and all extremes.

    Args:
        xs: growing.
        columns: name of a step series to its values, as long as `xs`.
        capacity: about the most points to keep; 64 or more.
        also: x values whose point is kept in any case.
    """
    from tsdownsample import MinMaxLTTBDownsampler

    if len(xs) <= capacity:
        return list(range(len(xs)))
    keep = {0, len(xs) - 1}
    keep.update(int(index) for index in np.searchsorted(np.asarray(xs), list(also)) if index < len(xs))
    for name, values in columns.items():
        usable = np.array([index for index, value in enumerate(values) if value is not None], dtype=np.int64)
        if not usable.size:
            continue
        y = np.array([values[index] for index in usable], dtype=np.float64)
        keep.update((int(usable[y.argmin()]), int(usable[y.argmax()])))
        num_out = max(int(capacity * _SHARES.get(name, 0.1)) // 2 * 2, 4)
        if usable.size > num_out:
            downsampler = MinMaxLTTBDownsampler()  # type: ignore[no-untyped-call]
            chosen = downsampler.downsample(np.asarray(xs, dtype=np.float64)[usable], y, n_out=num_out)
            keep.update(int(index) for index in usable[chosen])
        else:
            keep.update(int(index) for index in usable)
    return sorted(keep)


def best_index(scores: Sequence[Number]) -> int | None:
    """Where the highest score stands, the first of equals; None where none is known."""
    known = [index for index, score in enumerate(scores) if score is not None]
    return max(known, key=lambda index: (scores[index], -index), default=None)


def finite(value: Number) -> Number:
    """The number, or None where it is NaN or infinite: JSON has neither."""
    return value if value is not None and math.isfinite(value) else None


def _short(value: Number) -> Number:
    return None if value is None else float(f"{value:.6g}")


def _tail(columns: dict[str, list[Any]], start: int) -> dict[str, list[Any]]:
    return {name: values[start:] for name, values in columns.items()}


def _two_numbers(text: str) -> tuple[int, int]:
    left, _, right = text.partition(".")
    return (int(left), int(right)) if left.isdecimal() and right.isdecimal() else (0, 0)
