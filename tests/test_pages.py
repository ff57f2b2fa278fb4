"""The pages, drawn without a browser: empty, with runs, and with a person's mistakes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from streamlit.testing.v1 import AppTest

from core.config import RunConfig, make_config
from core.devices.base import DeviceInfo
from core.events import EpochEnded, HostFallback, Phases, ProgramCompiled, RunEnded, RunPrepared, StepLogged
from core.running.pulse import Pulse
from core.store import Store
from ui import registry
from ui.forms import device_caption

MAIN = str(Path(__file__).resolve().parents[1] / "ui" / "main.py")


def pages_store(home: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The pages' store, with a worker that only counts how often it is woken."""
    store = Store(home)
    woken: list[int] = []
    worker = SimpleNamespace(wake=lambda: woken.append(1), woken=woken)
    monkeypatch.setattr(registry._entry(), "services", registry.Services(store, worker))
    return store


@pytest.fixture
def store(tmp_path, monkeypatch):
    store = pages_store(tmp_path, monkeypatch)
    yield store
    store.close()


def open_page(name: str, **params: str) -> AppTest:
    app = AppTest.from_file(MAIN, default_timeout=60)
    app.run()
    if name != "train":
        app.switch_page(f"../pages/{name}.py")
    for key, value in params.items():
        app.query_params[key] = value
    app.run()
    assert not app.exception, app.exception
    return app


def train_page(config: RunConfig) -> AppTest:
    """The Train page with the form filled in as this config."""
    app = AppTest.from_file(MAIN, default_timeout=60)
    for name, value in config.model_dump().items():
        app.session_state[f"form_{name}"] = value
    app.run()
    assert not app.exception, app.exception
    return app


def add_run(store: Store, state: str = "finished", **changes: object) -> str:
    run_id = store.create_run(make_config("quick", **changes))
    store.claim(run_id, "cpu")
    phases = Phases(setup_s=1.0, compute_s=3.0)
    events = [
        RunPrepared("cpu", "A CPU", ["cat", "dog"], 80, 20, 4, 1000, 10, 64, {"torch": "2"}),
        StepLogged(1, 1, 0.7, 50.0, 1e-3, 32, 0.5, 0.1, 60.0, 0),
        EpochEnded(1, 4, 0.7, 60.0, 0.6, 75.0, None, 2.5, 32.0, phases, 0, 1e-3),
        RunEnded(state, 4.0, phases, 0, 0.0, *(("It broke.", "Mend it.") if state == "failed" else ())),
    ]
    store.append_events(run_id, [(time.time(), event) for event in events])
    store.end_run(run_id, state)
    return run_id


def button(app: AppTest, label: str):
    return next(item for item in app.button if item.label == label)


def test_train_starts_as_quick_start_with_start_ready(store):
    app = open_page("train")
    assert app.session_state["preset"] == "quick"
    assert app.session_state["form_trainable"] == "head"
    assert not button(app, "Start").disabled


def test_start_queues_the_form_once_and_wakes_the_worker(store):
    app = open_page("train")
    app.number_input(key="form_epochs").set_value(2).run()
    assert "changed" in app.number_input(key="form_epochs").label
    button(app, "Start").click().run()
    assert not app.exception, app.exception
    [record] = store.list_runs()
    assert record.config == make_config("quick", epochs=2)
    assert registry.services().worker.woken == [1]


def test_two_tabs_that_press_start_at_once_make_one_run(store):
    first, second = open_page("train"), open_page("train")
    button(first, "Start").click().run()
    button(second, "Start").click().run()
    assert len(store.list_runs()) == 1


def test_an_old_tab_starts_a_run_of_its_own(store):
    first, second = open_page("train"), open_page("train")
    button(first, "Start").click().run()
    store.request(store.list_runs()[0].run_id, "stop")
    button(second, "Start").click().run()
    assert len(store.list_runs()) == 2


def test_a_preset_sets_the_form_and_reset_goes_back_to_it(store):
    app = open_page("train")
    app.session_state["form_lr"] = 0.5
    app.run()
    button(app, "Reset 1 changed field").click().run()
    assert app.session_state["form_lr"] == 3e-3


def test_a_batch_that_devices_cannot_share_keeps_start_shut(store):
    app = open_page("train")
    app.session_state["form_num_devices"] = 3
    app.run()
    assert button(app, "Start").disabled
    assert any("A batch of 32 can't be shared evenly by 3 devices" in item.value for item in app.markdown)


def test_several_chips_are_told_with_the_memory_of_each():
    info = DeviceInfo("xla", "TPU v5e", True, memory_gib=16.0, count=8, note="Experimental.")
    assert device_caption(info) == "8 x TPU v5e · 16 GiB each · Experimental."
    assert device_caption(DeviceInfo("cuda", "NVIDIA GPU", False, "No NVIDIA GPU answers here.")).startswith(
        "No NVIDIA"
    )


def compiled_run(store: Store) -> str:
    run_id = store.create_run(make_config("quick", device="xla"))
    store.claim(run_id, "xla")
    late = ProgramCompiled("training", 7, 1, 1, 3.0, "the shape of images changed from 4 x 3 x 8 x 8 to 2 x 3 x 8 x 8")
    events = [ProgramCompiled("training", 1, 1, 1, 5.0), HostFallback(["im2col"]), late]
    with Pulse(store, run_id, 3, lambda event: None) as pulse:
        for event in events:
            pulse.emit(event)
    return run_id


