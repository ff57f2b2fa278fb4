"""Steering a run, taking it up again and making another of it, on the pages, without a browser."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from core.config import make_config
from core.events import (
    CheckpointFailed,
    CheckpointSaved,
    EndedEarly,
    Paused,
    RunContinued,
    RunPrepared,
    StepLogged,
    Stuck,
    Tweaked,
)
from core.running.resume import plan_resume
from core.running.script import script_of
from core.running.trainer import train_run
from core.series import RunSeries
from core.store import Store
from tests.test_groups import tiny
from tests.test_pages import MAIN, add_run, button, open_page, pages_store
from ui import registry

PREPARED = RunPrepared("cpu", "A CPU", ["cat", "dog"], 80, 20, 4, 1000, 10, 64, {"torch": "2"})
PHASE = {"phase": "training", "epoch": 2, "epochs": 3, "step": 2, "steps": 4, "progress": 0.5, "eta_s": 9}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened = pages_store(tmp_path / "home", monkeypatch)
    yield opened
    opened.close()


def step(number: int, lr: float = 1e-3) -> StepLogged:
    return StepLogged(number, 1 + (number - 1) // 4, 0.7, 50.0, lr, 32, 0.5, 0.1, 60.0, 0)


def tell(store: Store, run_id: str, *events: object) -> None:
    store.append_events(run_id, [(time.time(), event) for event in events])


def going_on(store: Store, state: str = "running", **changes: object) -> str:
    """A run of this process that stands after step 6, in its second epoch of three."""
    run_id = store.create_run(make_config("quick", **changes))
    assert store.claim(run_id, "cpu")
    tell(store, run_id, PREPARED, *[step(number) for number in range(1, 7)])
    store.beat(run_id, {**PHASE, "phase": "paused"} if state == "paused" else PHASE, state)
    return run_id


def parked(store: Store) -> str:
    run_id = going_on(store)
    tell(store, run_id, Paused(6, 2, is_freed=True))
    store.park(run_id)
    return run_id


def press(app: AppTest, label: str) -> AppTest:
    button(app, label).click().run()
    assert not app.exception, app.exception
    return app


def labels(app: AppTest) -> list[str]:
    return [item.label for item in app.button]


def text(app: AppTest) -> str:
    return "\n".join(item.value for item in (*app.markdown, *app.caption, *app.warning, *app.info, *app.error))


# The control panel


def test_a_paused_run_says_so_once_and_where_it_stands(store: Store):
    going_on(store, "paused")
    assert ":orange-badge[Paused] Epoch 2 of 3, step 2 of 4" in [item.value for item in open_page("live").markdown]


@pytest.mark.parametrize(("frees", "payload"), [(False, {}), (True, {"free": True})])
def test_a_pause_keeps_the_device_or_frees_it_as_is_chosen(store: Store, frees: bool, payload: dict):
    run_id = going_on(store)
    app = open_page("live")
    if frees:
        app.checkbox[0].check().run()
    press(app, "Pause")
    assert store.take_requests(run_id) == [("pause", payload)]
    assert "Go on" not in labels(app)


def test_a_run_that_left_its_device_goes_on_before_all_that_wait(store: Store):
    waiting, run_id = store.create_run(make_config("quick")), parked(store)
    app = open_page("live", run=run_id)
    assert ":orange-badge[Paused, device free] Epoch 2 of 3, step 2 of 4" in [item.value for item in app.markdown]
    assert "Abort" not in labels(app) and not any("sign of life" in item.value for item in app.caption)
    press(app, "Go on")
    assert [record.run_id for record in store.waiting_runs()] == [run_id, waiting]
    assert registry.services().worker.woken == [1]
    # queued again, it is neither alive nor silent
    assert not any("sign of life" in item.value for item in open_page("live", run=run_id).caption)


def test_what_is_asked_of_a_run_that_left_its_device_waits_for_it(store: Store):
    run_id = parked(store)
    app = open_page("live", run=run_id)
    app.number_input(key=f"change_lr_{run_id}").set_value(0.5)
    press(app, "Change from the next step on")
    press(app, "Go on")
    assert store.take_requests(run_id) == [("change", {"what": "lr", "value": 0.5})]


def test_the_panel_shows_what_holds_now_and_not_what_held_at_the_start(store: Store):
    run_id = going_on(store, lr=3e-3, schedule="step", step_epochs=1, step_factor=0.1, patience=0)
    app = open_page("live")
    # the second epoch has a tenth of the first one's rate
    assert app.number_input(key=f"change_lr_{run_id}").placeholder == "0.0003"
    tell(store, run_id, Tweaked(6, 2, "lr", 3e-4, 6e-4, 2.0), Tweaked(6, 2, "patience", 0, 4))
    app.run()
    shown = {name: app.number_input(key=f"change_{name}_{run_id}").placeholder for name in ("lr", "patience", "epochs")}
    assert shown == {"lr": "0.0006", "patience": "4", "epochs": "3"}


def test_the_buttons_multiply_the_learning_rate_and_each_press_counts(store: Store):
    run_id = going_on(store)
    tell(store, run_id, Tweaked(6, 2, "lr", 3e-3, 1.5e-3, 0.5))
    app = open_page("live")
    press(press(app, "× 0.5"), "× 0.5")
    asked = [payload["value"] for _, payload in store.take_requests(run_id)]
    assert asked == [0.25, 0.125]
    # once the run has answered, the next press counts on its answer
    tell(store, run_id, Tweaked(7, 2, "lr", 1.5e-3, 3.75e-4, 0.125))
    app.run()
    press(app, "× 2")
    assert store.take_requests(run_id) == [("change", {"what": "lr_factor", "value": 0.25})]


def test_a_change_that_cannot_be_is_refused_beside_the_form_and_nothing_is_asked(store: Store):
    run_id = going_on(store)
    app = open_page("live")
    app.number_input(key=f"change_lr_{run_id}").set_value(1e-4)
    app.number_input(key=f"change_epochs_{run_id}").set_value(0)
    press(app, "Change from the next step on")
    assert "epochs can't be 0" in app.error[0].value.replace("\\", "") and store.take_requests(run_id) == []


def test_abort_asks_first_and_says_what_is_lost(store: Store):
    run_id = going_on(store)
    tell(store, run_id, CheckpointSaved("state", 1, "state-4.pt", 4), CheckpointSaved("best", 1, "best.safetensors", 4))
    app = press(open_page("live"), "Abort")
    assert "nothing is saved: what came after step 4 is lost" in text(app)
    press(app, "Let it go on")
    assert store.take_requests(run_id) == []
    press(app, "Abort")
    press(app, "Abort now")
    assert store.take_requests(run_id) == [("abort", {})]
    app.run()
    assert "Aborting" in labels(app) and "Abort now" not in labels(app)


def test_a_run_can_be_stopped_once_each_time_that_it_goes_on(store: Store):
    run_id = going_on(store)
    app = press(open_page("live"), "Stop")
    app.run()
    assert button(app, "Stopping").disabled
    store.end_run(run_id, "stopped")
    store.requeue(run_id)
    assert store.claim(run_id, "cpu")
    app.run()
    assert not button(app, "Stop").disabled


# What the status tells


def test_a_run_that_hangs_is_told_until_a_step_ends(store: Store):
    run_id = going_on(store)
    tell(store, run_id, Stuck(6, 2, 42.0, 0.5))
    app = open_page("live")
    # as long as it was then, and since
    assert re.match(r"No step has ended for 4\d s; one usually takes 0.5 s\.", app.warning[0].value)
    tell(store, run_id, step(7))
    app.run()
    assert not app.warning


def test_a_checkpoint_that_could_not_be_kept_is_told_until_one_is(store: Store):
    run_id = going_on(store)
    tell(store, run_id, CheckpointFailed("state", 2, 6, "state-6.pt can't be written: the disk is full."))
    app = open_page("live")
    words = app.warning[0].value.replace("\\", "")
    assert words.startswith("The checkpoint after step 6 could not be kept: state-6.pt can't be written: the disk is")
    tell(store, run_id, CheckpointSaved("state", 2, "state-8.pt", 8))
    app.run()
    assert not app.warning


def test_a_run_taken_up_again_says_where_and_by_which_rules_and_marks_it_in_the_charts(store: Store):
    run_id = going_on(store)
    tell(
        store, run_id,
        Tweaked(3, 1, "lr", 1e-3, 5e-4, 0.5), Tweaked(6, 2, "lr", 1e-3, 1e-4, 0.1),
        RunContinued(4, 1, ["The schedule is that of 9 epochs from here on."]), PREPARED,
    )  # fmt: skip
    app = open_page("live")
    assert "Taken up after step 4, in epoch 1" in text(app)
    assert "The schedule is that of 9 epochs from here on" in text(app)
    series = RunSeries(store, run_id)
    series.update()
    assert series.marks == [{"step": 3, "text": "learning rate 0.0005"}, {"step": 4, "text": "taken up"}]


def test_an_end_before_the_last_epoch_is_explained(store: Store):
    run_id = going_on(store)
    tell(store, run_id, EndedEarly("It was aborted: nothing after the last checkpoint is kept."))
    store.end_run(run_id, "stopped")
    assert "It was aborted" in open_page("live").info[0].value


# The resume card


def stopped(store: Store, pictures: Path, **changes: object) -> str:
    """A real run that was stopped in its first epoch, and has kept its state."""
    run_id = store.create_run(tiny(pictures, epochs=3, log_every=1, schedule="constant", lr=0.01, **changes))
    seen: list[object] = []
    state = train_run(store, run_id, on_event=seen.append, should_stop=lambda: any(map(is_step, seen)))
    assert state == "stopped"
    return run_id


def is_step(event: object) -> bool:
    return isinstance(event, StepLogged)


def open_card(page: str, run_id: str) -> AppTest:
    app = open_page(page, run=run_id)
    app.session_state[f"resume_{run_id}"] = True
    app.run()
    assert not app.exception, app.exception
    return app


@pytest.mark.parametrize("page", ["live", "runs"])
def test_the_rules_of_resuming_are_told_before_it_is_asked_for(store: Store, pictures: Path, page: str):
    run_id = stopped(store, pictures)
    app = open_card(page, run_id)
    at = plan_resume(store, run_id).step
    assert f"It goes on after step {at} (in epoch 1" in text(app).replace("\\", "")
    app.number_input(key=f"resume_lr_{run_id}").set_value(0.002).run()
    assert f"The learning rate of step {at + 1} is 0.002 in place of 0.01." in text(app).replace("\\", "")
    assert store.get_run(run_id).state == "stopped"
    press(app, "Resume")
    assert store.get_run(run_id).state == "queued" and registry.services().worker.woken == [1]
    assert store.take_requests(run_id) == [("change", {"what": "lr", "value": 0.002})]


def test_what_cannot_be_resumed_so_is_told_in_one_line(store: Store, pictures: Path):
    run_id = stopped(store, pictures)
    app = open_card("live", run_id)
    app.number_input(key=f"resume_epochs_{run_id}").set_value(0).run()
    assert button(app, "Resume").disabled
    assert any("epochs can't be 0" in item.value.replace("\\", "") for item in app.markdown)


def test_a_finished_run_is_resumed_for_more_epochs(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, epochs=1))
    assert train_run(store, run_id) == "finished"
    app = open_card("runs", run_id)
    assert button(app, "Resume").disabled and "All its 1 epochs are trained" in text(app)
    app.number_input(key=f"resume_epochs_{run_id}").set_value(2).run()
    press(app, "Resume")
    assert store.get_run(run_id).state == "queued"


def test_changes_that_went_with_the_steps_to_be_made_again_are_followed_or_left_out(store: Store, pictures: Path):
    run_id = stopped(store, pictures)
    tell(store, run_id, Tweaked(3, 1, "lr", 0.01, 0.005, 0.5))
    app = open_card("live", run_id)
    made_again = "Made again: From step 3 on: learning rate 0.5 times the schedule's."
    assert made_again in text(app).replace("\\", "")
    app.checkbox(key=f"resume_follow_{run_id}").uncheck().run()
    assert made_again.replace("Made again", "Left out") in text(app).replace("\\", "")
    press(app, "Resume")
    assert store.get_run(run_id).script == []


# Another run made of one


def changed_run(store: Store) -> str:
    run_id = add_run(store, lr=0.02, epochs=7)
    tell(store, run_id, Tweaked(2, 1, "lr", 0.02, 0.01, 0.5), Tweaked(3, 1, "weight_decay", 0.01, 0.1))
    store.run_folder(run_id).mkdir(parents=True)
    return run_id


def to_train(app: AppTest, press_first: str) -> AppTest:
    press(app, press_first)
    # AppTest itself does not follow to another page
    app.switch_page("../pages/train.py").run()
    assert not app.exception, app.exception
    return app


@pytest.mark.parametrize("follows", [True, False])
def test_running_again_asks_whether_to_follow_the_changes(store: Store, follows: bool):
    run_id = changed_run(store)
    app = to_train(open_page("runs", run=run_id), "Run again with changes")
    follow = app.checkbox(key="follow_changes")
    assert follow.label == "Follow the 2 changes made while it ran" and not follow.value
    told = text(app).replace("\\", "")
    assert "From step 2 on: learning rate 0.5 times the schedule's." in told
    assert "From step 3 on: weight decay 0.1." in told
    if follows:
        follow.check().run()
    assert ("--follow-changes" in app.code[0].value) == follows and f"--again {run_id}" in app.code[0].value
    press(app, "Start")
    made = store.list_runs()[0]
    assert made.forked_from == run_id and made.script == (script_of(store, run_id) if follows else [])


def test_a_run_that_was_not_changed_asks_nothing_when_it_is_run_again(store: Store):
    app = to_train(open_page("runs", run=add_run(store)), "Run again with changes")
    assert not app.checkbox
    press(press(app, "Back to the preset"), "Start")
    assert store.list_runs()[0].forked_from == ""


def test_a_run_starts_from_the_weights_of_another_of_its_model(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures))
    assert train_run(store, run_id) == "finished"
    store.rename(run_id, "Mine")
    app = to_train(open_page("runs", run=run_id), "Start from its weights")
    assert app.session_state["form_weights"] == f"run:{run_id}"
    weights = app.selectbox(key="form_weights")
    assert weights.options == ["default", "none", f"Mine · {run_id[-6:]}"] and "changed" in weights.label
    press(app, "Start")
    made = store.list_runs()[0]
    assert (made.config.weights, made.forked_from) == (f"run:{run_id}", run_id)
    assert train_run(store, made.run_id) == "finished"
    app = open_page("runs", run=made.run_id)
    assert f"It started from the best weights of run {run_id} (epoch 1), with its head." in text(app).replace("\\", "")
    (config,) = [frame.value for frame in app.dataframe if "Field" in frame.value.columns]
    first = config.iloc[0]
    assert (first["Field"], first["Value"], first["There"]) == ("● Weights", f"run:{run_id}", "none")
    assert not config["Field"].iloc[1:].str.startswith("●").any()
    assert "1 option differs from the run it was made from." in text(app)


def test_a_run_without_a_checkpoint_offers_no_weights(store: Store):
    app = open_page("runs", run=add_run(store))
    assert button(app, "Start from its weights").disabled


@pytest.mark.parametrize(
    ("weights", "words"),
    [("run:nobody", "No run 'nobody' has left weights here"), ("run:../x", "names no weights of a run"), ("x.pth", "")],
)
def test_weights_that_are_not_there_keep_start_shut(store: Store, weights: str, words: str):
    app = AppTest.from_file(MAIN, default_timeout=60)
    app.session_state["form_weights"] = weights
    app.run()
    assert not app.exception, app.exception
    assert button(app, "Start").disabled
    assert any((words or "There is no weight file 'x.pth'") in item.value.replace("\\", "") for item in app.markdown)


def test_a_run_whose_origin_was_deleted_still_says_so(store: Store):
    origin = add_run(store)
    run_id = store.create_run(make_config("quick"), forked_from=origin)
    links = [link.proto.label.replace("\\", "") for link in open_page("runs", run=run_id).get("page_link")]
    assert f"Made from {store.get_run(origin).name} ({origin})" in links
    store.delete(origin)
    app = open_page("runs", run=run_id)
    assert f"Made from run {origin}, which was deleted." in text(app)
