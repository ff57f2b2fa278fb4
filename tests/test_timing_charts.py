"""The charts of time: what they show, that colours can be told apart, and that nothing overlaps on a phone."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import plotly.io as pio
import pytest
from PIL import Image
from skimage.color import deltaE_ciede2000, rgb2lab

from core.analysis.article import ARTICLE
from core.analysis.comparison import compare
from core.analysis.repeats import Repeat, RunGroup, group_of
from core.analysis.statistics import describe
from core.analysis.summary import summarise
from core.config import make_config
from core.events import MachineSampled, Phases
from core.output.group_charts import phases_by_repeat, ratios_figure, repeats_figure
from core.output.phases import PHASE_COLOURS, PHASE_HELP, PHASE_TITLES
from core.output.timing_charts import MOST_POINTS, machine_figure, phases_by_epoch, setup_figure, step_histogram
from core.running.trainer import train_run
from core.store import Store
from tests.browser import CHROMIUM, chromium_page

HAS_CHROMIUM = Path(CHROMIUM).exists()
TINY = {"threads": 1, "model": "torchvision/resnet18", "weights": "none", "image_size": 32, "batch_size": 4}
LONG = "model torchvision/wide_resnet50_2, precision bf16, augmentation <b>strong</b>"
COLOUR_BLIND = {
    # G. M. Machado, M. M. Oliveira, L. A. F. Fernandes, IEEE Transactions on Visualization 15 (2009), at full strength
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
    "full colour": np.eye(3).tolist(),
}


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Of a real run of two epochs."""
    home = tmp_path_factory.mktemp("home")
    write_pictures(home / "pictures", ("dark", "light"))
    store = Store(home)
    run_id = store.create_run(make_config(**TINY, data=str(home / "pictures"), epochs=2))
    train_run(store, run_id)
    told = summarise(store, run_id)
    store.close()
    assert told["state"] == "finished", told["reason"]
    return told


def write_pictures(folder: Path, classes: Sequence[str]) -> None:
    """Five pictures a class to train on, and five to validate on."""
    for split, (label, name) in itertools.product(("train", "val"), enumerate(classes)):
        (folder / split / name).mkdir(parents=True)
        for index in range(5):
            Image.new("RGB", (40, 40), (100 * label, 20 * index, 0)).save(folder / split / name / f"{index}.png")


def group(times: dict[tuple[str, str], list[float]]) -> RunGroup:
    """Repeats by label and start, half of each computing and half set-up."""
    repeats = [
        Repeat(label, start, f"{label}-{start}-{place}", "finished", total, phases_of(total), [])
        for (label, start), totals in times.items()
        for place, total in enumerate(totals)
    ]
    return RunGroup("group", "By hand", repeats)


def phases_of(total: float) -> dict[str, float]:
    return asdict(Phases(setup_s=total / 2, compute_s=total / 2))


def columns_of(samples: list[tuple[float, MachineSampled]]) -> dict:
    """As `Store.columns` gives them."""
    times = {"at": [at for at, _ in samples]}
    names = asdict(MachineSampled())
    return times | {name: np.array([getattr(sample, name) for _, sample in samples], dtype=float) for name in names}


def samples_of_a_gpu(count: int) -> dict:
    """As on a machine with a GPU, which isn't here."""
    return columns_of(
        [
            (1000.0 + place, MachineSampled(own_cpu_percent=place % 50, other_cpu_percent=10.0, gpu_percent=90.0))
            for place in range(count)
        ]
    )


def bars(figure) -> list:
    return [trace for trace in figure.data if trace.type == "bar"]


def test_each_phase_has_a_title_a_colour_and_a_sentence():
    names = list(asdict(Phases()))
    assert list(PHASE_TITLES) == list(PHASE_COLOURS) == list(PHASE_HELP) == names


@pytest.mark.parametrize("eyes", COLOUR_BLIND)
def test_colours_of_phases_are_told_apart(eyes: str):
    rgb = np.array(
        [[int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)] for colour in PHASE_COLOURS.values()]
    )
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ np.array(COLOUR_BLIND[eyes]).T
    linear = linear.clip(0, 1)
    seen = rgb2lab(np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)[None])[0]
    distances = {pair: deltaE_ciede2000(seen[pair[0]], seen[pair[1]]) for pair in itertools.combinations(range(8), 2)}
    assert min(distances.values()) > 12, min(distances, key=distances.get)


