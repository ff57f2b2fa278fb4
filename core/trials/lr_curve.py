"""What the losses of a range test say: a curve, and the learning rate to train with.

Smith, "Cyclical Learning Rates for Training Neural Networks" (2015, arXiv:1506.01186): the loss first stays as it is,
then falls, then rises; a good rate lies where it falls most quickly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from core.charts import PALETTE, TRAINING_COLOUR, VALIDATION_COLOUR, base_layout
from core.config import RunConfig
from core.events import RangeTested
from core.words import lr_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

FIRST, LAST, STEPS = 1e-7, 10.0, 100
DIVERGED = 4.0
"""How many times its best the running mean of the loss may reach."""
RUNNING = 0.9
"""Decay of the running mean, by which a test knows when to end."""
WIDTH = 3.0
"""Standard deviation, in steps, of the weights with which the curve is smoothed."""
CLEARLY = 6.0
"""How many times the noise of the smoothed curve the loss must fall by."""
LEAST_FALL = 0.01
"""And by what share of the loss at the beginning, however little noise there is."""
BEGUN = 0.1
"""The share of its fall after which the loss doesn't come back to where it began."""
CAREFUL = 10.0
ROWS = 12
"""About how many points of the curve the command line prints."""
FEWEST = 10
"""Steps that tell of the beginning; with fewer nothing is said."""
IRRELEVANT = (
    "lr", "epochs", "schedule", "warmup_epochs", "step_epochs", "step_factor", "seed", "device", "torch_compile",
    "threads", "workers", "log_every", "patience", "time_limit_min", "checkpoint_min",
    "process", "caches",
)  # fmt: skip
"""Options in which two runs may differ and be told the same by a range test."""


def learning_rates(first: float = FIRST, last: float = LAST, steps: int = STEPS) -> list[float]:
    """Rates that grow by the same factor from step to step."""
    rates: list[float] = np.geomspace(first, last, steps).tolist()
    return rates


def same_test(one: RunConfig, other: RunConfig) -> bool:
    """Whether a range test of one config tells as much of the other."""
    names = RunConfig.model_fields.keys() - set(IRRELEVANT)
    return all(getattr(one, name) == getattr(other, name) for name in names)


def judge(lrs: Sequence[float], losses: Sequence[float]) -> RangeTested:
    """What a range test says.

    The curve is smoothed on both sides of each step: a running mean lags behind, by half a decade here, which would
    make rates look better than they are.

    Args:
        lrs: each by the same factor above the one before.
        losses: of the training batch at each of them; from the first on that is not finite, they count for nothing.
    """
    finite = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    curve = smooth(losses[:finite])
    told = RangeTested(list(lrs), list(losses), [*curve.tolist(), *losses[finite:]])
    if finite < FEWEST:
        return replace(told, why=f"the loss was no number after {finite} steps")
    bottom = int(curve.argmin())
    start = float(np.mean(losses[:FEWEST]))
    fall = start - float(curve[bottom])
    # a point of the curve is the mean of some 2 sqrt(pi) WIDTH steps
    noise = _noise(np.array(losses[:finite])) / math.sqrt(2 * math.sqrt(math.pi) * WIDTH)
    if fall < max(LEAST_FALL * start, CLEARLY * noise):
        return replace(told, why="the loss never fell")
    # noise before it began to fall may be steep too
    began = int(np.flatnonzero(curve[: bottom + 1] >= start - BEGUN * fall).max(initial=0))
    steepest = lrs[began + int(np.gradient(curve)[began : bottom + 1].argmin())]
    lowest = lrs[bottom]
    # where the loss is lowest soon after it falls most quickly, a tenth of that is no more careful
    careful = rounded(min(lowest / CAREFUL, steepest))
    return replace(told, suggestion=rounded(steepest), steepest=steepest, lowest=lowest, careful=careful)


def smooth(losses: Sequence[float]) -> NDArray[np.float64]:
    """Means with Gaussian weights over neighbouring steps; at either end over those that there are.

    Losses far above the best count as `DIVERGED` times the best running mean, so that the end of a test that diverged
    doesn't reach back.
    """
    values = np.array(losses, dtype=np.float64)
    if not len(values):
        return values
    values = np.minimum(values, DIVERGED * RunningMean().best_of(values))
    reach = math.ceil(3 * WIDTH)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / WIDTH) ** 2)
    there = slice(reach, reach + len(values))
    means: NDArray[np.float64] = np.convolve(values, weights)[there] / np.convolve(np.ones_like(values), weights)[there]
    return means


