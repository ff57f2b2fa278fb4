"""A run made from another one: its options, its weights, and the changes that were made while it ran."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from core.__main__ import main
from core.analysis.summary import summarise
from core.checkpoint import read_about, read_weights
from core.control import Wish
from core.errors import ModelError, StoreError
from core.events import RunContinued, Tweaked
from core.models.build import build_model
from core.models.from_run import check_weights, find_run_weights, run_of
from core.running.script import Scripted, script_in_words, script_of, values_now
from core.running.trainer import train_run
from core.store import Store
from tests.test_control import Asks, wait_for
from tests.test_groups import tiny
from tests.tiny import NoWishes, losses, make_task, run

BARE = {"num_classes": 2, "image_size": 32, "trainable": "all", "seed": 3}


def trained(store: Store, pictures: Path, **changes) -> str:
    run_id = store.create_run(tiny(pictures, **changes))
    assert train_run(store, run_id) == "finished", summarise(store, run_id)["reason"]
    return run_id


def weights_of(store: Store, run_id: str, which: str = "best") -> dict[str, torch.Tensor]:
    return read_weights(store.run_folder(run_id) / f"{which}.safetensors")


def loss_of(store: Store, run_id: str) -> list[float]:
    return [event.payload["loss"] for event in store.events(run_id, kinds=["StepLogged"])]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Warm start


def test_a_run_starts_from_the_best_or_last_weights_of_another_with_its_head(store: Store, pictures: Path):
    run_id = trained(store, pictures, epochs=3, lr=0.05, trainable="all")
    runs, classes = store.home / "runs", ["dark", "light"]
    for spec, which in ((f"run:{run_id}", "best"), (f"run:{run_id}:last", "last")):
        built = build_model("timm/test_resnet", weights=spec, classes=classes, runs=runs, **BARE)
        assert same(dict(built.module.state_dict()), weights_of(store, run_id, which))
        epoch = read_about(store.run_folder(run_id) / f"{which}.safetensors")["epoch"]
        assert built.start == f"the {which} weights of run {run_id} (epoch {epoch}), with its head"


@pytest.mark.parametrize("classes", [["light", "dark"], ["dark", "grey"], ["dark", "grey", "light"]])
def test_a_head_of_other_classes_is_begun_anew_as_the_seed_has_it(store: Store, pictures: Path, classes: list[str]):
    run_id = trained(store, pictures, trainable="all", lr=0.05)
    options = {**BARE, "num_classes": len(classes)}
    built = build_model(
        "timm/test_resnet", weights=f"run:{run_id}", classes=classes, runs=store.home / "runs", **options
    )
    anew = build_model("timm/test_resnet", weights="none", **options)
    had, has = weights_of(store, run_id), dict(built.module.state_dict())
    for name, tensor in has.items():
        expected = anew.module.state_dict()[name] if name.startswith("fc.") else had[name]
        assert torch.equal(tensor, expected), name
    assert built.start.endswith("with a new head, since the classes differ")


def test_a_warm_start_is_told_in_the_runs_record_and_begins_where_the_other_ended(store: Store, pictures: Path):
    first = trained(store, pictures, epochs=6, lr=0.03, trainable="all", log_every=1)
    second = trained(store, pictures, epochs=1, lr=1e-6, trainable="head", weights=f"run:{first}:last")
    told = summarise(store, second)
    assert told["environment"]["started_from"] == f"the last weights of run {first} (epoch 6), with its head"
    assert "started_from" not in summarise(store, first)["environment"]
    # at this rate a head hardly moves, so it is as good as the other was
    was = summarise(store, first)["epochs"][-1]["val_loss"]
    assert told["epochs"][0]["val_loss"] == pytest.approx(was, abs=1e-4)


def test_weights_of_another_model_are_refused_by_name(store: Store, pictures: Path):
    run_id = trained(store, pictures)
    runs = store.home / "runs"
    with pytest.raises(ModelError, match=rf"Run {run_id} trained timm/test_resnet, not resnet18") as refused:
        check_weights(f"run:{run_id}", runs, "resnet18")
    assert refused.value.fix == "Choose --model timm/test_resnet, or other weights."
    # another name of the same model
    check_weights(f"run:{run_id}", runs, "test_resnet")


def test_a_run_without_a_checkpoint_is_refused_and_its_last_one_is_offered(store: Store, pictures: Path):
    run_id = trained(store, pictures)
    folder = store.run_folder(run_id)
    (folder / "best.safetensors").unlink()
    with pytest.raises(ModelError, match="has no best checkpoint") as refused:
        find_run_weights(f"run:{run_id}", folder.parent, "test_resnet")
    assert refused.value.fix == f"Take its last one: run:{run_id}:last."
    (folder / "last.safetensors").write_bytes(b"no checkpoint")
    with pytest.raises(ModelError, match="can't be read"):
        find_run_weights(f"run:{run_id}:last", folder.parent, "test_resnet")
    with pytest.raises(ModelError, match="No run 'never-was' has left weights here"):
        find_run_weights("run:never-was", folder.parent, "test_resnet")


@pytest.mark.parametrize("run_id", ["../outside", "..", ".", "", "a/b", "/etc", "a\\b", "x\n", "%2e%2e", "a:best:last"])
def test_a_run_id_never_leaves_the_folder_of_runs(store: Store, pictures: Path, run_id: str):
    made = trained(store, pictures)
    shutil.copytree(store.run_folder(made), store.home / "outside")
    with pytest.raises(ModelError, match="names no weights of a run"):
        check_weights(f"run:{run_id}", store.home / "runs", "test_resnet")
    assert run_of(f"run:{run_id}") == ""


def test_the_command_line_refuses_weights_that_are_not_there_before_a_run_is_made(store: Store, pictures: Path, capsys):
    run_id = trained(store, pictures)
    told = [
        core(capsys, store.home, "train", "--data", str(pictures), "--model", model, "--weights", weights)
        for model, weights in (("test_resnet", "run:nobody"), ("resnet18", f"run:{run_id}"), ("resnet18", "no.pth"))
    ]
    assert [status for status, _, _ in told] == [2, 2, 2]
    assert [errors.split(". ")[0] for _, _, errors in told] == [
        "No run 'nobody' has left weights here",
        f"Run {run_id} trained timm/test_resnet, not resnet18",
        "There is no weight file 'no.pth'",
    ]
    assert [record.run_id for record in store.list_runs()] == [run_id]


# The script


def core(capsys, home: Path, *words: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a command line, in this process."""
    status = main(["--home", str(home), *words])
    told = capsys.readouterr()
    return status, told.out, told.err