def test_bars_of_a_run_add_up_to_its_time(summary: dict):
    figure = phases_by_epoch(summary)
    shown = sum(sum(trace.y) for trace in figure.data)
    assert shown == pytest.approx(summary["total_s"], abs=0.05)
    epochs = {place: epoch["seconds"] for place, epoch in enumerate(summary["epochs"], start=1)}
    for place, seconds in epochs.items():
        height = sum(y for trace in figure.data for x, y in zip(trace.x, trace.y, strict=True) if x == place)
        assert height == pytest.approx(seconds, abs=0.02)
    assert list(figure.layout.xaxis.ticktext)[:3] == ["Set-up", "1", "2"]


def test_phases_without_time_are_left_out_and_the_others_told_in_words(summary: dict):
    figure = phases_by_epoch(summary)
    assert summary["phases"]["compile_s"] == 0
    names = [trace.name for trace in figure.data]
    assert "Compile" not in names and {"Set-up", "Compute", "Evaluation"} <= set(names)
    compute = figure.data[names.index("Compute")]
    assert compute.hovertemplate.startswith("<b>Compute</b>")
    share = 100 * summary["epochs"][0]["phases"]["compute_s"] / summary["epochs"][0]["seconds"]
    assert compute.customdata[0].endswith(f"{share:.1f} % of epoch 1") and " s, " in compute.customdata[0]


def test_a_run_that_goes_on_shows_what_is_known(store: Store):
    told = summarise(store, store.create_run(make_config(**TINY)))
    assert not phases_by_epoch(told).data
    known = {**told, "setup_parts": {"scan_s": 2.0, "model_s": 1.0}}
    [setup] = phases_by_epoch(known).data
    assert setup.name == "Set-up" and list(setup.y) == [3.0]


def test_epochs_of_a_long_run_are_numbered_sparsely(summary: dict):
    epochs = [{**summary["epochs"][0], "epoch": number} for number in range(1, 101)]
    figure = phases_by_epoch({**summary, "epochs": epochs})
    texts = figure.layout.xaxis.ticktext
    assert texts[0] == "Set-up" and len(texts) <= 9 and "17" in texts


def test_set_up_is_shown_part_by_part_longest_first(summary: dict):
    [parts] = setup_figure(summary).data
    known = sorted((part for part in summary["setup_parts"].values() if part >= 1e-3), reverse=True)
    assert list(parts.x) == known
    assert "Building the model" in parts.customdata


def test_the_histogram_counts_every_settled_step(summary: dict):
    times = summary["step_times"]
    figure = step_histogram(summary)
    [steps] = figure.data
    longer = times["histogram"]["longer"]
    settled = 2 * summary["steps_per_epoch"] - sum(times["left_out"].values())
    assert sum(steps.y) + longer == times["steps"] == settled > 0
    assert len(figure.layout.shapes) == 2 or longer
    assert figure.layout.shapes[0].x0 == pytest.approx(1000 * times["median_s"])
    assert f"{settled} settled steps" in figure.layout.title.text
    far = {**times, "p95_s": 99.0, "histogram": {**times["histogram"], "longer": 3}}
    figure = step_histogram({**summary, "step_times": far})
    assert "3 longer than shown" in figure.layout.title.text and len(figure.layout.shapes) == 1
    assert not step_histogram({**summary, "step_times": None}).data


def test_the_machine_is_shown_with_what_has_values():
    figure = machine_figure(samples_of_a_gpu(10), 1000.0)
    assert [trace.name for trace in figure.data] == ["CPU, this run", "CPU, others", "GPU busy"]
    assert [trace.stackgroup for trace in figure.data] == ["cpu", "cpu", None]
    assert list(figure.data[2].y) == [90.0] * 10 and list(figure.data[0].x) == list(range(10))
    assert not machine_figure(columns_of([]), 0.0).data


