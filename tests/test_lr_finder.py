"""The range test: what its curve says, its steps on each device, and the way through store, command line and page."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from streamlit.testing.v1 import AppTest

from core.__main__ import main
from core.analysis.forecast import forecast_for
from core.analysis.summary import summarise
from core.devices.local import CpuDevice
from core.events import Phases, ProgramCompiled, RangeTested, RunEnded, payload_of
from core.running.trainer import train_run
from core.store import Store
from core.timing import PhaseTimer
from core.trials.lr_curve import (
    DIVERGED,
    FIRST,
    LAST,
    STEPS,
    RunningMean,
    judge,
    learning_rates,
    range_figure,
    same_test,
    smooth,
    suggestion_in_words,
)
from core.trials.lr_finder import WORK, range_test
from core.words import lr_in_words
from core.worker import train_queued
from tests.browser import CHROMIUM, chromium_page, dashboard
from tests.test_groups import tiny
from tests.test_pages import button, train_page
from tests.tiny import NoWishes, StopAfter, TickClock, make_task
from ui import registry

RATES = learning_rates()


def losses(best: float = 1e-3, *, fall: float = 1.3, noise: float = 0.0, seed: int = 0) -> list[float]:
    """A loss of 2.3 that falls most quickly at the rate `best` and diverges a hundred times above it."""
    tens = np.log10(RATES) - math.log10(best)
    curve = 2.3 - fall / (1 + 10 ** (-2 * tens)) + 10 ** (2 * (tens - 2))
    return list(curve + noise * np.random.default_rng(seed).normal(size=STEPS))


def test_the_rates_grow_by_the_same_factor():
    assert (RATES[0], RATES[-1], len(RATES)) == (FIRST, pytest.approx(LAST), STEPS)
    np.testing.assert_allclose(np.diff(np.log(RATES)), math.log(LAST / FIRST) / (STEPS - 1))


@pytest.mark.parametrize("best", [1e-5, 1e-3, 3e-2])
def test_the_suggestion_is_where_the_loss_falls_most_quickly(best: float):
    told = judge(RATES, losses(best))
    assert best / 1.5 < told.steepest < best * 1.5
    assert told.suggestion == pytest.approx(told.steepest, rel=0.05) and lr_in_words(told.suggestion).count(".") <= 1
    assert told.steepest < told.lowest and told.careful <= told.suggestion
    assert told.careful == pytest.approx(min(told.lowest / 10, told.steepest), rel=0.05)
    assert told.why == "" and len(told.smoothed) == STEPS


def test_a_rate_that_is_no_more_careful_is_not_called_so():
    # it falls quickly at first and slowly for long, so that a tenth of where it is lowest is above the suggestion
    quick, slow = np.linspace(3, 1.5, 10), np.linspace(1.5, 1.0, 50)
    told = judge(RATES[:90], [*[3.0] * 20, *quick, *slow, *np.linspace(1, 3, 10)])
    assert told.lowest / 10 > told.suggestion and told.careful == told.suggestion
    assert suggestion_in_words(payload_of(told)).endswith("there the loss falls most quickly.")


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_noise_moves_the_suggestion_by_less_than_a_factor_of_three(noise: float):
    found = [judge(RATES, losses(noise=noise, seed=seed)).suggestion for seed in range(50)]
    assert all(1e-3 / 3 < lr < 3e-3 for lr in found)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.2])
def test_of_a_loss_that_never_fell_nothing_is_suggested(noise: float):
    told = [judge(RATES, losses(fall=0.0, noise=noise, seed=seed)[:70]) for seed in range(50)]
    assert [one.why for one in told if one.suggestion is None] == ["the loss never fell"] * len(told)
    assert suggestion_in_words(payload_of(told[0])) == "No suggestion: the loss never fell."


def test_of_a_loss_that_diverged_at_once_nothing_is_suggested():
    told = judge(RATES[:14], [2.3 * 1.5**step for step in range(14)])
    assert (told.suggestion, told.why) == (None, "the loss never fell")
    told = judge(RATES[:4], [2.3, 2.3, 900.0, math.nan])
    assert (told.suggestion, told.why) == (None, "the loss was no number after 3 steps")
    assert judge([], []).why == "the loss was no number after 0 steps"


def test_a_last_loss_that_is_no_number_changes_nothing():
    until = 90
    told = judge(RATES[: until + 1], [*losses()[:until], math.inf])
    assert told.suggestion == judge(RATES[:until], losses()[:until]).suggestion
    assert payload_of(told)["losses"][-1] is None and payload_of(told)["smoothed"][-1] is None


def test_smoothing_keeps_a_line_where_it_is_and_lets_no_divergence_reach_far_back():
    line = np.linspace(3, 1, 50)
    np.testing.assert_allclose(smooth(line)[9:-9], line[9:-9])
    np.testing.assert_allclose(smooth([2.0] * 50), 2.0)
    exploded = smooth([*line, 1e9])
    np.testing.assert_allclose(exploded[:40], smooth(line)[:40])
    assert exploded.max() < DIVERGED * line.max()


def test_the_running_mean_begins_without_a_bias_and_ends_the_test_at_four_times_its_best():
    mean = RunningMean()
    assert [mean.add(2.0) for _ in range(5)] == pytest.approx([2.0] * 5)
    assert not mean.is_over(7.9) and mean.best == pytest.approx(2.0)
    overs = [mean.is_over(100.0) for _ in range(2)]
    assert overs == [True, True]
    assert RunningMean().is_over(math.nan) and RunningMean().is_over(math.inf)


def test_a_rate_is_told_as_a_person_would_write_it():
    words = [lr_in_words(lr) for lr in (3e-4, 3.2e-4, 1e-7, 0.001, 0.012, 1.5, 10.0)]
    assert words == ["3e-4", "3.2e-4", "1e-7", "0.001", "0.012", "1.5", "10"]
    assert [float(word) for word in words] == [3e-4, 3.2e-4, 1e-7, 0.001, 0.012, 1.5, 10.0]


def test_the_figure_has_rates_by_factors_and_marks_the_suggestion():
    told = payload_of(judge([*RATES[:90], RATES[90]], [*losses()[:90], math.nan]))
    figure = range_figure(told)
    assert figure.layout.xaxis.type == "log"
    mark = next(trace for trace in figure.data if trace.name == "Suggestion")
    assert mark.x == (told["steepest"],) and mark.text == (lr_in_words(told["suggestion"]),)
    assert [trace.name for trace in range_figure(payload_of(judge([], []))).data] == ["Each step", "Smoothed"]


def test_a_test_tells_the_same_of_another_rate_and_nothing_of_another_optimizer(pictures: Path):
    config = tiny(pictures)
    assert same_test(config, tiny(pictures, lr=0.5, epochs=7, schedule="cosine", seed=3, device="auto"))
    for changes in ({"optimizer": "sgd"}, {"batch_size": 4}, {"trainable": "all"}, {"weight_decay": 0.5}):
        assert not same_test(config, tiny(pictures, **changes))


# The steps


def range_of(task, control=None):
    events: list = []
    timer = PhaseTimer(TickClock())
    state = range_test(task, emit=events.append, control=control or NoWishes(), timer=timer)
    assert timer.phases().total_s() == timer.total_s()
    return state, [event for event in events if isinstance(event, RangeTested)], events


def test_it_goes_over_the_images_again_until_all_rates_were_tried():
    task = make_task(optimizer="sgd", momentum=0.0)
    state, [told], _ = range_of(task)
    assert state == "finished" and task.train.num_batches == 3
    assert len(told.lrs) > 30 and told.lrs == RATES[: len(told.lrs)]
    # by the 30th step the rate is still too low to change anything: the same three batches come again
    assert told.losses[:3] == pytest.approx(told.losses[27:30], rel=1e-3)


def test_the_loss_of_each_step_is_that_of_its_batch_and_the_rate_that_of_its_update():
    task, other = make_task(), make_task()
    rates: list[float] = []
    step = task.device.optimizer_step
    task.device.optimizer_step = lambda optimizer: (rates.append(optimizer.param_groups[0]["lr"]), step(optimizer))
    _, [told], _ = range_of(task)
    assert rates[: len(told.lrs)] == told.lrs
    other.set_train_mode()
    batch = other.train.batches[0]
    loss = torch.nn.functional.cross_entropy(other.logits(batch.images), batch.labels).item()
    assert told.losses[0] == pytest.approx(loss, rel=1e-5)


def test_a_loss_that_is_no_number_ends_the_test_well():
    task = make_task()
    task.scale = torch.zeros_like(task.scale)
    state, [told], _ = range_of(task)
    assert state == "finished" and len(told.losses) == 1 and math.isnan(told.losses[0])
    assert told.suggestion is None and told.why == "the loss was no number after 0 steps"


def test_a_loss_that_rises_far_ends_the_test_before_the_last_rate():
    _, [told], _ = range_of(make_task(optimizer="sgd"))
    assert FIRST < told.lrs[-1] < LAST
    assert told.losses[-1] > 4 * min(told.smoothed)


def test_a_stop_is_heeded_between_two_steps_and_nothing_is_told():
    state, told, _ = range_of(make_task(), StopAfter(5))
    assert (state, told) == ("stopped", [])


class Behind(CpuDevice):
    """Notes in which order batches are sent and figures are fetched, as a device that runs behind would see it."""

    runs_behind = True

    def __init__(self, log: list[str]):
        super().__init__()
        self.log = log

    def place_batch(self, images: torch.Tensor, labels: torch.Tensor):
        self.log.append("sent")
        return super().place_batch(images, labels)

    def fetch(self, sums: torch.Tensor):
        values = sums.tolist()
        return SimpleNamespace(values=lambda: (self.log.append("fetched"), values)[1])


def test_figures_are_fetched_when_the_step_after_them_was_sent():
    log: list[str] = []
    task = make_task()
    task.device = Behind(log)
    range_of(task)
    assert log[:6] == ["sent", "sent", "fetched", "sent", "fetched", "sent"] and log[-1] == "fetched"
    task.device.close()


@pytest.mark.xla
@pytest.mark.parametrize(("optimizer", "width"), [("adamw", 90), ("sgd", 91)])
def test_on_xla_no_learning_rate_compiles_anything_and_the_losses_are_those_of_the_cpu(optimizer: str, width: int):
    changes = {"optimizer": optimizer, "width": width}
    task = make_task("xla", **changes)
    before = task.device.compile_count()
    _, [told], events = range_of(task)
    compiled = [event for event in events if isinstance(event, ProgramCompiled)]
    assert [(event.step, event.cause) for event in compiled] == [(1, "")]
    assert task.device.compile_count() - before == sum(event.count for event in compiled) == 1
    assert told.lrs[0] < 1e-6 and told.lrs[-1] > 0.1
    _, [on_cpu], _ = range_of(make_task("cpu", **changes))
    assert told.losses[:40] == pytest.approx(on_cpu.losses[:40], rel=1e-3)
    with task.device.turn():
        task.device.wait()
    task.device.close()


# Through the store


def test_a_range_test_is_a_run_that_leaves_nothing_but_its_event(store: Store, pictures: Path):
    config = tiny(pictures, trainable="all", optimizer="sgd")
    run_id = store.create_run(config, purpose="probe", work=WORK)
    assert train_run(store, run_id) == "finished", summarise(store, run_id)["reason"]
    summary = summarise(store, run_id)
    told = summary["range_test"]
    assert told["lrs"] == RATES[: len(told["lrs"])] and len(told["losses"]) == len(told["lrs"])
    assert summary["epochs"] == [] and store.list_runs() == []
    assert not store.run_folder(run_id).exists()
    assert sum(summary["phases"].values()) == pytest.approx(summary["total_s"])
    # it timed nothing, so it forecasts nothing
    assert forecast_for(store, config, "cpu") is None
    timing = store.create_run(config, purpose="probe")
    assert train_run(store, timing) == "finished"
    assert summarise(store, timing)["range_test"] is None
    assert forecast_for(store, config, "cpu").basis.endswith("steps that were timed")


def test_it_runs_in_a_process_of_its_own_where_the_run_would(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, process="own"), own=True, purpose="probe", work=WORK)
    assert train_queued(store, run_id) == "finished", summarise(store, run_id)["reason"]
    assert summarise(store, run_id)["range_test"]["lrs"][0] == FIRST


def command(home: Path, pictures: Path, *more: str) -> list[str]:
    options = ["--data", str(pictures), "--model", "timm/test_resnet", "--weights", "none", "--image-size", "32"]
    return ["--home", str(home), "find-lr", *options, "--device", "cpu", "--threads", "1", "--batch-size", "8", *more]


def test_the_command_line_prints_the_suggestion_and_its_curve(tmp_path: Path, pictures: Path, capsys):
    assert main(command(tmp_path / "home", pictures, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"run_id", "suggestion", "lrs", "losses", "smoothed"} <= told.keys()
    assert len(told["lrs"]) == len(told["losses"]) == len(told["smoothed"])
    assert main(command(tmp_path / "home", pictures, "--optimizer", "sgd")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "finished" in lines[0] and lines[1].split()[0] == "1e-7"
    assert "earning rate" in lines[-1] or lines[-1].startswith("No suggestion")


def test_the_command_line_refuses_bad_input_in_one_line_and_runs_nothing(tmp_path: Path, pictures: Path, capsys):
    assert main(command(tmp_path / "home", tmp_path / "nowhere")) == 2
    assert main(command(tmp_path / "home", pictures, "--lr", "-1")) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.strip().splitlines()) == 2


def test_a_test_that_failed_says_why(tmp_path: Path, pictures: Path, capsys):
    weights = tmp_path / "broken.safetensors"
    weights.write_bytes(b"no weights")
    status = main(command(tmp_path / "home", pictures, "--weights", str(weights), "--json"))
    assert status in (1, 2) and "broken.safetensors" in capsys.readouterr().err


# On the page


@pytest.fixture
def home(store, monkeypatch) -> Store:
    """The pages' store; its worker only hears that it is woken."""
    monkeypatch.setattr(registry._entry(), "services", registry.Services(store, SimpleNamespace(wake=lambda: None)))
    return store