class RunningMean:
    """An exponential moving mean of losses, free of the bias towards 0 that it begins with, and its best so far."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0
        self.best = math.inf

    def add(self, loss: float) -> float:
        self._sum = RUNNING * self._sum + (1 - RUNNING) * loss
        self._count += 1
        mean = self._sum / (1 - RUNNING**self._count)
        self.best = min(self.best, mean)
        return mean

    def is_over(self, loss: float) -> bool:
        """Add a loss, and say whether the test has seen enough: it diverged, or is no number any more."""
        return not math.isfinite(loss) or self.add(loss) > DIVERGED * self.best

    def best_of(self, losses: NDArray[np.float64]) -> float:
        for loss in losses:
            self.add(float(loss))
        return self.best


def rounded(lr: float) -> float:
    """To two digits, as a person would write it."""
    return float(f"{lr:.1e}")


def _noise(losses: NDArray[np.float64]) -> float:
    """Standard deviation of a loss about the curve: neighbours differ by noise, for the most part."""
    return float(np.median(np.abs(np.diff(losses)))) / 0.6745 / math.sqrt(2)


def told_of(summary: dict[str, Any]) -> dict[str, Any]:
    """What the command line prints of a range test, from its run's summary; all are None where it did not end well."""
    told = summary["range_test"] or dict.fromkeys(RangeTested.__dataclass_fields__)
    names = ("run_id", "state", "device", "total_s", "reason", "fix")
    return {**{name: summary[name] for name in names}, **told}


def lines_of(summary: dict[str, Any]) -> list[str]:
    """The same for people."""
    device, told = summary["device"], summary["range_test"]
    lines = [f"{summary['run_id']}  {summary['state']}  on {device['name'] or device['kind']}"]
    return lines if told is None else [*lines, *_curve_lines(told), suggestion_in_words(told)]


def suggestion_in_words(told: dict[str, Any]) -> str:
    """What a range test says, given its event as plain values."""
    if told["suggestion"] is None:
        return f"No suggestion: {told['why']}."
    words = f"Learning rate {lr_in_words(told['suggestion'])}: there the loss falls most quickly."
    # a test of before may hold a higher one
    if told["careful"] >= told["suggestion"]:
        return words
    return f"{words} More careful: {lr_in_words(told['careful'])}, a tenth of where it is lowest."


def _curve_lines(told: dict[str, Any]) -> list[str]:
    """Some points of the curve."""
    every = range(0, len(told["lrs"]), max(1, len(told["lrs"]) // ROWS))
    return [f"{lr_in_words(told['lrs'][index]):>8}  {_loss(told['smoothed'][index])}" for index in every]


def _loss(value: float | None) -> str:
    return "no number" if value is None else f"loss {value:.4g}"


def range_figure(told: dict[str, Any]) -> go.Figure:
    """Loss over learning rate, which grows by factors; the suggestion is marked.

    Args:
        told: a range test's event as plain values.
    """
    import plotly.graph_objects as go

    layout = base_layout("Loss at each learning rate", "Learning rate", "Training loss")
    layout["xaxis"] |= {"type": "log", "rangemode": "normal", "exponentformat": "power"}
    figure = go.Figure(layout={**layout, "height": 280, "showlegend": False, "hovermode": "closest"})
    words = "learning rate %{x:.2g}: %{y:.4g}<extra></extra>"
    figure.add_scatter(
        x=told["lrs"], y=told["losses"], mode="markers", name="Each step", hovertemplate=words,
        marker={"size": 4, "color": PALETTE[5], "opacity": 0.6},
    )  # fmt: skip
    figure.add_scatter(
        x=told["lrs"], y=told["smoothed"], mode="lines", name="Smoothed", hovertemplate=words,
        line={"color": TRAINING_COLOUR, "width": 2},
    )  # fmt: skip
    known = [value for value in told["smoothed"] if value is not None]
    if known:
        # one step that diverged would press all others flat
        low, high = min(known), max(known)
        figure.update_yaxes(range=[low - 0.08 * (high - low) - 1e-3, high + 0.08 * (high - low) + 1e-3])
    if told["suggestion"] is not None:
        place = told["lrs"].index(told["steepest"])
        figure.add_scatter(
            x=[told["steepest"]], y=[told["smoothed"][place]], mode="markers+text", name="Suggestion",
            text=[lr_in_words(told["suggestion"])], textposition="top right", cliponaxis=False, hovertemplate=words,
            marker={"size": 12, "symbol": "diamond", "color": VALIDATION_COLOUR},
        )  # fmt: skip
    return figure
