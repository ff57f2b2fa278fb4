"""The charts of a run, defined once: for plotly figures and for the live page's plotly.js alike.

Backgrounds are transparent and text colours open, so that a figure suits a light and a dark page.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.series import RunSeries

if TYPE_CHECKING:
    import plotly.graph_objects as go

TRAINING_COLOUR = "#2a9d8f"
VALIDATION_COLOUR = "#e08e45"
PALETTE = (TRAINING_COLOUR, VALIDATION_COLOUR, "#6d83c9", "#b5658f", "#7a9a4b", "#8a8f98", "#c2a13a", "#4f7f9f")


@dataclass(frozen=True)
class TraceSpec:
    """One curve: `x` and `y` are columns of `RunSeries.steps` or `.epochs`, as `source` says."""

    name: str
    source: str
    x: str
    y: str
    style: dict[str, Any]


@dataclass(frozen=True)
class ChartSpec:
    """One chart; `layout` is plotly's, without colours of text and lines."""

    id: str
    title: str
    traces: list[TraceSpec]
    layout: dict[str, Any]
    needs_top5: bool = False


def chart_specs(has_top5: bool) -> list[ChartSpec]:
    """All charts of a run, in the order of the page.

    Args:
        has_top5: whether the run has a top-5 accuracy, that is more than 5 classes.
    """
    step, epoch = "Step", "Epoch"
    charts = [
        ChartSpec(
            "loss",
            "Loss",
            [_line("Training", "loss"), _dots("Validation", "val_loss", "step")],
            base_layout("Loss", step, "Cross-entropy"),
        ),
        ChartSpec(
            "top1",
            "Top-1 accuracy",
            [_line("Training", "top1"), _dots("Validation", "val_top1", "step")],
            base_layout("Top-1 accuracy", step, "Percent"),
        ),
        ChartSpec(
            "top5",
            "Top-5 accuracy",
            [_dots("Validation", "val_top5", "step")],
            base_layout("Top-5 accuracy", step, "Percent"),
            needs_top5=True,
        ),
        ChartSpec(
            "lr",
            "Learning rate",
            [_line("Learning rate", "lr")],
            base_layout("Learning rate", step, "", tickformat="~e", rangemode="tozero"),
        ),
        ChartSpec(
            "seconds",
            "Epoch time",
            [
                TraceSpec(
                    "Epoch time",
                    "epochs",
                    "epoch",
                    "seconds",
                    {"type": "bar", "width": 0.6, "marker": {"color": TRAINING_COLOUR}},
                )
            ],
            base_layout("Epoch time", epoch, "Seconds", rangemode="tozero"),
        ),
        ChartSpec(
            "throughput",
            "Throughput",
            [_line("Throughput", "throughput")],
            base_layout("Throughput", step, "Images/s", rangemode="tozero"),
        ),
    ]
    return [chart for chart in charts if has_top5 or not chart.needs_top5]


def figures(run_series: RunSeries) -> dict[str, go.Figure]:
    """Chart id to figure, for `st.plotly_chart` and for export."""
    import plotly.graph_objects as go

    columns, marks = {"steps": run_series.steps, "epochs": run_series.epochs}, run_series.drawn_marks()
    drawn = {}
    for chart in chart_specs(run_series.has_top5):
        traces = [_trace(trace, columns[trace.source]) for trace in chart.traces]
        layout = {**chart.layout, **marks[chart.traces[0].x], "uirevision": run_series.run_id}
        drawn[chart.id] = go.Figure(data=traces, layout=layout)
    return drawn


def _trace(spec: TraceSpec, columns: dict[str, list[Any]]) -> dict[str, Any]:
    x, y, style = columns[spec.x], columns[spec.y], dict(spec.style)
    if len(y) == 1 and style.get("mode") == "lines":
        # a line of one point can't be seen
        style["mode"] = "lines+markers"
    return {**style, "name": spec.name, "x": x, "y": y}


def compare_figure(runs: Sequence[tuple[str, RunSeries]], metric: str) -> go.Figure:
    """One curve a run.

    Args:
        runs: name and series of each.
        metric: a column of `RunSeries.epochs` (drawn over epochs), else of `.steps` (drawn over steps).
    """
    import plotly.graph_objects as go

    titles = {
        "val_loss": "Validation loss",
        "val_top1": "Validation top-1 (percent)",
        "val_top5": "Validation top-5 (percent)",
        "train_loss": "Training loss",
        "train_top1": "Training top-1 (percent)",
        "seconds": "Epoch time (s)",
        "images_per_s": "Throughput (images/s)",
        "loss": "Training loss",
        "top1": "Training top-1 (percent)",
        "lr": "Learning rate",
        "throughput": "Throughput (images/s)",
    }
    traces: list[dict[str, Any]] = []
    is_by_epoch = True
    for place, (name, series) in enumerate(runs):
        epochs = series.epochs
        is_by_epoch = metric in epochs and metric != "lr"
        columns, x = (epochs, "epoch") if is_by_epoch else (series.steps, "step")
        colour = PALETTE[place % len(PALETTE)]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if is_by_epoch else "lines",
                # plotly reads tags in names
                "name": html.escape(name, quote=False),
                "x": columns[x],
                "y": columns[metric],
                "line": {"color": colour, "width": 2},
            }
        )
    layout = base_layout(titles.get(metric, metric), "Epoch" if is_by_epoch else "Step", "")
    return go.Figure(data=traces, layout={**layout, "showlegend": True})


def _line(name: str, column: str) -> TraceSpec:
    style = {"type": "scatter", "mode": "lines", "line": {"color": TRAINING_COLOUR, "width": 1.8}}
    return TraceSpec(name, "steps", "step", column, style)


def _dots(name: str, column: str, x: str) -> TraceSpec:
    style = {
        "type": "scatter",
        "mode": "lines+markers",
        "line": {"color": VALIDATION_COLOUR, "width": 1.8},
        "marker": {"size": 7},
    }
    return TraceSpec(name, "epochs", x, column, style)


def base_layout(title: str, x_title: str, y_title: str, **y_axis: Any) -> dict[str, Any]:
    """What all charts have in common; `y_axis` goes to plotly's y axis."""
    return {
        "title": {"text": title, "font": {"size": 15}, "x": 0.02, "xanchor": "left"},
        "margin": {"l": 56, "r": 12, "t": 44, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "x unified",
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"},
        "xaxis": {"title": {"text": x_title, "standoff": 6}, "rangemode": "tozero", "zeroline": False},
        "yaxis": {"title": {"text": y_title, "standoff": 6}, "zeroline": False, "automargin": True, **y_axis},
    }