def changed_live(store: Store, pictures: Path, **options) -> str:
    """A run whose rate, decay and number of epochs are changed while it trains, wherever that happens to be."""
    config = tiny(pictures, epochs=4000, log_every=1, schedule="cosine", lr=0.01, trainable="all", **options)
    run_id = store.create_run(config)
    thread = threading.Thread(target=train_run, args=(store, run_id))
    thread.start()
    wait_for(store, run_id, "StepLogged", thread)
    for what, value in (("lr", 0.00123), ("weight_decay", 0.3), ("lr_factor", 0.7), ("patience", 3000)):
        count = len(store.events(run_id, kinds=["Tweaked"]))
        store.request(run_id, "change", {"what": what, "value": value})
        while len(store.events(run_id, kinds=["Tweaked"])) == count:
            assert thread.is_alive()
            time.sleep(0.01)
    store.request(run_id, "change", {"what": "epochs", "value": 1})
    thread.join(60)
    assert store.get_run(run_id).state == "finished"
    return run_id


def again(store: Store, run_id: str, script: list) -> str:
    made = store.create_run(store.get_run(run_id).config, script=script, forked_from=run_id)
    assert train_run(store, made, should_stop=longer_than(store, made, len(loss_of(store, run_id)))) is not None
    return made


def longer_than(store: Store, run_id: str, steps: int):
    """Whether a run has logged more steps than so many."""
    return lambda: len(store.events(run_id, kinds=["StepLogged"])) > steps


def test_a_run_that_follows_the_changes_of_another_is_equal_to_it_bit_by_bit(store: Store, pictures: Path):
    first = changed_live(store, pictures)
    second = again(store, first, script_of(store, first))
    assert loss_of(store, second) == loss_of(store, first)
    for which in ("best", "last"):
        assert same(weights_of(store, second, which), weights_of(store, first, which))
    assert script_of(store, second) == script_of(store, first)
    assert [change["what"] for change in script_of(store, first)] == [
        "lr_factor", "weight_decay", "lr_factor", "patience", "epochs",
    ]  # fmt: skip


