"""Which config was faster, from repeats written by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from core.analysis.article import ARTICLE
from core.analysis.comparison import MEASURES, compare, markdown
from core.analysis.repeats import Repeat, RunGroup, group_of, label_of, start_of
from core.config import make_config
from core.errors import ConfigError
from core.events import Phases

FAST = [10.0, 10.2, 9.9, 10.1, 9.8]
SLOW = [16.1, 16.4, 15.9, 16.3, 16.3]
PHASES = dict.fromkeys(Phases.__dataclass_fields__, 1.0)


def epoch(number: int, seconds: float, top1: float | None = 50.0, images_per_s: float | None = 100.0) -> dict:
    return {"epoch": number, "seconds": seconds, "val_top1": top1, "images_per_s": images_per_s}


def summary(kind: str = "cpu", is_warm: bool | None = True, environment: dict | None = None, **changes) -> dict:
    facts = {"cpu": "A CPU", "cores": 2, "memory_gib": 8.0, "torch": "2.9.1", "threads": 2, "precision": "fp32"}
    return {
        "run_id": "run",
        "state": "finished",
        "total_s": 8.0,
        "config": {**make_config("quick").model_dump(), "process": "own", "caches": "use", **changes},
        "device": {"kind": kind, "name": f"The {kind}"},
        "epochs": [epoch(1, 3.0)],
        "phases": PHASES,
        "is_warm": is_warm,
        "environment": {**facts, **(environment or {})},
        "step_times": {"median_s": 0.25},
    }


def repeat(label: str, total_s: float | None, start: str = "warm", told: dict | None = None, **changes) -> Repeat:
    known = {"run_id": f"{label} {total_s}", "state": "finished", "phases": PHASES, "epochs": [epoch(1, 3.0)]}
    return Repeat(label=label, start=start, total_s=total_s, summary=told, **{**known, **changes})


def group(*repeats: Repeat) -> RunGroup:
    return RunGroup("group", "Two devices", list(repeats))


def two(slow: list[float], fast: list[float]) -> RunGroup:
    return group(*(repeat("cpu", value) for value in fast), *(repeat("xla", value) for value in slow))


def test_a_clear_difference_is_told_with_its_interval():
    result = compare(two(SLOW, FAST))
    assert result["baseline"] == "cpu" and result["warnings"] == []
    [ratio] = result["ratios"]
    assert (ratio["label"], ratio["baseline"], ratio["start"], ratio["is_clear"]) == ("xla", "cpu", "warm", True)
    assert ratio["ratio"] == pytest.approx(1.62) and (ratio["n_a"], ratio["n_b"]) == (5, 5)
    assert ratio["words"] == "xla took 1.62 times as long as cpu (95 % interval 1.59 to 1.65, 5 and 5 repeats)."


def test_the_other_way_round_the_ratio_is_below_1():
    [ratio] = compare(two(SLOW, FAST), baseline="xla")["ratios"]
    assert ratio["words"] == "cpu took 0.62 times as long as xla (95 % interval 0.60 to 0.63, 5 and 5 repeats)."


def test_what_overlaps_is_no_clear_difference():
    [ratio] = compare(two([9.6, 10.9, 10.3, 9.9, 10.5], FAST))["ratios"]
    assert not ratio["is_clear"]
    assert ratio["words"] == (
        "No clear difference: xla took 1.02 times as long as cpu (5 and 5 repeats), the interval 0.96 to 1.09 holds 1."
    )


def test_a_small_clear_difference_is_not_rounded_away():
    [ratio] = compare(two([100.3, 100.31, 100.3], [100.0, 100.01, 100.0]))["ratios"]
    assert ratio["is_clear"] and "1.003 times as long" in ratio["words"] and "1.003 to 1.003" in ratio["words"]


@pytest.mark.parametrize(("slow", "fast", "told"), [(SLOW[:2], FAST, "2 repeats of xla"), (SLOW, [9.8], "1 repeat of")])
def test_of_fewer_than_three_repeats_nothing_is_said(slow, fast, told):
    result = compare(two(slow, fast))
    [ratio] = result["ratios"]
    assert (ratio["low"], ratio["high"], ratio["is_clear"]) == (None, None, False)
    assert ratio["words"].startswith(told)
    assert ratio["words"].endswith(": nothing can be said about which is faster; at least 3 are needed, 5 are advised.")
    assert any("at least 3 are needed" in warning for warning in result["warnings"])


def test_three_repeats_are_compared_with_a_warning():
    result = compare(two(SLOW[:3], FAST))
    assert result["ratios"][0]["is_clear"]
    assert result["warnings"] == ["xla, warm: 3 repeats; 5 are advised, the interval is wide with fewer."]


def test_the_articles_three_runs_against_two_conclude_nothing():
    result = compare(ARTICLE)
    tpu, gpu = result["cells"]
    assert [item["value"] for item in tpu["values"]] == [478, 755, 515]
    assert [item["value"] for item in gpu["values"]] == [675, 668]
    assert (tpu["n"], tpu["phases"], gpu["n"], gpu["low"]) == (3, {}, 2, None)
    assert "Dajiro" in result["note"] and result["group_id"] == "article-2020"
    [ratio] = result["ratios"]
    assert (ratio["is_clear"], ratio["low"]) == (False, None)
    assert ratio["words"].startswith("2 repeats of GPU: nothing can be said about which is faster")
    assert [warning.split(";")[0] for warning in result["warnings"]] == ["TPU: 3 repeats", "GPU: 2 repeats"]


def test_of_the_article_only_whole_runs_can_be_compared():
    for measure in set(MEASURES) - {"total_s"}:
        result = compare(ARTICLE, measure, accuracy=50.0)
        assert [cell["n"] for cell in result["cells"]] == [0, 0]
        assert result["ratios"][0]["ratio"] is None


def test_a_cell_describes_its_repeats():
    [cell] = compare(group(*(repeat("cpu", value) for value in FAST)))["cells"]
    assert cell["values"][0] == {"run_id": "cpu 10.0", "value": 10.0}
    assert (cell["n"], cell["median"], cell["min"], cell["max"]) == (5, 10.0, 9.8, 10.2)
    assert cell["mean"] == pytest.approx(10.0) and cell["low"] < 10.0 < cell["high"]
    assert cell["phases"] == PHASES
    assert cell["words"] == "cpu, warm: 10.00 s on average of 5 repeats (95 % interval 9.80 to 10.20), spread 1.6 %."


def test_phases_of_a_cell_are_means():
    repeats = [repeat("cpu", 10.0, phases={**PHASES, "compute_s": seconds}) for seconds in (4.0, 5.0)]
    [cell] = compare(group(*repeats))["cells"]
    assert cell["phases"]["compute_s"] == 4.5 and cell["phases"]["other_s"] == 1.0


def test_cold_and_warm_and_unknown_starts_are_compared_apart():
    starts = ["", "warm", "cold"]
    repeats = [repeat(label, 10.0, start=start) for label in ("cpu", "xla") for start in starts for _ in range(3)]
    result = compare(group(*repeats))
    assert [(cell["start"], cell["label"], cell["n"]) for cell in result["cells"]] == [
        (start, label, 3) for start in ("cold", "warm", "") for label in ("cpu", "xla")
    ]
    assert [(ratio["start"], ratio["n_a"], ratio["n_b"]) for ratio in result["ratios"]] == [
        ("cold", 3, 3),
        ("warm", 3, 3),
        ("", 3, 3),
    ]


def test_the_others_are_compared_with_the_fastest_unless_a_label_is_asked_for():
    assert compare(two(SLOW, FAST))["baseline"] == "cpu" and compare(two(FAST, SLOW))["baseline"] == "xla"
    assert compare(two(SLOW, FAST), baseline="xla")["baseline"] == "xla"
    assert compare(group(repeat("cpu", None, state="failed")))["baseline"] == "cpu"


def test_a_start_that_the_baseline_lacks_is_compared_with_nothing():
    repeats = [repeat("cpu", 10.0, start="warm") for _ in range(3)] + [repeat("xla", 9.0, start="cold")] * 3
    [ratio] = compare(group(*repeats), baseline="cpu")["ratios"]
    assert (ratio["ratio"], ratio["n_b"]) == (None, 0) and ratio["words"].startswith("0 repeats of cpu: nothing")


def test_only_finished_repeats_count():
    states = ["finished", "failed", "interrupted", "stopped", "running", "queued"]
    repeats = [repeat("cpu", 10.0, run_id=state, state=state) for state in states]
    result = compare(group(*repeats))
    [cell] = result["cells"]
    assert [item["run_id"] for item in cell["values"]] == ["finished"] and cell["failed"] == 3
    assert "cpu, warm: 2 repeats not ended yet, left out." in result["warnings"]
    assert cell["words"] == "cpu, warm: 10.00 s, one repeat."


@pytest.mark.parametrize(
    ("measure", "value", "claim"),
    [
        ("total_s", 20.0, "took 1.00 times as long as"),
        ("epoch_s", 5.0, "took 1.00 times as long for an epoch as"),
        ("step_s", 0.25, "took 1.00 times as long for a step as"),
        ("images_per_s", 110.0, "trained 1.00 times as many images a second as"),
        ("setup_s", 1.0, "took 1.00 times as long for set-up as"),
        ("data_wait_s", 1.0, "took 1.00 times as long for data wait as"),
        ("time_to_accuracy_s", 14.0, "took 1.00 times as long to reach 60 % as"),
    ],
)
def test_each_measure_is_read_from_its_place_and_has_words_of_its_own(measure, value, claim):
    epochs = [epoch(1, 9.0, 40.0, None), epoch(2, 4.0, 60.0, 120.0), epoch(3, 6.0, 70.0, 100.0)]
    repeats = [repeat(label, 20.0, epochs=epochs, told=summary()) for label in ("a", "b") for _ in range(3)]
    result = compare(group(*repeats), measure, accuracy=60.0)
    assert [cell["mean"] for cell in result["cells"]] == [value, value]
    assert f"No clear difference: b {claim} a" in result["ratios"][0]["words"]
    assert result["measure"]["lower_is_better"] == (measure != "images_per_s")


def test_every_phase_is_a_measure():
    assert set(Phases.__dataclass_fields__) < set(MEASURES)
    assert MEASURES["setup_s"].title == "Set-up" and MEASURES["data_wait_s"].title == "Data wait"


def test_the_time_of_a_single_epoch_is_that_of_the_first():
    [cell] = compare(group(repeat("cpu", 5.0)), "epoch_s")["cells"]
    assert cell["mean"] == 3.0


def test_a_repeat_that_never_reached_the_accuracy_is_left_out_and_told():
    reached = [repeat("cpu", 10.0, epochs=[epoch(1, 3.0, None), epoch(2, 3.0, 80.0)])] * 5
    result = compare(group(*reached, repeat("cpu", 10.0)), "time_to_accuracy_s", accuracy=80.0)
    assert (result["cells"][0]["n"], result["cells"][0]["mean"]) == (5, 7.0)
    assert result["measure"]["title"] == "Time to 80 % top-1"
    assert result["warnings"] == [
        "cpu, warm: 1 repeat without Time to 80 % top-1, left out: the figures hold for the others only."
    ]


def test_there_is_no_ratio_to_a_phase_that_took_no_time():
    none, some = {**PHASES, "compile_s": 0.0}, {**PHASES, "compile_s": 5.0}
    repeats = [repeat(label, 10.0, phases=phases) for label, phases in (("cpu", none), ("xla", some)) for _ in range(3)]
    [ratio] = compare(group(*repeats), "compile_s")["ratios"]
    assert ratio["words"] == "No ratio of xla to cpu: a mean is 0." and not ratio["is_clear"]


def told_of(*summaries: dict, labels: tuple[str, ...] = ("cpu", "xla"), start: str = "warm") -> list[str]:
    repeats = [
        repeat(label, 10.0, start=start, told=told)
        for label, told in zip(labels, summaries, strict=True)
        for _ in range(5)
    ]
    return compare(group(*repeats))["warnings"]


def test_labels_that_differ_in_one_thing_need_no_warning():
    assert told_of(summary("cpu"), summary("xla")) == []
    assert told_of(summary(batch_size=32), summary(batch_size=64)) == []
    assert told_of(summary(seed=1), summary(seed=2, process="shared", caches="anew")) == []


def test_labels_that_differ_in_more_than_the_device_are_told():
    other = summary("xla", precision="bf16", environment={"precision": "bf16", "torch": "2.8.0"})
    assert told_of(summary("cpu"), other) == [
        "xla and cpu also differ in: precision (bf16 / fp32), torch (2.8.0 / 2.9.1)."
    ]


def test_a_precision_that_the_device_chose_by_itself_is_told():
    chosen = [
        summary(kind, precision="auto", environment={"precision": p}) for kind, p in (("cpu", "fp32"), ("xla", "bf16"))
    ]
    assert told_of(*chosen) == ["xla and cpu also differ in: precision (bf16 / fp32)."]


def test_labels_that_differ_in_two_things_on_one_device_are_told():
    [warning] = told_of(summary(batch_size=32), summary(batch_size=64, lr=0.1), labels=("a", "b"))
    assert warning == "b and a differ in more than one thing: batch_size (64 / 32), lr (0.1 / 0.003)."


def test_repeats_of_one_label_should_be_equal():
    repeats = [repeat("cpu", 10.0, told=summary(epochs=count)) for count in (3, 3, 3, 3, 4)]
    assert compare(group(*repeats))["warnings"] == ["cpu, warm: the repeats differ in epochs (3, 4)."]


def test_repeats_on_different_machines_are_told():
    warnings = told_of(summary("cpu"), summary("xla", environment={"cpu": "B CPU", "cores": 8}))
    assert warnings == ["The repeats ran on different machines: A CPU with 2 cores (cpu); B CPU with 8 cores (xla)."]


def test_a_start_that_was_not_what_it_should_be_is_told():
    warm, cold, unknown = summary(is_warm=True), summary(is_warm=False), summary(is_warm=None)
    assert told_of(warm, labels=("cpu",), start="cold") == [
        "cpu, cold: 5 repeats not cold: nothing was compiled and no image packed."
    ]
    assert told_of(cold, labels=("cpu",), start="warm") == [
        "cpu, warm: 5 repeats not warm: something was compiled or images were packed."
    ]
    for told, start in ((cold, "cold"), (warm, "warm"), (unknown, "cold"), (unknown, "warm"), (cold, "")):
        assert told_of(told, labels=("cpu",), start=start) == []


def test_runs_that_differ_in_the_device_only_are_labelled_by_it():
    assert label_of([summary("cpu", device="auto"), summary("xla", device="xla", seed=3)]) == ["cpu", "xla"]
    assert label_of([summary("cpu"), summary("cpu", seed=1)]) == ["cpu", "cpu"]


def test_runs_are_labelled_by_the_fields_in_which_they_differ():
    both = [summary("cpu", precision="fp32"), summary("xla", precision="bf16")]
    assert label_of(both) == ["device cpu, precision fp32", "device xla, precision bf16"]
    assert label_of([summary(lr=0.1), summary(lr=3e-4)]) == ["lr 0.1", "lr 0.0003"]
    assert label_of(both, ["precision"]) == ["precision fp32", "precision bf16"]
    assert label_of([]) == []


def test_the_start_of_a_run_is_what_its_summary_knows():
    assert [start_of(summary(is_warm=known)) for known in (True, False, None)] == ["warm", "cold", ""]


def test_a_group_is_made_of_summaries():
    told = summary("xla")
    made = group_of("Mine", [told], ["xla"], ["cold"], "g1", "A note.")
    expected = Repeat("xla", "cold", "run", "finished", 8.0, PHASES, [epoch(1, 3.0)], told)
    assert made == RunGroup("g1", "Mine", [expected], "A note.")
    with pytest.raises(ValueError, match="zip"):
        group_of("Mine", [told], ["xla", "cpu"], ["cold"])


def test_the_table_for_a_readme_holds_a_row_a_cell():
    runs = two(SLOW, FAST)
    runs = replace(runs, repeats=[*runs.repeats, repeat("xla", None, state="failed"), repeat("a|b", 3.0, start="")])
    assert markdown(compare(runs, baseline="cpu")).splitlines() == [
        "| Label | Start | Repeats | Median (s) | Mean (s), 95 % interval | Spread | Ratio to cpu |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| cpu | warm | 5 | 10.00 | 10.00 ± 0.20 | 1.6 % | 1 |",
        "| xla | warm | 5 (1 unfinished) | 16.30 | 16.20 ± 0.25 | 1.2 % | 1.62 (1.59 to 1.65) |",
        "| a/b | not known | 1 | 3.000 | 3.000 | – | – |",
    ]


def test_a_result_is_plain_json():
    for result in (compare(two(SLOW, FAST)), compare(ARTICLE), compare(group())):
        assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_what_can_not_be_compared_is_an_error_with_a_fix():
    with pytest.raises(ConfigError, match=r"no measure 'speed'.*total_s"):
        compare(ARTICLE, "speed")
    with pytest.raises(ConfigError, match=r"label 'CPU'.*TPU, GPU"):
        compare(ARTICLE, baseline="CPU")
    with pytest.raises(ConfigError, match="accuracy"):
        compare(ARTICLE, "time_to_accuracy_s")
