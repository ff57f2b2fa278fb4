"""Timings, comparing and forecasts on the pages: real tiny runs, with and without a browser."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from streamlit.testing.v1 import AppTest

from core.analysis.article import ARTICLE
from core.config import make_config
from core.groups import plan_group, run_group, varied
from core.running.trainer import train_run
from core.store import Store
from core.worker import Worker
from tests.browser import CHROMIUM, chromium_page, dashboard
from tests.test_groups import tiny
from tests.test_pages import add_run, button, open_page, train_page
from ui import group_form, registry

pytestmark = pytest.mark.long

HOSTILE = '<img src=x onerror="alert(1)"> **bold** [link](javascript:alert(1)) $x$'
WAIT_MS = 30_000


@pytest.fixture
def home(store, monkeypatch) -> Store:
    """The pages' store; its worker only hears that it is woken."""
    monkeypatch.setattr(registry._entry(), "services", registry.Services(store, SimpleNamespace(wake=lambda: None)))
    return store


@pytest.fixture
def worked(store, monkeypatch) -> Store:
    """The pages' store with a worker that trains."""
    worker = Worker(store)
    worker.start()
    monkeypatch.setattr(registry._entry(), "services", registry.Services(store, worker))
    yield store
    worker.shutdown(30)


def texts(app: AppTest) -> str:
    """All words of the page, without the backslashes that keep markdown from reading them."""
    parts = [*app.markdown, *app.caption, *app.info, *app.warning, *app.error, *app.subheader]
    return " ".join(part.value for part in parts).replace("\\", "")


def address(app: AppTest) -> str:
    """The group that the address names."""
    named = app.query_params["group"]
    return named if isinstance(named, str) else named[0]


def past_group(store: Store, name: str = "Mine", labels: tuple[str, ...] = ("a", "a", "b", "b")) -> str:
    return store.groups.of_past_runs(name, [(add_run(store), label, "warm") for label in labels])


def test_without_a_group_the_articles_runs_are_shown_and_nothing_is_concluded(home):
    app = open_page("timings")
    assert app.selectbox(key="timings_group").value == ARTICLE.group_id
    assert "Nothing can be said" in texts(app) and "2 repeats of GPU" in texts(app)
    assert ARTICLE.note in texts(app)
    assert address(app) == ARTICLE.group_id


def test_a_group_of_real_runs_shows_ratio_interval_phases_and_every_run(home, pictures):
    configs = varied(tiny(pictures), {"image_size": [32, 64]})
    group_id = home.groups.create("Sizes", plan_group(configs, repeats=3, start="warm"), plan={})
    run_group(home, group_id)
    app = open_page("timings", group=group_id)
    words = texts(app)
    assert "image_size 64 took " in words or "image_size 32 took " in words
    assert "holds 1." in words or "95 % interval" in words
    headings = [item.value for item in app.subheader]
    assert "Where the time went, repeat by repeat" in headings and len(app.get("plotly_chart")) == 3
    [cells] = [frame.value for frame in app.dataframe if "95 % from" in frame.value.columns]
    assert list(cells["Repeats"]) == [3, 3] and (cells["95 % from"] < cells["Mean"]).all()
    [runs] = [frame.value for frame in app.dataframe if "Run" in frame.value.columns]
    members = [member.run_id for member in home.groups.get(group_id).members if member.purpose == "train"]
    assert list(runs["Run"]) == [f"runs?run={run_id}" for run_id in members]

    app = open_page("runs", run=members[0])
    words = texts(app)
    assert all(heading in words for heading in ("Where the time went, epoch by epoch", "Set-up", "Programs"))


def test_the_time_to_an_accuracy_starts_from_one_that_all_repeats_reached(home):
    app = open_page("timings", group=past_group(home))
    app.selectbox(key=f"measure_{home.groups.list_all()[0].group_id}").set_value("time_to_accuracy_s").run()
    assert not app.exception, app.exception
    assert app.number_input[0].value == 75.0
    assert "Time to 75 % top-1" in texts(app)


