"""A run's figures in bounded memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def test_a_series_within_its_capacity_is_exact():
    series = BoundedSeries(4)
    for x in range(4):
        series.add(x, x * 10.0)
    assert (series.xs(), series.means(), series.width, series.generation) == ([0, 1, 2, 3], [0, 10, 20, 30], 1, 0)


def test_the_width_doubles_when_all_buckets_are_full():
    series = BoundedSeries(4)
    for x in range(5):
        series.add(x, float(x))
    assert (series.width, series.generation) == (2, 1)
    assert (series.xs(), series.means()) == ([1, 3, 4], [0.5, 2.5, 4.0])
    assert [(bucket.min, bucket.max) for bucket in series.buckets[:2]] == [(0, 1), (2, 3)]


def test_any_number_of_points_keeps_within_capacity_and_loses_no_count():
    series = BoundedSeries(16)
    for x in range(1000):
        series.add(x, 1.0)
    assert len(series.buckets) <= 16
    assert sum(bucket.count for bucket in series.buckets) == 1000


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_what_is_not_a_number_becomes_none(bad: float | None):
    series = BoundedSeries(4)
    series.add(1, bad)
    assert series.means() == [None]


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
    assert thin_indices([1, 2, 3], {"loss": [1.0, None, 2.0]}, 64) == [0, 1, 2]


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