def test_each_unit_of_the_machine_has_a_panel():
    seen = MachineSampled(own_cpu_percent=5, own_memory_gib=2, gpu_temperature_c=70, gpu_power_w=300, gpu_throttled=1)
    figure = machine_figure(columns_of([(0.0, seen), (1.0, replace(seen, gpu_throttled=0))]), 0.0)
    units = [figure.layout[f"yaxis{place}"].title.text for place in ("", 2, 3, 4)]
    assert units == ["Percent", "GiB", "°C", "W"]
    [slowed] = [trace for trace in figure.data if trace.name == "GPU slowed"]
    assert slowed.y[0] == 100 and np.isnan(slowed.y[1])


def test_a_long_run_s_machine_is_shown_by_means():
    figure = machine_figure(samples_of_a_gpu(3000), 1000.0)
    own = figure.data[0]
    assert len(own.x) <= MOST_POINTS
    assert np.mean(own.y) == pytest.approx(np.mean(np.arange(3000) % 50), abs=0.01)
    assert own.x[-1] == pytest.approx(3000 / 60, abs=0.1)


def test_every_repeat_of_the_article_is_a_point_and_means_have_intervals():
    figure = repeats_figure(compare(ARTICLE))
    points = [trace for trace in figure.data if trace.marker.symbol != "diamond"]
    assert sorted(x for trace in points for x in trace.x) == sorted(repeat.total_s for repeat in ARTICLE.repeats)
    tpu, gpu = (trace for trace in figure.data if trace.marker.symbol == "diamond")
    told = describe([repeat.total_s for repeat in ARTICLE.repeats if repeat.label == "TPU"])
    assert tpu.x[0] == told.mean and tpu.x[0] + tpu.error_x.array[0] == pytest.approx(told.high)
    assert gpu.error_x.array is None
    assert list(figure.layout.yaxis.ticktext) == ["TPU", "GPU"]


def test_repeats_without_phases_are_one_bar_each():
    figure = phases_by_repeat(ARTICLE)
    [whole] = figure.data
    assert whole.name == "Whole run, phases not known"
    assert list(whole.x) == [repeat.total_s for repeat in ARTICLE.repeats]
    assert list(figure.layout.yaxis.ticktext) == ["TPU", "GPU"]


def test_the_phases_of_a_real_repeat_add_up(summary: dict):
    figure = phases_by_repeat(group_of("Real", [summary, summary], ["one", "two"], ["cold", "cold"]))
    for place in {y for trace in figure.data for y in trace.y}:
        length = sum(x for trace in figure.data for x, y in zip(trace.x, trace.y, strict=True) if y == place)
        assert length == pytest.approx(summary["total_s"], abs=0.02)
    assert list(figure.layout.yaxis.ticktext) == ["one · cold", "two · cold"]


def test_repeats_that_did_not_finish_are_not_drawn():
    made = group({("cpu", "warm"): [4.0, 5.0]})
    made.repeats[1] = replace(made.repeats[1], state="failed")
    assert {y for trace in bars(phases_by_repeat(made)) for y in trace.y} == {0.0}


def test_cold_repeats_stand_apart_from_warm_ones():
    figure = phases_by_repeat(group({("cpu", "warm"): [4.0, 5.0], ("cpu", "cold"): [8.0, 9.0]}))
    assert list(figure.layout.yaxis.ticktext) == ["cpu · cold", "cpu · warm"]
    places = sorted({y for trace in figure.data for y in trace.y})
    assert np.diff(places)[1] > np.diff(places)[0]


def test_ratios_lie_around_the_line_at_1_and_unclear_ones_are_grey():
    times = {("a", "warm"): [10.0, 10.1, 9.9], ("b", "warm"): [20.0, 20.2, 19.8], ("c", "warm"): [10.1, 9.9, 10.0]}
    figure = ratios_figure(compare(group(times)))
    clear, unclear = figure.data
    assert clear.x[0] == pytest.approx(2.0) and unclear.x[0] == pytest.approx(1.0)
    assert unclear.marker.color == PHASE_COLOURS["other_s"] != clear.marker.color
    low, high = figure.layout.xaxis.range
    assert figure.layout.shapes[0].x0 == 1 and low < 1 and high > clear.x[0] + clear.error_x.array[0]