def labels(app: AppTest) -> list[str]:
    return [item.label for item in app.button]


def texts(app: AppTest) -> str:
    return " ".join(part.value for part in [*app.markdown, *app.caption]).replace("\\", "")


def test_a_rate_is_found_and_taken_from_the_form(home: Store, pictures: Path):
    app = train_page(tiny(pictures, trainable="all", optimizer="sgd"))
    button(app, "Find a learning rate").click().run()
    [record] = home.list_runs(with_probes=True)
    assert (record.purpose, record.work) == ("probe", WORK) and home.list_runs() == []
    assert "Learning rates are being tried" in texts(app) and "Find a learning rate" not in labels(app)
    # its end is written here, since whether random weights give a suggestion is chance
    home.claim(record.run_id, "cpu")
    home.append_events(record.run_id, [(time.time(), judge(RATES, losses(4e-3)))])
    home.end_run(record.run_id, "finished")
    app.run()
    told = summarise(home, record.run_id)["range_test"]
    use = f"Use {lr_in_words(told['suggestion'])}"
    assert use in labels(app) and f"Use {lr_in_words(told['careful'])}" in labels(app)
    button(app, use).click().run()
    assert not app.exception, app.exception
    assert app.number_input(key="form_lr").value == told["suggestion"]
    assert button(app, use).disabled
    # it tells of another number of epochs as well, and not of another optimizer
    app.number_input(key="form_epochs").set_value(9).run()
    assert use in labels(app)
    app.session_state["form_optimizer"] = "adam"
    app.run()
    assert use not in labels(app) and "Find a learning rate" in labels(app)