def test_the_address_names_the_group_and_choosing_one_changes_the_address(home):
    older, newer = past_group(home, "Older"), past_group(home, "Newer")
    assert address(open_page("timings")) == newer
    app = open_page("timings", group=older)
    assert app.selectbox(key="timings_group").value == older
    app.selectbox(key="timings_group").set_value(newer).run()
    assert address(app) == newer
    assert "There is no group nowhere" in texts(open_page("timings", group="nowhere"))


def test_a_group_is_stopped_with_all_its_runs_that_wait(home):
    planned = plan_group(varied(make_config(), {"seed": [1, 2]}), repeats=2, start="warm")
    group_id = home.groups.create("Long", planned, plan={"repeats": 2, "start": "warm", "order_seed": 0})
    app = open_page("timings", group=group_id)
    assert "2 repeats of each, warm" in texts(app)
    button(app, "Stop group").click().run()
    assert {member.state for member in home.groups.get(group_id).members} == {"stopped"}


def test_a_deleted_group_leaves_its_runs(home):
    app = open_page("timings", group=past_group(home))
    button(app, "Delete group").click().run()
    button(app, "Delete the group").click().run()
    assert home.groups.list_all() == [] and len(home.list_runs()) == 4


def test_a_comparison_that_is_started_on_train_runs_and_is_shown_on_timings(worked, pictures):
    app = train_page(tiny(pictures))
    app.button_group(key="compare_what").set_value("option").run()
    app.text_input(key="compare_values_batch_size").set_value("4, 8").run()
    app.number_input(key="compare_repeats").set_value(2).run()
    assert "3 repeats are needed to say anything" in texts(app) and "**6 runs**" in texts(app)
    button(app, "Start the comparison").click().run()
    assert not app.exception, app.exception
    [group] = worked.groups.list_all()
    assert app.title[0].value == "Timings" and address(app) == group.group_id
    deadline = time.monotonic() + 120
    while worked.groups.get(group.group_id).is_active and time.monotonic() < deadline:
        time.sleep(0.2)
    members = worked.groups.get(group.group_id).members
    assert [(member.state, member.purpose) for member in members] == [("finished", "warm-up")] * 2 + [
        ("finished", "train")
    ] * 4
    app.run()
    assert "Nothing can be said" in texts(app) and "2 warm-up runs went before" in texts(app)


def test_a_second_press_on_the_same_page_starts_no_second_comparison(home, monkeypatch):
    monkeypatch.setattr(group_form.st, "session_state", {})
    comparison = group_form.comparison_of(make_config(), {"seed": [1, 2]}, repeats=3, start="warm", seed=0)
    for _ in range(2):
        group_form.start_group(comparison, "")
    assert len(home.groups.list_all()) == 1


