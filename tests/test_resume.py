"""A run that was broken off and taken up again trains as one in one piece: bit by bit on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.__main__ import main
from core.analysis.summary import summarise
from core.errors import ConfigError, DataError, StoreError
from core.events import Paused, StepLogged
from core.running.resume import plan_resume, resume
from core.running.trainer import train_run
from core.store import Store
from core.training.state import read_state, state_files
from tests.test_groups import tiny

ROOT = Path(__file__).parents[1]
BASE = {
    "trainable": "all",
    "batch_size": 4,
    "epochs": 3,
    "log_every": 2,
    "optimizer": "adamw",
    "schedule": "cosine",
    "lr": 1e-3,
}
"""Five steps an epoch; two of three stops below come between two logged steps."""


class StopAt:
    """Asks for a stop when this step has been sent: the loop looks once a step, after it, and once after an epoch."""

    def __init__(self, step: int) -> None:
        self.left = step

    def pulse(self, pulse) -> None:
        look = pulse.should_stop

        def should_stop() -> bool:
            self.left -= self.is_training
            return self.left <= 0 or look()

        self.is_training = False
        pulse.should_stop = should_stop

    def event(self, event) -> None:
        if type(event).__name__ == "RunPrepared":
            self.is_training = True
        elif type(event).__name__ == "PhaseChanged" and event.phase in ("validating", "saving"):
            # an evaluation looks after each batch
            self.is_training = event.phase == "saving"


def train(store: Store, run_id: str, stop_at: int = 0) -> str | None:
    if not stop_at:
        return train_run(store, run_id)
    stop = StopAt(stop_at)
    return train_run(store, run_id, on_event=stop.event, on_pulse=stop.pulse)


def go_on(store: Store, run_id: str, stop_at: int = 0, **changes) -> str | None:
    resume(store, plan_resume(store, run_id, **changes))
    return train(store, run_id, stop_at)


def figures(store: Store, run_id: str) -> tuple[dict, list, dict, dict]:
    """Losses by step and of epochs as told last, and the weights that were best and last."""
    steps = {
        event.payload["step"]: (event.payload["loss"], event.payload["top1"], event.payload["lr"])
        for event in store.events(run_id, kinds=["StepLogged"])
    }
    names = ("epoch", "train_loss", "train_top1", "val_loss", "val_top1", "lr")
    epochs = [[epoch[name] for name in names] for epoch in summarise(store, run_id)["epochs"]]
    weights = [load_file(store.run_folder(run_id) / f"{which}.safetensors") for which in ("best", "last")]
    return steps, epochs, *weights


def assert_equal(store: Store, whole: str, broken: str) -> None:
    ours, theirs = figures(store, broken), figures(store, whole)
    # a stop logs what there is; a run in one piece has no such step
    assert {step: ours[0][step] for step in theirs[0]} == theirs[0]
    assert ours[1] == theirs[1]
    for one, two in zip(ours[2:], theirs[2:], strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


CASES = {
    "adam": {"optimizer": "adam"},
    "adamw": {},
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "sgd without momentum": {"optimizer": "sgd", "momentum": 0.0},
    "constant": {"schedule": "constant"},
    "step": {"schedule": "step", "step_epochs": 1},
    "onecycle": {"schedule": "onecycle"},
    "warm-up": {"warmup_epochs": 1.5},
    "EMA": {"ema_decay": 0.9},
    "bf16": {"precision": "bf16"},
    "bf16, EMA, clipping": {"precision": "bf16", "ema_decay": 0.99, "clip_grad_norm": 0.5},
    "MixUp": {"mixup": 0.2},
    "MixUp and CutMix": {"mixup": 0.2, "cutmix": 1.0, "label_smoothing": 0.1},
    "augmentation": {"augmentation": "resized_crop", "auto_augment": "randaugment", "random_erasing": 0.5},
    "balanced": {"sampling": "balanced", "class_weights": "balanced"},
    "accumulation": {"accumulate": 2, "ema_decay": 0.9},
    "head": {"trainable": "head"},
    "dropout": {"model": "torchvision/mobilenet_v3_small"},
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_taken_up_again_twice_equals_one_in_one_piece(store: Store, pictures: Path, name: str):
    config = tiny(pictures, **{**BASE, **CASES[name]})
    whole, broken = store.create_run(config), store.create_run(config)
    assert train(store, whole) == "finished"
    assert train(store, broken, stop_at=3) == "stopped"
    # in the midst of the first epoch, and then in the second, between two logged steps
    assert read_state(store.run_folder(broken)).position.step == 3
    assert go_on(store, broken, stop_at=4) == "stopped"
    assert read_state(store.run_folder(broken)).position.step == 7
    assert go_on(store, broken) == "finished"
    assert_equal(store, whole, broken)


def test_in_a_long_epoch_the_state_is_kept_by_the_clock_at_logged_steps_and_the_last_two_stay(
    store: Store, pictures: Path
):
    config = tiny(pictures, **BASE, checkpoint_min=1e-9)
    run_id = store.create_run(config)
    assert train(store, run_id) == "finished"
    kept = [event.payload for event in store.events(run_id, kinds=["CheckpointSaved"])]
    assert [told["step"] for told in kept if told["which"] == "state"] == [1, 2, 4, 5, 6, 8, 10, 12, 14, 15]
    assert [path.name for path in state_files(store.run_folder(run_id))] == ["state-000000015.pt", "state-000000014.pt"]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_a_state_that_was_cut_gives_way_to_the_one_before(store: Store, pictures: Path, share: float):
    config = tiny(pictures, **BASE, checkpoint_min=1e-9)
    whole, broken = store.create_run(config), store.create_run(config)
    train(store, whole)
    train(store, broken, stop_at=9)
    newest, before = state_files(store.run_folder(broken))
    content = newest.read_bytes()
    newest.write_bytes(content[: min(int(share * len(content)), len(content) - 1)])
    plan = plan_resume(store, broken)
    assert before.name == "state-000000008.pt" and (plan.step, plan.epoch) == (8, 2)
    assert "What was kept later can't be read." in plan.rules
    assert go_on(store, broken) == "finished"
    assert_equal(store, whole, broken)


def test_figures_that_died_before_they_were_written_are_told_again_by_the_state(store: Store, pictures: Path):
    config = tiny(pictures, **BASE)
    whole, broken = store.create_run(config), store.create_run(config)
    train(store, whole)
    train(store, broken, stop_at=6)
    with store.database.write() as db:
        db.execute("DELETE FROM events WHERE run_id = ? AND kind = 'EpochEnded'", (broken,))
    assert summarise(store, broken)["epochs"] == []
    go_on(store, broken)
    assert_equal(store, whole, broken)


def test_a_pause_that_frees_the_device_lets_another_run_in_and_changes_nothing(store: Store, pictures: Path):
    config = tiny(pictures, **BASE)
    whole, broken = store.create_run(config), store.create_run(config)
    train(store, whole)

    def ask(event) -> None:
        if isinstance(event, StepLogged) and event.step == 6:
            pulses[0]._heed("pause", {"free": True})

    pulses: list = []
    assert train_run(store, broken, on_event=ask, on_pulse=pulses.append) == "paused"
    assert store.get_run(broken).is_parked and not store.is_held("cpu")
    assert store.recover() == [] and store.waiting_runs() == []
    other = store.create_run(tiny(pictures))
    assert train(store, other) == "finished"
    store.request(broken, "resume")
    assert [record.run_id for record in store.waiting_runs()] == [broken]
    assert train(store, broken) == "finished"
    assert_equal(store, whole, broken)
    ended = [event.payload["state"] for event in store.events(broken, kinds=["RunEnded"])]
    assert ended == ["paused", "finished"]


def test_a_run_that_is_to_go_on_where_no_dashboard_is_goes_on_by_resume(store: Store, pictures: Path, capsys):
    run_id = store.create_run(tiny(pictures, **BASE))
    new = store.create_run(tiny(pictures, **BASE))
    assert train(store, run_id, stop_at=6) == "stopped"
    resume(store, plan_resume(store, run_id))
    # another run has the device: this one waits as before
    store.claim(new, "cpu")
    assert main(["--home", str(store.home), "resume", run_id]) == 2
    assert "Another run holds device cpu." in capsys.readouterr().err and store.get_run(run_id).is_taken_up
    store.end_run(new, "stopped")
    assert main(["--home", str(store.home), "resume", run_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    # one that never began waits for its turn
    waiting = store.create_run(tiny(pictures, **BASE))
    assert main(["--home", str(store.home), "resume", waiting]) == 2
    assert "is queued" in capsys.readouterr().err


@pytest.mark.parametrize(("then", "state"), [("stop", "stopped"), ("free", "paused"), ("abort", "stopped")])
def test_what_is_asked_of_a_run_that_stands_still_is_done_before_another_step(
    store: Store, pictures: Path, then: str, state: str
):
    config = tiny(pictures, **BASE)
    whole, broken = store.create_run(config), store.create_run(config)
    train(store, whole)

    def ask(event) -> None:
        if isinstance(event, StepLogged) and event.step == 8:
            pulses[0]._heed("pause", {})
        elif isinstance(event, Paused):
            pulses[0]._heed("pause" if then == "free" else then, {"free": True})

    pulses: list = []
    assert train_run(store, broken, on_event=ask, on_pulse=pulses.append) == state
    stood_at = store.events(broken, kinds=["Paused"])[0].payload["step"]
    kept = read_state(store.run_folder(broken))
    # an abort keeps nothing: what was kept is of the epoch before
    assert kept is not None and kept.position.step == (5 if then == "abort" else stood_at)
    if then == "free":
        store.request(broken, "resume")
        assert train(store, broken) == "finished"
    else:
        assert go_on(store, broken) == "finished"
    assert_equal(store, whole, broken)


def test_time_of_all_parts_adds_up_and_an_epoch_in_two_parts_has_all_of_its_time(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, **BASE))
    train(store, run_id, stop_at=3)
    go_on(store, run_id)
    summary = summarise(store, run_id)
    assert summary["total_s"] == pytest.approx(sum(summary["phases"].values()), rel=1e-6)
    parts = [event.payload for event in store.events(run_id, kinds=["RunEnded"])]
    assert summary["total_s"] == pytest.approx(sum(part["total_s"] for part in parts))
    (first, *_) = [event.payload for event in store.events(run_id, kinds=["EpochEnded"])]
    earlier = sum(first["earlier"].values())
    assert 0 < earlier < parts[0]["total_s"] and first["seconds"] == pytest.approx(sum(first["phases"].values()))
    assert first["seconds"] > earlier and summary["steps_per_epoch"] == 5


def test_an_aborted_run_keeps_nothing_after_its_last_checkpoint(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, **BASE))

    def ask(event) -> None:
        if isinstance(event, StepLogged) and event.step == 8:
            pulses[0]._heed("abort", {})

    pulses: list = []
    assert train_run(store, run_id, on_event=ask, on_pulse=pulses.append) == "stopped"
    assert read_state(store.run_folder(run_id)).position.step == 5
    assert summarise(store, run_id)["ended_early"].startswith("It was aborted")
    assert go_on(store, run_id) == "finished"


def test_changes_made_before_and_after_the_state_hold_again_or_are_left_out(store: Store, pictures: Path):
    config = tiny(pictures, **BASE)

    def tweaked(run_id: str, stop_at: int) -> None:
        def ask(event) -> None:
            if isinstance(event, StepLogged) and event.step in (2, 6):
                pulses[0]._heed("change", {"what": "lr_factor", "value": 0.5 if event.step == 2 else 3.0})

        pulses: list = []
        stop = StopAt(stop_at)
        train_run(
            store, run_id, on_event=lambda event: (stop.event(event), ask(event)),
            on_pulse=lambda pulse: (pulses.append(pulse), stop.pulse(pulse)),
        )  # fmt: skip

    whole, followed, left = (store.create_run(config) for _ in range(3))
    tweaked(whole, 10**6)
    for run_id in (followed, left):
        tweaked(run_id, 9)
        # as if the process had died after the change at step 7: the state is that of the first epoch's end
        state_files(store.run_folder(run_id))[0].unlink()
    plan = plan_resume(store, followed)
    assert plan.step == 5 and [change["step"] for change in plan.script] == [7]
    assert "Made again: From step 7 on: learning rate 3 times the schedule's." in plan.rules
    assert go_on(store, followed) == "finished"
    assert_equal(store, whole, followed)
    assert go_on(store, left, follow=False) == "finished"
    rates = {event.payload["step"]: event.payload["lr"] for event in store.events(left, kinds=["StepLogged"])}
    theirs = {event.payload["step"]: event.payload["lr"] for event in store.events(whole, kinds=["StepLogged"])}
    assert rates[4] == theirs[4] and rates[10] == pytest.approx(theirs[10] / 6)


def test_the_rule_of_another_learning_rate_and_more_epochs_is_told_before_and_kept(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, **BASE))
    assert train(store, run_id) == "finished"
    with pytest.raises(ConfigError, match="All its 3 epochs are trained"):
        plan_resume(store, run_id)
    with pytest.raises(ConfigError, match="Epochs can't be 2"):
        plan_resume(store, run_id, changes={"epochs": 2})
    plan = plan_resume(store, run_id, changes={"epochs": 5, "lr": 2e-4})
    assert (plan.step, plan.epochs) == (15, 5)
    assert any("The learning rate of step 16 is 0.0002 in place of" in rule for rule in plan.rules)
    resume(store, plan)
    assert train(store, run_id) == "finished"
    rates = {event.payload["step"]: event.payload["lr"] for event in store.events(run_id, kinds=["StepLogged"])}
    summary = summarise(store, run_id)
    assert len(summary["epochs"]) == summary["planned_epochs"] == 5 and summary["config"]["epochs"] == 3
    assert 0 < rates[25] < rates[18] < rates[16] <= 2e-4
    assert [tweak["step"] for tweak in summary["tweaks"]] == [16, 16]


def test_other_data_than_it_began_with_are_refused_and_nothing_is_lost(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, **BASE))
    train(store, run_id, stop_at=7)
    extra = pictures / "train" / "dark" / "0.png"
    (pictures / "train" / "dark" / "more.png").write_bytes(extra.read_bytes() + b" ")
    assert go_on(store, run_id) == "failed"
    ended = store.events(run_id, kinds=["RunEnded"])[-1].payload
    assert ended["reason"] == "The data have changed since the run began: 17 training images then, 18 now."
    assert ended["error"] == DataError.__name__ and not ended["traceback"]
    (pictures / "train" / "dark" / "more.png").unlink()
    whole = extra.read_bytes()
    extra.write_bytes(whole + b" ")
    assert go_on(store, run_id) == "failed"
    ended = store.events(run_id, kinds=["RunEnded"])[-1].payload
    assert ended["reason"].endswith("other pictures or other names of them, though as many.")
    # the same bytes, at another time
    extra.write_bytes(whole)
    assert go_on(store, run_id) == "finished"


def test_a_run_that_was_killed_after_its_last_checkpoint_gets_its_last_epoch_and_its_end(store: Store, pictures: Path):
    config = tiny(pictures, **BASE)
    whole, broken = store.create_run(config), store.create_run(config)
    assert (train(store, whole), train(store, broken)) == ("finished", "finished")
    last = store.events(broken, kinds=["EpochEnded"])[-1].id
    with store.database.write() as db:
        # what a process that is killed there has not written yet
        db.execute("DELETE FROM events WHERE run_id = ? AND id >= ?", (broken, last))
        db.execute("UPDATE runs SET state = 'running', pid = 1, pid_started = 0 WHERE run_id = ?", (broken,))
    assert store.recover() == [broken]
    assert "All its epochs are trained: only its end is missing." in plan_resume(store, broken).rules
    assert go_on(store, broken) == "finished"
    assert_equal(store, whole, broken)
    with pytest.raises(ConfigError, match="All its 3 epochs are trained"):
        plan_resume(store, broken)


def test_a_run_that_is_active_or_no_run_for_people_is_not_resumed(store: Store, pictures: Path):
    waiting = store.create_run(tiny(pictures))
    with pytest.raises(StoreError, match="is queued"):
        plan_resume(store, waiting)
    probe = store.create_run(tiny(pictures), purpose="probe")
    with pytest.raises(StoreError, match="is a probe"):
        plan_resume(store, probe)


def test_a_run_that_ended_before_its_first_step_begins_anew(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures))
    store.request(run_id, "stop")
    plan = plan_resume(store, run_id)
    assert plan.step == 0 and plan.rules == ["It kept no state, so it begins anew."]
    resume(store, plan)
    assert train(store, run_id) == "finished"


def core(home: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "core", "--home", str(home), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_command_line_says_the_rule_and_goes_on(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, **BASE))
    train(store, run_id, stop_at=7)
    planned = core(store.home, "resume", run_id, "--plan", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["step"] == 7 and store.get_run(run_id).state == "stopped"
    told = core(store.home, "resume", run_id, "--epochs", "4", "--json")
    assert told.returncode == 0, told.stderr
    assert "The schedule is that of 4 epochs from here on." in told.stderr
    summary = json.loads(told.stdout)
    assert [epoch["epoch"] for epoch in summary["epochs"]] == [1, 2, 3, 4] and summary["state"] == "finished"
    again = core(store.home, "resume", run_id)
    assert again.returncode == 2 and again.stderr.startswith("All its 4 epochs are trained.")
    assert core(store.home, "resume", "nothing").returncode == 2


@pytest.mark.xla
@pytest.mark.parametrize(("optimizer", "more"), [("adamw", {"ema_decay": 0.9}), ("sgd", {})])
def test_on_xla_a_run_taken_up_again_equals_one_in_one_piece_up_to_rounding_and_compiles_nothing(
    store: Store, pictures: Path, optimizer: str, more: dict
):
    config = tiny(pictures, **{**BASE, "device": "xla", "optimizer": optimizer, "lr": 1e-3, **more})
    whole, broken = store.create_run(config), store.create_run(config)
    train(store, whole)
    train(store, broken, stop_at=7)
    assert go_on(store, broken) == "finished"
    ours, theirs = figures(store, broken), figures(store, whole)
    for step, told in theirs[0].items():
        assert ours[0][step] == pytest.approx(told, rel=1e-5, abs=1e-6)
    for name, tensor in theirs[3].items():
        assert torch.allclose(ours[3][name].float(), tensor.float(), rtol=1e-4, atol=1e-6), name
    assert store.events(broken, kinds=["RunEnded"])[-1].payload["compile_count"] == 0


@pytest.mark.xla
@pytest.mark.parametrize(
    ("first", "then", "optimizer", "more"),
    [("xla", "cpu", "adamw", {"ema_decay": 0.9}), ("xla", "cpu", "sgd", {}), ("cpu", "xla", "sgd", {})],
)
def test_a_run_goes_on_on_another_device_kind(
    store: Store, pictures: Path, first: str, then: str, optimizer: str, more: dict
):
    config = tiny(pictures, **{**BASE, "optimizer": optimizer, "lr": 1e-3, "device": first, **more})
    whole, broken = store.create_run(config), store.create_run(config)
    train(store, whole)
    train(store, broken, stop_at=7)
    plan = plan_resume(store, broken, device=then)
    assert f"It goes on on {then} in place of {first}: figures are equal up to rounding." in plan.rules
    resume(store, plan)
    assert train(store, broken) == "finished"
    ours, theirs = figures(store, broken), figures(store, whole)
    for step, told in theirs[0].items():
        assert ours[0][step] == pytest.approx(told, rel=2e-3, abs=1e-4)
    assert ours[1][-1][1] == pytest.approx(theirs[1][-1][1], rel=2e-3)


def test_a_run_of_two_processes_is_taken_up_again_by_two(store: Store, pictures: Path):
    config = tiny(pictures, **{**BASE, "log_every": 1, "epochs": 8}, num_devices=2)
    whole, broken = store.create_run(config), store.create_run(config)
    train(store, whole)

    def ask(event) -> None:
        if isinstance(event, StepLogged) and event.step == 2:
            pulses[0].ask_stop()

    pulses: list = []
    assert train_run(store, broken, on_event=ask, on_pulse=pulses.append) == "stopped"
    stopped_at = read_state(store.run_folder(broken)).position.step
    assert 2 <= stopped_at < 40
    assert go_on(store, broken) == "finished"
    ours, theirs = figures(store, broken), figures(store, whole)
    assert len(ours[1]) == 8 and list(ours[0]) == list(range(1, 41))
    # what each process had added up by then is shared out anew, so figures differ by rounding
    for step in range(stopped_at + 1, stopped_at + 4):
        assert ours[0][step] == pytest.approx(theirs[0][step], rel=1e-4)


def test_of_a_part_that_was_killed_the_time_counts_until_its_last_sign_of_life(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, **BASE))
    train(store, run_id, stop_at=8)
    with store.database.write() as db:
        # as if it had been killed after the state at the first epoch's end
        db.execute("DELETE FROM events WHERE run_id = ? AND kind = 'RunEnded'", (run_id,))
        db.execute("UPDATE runs SET state = 'running', pid = 1, pid_started = 0 WHERE run_id = ?", (run_id,))
    state_files(store.run_folder(run_id))[0].unlink()
    assert store.recover() == [run_id] and store.get_run(run_id).state == "interrupted"
    plan = plan_resume(store, run_id)
    assert plan.step == 5
    resume(store, plan)
    assert train(store, run_id) == "finished"
    (continued,) = [event.payload for event in store.events(run_id, kinds=["RunContinued"])]
    assert (continued["step"], continued["epoch"], continued["rules"]) == (5, 2, plan.rules)
    parts = [event.payload["total_s"] for event in store.events(run_id, kinds=["RunEnded"])]
    summary = summarise(store, run_id)
    assert len(parts) == 2 and min(parts) > 0
    assert sum(summary["phases"].values()) == pytest.approx(sum(parts)) == pytest.approx(summary["total_s"])
