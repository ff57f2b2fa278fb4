"""Changing, pausing and stopping a run while it goes on: in the loop, through the store, from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from core.analysis.summary import summarise
from core.charts import chart_specs, figures
from core.commands.control import control_command
from core.config import make_config
from core.control import Wish, check_wish
from core.errors import ConfigError, StoreError
from core.events import EpochEnded, Paused, Resumed, StepLogged, Tweaked, TweakRefused
from core.running.pulse import PULSE_S
from core.running.trainer import train_run
from core.schedule import lr_at
from core.series import RunSeries
from core.store import Store
from tests.test_groups import tiny
from tests.tiny import NoWishes, losses, make_task, run

ROOT = Path(__file__).parents[1]


class Asks(NoWishes):
    """Wishes by the number of the look for them, which comes once a step."""

    def __init__(self, **by_look):
        self.by_look, self.looks, self.pause_after, self.waited = by_look, 0, 0, 0

    def wishes(self) -> list[Wish]:
        self.looks += 1
        return [Wish(*wish) for wish in self.by_look.get(f"at_{self.looks}", [])]

    def should_pause(self) -> bool:
        return self.looks == self.pause_after

    def wait_while_paused(self) -> None:
        self.waited += 1


def of_kind(events, kind) -> list:
    return [event for event in events if isinstance(event, kind)]


def test_a_new_learning_rate_is_that_of_the_step_and_the_schedule_goes_on_in_proportion():
    task = make_task(schedule="cosine", lr=0.1, epochs=2)
    _, _, events = run(task, Asks(at_3=[("lr", 0.01)]))
    config = make_config(schedule="cosine", lr=0.1, epochs=2)
    planned = [lr_at(config, step, 3) for step in range(1, 7)]
    factor = 0.01 / planned[2]
    rates = [event.lr for event in of_kind(events, StepLogged)]
    assert rates == pytest.approx(planned[:2] + [rate * factor for rate in planned[2:]])
    (tweak,) = of_kind(events, Tweaked)
    assert (tweak.step, tweak.epoch, tweak.what) == (3, 1, "lr")
    assert (tweak.before, tweak.after) == (pytest.approx(planned[2]), pytest.approx(0.01))


def test_a_factor_multiplies_the_schedule_and_a_second_one_takes_its_place():
    _, _, events = run(make_task(lr=0.1, epochs=2), Asks(at_2=[("lr_factor", 0.5)], at_5=[("lr_factor", 2)]))
    assert [event.lr for event in of_kind(events, StepLogged)] == pytest.approx([0.1, 0.05, 0.05, 0.05, 0.2, 0.2])


def test_a_run_that_is_changed_trains_as_one_that_was_so_from_the_start():
    as_asked = losses(run(make_task(lr=0.05, weight_decay=0.1, epochs=2))[2])
    asks = Asks(at_1=[("lr", 0.05), ("weight_decay", 0.1)])
    assert losses(run(make_task(lr=0.2, weight_decay=0.0, epochs=2), asks)[2]) == as_asked
    assert losses(run(make_task(lr=0.2, weight_decay=0.0, epochs=2))[2]) != as_asked


@pytest.mark.parametrize(("epochs", "ended_at"), [(5, 5), (2, 2), (1, 2)])
def test_another_number_of_epochs_holds_and_an_epoch_that_goes_on_is_finished(epochs: int, ended_at: int):
    state, _, events = run(make_task(epochs=3), Asks(at_4=[("epochs", epochs)]))
    assert state == "finished" and of_kind(events, EpochEnded)[-1].epoch == ended_at


def test_what_cannot_be_is_refused_by_an_event_and_nothing_changes():
    task = make_task(lr=0.1)
    asks = Asks(at_2=[("lr", -1.0), ("epochs", 2.5), ("batch_size", 8), ("lr_factor", 0.0)])
    _, _, events = run(task, asks)
    assert [event.what for event in of_kind(events, TweakRefused)] == ["lr", "epochs", "batch_size", "lr_factor"]
    assert not of_kind(events, Tweaked) and {event.lr for event in of_kind(events, StepLogged)} == {0.1}
    with pytest.raises(ConfigError, match="batch_size can't be changed"):
        check_wish(Wish("batch_size", 8), task.config)


def test_a_pause_stands_still_after_a_step_and_changes_no_number():
    asks = Asks()
    asks.pause_after = 2
    state, _, events = run(make_task(epochs=2), asks)
    plain = run(make_task(epochs=2))
    assert asks.waited == 1 and state == "finished"
    (paused,), (resumed,) = of_kind(events, Paused), of_kind(events, Resumed)
    assert (paused.step, resumed.step) == (2, 2) and resumed.seconds > 0
    assert losses(events) == losses(plain[2])


def test_a_pause_does_not_count_as_time(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, epochs=400))
    thread = threading.Thread(target=train_run, args=(store, run_id))
    thread.start()
    wait_for(store, run_id, "StepLogged", thread)
    store.request(run_id, "pause")
    wait_for(store, run_id, "Paused", thread)
    time.sleep(2.0)
    assert store.get_run(run_id).state == "paused"
    before = len(store.events(run_id, kinds=["StepLogged"]))
    time.sleep(0.5)
    assert len(store.events(run_id, kinds=["StepLogged"])) == before
    store.request(run_id, "resume")
    wait_for(store, run_id, "Resumed", thread)
    store.request(run_id, "change", {"what": "epochs", "value": 1})
    thread.join(60)
    summary = summarise(store, run_id)
    (resumed,) = [event.payload for event in store.events(run_id, kinds=["Resumed"])]
    record = store.get_run(run_id)
    assert summary["state"] == "finished" and resumed["seconds"] > 2.4
    assert summary["total_s"] == pytest.approx(sum(summary["phases"].values()))
    assert summary["total_s"] < record.ended - record.started - 2.3


def wait_for(store: Store, run_id: str, kind: str, thread: threading.Thread) -> None:
    while not store.events(run_id, kinds=[kind]):
        assert thread.is_alive()
        time.sleep(0.02)


def test_a_change_through_the_store_is_answered_within_a_second_and_marked_in_charts(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, epochs=3000, log_every=1))
    thread = threading.Thread(target=train_run, args=(store, run_id))
    thread.start()
    wait_for(store, run_id, "StepLogged", thread)
    asked = time.time()
    store.request(run_id, "change", {"what": "lr", "value": 1e-4})
    wait_for(store, run_id, "Tweaked", thread)
    (tweak,) = store.events(run_id, kinds=["Tweaked"])
    assert tweak.at - asked < 1 and time.time() - asked < 2
    store.request(run_id, "stop")
    thread.join(60)
    assert summarise(store, run_id)["tweaks"][0]["after"] == pytest.approx(1e-4)
    series = RunSeries(store, run_id)
    series.update()
    step = tweak.payload["step"]
    assert series.marks == [{"step": step, "text": "learning rate 0.0001"}]
    drawn, live = figures(series), series.since()["marks"]
    for chart in chart_specs(series.has_top5):
        places = [shape.x0 for shape in drawn[chart.id].layout.shapes]
        if chart.id == "seconds":
            assert places == [0.5 + step / steps_per_epoch(store, run_id)]
        else:
            assert places == [step]
        assert [words.text for words in drawn[chart.id].layout.annotations] == ["learning rate 0.0001"]
        assert [shape["x0"] for shape in live[chart.traces[0].x]["shapes"]] == places


def steps_per_epoch(store: Store, run_id: str) -> int:
    return store.events(run_id, kinds=["RunPrepared"])[0].payload["steps_per_epoch"]


def test_a_run_that_waits_or_has_ended_takes_no_changes(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures))
    with pytest.raises(StoreError, match="has not begun"):
        store.request(run_id, "pause")
    store.request(run_id, "stop")
    with pytest.raises(StoreError, match="stopped already"):
        store.request(run_id, "change", {"what": "lr", "value": 0.1})


def control(home: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "core", "--home", str(home), "control", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_command_line_changes_a_run_of_another_process(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, epochs=9000))
    thread = threading.Thread(target=train_run, args=(store, run_id))
    thread.start()
    wait_for(store, run_id, "StepLogged", thread)
    told = control(store.home, run_id, "--lr", "3e-4", "--patience", "7000", "--json")
    assert told.returncode == 0, told.stderr
    answers = json.loads(told.stdout)["answers"]
    assert [(answer["what"], answer["after"]) for answer in answers] == [
        ("lr", pytest.approx(3e-4)),
        ("patience", 7000),
    ]
    refused = control(store.home, run_id, "--epochs", "0")
    assert refused.returncode == 2 and refused.stderr.startswith("--epochs can't be 0") and thread.is_alive()
    stopped = control(store.home, run_id, "--stop")
    assert stopped.returncode == 0 and stopped.stdout.strip() == "The run has ended: stopped."
    thread.join(30)


@contextmanager
def going_on(store: Store, pictures: Path) -> Iterator[str]:
    """A run that trains in a thread for as long as the block lasts."""
    run_id = store.create_run(tiny(pictures, epochs=9000))
    thread = threading.Thread(target=train_run, args=(store, run_id))
    thread.start()
    try:
        wait_for(store, run_id, "StepLogged", thread)
        yield run_id
    finally:
        if store.get_run(run_id).is_active:
            store.request(run_id, "stop")
        thread.join(60)
        assert not thread.is_alive()


def asked(store: Store, run_id: str, ask: str | None = None, *wishes: tuple[str, float], **options) -> list[str]:
    """The lines of an answer, which comes at once."""
    began = time.monotonic()
    told, lines = control_command(store, run_id, [Wish(*wish) for wish in wishes], ask, **options)
    assert told["acknowledged"] and time.monotonic() - began < 5
    return lines


def test_what_changes_nothing_now_is_answered_at_once(store: Store, pictures: Path):
    with going_on(store, pictures) as run_id:
        assert asked(store, run_id, "resume") == ["The run is running."]
        assert asked(store, run_id, "pause")[0].startswith("Paused at step")
        assert asked(store, run_id, "pause") == ["The run is paused."]
        noted = ["lr: 0.0002 from the next step on, when the run goes on."]
        assert asked(store, run_id, None, ("lr", 2e-4)) == noted
        assert asked(store, run_id, "pause", ("lr", 2e-4)) == [*noted, "The run is paused."]
        resumed, changed = sorted(asked(store, run_id, "resume", ("weight_decay", 0)))
        assert resumed.startswith("Resumed at step") and changed.startswith("weight_decay: 0.01 -> 0 from step")
        assert summarise(store, run_id)["tweaks"][0]["after"] == pytest.approx(2e-4)


def test_an_end_in_a_pause_is_answered_by_the_end_and_takes_no_changes(store: Store, pictures: Path):
    with going_on(store, pictures) as run_id:
        asked(store, run_id, "pause")
        with pytest.raises(ConfigError, match="No step comes after --abort"):
            control_command(store, run_id, [Wish("lr", 0.1)], "abort")
        assert asked(store, run_id, "abort") == ["The run has ended: stopped."]


def test_each_of_two_clients_hears_the_answer_to_what_it_asked(store: Store, pictures: Path):
    with going_on(store, pictures) as run_id:
        told: dict[float, list[str]] = {}

        def ask(lr: float) -> None:
            told[lr] = asked(store, run_id, None, ("lr", lr))

        threads = [threading.Thread(target=ask, args=(lr,)) for lr in (1e-4, 2e-4, 3e-4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for lr, lines in told.items():
            assert len(lines) == 1 and f"-> {lr:g} from step" in lines[0]


def test_a_run_that_stands_still_frees_its_device_when_that_is_asked_then(store: Store, pictures: Path):
    with going_on(store, pictures) as run_id:
        asked(store, run_id, "pause")
        assert store.is_held("cpu")
        asked(store, run_id, None, ("weight_decay", 0.5))
        # heard by the process that stands still, and kept when that one leaves
        time.sleep(4 * PULSE_S)
        [line] = asked(store, run_id, "pause", should_free=True)
        assert line.startswith("Paused at step") and line.endswith("it is saved, and its device is free.")
        deadline = time.monotonic() + 10
        while not store.get_run(run_id).is_parked and time.monotonic() < deadline:
            time.sleep(0.02)
        assert store.get_run(run_id).is_parked and not store.is_held("cpu")
        # what lies saved stands still, and goes on when it is asked to
        assert asked(store, run_id, "pause") == ["The run is paused."]
        assert asked(store, run_id, None, ("lr", 2e-4)) == ["lr: 0.0002 from the next step on, when the run goes on."]
        assert asked(store, run_id, "resume") == [
            "The run is queued: the dashboard takes it up, or python -m core resume here."
        ]
        changes = [{"what": "weight_decay", "value": 0.5}, {"what": "lr", "value": 2e-4}]
        assert store.take_requests(run_id) == [("change", change) for change in changes]


@pytest.mark.xla
def test_on_xla_nothing_compiles_for_changes_and_a_pause():
    task = make_task("xla", width=61, lr=0.1, epochs=3, optimizer="adamw")
    asks = Asks(at_3=[("lr", 0.01)], at_5=[("weight_decay", 0.3), ("lr_factor", 3)], at_6=[("epochs", 4)])
    asks.pause_after = 4
    before = task.device.compile_count()
    state, _, events = run(task, asks)
    assert state == "finished" and of_kind(events, EpochEnded)[-1].epoch == 4
    assert task.device.compile_count() - before == 2
    assert all(torch.isfinite(torch.tensor(loss)) for loss in losses(events))
    task.device.close()
