"""What a data set holds, as charts, tables and files; values in, values out."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from core.charts import PALETTE, TRAINING_COLOUR, VALIDATION_COLOUR
from core.data.dataset import FEW_IMAGES, Dataset

if TYPE_CHECKING:
    import plotly.graph_objects as go

SPLIT_WORDS = {"train": "Training", "val": "Validation", "test": "Test"}
SPLIT_COLOURS = {"train": TRAINING_COLOUR, "val": VALIDATION_COLOUR, "test": PALETTE[2]}
MOST_BARS = 40
"""With more classes there are ranks instead of a bar for each."""
MOST_POINTS = 2000
"""A chart gets no more points in a trace."""
MOST_DOTS = 500
"""With more sizes there is a grid instead of a dot for each."""
FIELDS = 40
"""Of the grid, each way."""
NAMED_FILES = 5
Counts = dict[str, NDArray[np.int64]]


def class_counts(dataset: Dataset) -> Counts:
    """Split to (classes,), the number of its images in each."""
    num = len(dataset.classes)
    return {
        split: np.bincount(np.fromiter((item.label for item in items), np.int64, len(items)), minlength=num)
        for split, items in dataset.splits.items()
    }


def class_table(dataset: Dataset) -> dict[str, Any]:
    """Column to values, a row a class: its images in each split and together, and a note where training has few."""
    counts = class_counts(dataset)
    notes = ["none" if not num else "few" if num < FEW_IMAGES else "" for num in counts["train"].tolist()]
    return {
        "Class": dataset.classes,
        "Images": sum(counts.values()),
        **{SPLIT_WORDS[split]: values for split, values in counts.items()},
        "Note": notes,
    }


def classes_figure(dataset: Dataset) -> go.Figure:
    """The images of each class by split: a bar each in the order of the classes, or ranks where they are many."""
    counts = class_counts(dataset)
    if len(dataset.classes) <= MOST_BARS:
        return _bars(dataset.classes, counts)
    return _ranks(dataset.classes, counts)


def sizes(dataset: Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(images,) widths and heights of all that are used."""
    items = [item for part in dataset.splits.values() for item in part]
    widths = np.fromiter((item.width for item in items), np.int64, len(items))
    return widths, np.fromiter((item.height for item in items), np.int64, len(items))


def sizes_figure(dataset: Dataset) -> go.Figure | None:
    """Width by height: a dot a size, or how many lie in each field of a grid where many differ; None where none do."""
    widths, heights = sizes(dataset)
    pairs, counts = np.unique(np.stack([widths, heights], axis=1), axis=0, return_counts=True)
    if len(pairs) < 2:
        return None
    figure = _dots(pairs, counts) if len(pairs) <= MOST_DOTS else _fields(pairs, counts)
    figure.update_xaxes(title="Width (px)", type=_axis(pairs))
    figure.update_yaxes(title="Height (px)", type=_axis(pairs))
    return figure


def sizes_in_words(widths: NDArray[np.int64], heights: NDArray[np.int64]) -> str:
    """The usual, the smallest and the largest picture by area."""
    if (widths == widths[0]).all() and (heights == heights[0]).all():
        return f"All images have {widths[0]:,} x {heights[0]:,} pixels."
    areas = widths * heights
    low, high = int(areas.argmin()), int(areas.argmax())
    return (
        f"Median {np.median(widths):,.0f} x {np.median(heights):,.0f} px, "
        f"smallest {widths[low]:,} x {heights[low]:,}, largest {widths[high]:,} x {heights[high]:,}."
    )


def enlarged_in_words(widths: NDArray[np.int64], heights: NDArray[np.int64], resize_size: int, image_size: int) -> str:
    """How many pictures are enlarged for a model.

    Args:
        resize_size: the short side that they are brought to.
        image_size: the side of the square that the model sees.
    """
    num = int((np.minimum(widths, heights) < resize_size).sum())
    seen = f"The short side is brought to {resize_size} px, and the model sees {image_size} x {image_size}"
    if not num:
        return f"{seen}: every image is large enough."
    return f"{seen}: {num:,} of {len(widths):,} images are smaller and are enlarged."


def duplicates_table(dataset: Dataset) -> dict[str, list[Any]]:
    """Column to values, a row a group of files with equal bytes; what may harm comes first."""
    split_of = {item.file: split for split, items in dataset.splits.items() for item in items}
    rows = []
    for group in dataset.duplicates:
        splits = list(dict.fromkeys(SPLIT_WORDS[split_of[item.file]] for item in group))
        labels = list(dict.fromkeys(dataset.classes[item.label] for item in group))
        marks = [mark for mark, found in (("two classes", labels), ("two splits", splits)) if len(found) > 1]
        files = [item.file for item in group[:NAMED_FILES]]
        if len(group) > NAMED_FILES:
            files.append(f"and {len(group) - NAMED_FILES:,} more")
        rows.append((", ".join(marks), len(group), ", ".join(splits), ", ".join(labels), ", ".join(files)))
    rows.sort(key=lambda row: (not row[0], -row[1]))
    titles = ("Beware", "Copies", "Splits", "Classes", "Files")
    return {title: [row[place] for row in rows] for place, title in enumerate(titles)}


