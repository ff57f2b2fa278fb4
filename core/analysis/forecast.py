"""How long a run will take, from runs like it and from steps that were timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import Any

from scipy.special import stdtrit

from core.config import RunConfig
from core.events import ForecastMade
from core.store import Store

SAME = (
    "model", "data", "val_percent", "image_size", "batch_size", "trainable", "precision", "matmul_precision",
    "torch_compile", "num_devices", "accumulate", "augmentation", "auto_augment", "caches", "process",
)  # fmt: skip
"""Options that a run must share with another one to say how long that will take."""
MOST_RUNS = 10
FEWEST_RUNS = 3
"""Below this number of runs nothing is said of how far off a forecast may be."""


def forecast_for(store: Store, config: RunConfig, kind: str) -> ForecastMade | None:
    """A forecast from the store's finished runs like this one, newest first, else from a probe; None without either.

    Args:
        kind: a device kind, resolved.
    """
    from core.analysis.summary import summarise

    runs: list[str] = []
    probes: list[str] = []
    for record in store.list_runs(with_probes=True):
        if record.state != "finished" or record.device_kind != kind or not _is_like(record.config, config):
            continue
        if record.purpose == "probe":
            probes.append(record.run_id)
        elif record.purpose == "train" and len(runs) < MOST_RUNS:
            runs.append(record.run_id)
    if runs:
        return from_runs([summarise(store, run_id) for run_id in runs], config.epochs)
    if probes:
        return from_probe(summarise(store, probes[0])["probe"], config.epochs)
    return None


def _is_like(past: RunConfig, config: RunConfig) -> bool:
    return all(getattr(past, name) == getattr(config, name) for name in SAME)


def from_runs(summaries: Sequence[dict[str, Any]], epochs: int) -> ForecastMade | None:
    """A forecast from finished runs of the same job, whatever their number of epochs.

    From three runs on, the bounds are a 95 % prediction interval for one more run: the t interval for a new value of
    the logarithm of the time (Hahn and Meeker, "Statistical Intervals", 1991).
    """
    past = [summary for summary in summaries if summary["epochs"] and summary["total_s"]]
    if not past:
        return None
    epoch_s = [_epoch_s(summary) for summary in past]
    # what is no later epoch's: set-up, compiling, packing, and what the first epoch took longer for
    once_s = [
        max(0.0, summary["total_s"] - len(summary["epochs"]) * each)
        for summary, each in zip(past, epoch_s, strict=True)
    ]
    total_s = [once + epochs * each for once, each in zip(once_s, epoch_s, strict=True)]
    basis = "1 run like this one" if len(past) == 1 else f"{len(past)} runs like this one"
    epoch_bounds, total_bounds = _bounds(epoch_s), _bounds(total_s)
    return ForecastMade(basis, median(epoch_s), median(total_s), *epoch_bounds, *total_bounds)


def _epoch_s(summary: dict[str, Any]) -> float:
    seconds = [epoch["seconds"] for epoch in summary["epochs"]]
    return float(median(seconds[1:] or seconds))


def _bounds(seconds: Sequence[float]) -> tuple[float | None, float | None]:
    n = len(seconds)
    if n < FEWEST_RUNS:
        return None, None
    logs = [math.log(max(value, 1e-9)) for value in seconds]
    off = float(stdtrit(n - 1, 0.975)) * stdev(logs) * math.sqrt(1 + 1 / n)
    return math.exp(fmean(logs) - off), math.exp(fmean(logs) + off)


def from_probe(probe: dict[str, Any], epochs: int) -> ForecastMade:
    """A forecast from a few timed steps; the bounds say how sure their means are, and know nothing of later drift."""
    steps, evaluations = probe["step_s"], probe["evaluation_step_s"]
    middle, low, high = (
        probe["steps_per_epoch"] * step + probe["evaluation_steps"] * evaluation
        for step, evaluation in zip(_mean_with_bounds(steps), _mean_with_bounds(evaluations), strict=True)
    )
    once_s = probe["setup_s"] + probe["compile_s"]
    return ForecastMade(
        f"{len(steps)} steps that were timed",
        middle,
        once_s + epochs * middle,
        low,
        high,
        once_s + epochs * low,
        once_s + epochs * high,
    )


def _mean_with_bounds(seconds: Sequence[float]) -> tuple[float, float, float]:
    n, mean = len(seconds), fmean(seconds)
    if n < FEWEST_RUNS:
        return mean, mean, mean
    off = float(stdtrit(n - 1, 0.975)) * stdev(seconds) / math.sqrt(n)
    return mean, max(min(seconds), mean - off), mean + off
