"""How long a run will take: from runs like it, and from steps that were timed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from core.analysis.forecast import forecast_for, from_probe, from_runs
from core.analysis.summary import summarise
from core.config import make_config
from core.running.trainer import train_run
from core.store import Store
from tests.test_groups import tiny


def past(total_s: float, *epochs: float) -> dict:
    return {"total_s": total_s, "epochs": [{"seconds": seconds} for seconds in epochs]}


def test_what_a_run_needs_once_is_added_to_its_epochs_whatever_their_number():
    # 10 s an epoch; set-up 5 s; the first epoch takes 3 s longer
    forecast = from_runs([past(38, 13, 10, 10)], epochs=6)
    assert (forecast.epoch_s, forecast.total_s) == (10, 68)
    assert forecast.total_low_s is None and forecast.basis == "1 run like this one"


def test_other_data_stretch_an_epoch_by_their_images():
    run = past(40.0, 10, 10) | {"num_train": 100, "num_val": 50}
    for epoch in run["epochs"]:
        epoch["phases"] = {"evaluation_s": 4.0}
    # 6 s for 100 training images and 4 s for 50 validation images; 20 s once
    forecast = from_runs([run], epochs=3, size=(300, 25))
    assert (forecast.epoch_s, forecast.total_s) == (20, 80)
    assert forecast.basis == "1 run like this one on other data"


def test_bounds_are_those_of_a_new_value_by_the_t_distribution():
    totals = [20.0, 22.0, 21.0, 26.0]
    forecast = from_runs([past(total, total) for total in totals], epochs=1)
    values = np.log(totals)
    spread = values.std(ddof=1) * np.sqrt(1 + 1 / 4)
    low, high = np.exp(stats.t.interval(0.95, 3, values.mean(), spread))
    assert (forecast.total_low_s, forecast.total_high_s) == (pytest.approx(low), pytest.approx(high))
    assert low < min(totals) and high > max(totals)


def test_a_probe_counts_steps_of_training_and_evaluation():
    probe = {
        "step_s": [1.0] * 5, "evaluation_step_s": [0.5] * 3, "steps_per_epoch": 10, "evaluation_steps": 4,
        "setup_s": 7.0, "compile_s": 3.0,
    }  # fmt: skip
    forecast = from_probe(probe, epochs=2)
    assert (forecast.epoch_s, forecast.total_s) == (12, 34)
    assert (forecast.total_low_s, forecast.total_high_s) == (34, 34)


def test_a_run_is_forecast_by_runs_like_it_alone_and_the_forecast_is_kept_with_it(store: Store, pictures: Path):
    config = tiny(pictures, epochs=2)
    assert forecast_for(store, config, "cpu") is None
    first, second = store.create_run(config), store.create_run(config)
    train_run(store, first), train_run(store, second)
    assert summarise(store, first)["forecast"] is None
    told = summarise(store, second)["forecast"]
    assert told["basis"] == "1 run like this one"
    assert told["total_s"] == pytest.approx(summarise(store, first)["total_s"])
    assert forecast_for(store, config, "cpu").basis == "2 runs like this one"
    assert forecast_for(store, tiny(pictures, batch_size=4), "cpu") is None
    assert forecast_for(store, config, "xla") is None
    # the same work on data whose size another run has told
    more = tiny(pictures, epochs=2, val_percent=50)
    assert forecast_for(store, more, "cpu") is None
    train_run(store, store.create_run(tiny(pictures, val_percent=50, batch_size=4)))
    assert forecast_for(store, more, "cpu").basis == "2 runs like this one on other data"


def test_a_probe_times_a_few_steps_and_leaves_no_run_behind(store: Store):
    config = make_config("quick", device="cpu", threads=1, epochs=2)
    run_id = store.create_run(config, purpose="probe")
    assert train_run(store, run_id) == "finished", summarise(store, run_id)["reason"]
    assert store.list_runs() == [] and not (store.run_folder(run_id) / "last.safetensors").exists()
    probe = summarise(store, run_id)["probe"]
    assert (probe["steps_per_epoch"], probe["evaluation_steps"]) == (32, 13)
    assert len(probe["step_s"]) >= 5 and len(probe["evaluation_step_s"]) == 3
    forecast = forecast_for(store, config, "cpu")
    assert forecast.basis.endswith("steps that were timed") and forecast.total_low_s <= forecast.total_s
    # what it says of an epoch is of the size of what the steps took
    assert forecast.epoch_s == pytest.approx(32 * sum(probe["step_s"]) / len(probe["step_s"]), rel=1.0)
