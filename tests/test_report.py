"""Tables for other programs, and reports: what they tell, that they stand alone, and that names in them are inert."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from core.analysis.article import ARTICLE
from core.analysis.summary import summarise
from core.analysis.tables import as_csv, as_parquet, run_tables
from core.config import make_config
from core.errors import StoreError
from core.events import StepLogged
from core.output.report import group_html, run_html
from core.running.trainer import train_run
from core.store import Store
from tests.browser import CHROMIUM, chromium_page
from tests.test_timing_charts import TINY, write_pictures

pytestmark = pytest.mark.long

HAS_CHROMIUM = Path(CHROMIUM).exists()
PLANTED = "<script>window.planted = 1</script><img src=x onerror='window.planted = 1'>"
CLASSES = ("<script>window.planted = 1;", "<img src=x onerror='window.planted = 1'>")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    opened = Store(tmp_path_factory.mktemp("home"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def planted(store: Store) -> str:
    """A real run of two epochs whose name, note, tags and class names are tags."""
    write_pictures(store.home / "pictures", CLASSES)
    run_id = store.create_run(make_config(**TINY, data=str(store.home / "pictures"), epochs=2), name=PLANTED)
    train_run(store, run_id)
    store.set_note(run_id, PLANTED)
    store.set_tags(run_id, [PLANTED])
    assert store.get_run(run_id).state == "finished", summarise(store, run_id)["reason"]
    return run_id


class Tags(HTMLParser):
    """What a browser would run or fetch of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data

    @property
    def loaded(self) -> list[str | None]:
        return [
            attrs[name]
            for tag, attrs in self.found
            for name in ("src", "href", "srcset", "data", "action")
            if name in attrs
        ]


def test_a_report_tells_what_a_stranger_asks(store: Store, planted: str):
    summary = summarise(store, planted)
    text = Tags(run_html(store, planted)).text
    environment = summary["environment"]
    told = ["finished", planted, "torchvision/resnet18", summary["config"]["data"], summary["device"]["name"]]
    told += [f"torch {environment['torch']}", "2 of 2", "Where the time went", "Epochs", "Set-up", "Building the model"]
    told += [f"{summary['best']['val_top1']:.1f} %", f"{summary['epochs'][1]['train_loss']:,.3f}", "Learning rate"]
    assert [words for words in told if words not in text] == []
    assert "Diagnosis" in text


def test_a_report_gives_the_diagnosis_with_its_advice(store: Store, planted: str):
    from core.analysis.diagnosis import diagnose

    text = Tags(run_html(store, planted)).text
    findings = diagnose(summarise(store, planted))
    assert findings
    for finding in findings:
        assert finding.sentence in text and finding.advice in text


def test_a_report_brings_plotly_once_and_loads_nothing(store: Store, planted: str):
    page = run_html(store, planted)
    tags = Tags(page)
    assert tags.loaded == []
    assert not any(tag in ("link", "img", "iframe", "object", "base") for tag, _ in tags.found)
    assert sum(len(script) > 1_000_000 for script in tags.scripts) == 1
    assert 3_000_000 < len(page.encode()) < 7_000_000
    assert "default-src 'none'" in page and '<meta charset="utf-8">' in page


def test_the_same_run_makes_the_same_report(store: Store, planted: str):
    assert run_html(store, planted) == run_html(store, planted)


def test_names_are_no_tags(store: Store, planted: str):
    tags = Tags(run_html(store, planted))
    assert tags.text.count(PLANTED) >= 3 and all(name in tags.text for name in CLASSES)
    assert not any("planted" in script for script in tags.scripts)
    assert not any("onerror" in attrs for _, attrs in tags.found)


def test_labels_and_notes_of_a_group_are_no_tags(store: Store, planted: str):
    group_id = store.groups.of_past_runs(PLANTED, [(planted, PLANTED, "cold")], note=PLANTED)
    tags = Tags(group_html(store, group_id))
    assert tags.text.count(PLANTED) >= 4
    assert not any("<script>window" in script or "<img" in script for script in tags.scripts[1:])
    assert not any("onerror" in attrs for _, attrs in tags.found)


def test_an_error_is_told_and_is_no_tag(store: Store, tmp_path: Path):
    run_id = store.create_run(make_config(**TINY, data=str(tmp_path / "<script>missing")))
    train_run(store, run_id)
    summary, tags = summarise(store, run_id), Tags(run_html(store, run_id))
    assert summary["state"] == "failed" and "<script>missing" in summary["reason"]
    assert summary["reason"] in tags.text and summary["fix"] in tags.text
    assert not any("script>missing" in script for script in tags.scripts)


def test_a_run_that_waits_has_a_report_without_charts(store: Store):
    page = run_html(store, store.create_run(make_config(**TINY)))
    assert "queued" in page and "0 of" in page and "Plotly" not in page
    assert "Where the time went" not in page and "–" not in Tags(page).text.partition("Details")[0]


def test_the_article_s_group_is_told_with_its_source(store: Store):
    text = Tags(group_html(store, ARTICLE.group_id)).text
    assert ARTICLE.note in text and "2 repeats of GPU: nothing can be said" in text
    told = [ARTICLE.name, "582.7 ± 373.6", "671.5", "25.8 %", "not known", "7:58 min", "No phases were recorded"]
    assert [words for words in told if words not in text] == []
    # no epoch of it is known
    assert "Epoch time" not in text


