"""A run's figures in bounded memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.charts import chart_specs, compare_figure, figures
from core.config import RunConfig
from core.events import EpochEnded, Phases, StepLogged
from core.series import BoundedSeries, RunSeries, thin_indices
from core.store import Store


def step(number: int, loss: float = 1.0, images_per_s: float | None = 50.0) -> StepLogged:
    return StepLogged(number, 1, loss, 50.0, 1e-3, 32, 0.5, 0.1, images_per_s, 1)


def epoch(number: int, at_step: int, val_top1: float = 50.0, val_top5: float | None = None) -> EpochEnded:
    return EpochEnded(number, at_step, 1.0, 50.0, 0.9, val_top1, val_top5, 3.0, 40.0, Phases(), 1, 1e-3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def run_id(store: Store) -> str:
    return store.create_run(RunConfig())


def told(store: Store, run_id: str, *events: StepLogged | EpochEnded) -> None:
    store.append_events(run_id, [(0.0, event) for event in events])


def merge(held: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta["whole"]:
        held.clear()
    for part in ("steps", "epochs"):
        columns = held.setdefault(part, {})
        for name, values in delta[part]["values"].items():
            columns[name] = columns.get(name, [])[: delta[part]["from"]] + values


class OneByOne:
    """Buckets as they are meant: each point is put into the last one, and neighbours are merged when all are full."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.width, self.generation = capacity, 1, 0
        self.buckets: list[list[tuple[float, float]]] = []

    def add(self, x: float, y: float) -> None:
        if not self.buckets or len(self.buckets[-1]) == self.width:
            if len(self.buckets) == self.capacity:
                self.width, self.generation = 2 * self.width, self.generation + 1
                self.buckets = [left + right for left, right in zip(self.buckets[::2], self.buckets[1::2], strict=True)]
            self.buckets.append([])
        self.buckets[-1].append((x, y))

    def xs(self) -> list[float]:
        return [bucket[-1][0] for bucket in self.buckets]

    def means(self) -> list[float | None]:
        known = [[y for _, y in bucket if math.isfinite(y)] for bucket in self.buckets]
        return [sum(values) / len(values) if values else None for values in known]


def series_of(values: Sequence[float], capacity: int = 4) -> BoundedSeries:
    series = BoundedSeries(["y"], capacity)
    series.extend(range(len(values)), {"y": values})
    return series


def test_a_series_within_its_capacity_is_exact():
    series = series_of([0.0, 10.0, 20.0, 30.0])
    assert (series.xs(), series.means("y")) == ([0, 1, 2, 3], [0, 10, 20, 30])
    assert (series.width, series.generation) == (1, 0)


def test_the_width_doubles_when_all_buckets_are_full():
    series = series_of([0.0, 1.0, 2.0, 3.0, 4.0])
    assert (series.width, series.generation) == (2, 1)
    assert (series.xs(), series.means("y")) == ([1, 3, 4], [0.5, 2.5, 4.0])


