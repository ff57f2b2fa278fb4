"""What a run came to, from events written by hand."""

from __future__ import annotations

import csv
import io
import json
import time

import pytest

from core.analysis.summary import export_csv, export_json, list_rows, summarise
from core.config import make_config
from core.errors import StoreError
from core.events import EpochEnded, Event, Phases, RunEnded, RunPrepared, StepLogged
from core.store import Store


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    yield store
    store.close()


def prepared() -> RunPrepared:
    return RunPrepared("cpu", "A CPU", ["cat", "dog"], 80, 20, 4, 1000, 10, 64, {"torch": "2"}, {"data_s": 1.0})


def epoch(number: int, top1: float, compute_s: float = 2.0) -> EpochEnded:
    phases = Phases(compute_s=compute_s, compile_s=0.5)
    return EpochEnded(number, 4 * number, 0.7, 60.0, 0.6, top1, None, 2.5, 32.0, phases, 1, 1e-3)


def ended(state: str = "finished", **more: str) -> RunEnded:
    return RunEnded(state, 10.0, Phases(setup_s=1, compute_s=8, other_s=1), 2, 1.5, **more)


def start(store: Store, *events: Event, state: str | None = None) -> str:
    run_id = store.create_run(make_config("quick"))
    store.claim(run_id, "cpu")
    store.append_events(run_id, [(time.time(), event) for event in events])
    if state:
        store.end_run(run_id, state)
    return run_id


def test_a_finished_run_tells_its_promised_keys(store):
    run_id = start(store, prepared(), epoch(1, 50.0), epoch(2, 75.0), epoch(3, 75.0), ended(), state="finished")
    summary = summarise(store, run_id)
    assert summary["run_id"] == run_id and summary["state"] == "finished"
    assert summary["config"]["model"] == "tf_efficientnet_lite0"
    assert summary["device"] == {"kind": "cpu", "name": "A CPU"}
    assert [item["val_top1"] for item in summary["epochs"]] == [50.0, 75.0, 75.0]
    assert summary["best"] == {"epoch": 2, "val_top1": 75.0}
    assert summary["total_s"] == sum(summary["phases"].values()) == 10.0
    assert len(summary["phases"]) == 8
    assert summary["compile"] == {"count": 2, "seconds": 1.5}
    assert (summary["num_train"], summary["num_val"], summary["classes"]) == (80, 20, ["cat", "dog"])


def test_a_queued_run_has_empty_figures(store):
    summary = summarise(store, store.create_run(make_config()))
    assert summary["epochs"] == [] and summary["best"] is None and summary["total_s"] is None
    assert summary["device"]["kind"] == "auto"


def test_an_interrupted_run_sums_its_epochs(store):
    run_id = start(store, prepared(), epoch(1, 50.0), epoch(2, 60.0), state="interrupted")
    summary = summarise(store, run_id)
    assert summary["phases"]["compute_s"] == 4.0
    assert summary["compile"] == {"count": 2, "seconds": 1.0}
    record = store.get_run(run_id)
    assert summary["total_s"] == pytest.approx(record.ended - record.started)


def test_a_failed_run_says_why(store):
    run_id = start(store, ended("failed", reason="No images.", fix="Add some."), state="failed")
    assert (summarise(store, run_id)["reason"], summarise(store, run_id)["fix"]) == ("No images.", "Add some.")


def test_a_resumed_run_sums_its_parts_and_keeps_the_later_epoch(store):
    run_id = start(
        store, prepared(), epoch(1, 50.0), ended("stopped"), prepared(), epoch(1, 55.0), ended(), state="finished"
    )
    summary = summarise(store, run_id)
    assert [item["val_top1"] for item in summary["epochs"]] == [55.0]
    assert summary["phases"]["compute_s"] == 16.0 and summary["total_s"] == 20.0


def test_rows_come_newest_first(store):
    first, second = start(store, prepared(), epoch(1, 50.0), ended(), state="finished"), store.create_run(make_config())
    rows = list_rows(store)
    assert [row["run_id"] for row in rows] == [second, first]
    assert rows[1]["best_val_top1"] == 50.0 and rows[1]["val_top1"] == [50.0] and rows[1]["device"] == "cpu"


def test_exports_hold_steps_and_epochs_without_nan(store):
    step = StepLogged(1, 1, float("nan"), 10.0, 1e-3, 32, 0.5, 0.1, None, 1)
    run_id = start(store, prepared(), step, epoch(1, 50.0), ended(), state="finished")
    rows = list(csv.DictReader(io.StringIO(export_csv(store, run_id))))
    assert [row["row"] for row in rows] == ["step", "epoch"]
    assert rows[0]["train_loss"] == "" and rows[1]["val_top1"] == "50.0" and rows[1]["compute_s"] == "2.0"
    exported = json.loads(export_json(store, run_id))
    assert exported["steps"][0]["loss"] is None and exported["epochs"][0]["epoch"] == 1


@pytest.mark.parametrize("ask", [summarise, export_csv, export_json])
def test_an_unknown_run_is_an_error_with_a_fix(store, ask):
    with pytest.raises(StoreError, match="nothing-like-it"):
        ask(store, "nothing-like-it")