@pytest.mark.parametrize(
    ("choices", "start", "words"),
    [
        ({"batch_size": []}, "warm", "No value is chosen for Batch size."),
        ({"batch_size": ["8"]}, "warm", "nothing to compare"),
        ({"batch_size": ["8", "many"]}, "warm", "--batch-size can't be 'many'"),
        ({"data": ["builtin:digits", "/nowhere/at/all"]}, "warm", "/nowhere/at/all"),
        ({"num_devices": ["1", "3"]}, "warm", "num_devices 3: A batch of 32 can't be shared evenly"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(home, choices, start, words):
    base = make_config(device="cpu")
    comparison = group_form.comparison_of(base, choices, repeats=3, start=start, seed=0)
    assert words in comparison.problem and not comparison.runs


def test_cold_runs_on_a_tpu_that_the_dashboard_holds_are_refused_and_warm_ones_are_not(home, monkeypatch):
    # no TPU is here: that the device xla were one is pretended
    monkeypatch.setattr(group_form, "wants_tpu", lambda: True)
    monkeypatch.setattr(group_form, "resolve_kind", lambda kind: "xla")
    base = make_config(device="cpu")
    cold, warm = (
        group_form.comparison_of(base, {"lr": ["0.1", "0.2"]}, repeats=3, start=start, seed=0)
        for start in ("both", "warm")
    )
    assert "compare warm runs here" in cold.problem and not warm.problem


def test_past_runs_become_a_group_with_what_makes_them_hard_to_compare(home, monkeypatch):
    for device, epochs in (("cpu", 2), ("cpu", 3)):
        add_run(home, device=device, epochs=epochs, lr=epochs / 100)
    ids = [record.run_id for record in home.list_runs()]
    # the table of runs is a canvas, in which AppTest can't select
    monkeypatch.setattr("ui.run_views.runs_table", lambda rows: ids)
    app = open_page("runs")
    assert "differ in more than one thing: epochs (2 / 3)" in texts(app)
    app.text_input(key="past_name").set_value("Two").run()
    button(app, "Make the group").click().run()
    [group] = home.groups.list_all()
    assert app.title[0].value == "Timings" and address(app) == group.group_id
    assert group.name == "Two" and {member.run_id for member in group.members} == set(ids)
    assert {member.label for member in group.members} == {"epochs 2, lr 0.02", "epochs 3, lr 0.03"}


def test_a_probe_that_is_asked_for_gives_a_forecast(home, pictures):
    app = train_page(tiny(pictures))
    button(app, "Time a few steps first").click().run()
    [probe] = home.list_runs(with_probes=True)
    assert "A few steps are being timed" in texts(app) and home.list_runs() == []
    train_run(home, probe.run_id)
    app.run()
    assert "that were timed." in texts(app) and "About " in texts(app)


def test_a_probe_that_failed_says_why_and_can_be_asked_for_again(home, pictures, tmp_path):
    (tmp_path / "none.pt").write_text("no weights")
    app = train_page(tiny(pictures, weights=str(tmp_path / "none.pt")))
    button(app, "Time a few steps first").click().run()
    train_run(home, home.list_runs(with_probes=True)[0].run_id)
    app.run()
    assert "none.pt" in texts(app)
    assert not button(app, "Time a few steps first").disabled


@pytest.mark.browser
@pytest.mark.skipif(not Path(CHROMIUM).exists() and os.environ.get("CI") != "true", reason=f"{CHROMIUM} is not there")
def test_on_a_phone_names_are_inert_findings_lead_to_their_chart_and_nothing_is_cut_off(tmp_path):
    store = Store(tmp_path)
    group_id = past_group(store, HOSTILE, (HOSTILE, HOSTILE, HOSTILE, "plain", "plain", "plain"))
    store.close()
    with dashboard(tmp_path) as running, chromium_page() as page:
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.set_viewport_size({"width": 390, "height": 844})
        page.goto(f"{running.url}/timings?group={group_id}")
        page.get_by_text("No clear difference", exact=True).wait_for(timeout=WAIT_MS)
        page.locator(".js-plotly-plot").first.wait_for(timeout=WAIT_MS)
        assert page.locator("[data-testid=stException], img[src=x], a[href^=javascript]").count() == 0
        told = [text for text in page.get_by_test_id("stMarkdownContainer").all_inner_texts() if "bold" in text]
        assert told and all("**bold**" in text for text in told)
        main = page.get_by_test_id("stMain")
        assert main.evaluate("main => main.scrollWidth <= main.clientWidth")
        before = main.evaluate("main => main.scrollTop")
        page.get_by_role("link", name="See it below").first.click()
        page.wait_for_function(
            f"() => document.querySelector('[data-testid=stMain]').scrollTop > {before} + 100", timeout=WAIT_MS
        )
        with page.expect_download(timeout=WAIT_MS) as download:
            page.get_by_role("button", name="Markdown").click()
        assert "plain" in Path(download.value.path()).read_text()
        assert wrong == []
