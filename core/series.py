"""A run's figures in bounded memory, and what is new in them since a cursor.

The charts of a live run see at most 2,048 buckets, however long it trains; when the run has ended, longer
series are thinned from the raw figures instead, and extremes are kept.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from core.events import EpochEnded
from core.marks import NO_MARKS, draw_marks
from core.storage.records import ENDED_STATES, StoredEvent
from core.storage.step_blocks import Columns
from core.store import Store
from core.words import stage_in_words, tweak_in_words

CAPACITY = 2048
_KINDS = ("EpochEnded", "RunContinued", "StageBegan", "Tweaked")
STEP_FIELDS = {"loss": "loss", "top1": "top1", "lr": "lr", "throughput": "images_per_s"}
_NO_CURVE = ("phases", "compile_count", "step_times", "left_out", "device_idle_s", "earlier")
EPOCH_FIELDS = tuple(item.name for item in fields(EpochEnded) if item.name not in _NO_CURVE)
_SHARES = {"loss": 0.45, "top1": 0.25, "throughput": 0.15, "lr": 0.1}

Number = float | int | None


class BoundedSeries:
    """Points with several values each, in at most `capacity` buckets of equal width; it doubles when all are full.

    A bucket stands at the x of its last point, and has the mean of the points that have a value, column by column.

    Args:
        names: of the columns.
        capacity: the most buckets.
    """

    def __init__(self, names: Iterable[str], capacity: int = CAPACITY) -> None:
        self.names = tuple(names)
        self.capacity = capacity
        self.width = 1
        self.generation = 0
        self._x = np.zeros(0)
        # of each bucket: its points; for each column how many have a value; for each column their sum
        self._table = np.zeros((1 + 2 * len(self.names), 0))

    def __len__(self) -> int:
        return len(self._x)

    def extend(self, xs: ArrayLike, columns: Mapping[str, ArrayLike]) -> None:
        """Add points, as if one by one; NaN and infinity count as a point without a value.

        Args:
            xs: growing, and above what was added before.
            columns: as many values for each name.
        """
        x = np.asarray(xs, dtype=np.float64)
        if not x.size:
            return
        num_held = int(self._table[0].sum())
        while (num_held + x.size - 1) // self.width >= self.capacity:
            self.width *= 2
            self.generation += 1
        # the first of them fill up the last bucket
        starts = np.unique(np.append(0, np.arange(-num_held % self.width, x.size, self.width)))
        ends = np.append(starts[1:], x.size)
        new = [ends - starts]
        values = [np.asarray(columns[name], dtype=np.float64) for name in self.names]
        known = [np.isfinite(y) for y in values]
        new += [np.add.reduceat(is_known, starts, dtype=np.float64) for is_known in known]
        new += [np.add.reduceat(np.where(is_known, y, 0.0), starts) for y, is_known in zip(values, known, strict=True)]
        self._x = np.append(self._x, x[ends - 1])
        self._table = np.append(self._table, np.stack(new), axis=1)
        self._merge()

    def xs(self, start: int = 0) -> list[int]:
        """Where the buckets stand, from the bucket `start` on."""
        return [int(x) for x in self._x[start:]]

    def means(self, name: str, start: int = 0) -> list[float | None]:
        """The mean of each bucket from `start` on, None where no point of it has a value."""
        row = 1 + self.names.index(name)
        counts, sums = self._table[row, start:].tolist(), self._table[row + len(self.names), start:].tolist()
        return [total / count if count else None for total, count in zip(sums, counts, strict=True)]

    def last(self, name: str) -> float | None:
        """The mean of the newest bucket that has one."""
        return next((mean for mean in reversed(self.means(name)) if mean is not None), None)

    def _merge(self) -> None:
        """Make one of the buckets that lie within one bucket of the width."""
        points = self._table[0]
        starts = np.flatnonzero(np.diff((np.cumsum(points) - points) // self.width, prepend=-1))
        self._x = self._x[np.append(starts[1:], len(points)) - 1]
        self._table = np.add.reduceat(self._table, starts, axis=1)


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
        self._state = ""
        self._restart()

    @property
    def state(self) -> str:
        """The run's state at the last `update`."""
        return self._state

    @property
    def has_top5(self) -> bool:
        return any(value is not None for value in self.epochs["val_top5"])

    @property
    def marks(self) -> list[dict[str, Any]]:
        """What was changed while the run went on, and where it was taken up again: `step` and `text` of each."""
        with self._lock:
            return list(self._marks)

    def drawn_marks(self) -> dict[str, dict[str, Any]]:
        """`shapes` and `annotations` of plotly's layout, in a chart over `step` and in one over `epoch`."""
        with self._lock:
            step, epoch = self._last_step, self._epochs["epoch"][-1:]
            end = step if math.isfinite(step) else 0.0
            per_epoch = self._epochs["step"][-1] / epoch[0] if epoch else None
            by_epoch = draw_marks(self._marks, epoch[0] + 0.5, per_epoch) if epoch else NO_MARKS
            return {"step": draw_marks(self._marks, end), "epoch": by_epoch}

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
            is_all = not self._step_cursor
            steps, events = self._news()
            is_new = bool(events) or bool(steps["id"].size)
            if (is_new and self._thinned is not None) or _goes_back(steps, self._last_step):
                self._restart()
                is_all = True
                steps, events = self._news()
            steps = that_count(steps)
            self._take_steps(steps)
            self._take(events)
            self._state = state
            if state in ENDED_STATES and self._thinned is None and self._bounded.width > 1:
                self._thin(steps if is_all else that_count(self._store.columns(self.run_id, "StepLogged")))

    def since(self, cursor: str = "") -> dict[str, Any]:
        """What is new since `cursor`, ready for JSON; everything where the cursor is empty or out of date.

        Returns:
            `cursor` for the next call, `whole` (forget what was held), `state`, and for `steps` and `epochs`
            `from` (the index that the sent `values` begin at; what was held from there on is replaced), and all
            `marks` as they are drawn.
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
            num_steps = len(self._bounded)
            # the last bucket of a live run still grows, so it is sent again
            is_open = self._thinned is None and bool(num_steps) and self._bounded.width > 1
            next_step = num_steps - is_open if self._thinned is None else len(self._thinned["step"])
            return {
                "cursor": f"{generation}|{next_step}.{len(self._epochs['epoch'])}",
                "whole": is_whole,
                "state": self._state,
                "steps": {"from": step_from, "values": steps},
                "epochs": {"from": epoch_from, "values": epochs},
                "marks": self.drawn_marks(),
            }

    def best_epoch(self) -> dict[str, Any] | None:
        """The epoch with the highest validation top-1 (the first of equals); None before the first."""
        with self._lock:
            index = best_index(self._epochs["val_top1"])
            return None if index is None else {name: values[index] for name, values in self._epochs.items()}

    def last(self, name: str) -> float | None:
        """The newest value of the step series `name`, None where it has none."""
        with self._lock:
            return self._bounded.last(name)

    def _restart(self) -> None:
        self._renew()
        self._cursor = self._step_cursor = 0
        self._last_step = -math.inf
        self._bounded = BoundedSeries(STEP_FIELDS, self._capacity)
        self._epochs: dict[str, list[Any]] = {name: [] for name in EPOCH_FIELDS}
        self._marks: list[dict[str, Any]] = []
        self._thinned: dict[str, list[Any]] | None = None

    def _renew(self) -> None:
        """No cursor of before is good any more, nor one that another process gave."""
        self._token = secrets.token_hex(4)

    def _generation(self) -> str:
        return f"{self._token}.{self._bounded.generation}.{int(self._thinned is not None)}"

    def _news(self) -> tuple[Columns, list[StoredEvent]]:
        steps = self._store.columns(self.run_id, "StepLogged", after=self._step_cursor)
        return steps, self._store.events(self.run_id, after=self._cursor, kinds=_KINDS)

    def _take_steps(self, steps: Columns) -> None:
        if steps["id"].size:
            # the newest one always counts
            self._step_cursor, self._last_step = int(steps["id"][-1]), float(steps["step"][-1])
            self._bounded.extend(steps["step"], {name: steps[source] for name, source in STEP_FIELDS.items()})

    def _take(self, events: Sequence[StoredEvent]) -> None:
        for event in events:
            self._cursor = event.id
            payload = event.payload
            if event.kind == "Tweaked":
                self._marks.append(
                    {"step": int(payload["step"]), "text": tweak_in_words(payload["what"], payload["after"])}
                )
            elif event.kind == "StageBegan":
                self._marks.append({"step": int(payload["step"]), "text": stage_in_words(payload["changes"])})
            elif event.kind == "RunContinued":
                # what was changed after that step was undone with it
                self._marks = [mark for mark in self._marks if mark["step"] <= payload["step"]]
                self._marks.append({"step": int(payload["step"]), "text": "taken up"})
            else:
                self._take_epoch(payload)

    def _take_epoch(self, payload: dict[str, Any]) -> None:
        epochs = self._epochs["epoch"]
        if epochs and epochs[-1] >= payload["epoch"]:
            kept = sum(epoch < payload["epoch"] for epoch in epochs)
            for values in self._epochs.values():
                del values[kept:]
            self._renew()
        for name in EPOCH_FIELDS:
            self._epochs[name].append(payload[name])

    def _columns(self, start: int) -> dict[str, list[Any]]:
        means = {name: [_short(mean) for mean in self._bounded.means(name, start)] for name in STEP_FIELDS}
        return {"step": self._bounded.xs(start), **means}

    def _thin(self, steps: Columns) -> None:
        columns = {name: steps[source] for name, source in STEP_FIELDS.items()}
        best = self.best_epoch()
        keep = thin_indices(steps["step"], columns, self._capacity, also=[int(best["step"])] if best else [])
        self._thinned = {"step": steps["step"][keep].astype(np.int64).tolist()}
        for name, values in columns.items():
            self._thinned[name] = [_short(finite(value)) for value in values[keep].tolist()]


def that_count(steps: Columns) -> Columns:
    """The rows that count, of logged steps in the order in which they came.

    One that is followed by the same step or an earlier one was undone when the run was taken up again.
    """
    numbers = steps["step"]
    lowest_after = np.append(np.minimum.accumulate(numbers[::-1])[::-1][1:], np.inf)
    counts = numbers < lowest_after
    return steps if counts.all() else {name: column[counts] for name, column in steps.items()}


def thin_indices(
    xs: ArrayLike, columns: Mapping[str, ArrayLike], capacity: int, *, also: Sequence[int] = ()
) -> list[int]:
    """Which points to keep so that all columns keep their shape: MinMaxLTTB, first, last, and all extremes.

    Args:
        xs: growing.
        columns: name of a step series to its values, as long as `xs`; NaN where there is none.
        capacity: about the most points to keep; 64 or more.
        also: x values whose point is kept in any case.
    """
    from tsdownsample import MinMaxLTTBDownsampler

    x = np.asarray(xs, dtype=np.float64)
    if len(x) <= capacity:
        return list(range(len(x)))
    keep = {0, len(x) - 1}
    keep.update(int(index) for index in np.searchsorted(x, list(also)) if index < len(x))
    for name, values in columns.items():
        y = np.asarray(values, dtype=np.float64)
        usable = np.flatnonzero(np.isfinite(y))
        if not usable.size:
            continue
        y = y[usable]
        keep.update((int(usable[y.argmin()]), int(usable[y.argmax()])))
        num_out = max(int(capacity * _SHARES.get(name, 0.1)) // 2 * 2, 4)
        if usable.size > num_out:
            downsampler = MinMaxLTTBDownsampler()  # type: ignore[no-untyped-call]
            chosen = downsampler.downsample(x[usable], y, n_out=num_out)
            keep.update(usable[chosen].tolist())
        else:
            keep.update(usable.tolist())
    return sorted(keep)


def best_index(scores: Sequence[Number]) -> int | None:
    """Where the highest score stands, the first of equals; None where none is known."""
    known = [index for index, score in enumerate(scores) if score is not None]
    return max(known, key=lambda index: (scores[index], -index), default=None)


def finite(value: Number) -> Number:
    """The number, or None where it is NaN or infinite: JSON has neither."""
    return value if value is not None and math.isfinite(value) else None


def _goes_back(steps: Columns, last_step: float) -> bool:
    """Whether one of these rows is of a step that was taken already: a resumed run goes over some again."""
    return bool(steps["step"].size) and bool(steps["step"].min() <= last_step)


def _short(value: Number) -> Number:
    return None if value is None else float(f"{value:.6g}")


def _tail(columns: dict[str, list[Any]], start: int) -> dict[str, list[Any]]:
    return {name: values[start:] for name, values in columns.items()}


def _two_numbers(text: str) -> tuple[int, int]:
    left, _, right = text.partition(".")
    return (int(left), int(right)) if left.isdecimal() and right.isdecimal() else (0, 0)
