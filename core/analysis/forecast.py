"""How long a run will take, from runs like it and from steps that were timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import Any

from scipy.special import stdtrit

from core.analysis.findings import RunFacts
from core.analysis.summary import summarise
from core.config import RunConfig
from core.events import ForecastMade
from core.schedule import changes_between_epochs
from core.storage.records import RunRecord
from core.store import Store

SAME_DATA = ("data", "val_percent", "val_duplicates")
SAME_WORK = (
    "model", "image_size", "batch_size", "trainable", "precision", "matmul_precision", "torch_compile", "num_devices",
    "accumulate", "augmentation", "auto_augment", "caches", "process", "trainable_from", "first_image_size",
)  # fmt: skip
SAME = (*SAME_WORK, *SAME_DATA)
"""Options that a run must share with another one to say by itself how long that will take."""
MOST_RUNS = 10
FEWEST_RUNS = 3
"""Below this number of runs nothing is said of how far off a forecast may be."""


def forecast_for(store: Store, config: RunConfig, kind: str) -> ForecastMade | None:
    """A forecast from the store's finished runs like this one, newest first; else from a probe; else from runs of the
    same work on other data, where it is known how many images this one has. None without any of these.

    Where epochs differ by the config, runs of as many epochs alone are like this one, and a probe says how long it
    takes at most.

    Args:
        kind: a device kind, resolved.
    """
    ended = [record for record in store.list_runs(with_probes=True) if record.state == "finished"]
    here = [record for record in ended if record.device_kind == kind]
    if changes_between_epochs(config):
        here = [record for record in here if record.purpose == "probe" or record.config.epochs == config.epochs]
    if alike := _summaries(store, here, config, SAME):
        return from_runs(alike, config.epochs)
    # a probe that does some other work than timing says nothing of this
    timed = [record for record in here if record.purpose == "probe" and not record.work]
    probes = [record for record in timed if _share(record.config, config, SAME)]
    if probes:
        forecast = from_probe(summarise(store, probes[0].run_id, with_machine=False)["probe"], config.epochs)
        return _at_most(forecast) if changes_between_epochs(config) else forecast
    known = next((record.run_id for record in ended if _share(record.config, config, SAME_DATA)), None)
    others = _summaries(store, here, config, SAME_WORK)
    if known is None or not others:
        return None
    size = summarise(store, known, with_machine=False)
    return from_runs(others, config.epochs, size=(size["num_train"], size["num_val"]))


def _summaries(
    store: Store, records: Sequence[RunRecord], config: RunConfig, same: Sequence[str]
) -> list[dict[str, Any]]:
    alike = [record for record in records if record.purpose == "train" and _share(record.config, config, same)]
    told = [summarise(store, record.run_id, with_machine=False) for record in alike[:MOST_RUNS]]
    return [summary for summary in told if summary["epochs"] and summary["total_s"]]


def _share(past: RunConfig, config: RunConfig, names: Sequence[str]) -> bool:
    return all(getattr(past, name) == getattr(config, name) for name in names)


def from_runs(summaries: Sequence[dict[str, Any]], epochs: int, *, size: tuple[int, int] | None = None) -> ForecastMade:
    """A forecast from finished runs of the same job, whatever their number of epochs.

    From three runs on, the bounds are a 95 % prediction interval for one more run: the t interval for a new value of
    the logarithm of the time (Hahn and Meeker, "Statistical Intervals", 1991).

    Args:
        summaries: one or more, each with epochs.
        size: training and validation images of the run to come where it has other data; an epoch's time goes with them.
    """
    epoch_s = [_epoch_s(summary) for summary in summaries]
    # what is no later epoch's: set-up, compiling, packing, and what the first epoch took longer for
    once_s = [
        max(0.0, summary["total_s"] - len(summary["epochs"]) * each)
        for summary, each in zip(summaries, epoch_s, strict=True)
    ]
    words = "1 run" if len(summaries) == 1 else f"{len(summaries)} runs"
    basis = f"{words} like this one"
    if size is not None:
        epoch_s = [_scaled(summary, size) for summary in summaries]
        basis = f"{words} like this one on other data"
    total_s = [once + epochs * each for once, each in zip(once_s, epoch_s, strict=True)]
    return ForecastMade(basis, median(epoch_s), median(total_s), *_bounds(epoch_s), *_bounds(total_s))


def _epoch_s(summary: dict[str, Any], phase: str = "") -> float:
    seconds = [epoch["phases"][phase] if phase else epoch["seconds"] for epoch in summary["epochs"]]
    if RunFacts(summary).changes_between_epochs:
        return fmean(seconds)
    return float(median(seconds[1:] or seconds))


def _scaled(summary: dict[str, Any], size: tuple[int, int]) -> float:
    """An epoch's seconds, with so many training and validation images."""
    evaluation_s = _epoch_s(summary, "evaluation_s")
    training_s = _epoch_s(summary) - evaluation_s
    num_train, num_val = size
    return float(training_s * num_train / summary["num_train"] + evaluation_s * num_val / summary["num_val"])


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


def _at_most(forecast: ForecastMade) -> ForecastMade:
    """The forecast of a run whose later epochs alone are as dear as the steps that were timed."""
    basis = f"{forecast.basis} as the dearest epoch has them, so at most"
    return ForecastMade(basis, forecast.epoch_s, forecast.total_s)


def _mean_with_bounds(seconds: Sequence[float]) -> tuple[float, float, float]:
    n, mean = len(seconds), fmean(seconds)
    if n < FEWEST_RUNS:
        return mean, mean, mean
    off = float(stdtrit(n - 1, 0.975)) * stdev(seconds) / math.sqrt(n)
    return mean, max(min(seconds), mean - off), mean + off