def test_a_group_of_runs_is_compared_by_run_and_by_epoch(store: Store, planted: str):
    summary = summarise(store, planted)
    group_id = store.groups.of_past_runs("Twice", [(planted, "one", "cold")])
    text = Tags(group_html(store, group_id)).text
    assert "Whole run, compared" in text and "Epoch time, compared" in text
    assert planted in text and f"torch {summary['environment']['torch']}" in text


def test_there_is_no_report_of_what_is_not_there(store: Store):
    with pytest.raises(StoreError):
        run_html(store, "none")
    with pytest.raises(StoreError):
        group_html(store, "none")


@pytest.mark.browser
@pytest.mark.skipif(not HAS_CHROMIUM and os.environ.get("CI") != "true", reason=f"{CHROMIUM} is not there")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_reports_open_offline_and_draw_their_charts(store: Store, planted: str, tmp_path: Path, scheme: str):
    group_id = store.groups.of_past_runs(PLANTED, [(planted, PLANTED, "cold")], note=PLANTED)
    reports = {
        "run": (run_html(store, planted), 5),
        "group": (group_html(store, group_id), 3),
        "article": (group_html(store, ARTICLE.group_id), 3),
    }
    with chromium_page() as page:
        page.context.set_offline(True)
        page.emulate_media(color_scheme=scheme)
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url) if "file:" not in request.url[:5] else None)
        for name, (content, charts) in reports.items():
            (tmp_path / f"{name}.html").write_text(content, encoding="utf-8")
            page.goto((tmp_path / f"{name}.html").as_uri())
            page.wait_for_function(f"document.querySelectorAll('.chart .gtitle').length >= {charts}")
            assert page.locator("#chart-phases .bars .point path").count() >= 1
            assert page.evaluate("window.planted") is None
            seen = page.evaluate("getComputedStyle(document.querySelector('.chart .gtitle')).fill")
            assert seen == page.evaluate("getComputedStyle(document.body).color")
            for width in (380, 1280):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth") <= width
            if folder := os.environ.get("FINETUNE_SCREENSHOTS"):
                page.screenshot(path=f"{folder}/report-{name}-{scheme}.png", full_page=True)
        assert wrong == []


def test_tables_have_a_row_a_step_an_epoch_and_a_phase(store: Store, planted: str):
    summary, tables = summarise(store, planted), run_tables(store, [planted])
    assert all(list(table)[:3] == ["run_id", "name", "device"] for table in tables.values())
    assert {(table["run_id"].unique().tolist()[0], table["device"][0]) for table in tables.values()} == {
        (planted, "cpu")
    }
    epochs = tables["epochs"]
    assert epochs["epoch"].tolist() == [1, 2]
    assert epochs["val_top1"].tolist() == [epoch["val_top1"] for epoch in summary["epochs"]]
    assert epochs["compute_s"].tolist() == [epoch["phases"]["compute_s"] for epoch in summary["epochs"]]
    assert (epochs["settled_steps"] + epochs["left_out_steps"]).tolist() == [summary["steps_per_epoch"]] * 2
    logged = [event.payload for event in store.events(planted, kinds=["StepLogged"])]
    assert tables["steps"]["step"].tolist() == [payload["step"] for payload in logged]
    assert tables["steps"]["loss"].tolist() == [payload["loss"] for payload in logged]


def test_phases_of_tables_add_up(store: Store, planted: str):
    summary, phases = summarise(store, planted), run_tables(store, [planted])["phases"]
    assert phases["part"].unique().tolist() == ["set-up", "epoch 1", "epoch 2", "run"]
    sums = phases.groupby("part")["seconds"].sum()
    assert sums["run"] == pytest.approx(summary["total_s"])
    assert sums["epoch 2"] == pytest.approx(summary["epochs"][1]["seconds"])
    assert sums["set-up"] == pytest.approx(sum(summary["setup_parts"].values()))


def test_tables_survive_parquet_and_csv(store: Store, planted: str):
    for table in run_tables(store, [planted]).values():
        pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(as_parquet(table))), table)
        types = {name: kind for name, kind in table.dtypes.items() if kind != "float64"}
        read = pd.read_csv(io.StringIO(as_csv(table)), dtype=types, keep_default_na=False, na_values={"seconds": ""})
        pd.testing.assert_frame_equal(read[["run_id", "name"]], table[["run_id", "name"]])
        assert len(read) == len(table) and list(read) == list(table)
        assert "Unnamed: 0" not in as_csv(table)


def test_tables_of_several_runs_follow_each_other_and_those_of_none_keep_their_columns(store: Store, planted: str):
    waiting = store.create_run(make_config(**TINY))
    tables = run_tables(store, [waiting, planted])
    assert tables["phases"]["run_id"].unique().tolist() == [waiting, planted]
    empty = run_tables(store, [waiting])
    for name in ("epochs", "steps"):
        assert len(empty[name]) == 0 and (empty[name].dtypes == tables[name].dtypes).all()


def test_a_step_that_was_trained_again_is_there_once_as_trained_last(store: Store):
    run_id = store.create_run(make_config(**TINY))
    told = [StepLogged(step, 1, loss, 50.0, 0.1, 4, 1.0, 0.1, None, 0) for step, loss in ((1, 3.0), (2, 2.0), (2, 1.5))]
    store.append_events(run_id, [(0.0, step) for step in told])
    steps = run_tables(store, [run_id])["steps"]
    assert steps["step"].tolist() == [1, 2] and steps["loss"].tolist() == [3.0, 1.5]
    assert steps["images_per_s"].isna().all()