def test_a_run_that_leaves_the_changes_out_is_equal_to_one_that_was_never_touched(store: Store, pictures: Path):
    first = changed_live(store, pictures)
    steps = script_of(store, first)[0]["step"]
    without, untouched = again(store, first, []), again(store, first, [])
    count = min(len(loss_of(store, without)), len(loss_of(store, untouched)))
    assert count > steps and loss_of(store, without)[:count] == loss_of(store, untouched)[:count]
    assert loss_of(store, without)[: steps - 1] == loss_of(store, first)[: steps - 1]
    assert loss_of(store, without)[steps : len(loss_of(store, first))] != loss_of(store, first)[steps:]
    assert not store.events(without, kinds=["Tweaked"])


def test_scripted_changes_come_before_what_people_ask_and_earlier_ones_are_dropped():
    script = [
        {"step": 2, "what": "lr", "value": 0.5},
        {"step": 4, "what": "lr_factor", "value": 2.0},
        {"step": 4, "what": "patience", "value": 3},
    ]
    control = Scripted(Asks(at_2=[("epochs", 7)]), script, first_step=3)
    assert [control.wishes() for _ in range(3)] == [
        [],
        [Wish("lr_factor", 2.0), Wish("patience", 3.0), Wish("epochs", 7)],
        [],
    ]


def test_what_else_is_asked_of_a_scripted_run_goes_through():
    class Everything(NoWishes):
        def should_stop(self) -> bool:
            return True

        is_aborted = should_free = should_pause = should_stop

        def wait_while_paused(self) -> None:
            self.waited = True

    asked = Everything()
    control = Scripted(asked, [{"step": 1, "what": "lr", "value": 0.5}])
    control.wait_while_paused()
    assert control.should_stop() and control.is_aborted() and control.should_free() and control.should_pause()
    assert asked.waited


def test_a_rate_far_above_the_end_of_a_schedule_can_be_followed():
    asks = {"at_9": [("lr", 0.05)]}
    _, _, events = run(make_task(schedule="onecycle", lr=0.1, epochs=3), Asks(**asks))
    (tweak,) = [event for event in events if isinstance(event, Tweaked)]
    assert tweak.factor > 1000
    script = [{"step": 9, "what": "lr_factor", "value": tweak.factor}]
    repeated = run(make_task(schedule="onecycle", lr=0.1, epochs=3), Scripted(NoWishes(), script))[2]
    assert losses(repeated) == losses(events)


@pytest.mark.xla
def test_on_xla_a_run_that_follows_changes_compiles_nothing_more_and_has_the_same_losses():
    options = {"lr": 0.1, "epochs": 3, "optimizer": "adamw", "schedule": "cosine", "width": 100}
    first, second = make_task("xla", **options), make_task("xla", **options)
    _, _, events = run(first, Asks(at_3=[("lr", 0.013)], at_5=[("weight_decay", 0.3)]))
    tweaks = [event for event in events if isinstance(event, Tweaked)]
    script = [
        {"step": 3, "what": "lr_factor", "value": tweaks[0].factor},
        {"step": 5, "what": "weight_decay", "value": tweaks[1].after},
    ]
    before = second.device.compile_count()
    repeated = run(second, Scripted(NoWishes(), script))[2]
    assert second.device.compile_count() == before and losses(repeated) == losses(events)
    first.device.close()
    second.device.close()


def tell(store: Store, run_id: str, *events) -> None:
    store.append_events(run_id, [(time.time(), event) for event in events])


def test_changes_after_the_step_from_which_a_run_was_taken_up_do_not_count(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures))
    tell(
        store, run_id,
        Tweaked(3, 1, "lr", 0.1, 0.05, 0.5),
        Tweaked(8, 2, "weight_decay", 0.0, 0.2),
        Tweaked(9, 2, "lr", 0.1, 0.01, 0.1),
        RunContinued(8, 2),
        Tweaked(9, 2, "epochs", 5, 6),
    )  # fmt: skip
    script = script_of(store, run_id)
    assert script == [
        {"step": 3, "what": "lr_factor", "value": 0.5},
        {"step": 8, "what": "weight_decay", "value": 0.2},
        {"step": 9, "what": "epochs", "value": 6},
    ]
    assert script_in_words(script) == [
        "From step 3 on: learning rate 0.5 times the schedule's.",
        "From step 8 on: weight decay 0.2.",
        "From step 9 on: epochs 6.",
    ]
    with pytest.raises(StoreError):
        script_of(store, "no-such-run")