def report_csv(dataset: Dataset) -> str:
    """What became of each file, a row each: used, skipped or ignored."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["file", "outcome", "reason", "split", "class"])
    for split, items in dataset.splits.items():
        rows.writerows((item.file, "used", "", split, dataset.classes[item.label]) for item in items)
    rows.writerows((item.file, "skipped", item.why, "", "") for item in dataset.skipped)
    rows.writerows((file, "ignored", "", "", "") for file in dataset.ignored)
    return text.getvalue()


def report_json(dataset: Dataset) -> str:
    """The report with the names of all files."""
    return json.dumps(dataset.report(with_files=True), indent=2) + "\n"


def _bars(classes: Sequence[str], counts: Counts) -> go.Figure:
    import plotly.graph_objects as go

    places = list(range(len(classes)))
    figure = go.Figure(layout=_layout(height=90 + 24 * len(classes)))
    for split, values in counts.items():
        figure.add_bar(
            name=SPLIT_WORDS[split],
            x=values,
            y=places,
            customdata=[html.escape(name, quote=False) for name in classes],
            orientation="h",
            marker={"color": SPLIT_COLOURS[split]},
            hovertemplate="%{customdata}: %{x:,}",
        )
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_xaxes(title="Images")
    figure.update_yaxes(
        tickvals=places, ticktext=[_short(name) for name in classes], range=[len(classes) - 0.4, -0.6], automargin=True
    )
    return figure


def _ranks(classes: Sequence[str], counts: Counts) -> go.Figure:
    import plotly.graph_objects as go

    order = np.argsort(-np.sum(list(counts.values()), axis=0), kind="stable")
    ranks = np.unique(np.linspace(0, len(order) - 1, min(len(order), MOST_POINTS)).round().astype(np.int64))
    names = [_short(classes[label]) for label in order[ranks]]
    figure = go.Figure(layout=_layout(height=340))
    for place, (split, values) in enumerate(counts.items()):
        figure.add_scatter(
            name=SPLIT_WORDS[split],
            x=ranks + 1,
            y=values[order[ranks]],
            customdata=names,
            stackgroup="splits",
            mode="lines",
            line={"width": 1, "color": SPLIT_COLOURS[split], "shape": "hv"},
            hovertemplate="%{y:,}" if place else "<b>%{customdata}</b>: %{y:,}",
        )
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title="Classes, largest first", range=[1, len(classes)])
    figure.update_yaxes(title="Images", rangemode="tozero")
    return figure


def _dots(pairs: NDArray[np.int64], counts: NDArray[np.int64]) -> go.Figure:
    import plotly.graph_objects as go

    share = np.sqrt(counts / counts.max())
    figure = go.Figure(layout=_layout(height=380))
    figure.add_scatter(
        x=pairs[:, 0],
        y=pairs[:, 1],
        customdata=counts,
        mode="markers",
        marker={"size": 6 + 16 * share, "color": TRAINING_COLOUR, "opacity": 0.35 + 0.5 * share},
        hovertemplate="%{x} x %{y} px: %{customdata:,}<extra></extra>",
    )
    return figure


def _fields(pairs: NDArray[np.int64], counts: NDArray[np.int64]) -> go.Figure:
    """A grid of squares, coloured by the root of their number so that a few images are seen beside thousands."""
    import plotly.graph_objects as go

    spaced = np.geomspace if _axis(pairs) == "log" else np.linspace
    edges = [spaced(side.min() - 0.5, side.max() + 0.5, FIELDS + 1) for side in pairs.T]
    grid = np.histogram2d(pairs[:, 0], pairs[:, 1], edges, weights=counts)[0].T
    figure = go.Figure(layout=_layout(height=380))
    figure.add_heatmap(
        x=edges[0],
        y=edges[1],
        z=np.where(grid > 0, np.sqrt(grid), np.nan),
        customdata=grid,
        colorscale=[[0, "rgba(42,157,143,0.2)"], [1, TRAINING_COLOUR]],
        showscale=False,
        hovertemplate="about %{x:.0f} x %{y:.0f} px: %{customdata:,}<extra></extra>",
    )
    return figure


def _axis(pairs: NDArray[np.int64]) -> str:
    return "log" if pairs.max() > 20 * pairs.min() else "linear"


def _short(name: str, most: int = 28) -> str:
    # plotly reads tags in labels
    return html.escape(name if len(name) <= most else f"{name[: most - 1]}…", quote=False)


def _layout(*, height: int) -> dict[str, Any]:
    return {
        "height": height,
        "margin": {"l": 8, "r": 8, "t": 32, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
    }