def test_too_few_repeats_have_a_ratio_without_an_interval():
    [ratio] = ratios_figure(compare(ARTICLE)).data
    assert ratio.marker.symbol == "diamond-open" and ratio.error_x.array is None


def test_backgrounds_are_clear_and_text_colours_open(summary: dict):
    made = group({("a", "warm"): [10.0, 11.0, 12.0], ("b", "warm"): [20.0, 21.0, 22.0]})
    for figure in figures_of(summary, made):
        layout = figure.layout
        assert layout.paper_bgcolor == layout.plot_bgcolor == "rgba(0,0,0,0)"
        assert layout.font.color is None and layout.title.font.color is None and figure.data


def figures_of(summary: dict, made: RunGroup) -> list:
    result = compare(made)
    return [
        phases_by_epoch(summary),
        setup_figure(summary),
        step_histogram(summary),
        machine_figure(samples_of_a_gpu(300), 1000.0),
        repeats_figure(result),
        phases_by_repeat(made),
        ratios_figure(result),
    ]


def test_labels_are_no_tags_and_take_three_lines_at_the_most():
    made = group({("cpu", "warm"): [1.0, 1.1, 1.2], (f"{LONG}, {LONG}", "warm"): [2.0, 2.1, 2.2]})
    for figure in (repeats_figure(compare(made)), phases_by_repeat(made), ratios_figure(compare(made))):
        label = figure.layout.yaxis.ticktext[-1]
        assert label.count("<br>") == 2 and label.endswith("…")
    [ratio] = ratios_figure(compare(group({("cpu", ""): [1.0], ("<b>x", ""): [2.0]}))).data
    assert "&lt;b&gt;x" in repeats_figure(compare(group({("<b>x", ""): [2.0]}))).layout.yaxis.ticktext[0]
    assert "<b>x" not in ratio.hovertemplate


@pytest.mark.browser
@pytest.mark.skipif(not HAS_CHROMIUM and os.environ.get("CI") != "true", reason=f"{CHROMIUM} is not there")
@pytest.mark.parametrize("width", [380, 1200])
def test_nothing_overlaps_or_leaves_the_chart(summary: dict, tmp_path: Path, width: int):
    made = group({(LONG, "cold"): [10.0, 11.0, 12.0], ("cpu", "cold"): [20.0, 21.0, 22.0], (LONG, "warm"): [5.0]})
    page_of = tmp_path / "charts.html"
    parts = [
        pio.to_html(figure, full_html=False, include_plotlyjs=place == 0, config={"responsive": True})
        for place, figure in enumerate(figures_of(summary, made))
    ]
    page_of.write_text(f"<!DOCTYPE html><meta charset='utf-8'><body>{''.join(parts)}", encoding="utf-8")
    with chromium_page() as page:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(page_of.as_uri())
        page.wait_for_function(f"document.querySelectorAll('.main-svg .gtitle').length == {len(parts)}")
        found = page.evaluate(
            """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap((chart, place) => {
              const box = element => element.getBoundingClientRect();
              const besides = (a, b) => a.right <= b.left || b.right <= a.left;
              const apart = (a, b) => besides(a, b) || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
              const [whole, texts] = [box(chart), [...chart.querySelectorAll('.main-svg text')]];
              const out = texts.filter(text => text.textContent && box(text).width).filter(text => {
                const {left, right, top, bottom} = box(text);
                const isWide = left < whole.left - 1 || right > whole.right + 1;
                return isWide || top < whole.top - 1 || bottom > whole.bottom + 1;
              }).map(text => `${place}: ${text.textContent} leaves the chart`);
              const legend = chart.querySelector('.infolayer .legend');
              const others = [...chart.querySelectorAll('.nsewdrag, .xtitle, .xtick text, .gtitle')];
              const under = legend ? others.filter(other => !apart(box(legend), box(other))) : [];
              const ticks = [...chart.querySelectorAll('.xtick text')];
              const near = ticks.slice(1).filter((tick, index) => !apart(box(ticks[index]), box(tick)));
              const tight = under.map(other => `${place}: the legend covers ${other.getAttribute('class')}`);
              return [...out, ...tight, ...near.map(tick => `${place}: ${tick.textContent} meets the tick before`)];
            })"""
        )
        assert found == []
