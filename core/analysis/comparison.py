"""Which of several configs was faster, and with what certainty: the repeats of a run group, compared.

Cold, warm and unknown starts are compared apart. Everything here takes values and returns values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from core.analysis.fairness import limits
from core.analysis.repeats import STARTS, Cell, Repeat, RunGroup, usual_epoch_s
from core.analysis.statistics import ADVISED_REPEATS, MIN_REPEATS, Description, Ratio, describe, ratio_of_means
from core.errors import ConfigError
from core.events import Phases
from core.storage.records import ENDED_STATES
from core.words import counted, escaped, phase_in_words

TIME_TO_ACCURACY = "time_to_accuracy_s"


@dataclass(frozen=True)
class Measure:
    """What is compared.

    Args:
        claim: what stands between two labels, with places for `ratio` and `accuracy`.
        value: of a repeat, given the accuracy asked for (percent; only `time_to_accuracy_s` reads it); None where it
            isn't known or was never reached.
    """

    title: str
    unit: str
    lower_is_better: bool
    claim: str
    value: Callable[[Repeat, float], float | None]


def _step_s(repeat: Repeat, _: float) -> float | None:
    times = (repeat.summary or {}).get("step_times")
    return float(times["median_s"]) if times else None


def _images_per_s(repeat: Repeat, _: float) -> float | None:
    known = [float(epoch["images_per_s"]) for epoch in repeat.epochs if epoch["images_per_s"] is not None]
    return median(known) if known else None


def _time_to_accuracy(repeat: Repeat, accuracy: float) -> float | None:
    if "setup_s" not in repeat.phases:
        return None
    seconds = repeat.phases["setup_s"]
    for epoch in repeat.epochs:
        seconds += float(epoch["seconds"])
        if epoch["val_top1"] is not None and epoch["val_top1"] >= accuracy:
            return seconds
    return None


def _phase(name: str) -> Measure:
    words = phase_in_words(name.removesuffix("_s"))
    claim = f"took {{ratio}} times as long for {words} as"
    return Measure(words.capitalize(), "s", True, claim, lambda repeat, _: repeat.phases.get(name))


MEASURES: dict[str, Measure] = {
    "total_s": Measure("Whole run", "s", True, "took {ratio} times as long as", lambda repeat, _: repeat.total_s),
    "epoch_s": Measure(
        "Epoch time",
        "s",
        True,
        "took {ratio} times as long for an epoch as",
        lambda repeat, _: usual_epoch_s(repeat.epochs),
    ),
    "step_s": Measure("Step time", "s", True, "took {ratio} times as long for a step as", _step_s),
    "images_per_s": Measure(
        "Throughput", "images/s", False, "trained {ratio} times as many images a second as", _images_per_s
    ),
    **{name: _phase(name) for name in Phases.__dataclass_fields__},
    TIME_TO_ACCURACY: Measure(
        "Time to accuracy", "s", True, "took {ratio} times as long to reach {accuracy:g} % as", _time_to_accuracy
    ),
}


def compare(
    group: RunGroup, measure: str = "total_s", *, accuracy: float | None = None, baseline: str | None = None
) -> dict[str, Any]:
    """A measure of all repeats, label by label, and each label's ratio to the baseline; plain JSON values.

    Only finished repeats count. A ratio divides the mean of its label by the mean of the baseline, start by start.

    Args:
        measure: a name of `MEASURES`.
        accuracy: validation top-1 (percent) for `time_to_accuracy_s`.
        baseline: a label; the fastest where it is None.

    Returns:
        `group_id`, `name`, `note`, `measure`, `baseline`, `cells` (one a label and start), `ratios` (one a cell but
        the baseline's) and `warnings` (what limits the conclusion, in words).

    Raises:
        ConfigError: no such measure or label, or an accuracy is needed.
    """
    if measure not in MEASURES:
        raise ConfigError(f"There is no measure '{measure}'.", fix=f"Choose one of {', '.join(MEASURES)}.")
    if measure == TIME_TO_ACCURACY and accuracy is None:
        raise ConfigError("No accuracy is given to reach.", fix="Give the validation top-1 in percent.")
    labels = list(dict.fromkeys(repeat.label for repeat in group.repeats))
    if baseline is not None and baseline not in labels:
        raise ConfigError(f"No repeat has the label '{baseline}'.", fix=f"Choose one of {', '.join(labels)}.")
    base = baseline if baseline is not None else fastest_label(group)
    asked, goal = MEASURES[measure], math.inf if accuracy is None else accuracy
    cells = _cells(group.repeats, labels, asked, goal)
    title = f"Time to {goal:g} % top-1" if measure == TIME_TO_ACCURACY else asked.title
    return {
        "group_id": group.group_id,
        "name": group.name,
        "note": group.note,
        "measure": {
            "name": measure,
            "title": title,
            "unit": asked.unit,
            "lower_is_better": asked.lower_is_better,
        },
        "baseline": base,
        "cells": [_cell_result(cell, asked.unit) for cell in cells],
        "ratios": [_ratio_result(cell, base, cells, asked, goal) for cell in cells if cell.label != base],
        "warnings": limits(cells, base, title),
    }


def fastest_label(group: RunGroup) -> str:
    """The label of the fastest mean, to which "3 times as long" is said of the others; the first where none ended."""
    totals: dict[str, list[float]] = {repeat.label: [] for repeat in group.repeats}
    for repeat in group.repeats:
        if repeat.state == "finished" and repeat.total_s:
            totals[repeat.label].append(repeat.total_s)
    return min(totals, key=lambda label: fmean(totals[label]) if totals[label] else math.inf, default="")


def rows_of(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """What `compare` returned as the texts of a table, the head first."""
    unit, ratios = result["measure"]["unit"], {(item["start"], item["label"]): item for item in result["ratios"]}
    head = ("Label", "Start", "Repeats", f"Median ({unit})", f"Mean ({unit}), 95 % interval", "Spread")
    rows: list[tuple[str, ...]] = [(*head, f"Ratio to {result['baseline']}")]
    for cell in result["cells"]:
        failed = f" ({cell['failed']} unfinished)" if cell["failed"] else ""
        rows.append(
            (
                cell["label"],
                STARTS[cell["start"]],
                f"{cell['n']}{failed}",
                _figure(cell["median"]),
                _figure(cell["mean"]) + (f" ± {_interval_half(cell)}" if cell["low"] is not None else ""),
                "–" if cell["cv_percent"] is None else f"{cell['cv_percent']:.1f} %",
                _ratio_cell(ratios.get((cell["start"], cell["label"]))),
            )
        )
    return rows


def markdown(result: dict[str, Any]) -> str:
    """What `compare` returned as a table for a README."""
    head, *rows = rows_of(result)
    # the labels are names that people gave
    rows = [(escaped(label.replace("|", "/")), *rest) for label, *rest in rows]
    lines = [(*head[:-1], escaped(head[-1].replace("|", "/"))), ("---", "---", *["---:"] * (len(head) - 2)), *rows]
    return "".join(f"| {' | '.join(text.replace('|', '/') for text in row)} |\n" for row in lines)


def _cells(repeats: Sequence[Repeat], labels: Sequence[str], measure: Measure, accuracy: float) -> list[Cell]:
    cells = {(start, label): Cell(label, start) for start in STARTS for label in labels}
    for repeat in repeats:
        cell = cells[repeat.start, repeat.label]
        cell.repeats.append(repeat)
        value = measure.value(repeat, accuracy) if repeat.state == "finished" else None
        if value is not None:
            cell.counted.append(repeat)
            cell.values.append(value)
    return [cell for cell in cells.values() if cell.repeats]


def _cell_result(cell: Cell, unit: str) -> dict[str, Any]:
    told = [repeat.phases for repeat in cell.counted if repeat.phases]
    description = describe(cell.values)
    if description.low is not None and min(cell.values) >= 0:
        # no time is negative, however wide the interval
        description = replace(description, low=max(0.0, description.low))
    return {
        "label": cell.label,
        "start": cell.start,
        "failed": cell.count(lambda repeat: repeat.state in ENDED_STATES and repeat.state != "finished"),
        "values": [
            {"run_id": repeat.run_id, "value": value} for repeat, value in zip(cell.counted, cell.values, strict=True)
        ],
        **asdict(description),
        "phases": {name: fmean(phases.get(name, 0.0) for phases in told) for name in told[0]} if told else {},
        "words": f"{cell.name}: {_cell_words(description, unit)}",
    }


def _cell_words(told: Description, unit: str) -> str:
    if told.n < 2:
        return f"{_figure(told.mean)} {unit}, one repeat." if told.n else "no finished repeat with this figure."
    mean = f"{_figure(told.mean)} {unit} on average of {told.n} repeats"
    if told.low is None or told.high is None:
        return f"{mean}, too few for an interval."
    interval = f"95 % interval {_figure(told.low, like=told.mean)} to {_figure(told.high, like=told.mean)}"
    return f"{mean} ({interval})" + (f", spread {told.cv_percent:.1f} %." if told.cv_percent is not None else ".")


def _ratio_result(cell: Cell, base: str, cells: Sequence[Cell], measure: Measure, accuracy: float) -> dict[str, Any]:
    others = next((other.values for other in cells if (other.label, other.start) == (base, cell.start)), [])
    ratio = ratio_of_means(cell.values, others)
    return {
        "start": cell.start,
        "label": cell.label,
        "baseline": base,
        **asdict(ratio),
        "is_clear": ratio.is_clear,
        "words": _ratio_words(cell.label, base, ratio, measure.claim, accuracy),
    }


def _ratio_words(label: str, base: str, ratio: Ratio, claim: str, accuracy: float) -> str:
    fewest = min(ratio.n_a, ratio.n_b)
    if fewest < MIN_REPEATS:
        scarce = label if ratio.n_a == fewest else base
        return (
            f"{counted(fewest, 'repeat')} of {scarce}: nothing can be said about which is faster; "
            f"at least {MIN_REPEATS} are needed, {ADVISED_REPEATS} are advised."
        )
    if ratio.ratio is None or ratio.low is None or ratio.high is None:
        return f"No ratio of {label} to {base}: a mean is 0."
    said = f"{label} {claim.format(ratio=_times(ratio.ratio), accuracy=accuracy)} {base}"
    interval, repeats = f"{_times(ratio.low)} to {_times(ratio.high)}", f"{ratio.n_a} and {ratio.n_b} repeats"
    if ratio.is_clear:
        return f"{said} (95 % interval {interval}, {repeats})."
    return f"No clear difference: {said} ({repeats}), the interval {interval} holds 1."


def _figure(value: float | None, like: float | None = None) -> str:
    """Four digits and as many decimals as `like` has, 1,234 or 0.01234; a dash where there is none."""
    if value is None:
        return "–"
    size = abs(value if like is None else like)
    decimals = 3 - math.floor(math.log10(size)) if size else 0
    return f"{value:,.{min(max(decimals, 0), 6)}f}"


def _interval_half(cell: dict[str, Any]) -> str:
    return _figure(cell["high"] - cell["mean"], like=cell["mean"])


def _ratio_cell(item: dict[str, Any] | None) -> str:
    if item is None:
        return "1"
    if item["ratio"] is None or item["low"] is None:
        return "–"
    interval = f"{_times(item['ratio'])} ({_times(item['low'])} to {_times(item['high'])})"
    return interval if item["is_clear"] else f"{interval}, not clear"


def _times(ratio: float) -> str:
    """Two decimals, and more where they would hide that it is not 1 or 0."""
    decimals = next((decimals for decimals in (2, 3, 4, 5) if round(ratio, decimals) not in (0, 1)), 2)
    return f"{ratio:,.{decimals}f}"