def test_what_was_compiled_and_why_is_told_live(store):
    compiled_run(store)
    app = open_page("live")
    assert "Compiled 2 programs in 8.0 s" in [item.value for item in app.caption]
    warnings = " ".join(item.value for item in app.warning)
    assert "Step 7 (training) compiled anew, 3.0 s: the shape of images changed" in warnings
    assert "im2col" in warnings


def test_a_runs_page_lists_its_programs_with_their_causes(store):
    run_id = compiled_run(store)
    store.append_events(
        run_id, [(time.time(), RunEnded("finished", 9.0, Phases(compute_s=9.0), 2, 8.0, is_warm=False))]
    )
    store.end_run(run_id, "finished")
    app = open_page("runs", run=run_id)
    told = [frame.value for frame in app.dataframe if "Cause" in frame.value.columns]
    assert [next(iter(frame["Cause"])) for frame in told] == ["the first of its kind"]
    assert any(item.value.startswith("Cold: ") for item in app.caption)
    assert any("Left to the host in every step: im2col" in item.value for item in app.caption)


def test_only_the_chosen_optimizers_fields_are_shown(store):
    app = open_page("train")
    app.session_state["form_optimizer"] = "sgd"
    app.run()
    keys = {item.key for item in app.number_input}
    assert "form_momentum" in keys and "form_beta1" not in keys


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("data", "/nowhere/at/all", "/nowhere/at/all"),
        ("warmup_epochs", 100.0, "warmup_epochs 100"),
        ("device", "mps", "Device mps"),
    ],
)
@pytest.mark.skipif(sys.platform == "darwin", reason="mps may be available there")
def test_start_is_disabled_with_the_reason(store, name, value, words):
    app = AppTest.from_file(MAIN, default_timeout=60)
    app.session_state[f"form_{name}"] = value
    app.run()
    assert not app.exception, app.exception
    assert button(app, "Start").disabled
    assert any(words in item.value.replace("\\", "") for item in app.markdown)


def test_runs_says_that_there_are_none(store):
    assert "no runs yet" in open_page("runs").info[0].value


def test_runs_lists_all_and_opens_one(store):
    run_id = add_run(store)
    app = open_page("runs")
    assert list(app.dataframe[0].value["Best top-1"]) == [75.0]
    app = open_page("runs", run=run_id)
    assert any(metric.value == "75.0 %" for metric in app.metric)


def test_runs_shows_why_a_run_failed(store):
    app = open_page("runs", run=add_run(store, "failed"))
    assert app.error[0].value.replace("\\", "") == "**It broke.** Mend it."


def test_an_unknown_run_is_told(store):
    add_run(store)
    assert "no-such-run" in open_page("runs", run="no-such-run").error[0].value.replace("\\", "")


def test_a_run_is_renamed_and_deleted_after_a_question(store):
    run_id = add_run(store)
    app = open_page("runs", run=run_id)
    app.text_input[0].set_value("Mine")
    button(app, "Save").click().run()
    assert store.get_run(run_id).name == "Mine"
    button(app, "Delete").click().run()
    button(app, "Delete for good").click().run()
    assert store.list_runs() == []


def test_live_is_drawn_without_and_with_a_run(store):
    open_page("live")
    add_run(store)
    open_page("live")


def test_well_known_data_are_explained_before_they_are_fetched(store):
    app = AppTest.from_file(MAIN, default_timeout=60)
    app.session_state["form_data"] = "imagenetv2:top-images"
    app.run()
    assert any("10 images in each of ImageNet's 1,000 classes" in item.value for item in app.caption)


def test_a_run_is_run_again_from_the_form_and_changes_to_it_are_marked(store: Store):
    run_id = add_run(store, lr=0.02, epochs=7)
    app = open_page("runs", run=run_id)
    button(app, "Run again with changes").click().run()
    assert not app.exception, app.exception
    assert app.session_state["form_lr"] == 0.02 and app.session_state["form_epochs"] == 7
    assert any(run_id in markdown.value for markdown in app.markdown)
    assert not [shown for shown in app.button if shown.label.startswith("Reset")]
    # AppTest itself does not follow to another page
    app.switch_page("../pages/train.py").run()
    app.number_input(key="form_epochs").set_value(9).run()
    assert [shown.label for shown in app.button if shown.label.startswith("Reset")] == ["Reset 1 changed field"]
    button(app, "Reset 1 changed field").click().run()
    assert app.session_state["form_epochs"] == 7
    button(app, "Back to the preset").click().run()
    assert app.session_state["form_epochs"] == 3


def test_stages_and_growing_images_are_asked_for_in_the_form_and_told_epoch_by_epoch(store: Store):
    app = open_page("train")
    app.text_input(key="form_trainable_from").set_value("2: last").run()
    app.number_input(key="form_first_image_size").set_value(32).run()
    assert not app.exception, app.exception
    told = "Then, from epoch 2 on the last stages, 48 px; from epoch 3 on 64 px."
    assert told in [caption.value for caption in app.caption]
    [command] = [code.value for code in app.code if "core train" in code.value]
    assert "--trainable-from 2:last " in command and "--first-image-size 32 " in command
    button(app, "Start").click().run()
    [record] = store.list_runs()
    assert (record.config.trainable_from, record.config.first_image_size) == ("2:last", 32)


def test_a_stage_that_never_comes_keeps_start_disabled_and_is_explained(store: Store):
    app = open_page("train")
    app.text_input(key="form_trainable_from").set_value("9:all").run()
    assert button(app, "Start").disabled
    assert any("names epoch 9, and the run has 3" in markdown.value for markdown in app.markdown)
    app.text_input(key="form_trainable_from").set_value("9").run()
    assert any("'9' is not an epoch, a colon" in caption.value for caption in app.caption)