def test_a_test_that_failed_or_found_nothing_says_so_on_the_page(home: Store, pictures: Path):
    app = train_page(tiny(pictures))
    button(app, "Find a learning rate").click().run()
    [record] = home.list_runs(with_probes=True)
    home.claim(record.run_id, "cpu")
    ended = RunEnded("failed", 1.0, Phases(setup_s=1.0), 0, 0.0, "The disk is full.", "Make room.", "DataError")
    home.append_events(record.run_id, [(time.time(), ended)])
    home.end_run(record.run_id, "failed")
    app.run()
    assert "The disk is full. Make room." in texts(app)
    button(app, "Find a learning rate").click().run()
    newest = home.list_runs(with_probes=True)[0].run_id
    home.claim(newest, "cpu")
    home.append_events(newest, [(time.time(), judge(RATES, [2.3] * STEPS))])
    home.end_run(newest, "finished")
    app.run()
    assert "No suggestion: the loss never fell." in texts(app)
    assert not [label for label in labels(app) if label.startswith("Use ")]


def test_no_test_is_begun_that_could_not_run(home: Store, tmp_path: Path):
    app = train_page(tiny(tmp_path / "nowhere"))
    assert button(app, "Find a learning rate").disabled


@pytest.mark.browser
@pytest.mark.skipif(not Path(CHROMIUM).exists() and os.environ.get("CI") != "true", reason=f"{CHROMIUM} is not there")
def test_in_a_browser_a_rate_is_found_by_the_worker_drawn_and_taken(tmp_path: Path):
    with dashboard(tmp_path) as running, chromium_page() as page:
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(running.url)
        page.get_by_role("button", name="Find a learning rate").click(timeout=60_000)
        page.get_by_text("Learning rates are being tried").wait_for(timeout=30_000)
        use = page.get_by_role("button", name="Use ").first
        use.wait_for(timeout=280_000)
        page.get_by_test_id("stPlotlyChart").filter(has_text="Loss at each learning rate").wait_for(timeout=30_000)
        wanted = float(use.inner_text().split()[-1])
        use.click()
        # its label says from then on that it was changed
        page.wait_for_function(
            "wanted => [...document.querySelectorAll('input[aria-label^=\"Learning rate\"]')]"
            ".some(box => Number(box.value) === wanted)",
            arg=wanted,
            timeout=30_000,
        )
        assert page.get_by_test_id("stException").count() == 0 and wrong == []