@pytest.mark.parametrize("seed", range(20))
def test_points_in_pieces_of_any_size_come_to_the_same_as_one_by_one(seed: int):
    random = np.random.default_rng(seed)
    capacity = int(random.choice([2, 4, 16, 64]))
    series, meant = BoundedSeries(["y", "minus"], capacity), OneByOne(capacity)
    x = 0
    for size in random.integers(0, random.choice([3, 40, 3000]), 12):
        xs = x + np.cumsum(random.integers(1, 4, size))
        ys = np.where(random.random(size) < 0.1, random.choice([math.nan, math.inf, -math.inf]), random.random(size))
        series.extend(xs, {"y": ys, "minus": -ys})
        for point in zip(xs.tolist(), ys.tolist(), strict=True):
            meant.add(*point)
        x = int(xs[-1]) if size else x
        assert (series.xs(), series.width, series.generation) == (meant.xs(), meant.width, meant.generation)
        assert series.means("y") == [None if mean is None else pytest.approx(mean) for mean in meant.means()]
        assert series.means("minus") == [None if mean is None else pytest.approx(-mean) for mean in meant.means()]
        assert len(series) <= capacity
        last = [mean for mean in meant.means() if mean is not None][-1:]
        assert series.last("y") == (pytest.approx(last[0]) if last else None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_becomes_none(bad: float):
    assert series_of([bad]).means("y") == [None]


def test_deltas_put_together_are_the_whole(store: Store, run_id: str):
    series = RunSeries(store, run_id, capacity=64)
    held: dict[str, Any] = {}
    cursor = ""
    number = 0
    for size in (1, 5, 30, 28, 1, 3, 60, 200, 7):
        for _ in range(size):
            number += 1
            told(store, run_id, step(number, loss=number / 3))
        told(store, run_id, epoch(len(series.epochs["epoch"]) + 1, number))
        series.update()
        delta = json.loads(json.dumps(series.since(cursor), allow_nan=False))
        merge(held, delta)
        cursor = delta["cursor"]
        assert held == {"steps": series.steps, "epochs": series.epochs}


def test_nothing_new_is_a_small_answer(store: Store, run_id: str):
    told(store, run_id, *[step(number) for number in range(1, 2000)])
    series = RunSeries(store, run_id)
    series.update()
    delta = series.since(series.since("")["cursor"])
    assert not delta["whole"] and delta["steps"]["values"]["step"] == []
    assert len(json.dumps(delta)) < 600


@pytest.mark.parametrize("cursor", ["", "rubbish", "9.9.9|4.4", "0.0.0|x.y", "|", "0.0.0|99999.99999"])
def test_any_cursor_is_answered(store: Store, run_id: str, cursor: str):
    told(store, run_id, step(1))
    series = RunSeries(store, run_id)
    series.update()
    assert json.dumps(series.since(cursor))


def test_a_nan_loss_is_null(store: Store, run_id: str):
    told(store, run_id, step(1, loss=math.nan))
    series = RunSeries(store, run_id)
    series.update()
    assert '"loss": [null]' in json.dumps(series.since(""), allow_nan=False)


def test_a_step_gone_over_again_replaces_what_followed(store: Store, run_id: str):
    series = RunSeries(store, run_id)
    told(store, run_id, *[step(number) for number in (1, 2, 3, 4)], epoch(1, 4))
    series.update()
    cursor = series.since("")["cursor"]
    told(store, run_id, step(3, loss=9.0), epoch(1, 3))
    series.update()
    delta = series.since(cursor)
    assert delta["whole"]
    assert (series.steps["step"], series.epochs["step"]) == ([1, 2, 3], [3])


def test_what_was_told_after_the_state_that_a_run_was_taken_up_from_is_no_part_of_it(store: Store, run_id: str):
    followed = RunSeries(store, run_id, capacity=64)
    parts = (range(1, 301), range(150, 200), range(120, 500), range(500, 501))
    for place, part in enumerate(parts):
        told(store, run_id, *[step(number, loss=100.0 * place + number / 1000) for number in part])
        followed.update()
    meant = OneByOne(64)
    for place, numbers in enumerate((range(1, 120), (), range(120, 500), range(500, 501))):
        for number in numbers:
            meant.add(number, 100.0 * place + number / 1000)
    opened = RunSeries(store, run_id, capacity=64)
    opened.update()
    for series in (followed, opened):
        assert series.steps["step"] == meant.xs()
        assert series.steps["loss"] == pytest.approx(meant.means(), rel=1e-5)
    store.end_run(run_id, "stopped")
    for series in (followed, opened):
        series.update()
        thinned = dict(zip(series.steps["step"], series.steps["loss"], strict=True))
        assert list(thinned) == sorted(thinned) and {1, 500} <= thinned.keys()
        for number, loss in thinned.items():
            assert loss == pytest.approx(
                (0 if number < 120 else 300 if number == 500 else 200) + number / 1000, rel=1e-5
            )


def test_a_cursor_of_another_process_is_out_of_date(store: Store, run_id: str):
    told(store, run_id, *[step(number) for number in range(1, 100)])
    series, of_another = RunSeries(store, run_id), RunSeries(store, run_id)
    series.update()
    of_another.update()
    assert of_another.since(series.since("")["cursor"])["whole"]


def test_a_run_whose_events_are_from_before_some_fields_came_opens(store: Store, run_id: str):
    told(store, run_id, step(1), epoch(1, 1))
    newer = [f"'$.{name}'" for name in ("step_times", "left_out", "device_idle_s", "earlier", "steps")]
    with store.database.write() as db:
        db.execute(f"UPDATE events SET payload = json_remove(payload, {', '.join(newer)})")
    series = RunSeries(store, run_id)
    series.update()
    assert series.steps["loss"] == [1.0] and series.epochs["val_top1"] == [50.0]
    assert all(isinstance(values[0], int | float | None) for values in series.epochs.values())


def test_an_ended_long_run_keeps_its_extremes_and_best_epoch(store: Store, run_id: str):
    losses = [2.0 + math.sin(number / 50) for number in range(1, 9001)]
    losses[4321], losses[7000] = 99.0, -7.0
    told(store, run_id, *[step(number + 1, loss) for number, loss in enumerate(losses)])
    told(store, run_id, epoch(1, 3333, 80.0), epoch(2, 9000, 70.0))
    series = RunSeries(store, run_id)
    series.update()
    assert 99.0 not in series.steps["loss"]
    live_cursor = series.since("")["cursor"]
    store.end_run(run_id, "finished")
    series.update()
    steps = series.steps
    assert len(steps["step"]) <= 2048
    assert {99.0, -7.0} <= set(steps["loss"]) and {1, 3333, 4322, 7001, 9000} <= set(steps["step"])
    assert series.since(live_cursor)["whole"] and not series.since(series.since("")["cursor"])["whole"]
    assert series.best_epoch() is not None and series.best_epoch()["epoch"] == 1


def test_a_short_series_is_not_thinned():
    assert thin_indices([1, 2, 3], {"loss": [1.0, math.nan, 2.0]}, 64) == [0, 1, 2]


def test_top5_is_drawn_only_where_there_are_more_than_5_classes(store: Store, run_id: str):
    told(store, run_id, step(1), epoch(1, 1))
    series = RunSeries(store, run_id)
    series.update()
    assert "top5" not in figures(series)
    told(store, run_id, epoch(2, 2, val_top5=90.0))
    series.update()
    drawn = figures(series)
    assert list(drawn) == [chart.id for chart in chart_specs(True)]
    assert list(drawn["top5"].data[0].y) == [None, 90.0]


def test_a_comparison_has_a_curve_for_each_run(store: Store, run_id: str):
    told(store, run_id, step(1), epoch(1, 1))
    series = RunSeries(store, run_id)
    series.update()
    figure = compare_figure([("a", series), ("b", series)], "val_top1")
    assert [trace.name for trace in figure.data] == ["a", "b"]


def test_a_line_of_one_point_is_seen(store: Store, run_id: str):
    series = RunSeries(store, run_id)
    told(store, run_id, step(1))
    series.update()
    assert figures(series)["loss"].data[0].mode == "lines+markers"
    told(store, run_id, step(2))
    series.update()
    assert figures(series)["loss"].data[0].mode == "lines"