def test_what_holds_in_a_run_is_told_after_its_changes(store: Store, pictures: Path):
    config = tiny(pictures, epochs=4, lr=0.1, schedule="step", step_epochs=1, step_factor=0.1, weight_decay=0.0)
    run_id = store.create_run(config)
    record = store.get_run(run_id)
    assert values_now(store, record, 0, 0) == {
        "lr": 0.1, "lr_factor": 1.0, "weight_decay": 0.0, "epochs": 4, "patience": 0, "log_every": 5,
    }  # fmt: skip
    tell(store, run_id, Tweaked(3, 1, "lr", 0.1, 0.05, 0.5), Tweaked(8, 2, "epochs", 4, 6))
    now = values_now(store, record, 11, 10)
    assert (now["lr"], now["lr_factor"], now["epochs"]) == (pytest.approx(0.005), 0.5, 6)


def test_processes_that_train_together_follow_a_script_at_its_steps(store: Store, pictures: Path):
    script = [{"step": 2, "what": "lr_factor", "value": 0.5}, {"step": 4, "what": "epochs", "value": 3}]
    run_id = store.create_run(tiny(pictures, epochs=2, num_devices=2, log_every=1, schedule="constant"), script=script)
    assert train_run(store, run_id) == "finished", summarise(store, run_id)["reason"]
    tweaks = [event.payload for event in store.events(run_id, kinds=["Tweaked"])]
    assert [(tweak["step"], tweak["what"], tweak["after"]) for tweak in tweaks] == [
        (2, "lr", pytest.approx(tiny(pictures).lr / 2)),
        (4, "epochs", 3),
    ]
    assert len(summarise(store, run_id)["epochs"]) == 3


def test_the_command_line_runs_again_with_changes_followed_and_options_of_its_own(store: Store, pictures: Path, capsys):
    first = trained(store, pictures, epochs=2, lr=0.02)
    tell(store, first, Tweaked(2, 1, "lr", 0.02, 0.01, 0.5))
    words = ("--again", first, "--follow-changes", "--weight-decay", "0.5", "--json")
    status, out, errors = core(capsys, store.home, "train", *words)
    assert status == 0, errors
    summary = json.loads(out)
    assert summary["forked_from"] == first and summary["config"]["weight_decay"] == 0.5
    assert summary["config"] == {**store.get_run(first).config.model_dump(), "weight_decay": 0.5}
    assert summary["script"] == [{"step": 2, "what": "lr_factor", "value": 0.5}]
    assert [(tweak["step"], tweak["factor"]) for tweak in summary["tweaks"]] == [(2, 0.5)]
    _, out, _ = core(capsys, store.home, "train", "--again", first, "--print-config", "--json")
    assert json.loads(out) == store.get_run(first).config.model_dump()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--again", "nobody"], "There is no run 'nobody'."),
        (["--follow-changes"], "--follow-changes needs a run to follow."),
        (["--again", "nobody", "--preset", "quick"], "--again and --preset clash"),
    ],
)
def test_running_again_what_cannot_be_is_refused_in_one_line(tmp_path: Path, capsys, words: list[str], problem: str):
    status, _, errors = core(capsys, tmp_path, "train", *words)
    assert status == 2 and errors.startswith(problem) and errors.count("\n") == 1


@pytest.mark.parametrize("is_shifted", [False, True])
def test_predictions_take_pictures_as_the_run_did_that_began_with_published_weights(tmp_path: Path, is_shifted: bool):
    from dataclasses import asdict

    from core.checkpoint import save_checkpoint
    from core.config import make_config
    from core.devices import open_device
    from core.models.build import build_model
    from core.predict import Predictor

    config = make_config(model="torchvision/googlenet", weights="none", image_size=64)
    built = build_model(
        config.model, num_classes=2, weights="none", image_size=64, trainable="all", seed=0, classes=["a", "b"]
    )
    about = {"classes": ["a", "b"], **asdict(built.preprocessing), "config": config.model_dump()}
    path = save_checkpoint(tmp_path, "best", built.module.state_dict(), {**about, "transform_input": is_shifted})
    assert Predictor(path, open_device("cpu"))._model.transform_input is is_shifted
