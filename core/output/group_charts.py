"""The charts of a run group: its repeats, where their time went, and the ratios.

A chart of which nothing is known has no traces.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from core.analysis.repeats import STARTS, Repeat, RunGroup
from core.charts import PALETTE, TRAINING_COLOUR
from core.output.chart_parts import ROW_PX, WHOLE, height_of, layout_of, new_figure, row_ticks, stacked, wrapped
from core.output.phases import PHASE_COLOURS
from core.words import time_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

_UNCLEAR_COLOUR = PHASE_COLOURS["other_s"]
_GAP = 1.7


def repeats_figure(result: dict[str, Any]) -> go.Figure:
    """Every repeat as a point, and the mean with its 95 % interval, a row for each label and start.

    Args:
        result: of `compare`.
    """
    measure, cells = result["measure"], result["cells"]
    figure = new_figure(layout_of(measure["title"], _axis_title(measure), "", height=height_of(len(cells), 2 * ROW_PX)))
    colours = _label_colours(cell["label"] for cell in cells)
    for row, cell in enumerate(cells):
        if not cell["values"]:
            continue
        name, colour = _cell_name(cell), colours[cell["label"]]
        values = [item["value"] for item in cell["values"]]
        figure.add_scatter(
            x=values,
            y=[row + 0.22] * len(values),
            mode="markers",
            marker={"size": 9, "color": colour, "opacity": 0.55},
            customdata=[[html.escape(item["run_id"]), _value_words(item["value"], measure)] for item in cell["values"]],
            hovertemplate=f"<b>{wrapped(name)}</b><br>%{{customdata[1]}}<br>run %{{customdata[0]}}<extra></extra>",
        )
        figure.add_scatter(
            x=[cell["mean"]],
            y=[row - 0.08],
            mode="markers+text",
            text=_value_words(cell["mean"], measure),
            textposition="top center",
            cliponaxis=False,
            marker={"size": 13, "symbol": "diamond", "color": colour},
            error_x=_interval(cell["mean"], cell, colour),
            hovertemplate=f"{wrapped(cell['words'], 48)}<extra></extra>",
        )
    figure.update_yaxes(row_ticks(range(len(cells)), [_cell_name(cell) for cell in cells]))
    figure.update_xaxes(rangemode="normal")
    return figure.update_layout(showlegend=False)


def phases_by_repeat(group: RunGroup) -> go.Figure:
    """A stacked bar for each repeat that finished, by label and start; without phases, one bar for the whole run."""
    cells: dict[str, list[Repeat]] = {}
    for start in STARTS:
        for repeat in group.repeats:
            if repeat.start == start and repeat.state == "finished" and repeat.total_s:
                cells.setdefault(_cell_name(vars(repeat)), []).append(repeat)
    bars: list[Mapping[str, float]] = []
    places: list[float] = []
    of, middles = [], []
    for name, repeats in cells.items():
        first = places[-1] + _GAP if places else 0.0
        middles.append(first + (len(repeats) - 1) / 2)
        for place, repeat in enumerate(repeats):
            places.append(first + place)
            bars.append(repeat.phases or {WHOLE: repeat.total_s or 0.0})
            of.append(f"of run {html.escape(repeat.run_id)}<br>{wrapped(name, 48)}")
    figure = stacked(bars, of, places, orientation="h")
    height = height_of(len(bars) + len(cells)) + 60
    figure.update_layout(layout_of("Where the time went, repeat by repeat", "Seconds", "", height=height))
    return figure.update_yaxes(row_ticks(middles, cells, high=max(places, default=0.0) + 0.6))


def ratios_figure(result: dict[str, Any]) -> go.Figure:
    """Each label's ratio to the baseline with its 95 % interval, around the line at 1; grey where it is not clear.

    Args:
        result: of `compare`.
    """
    ratios = [item for item in result["ratios"] if item["ratio"] is not None]
    title = f"{result['measure']['title']}: ratio to {_shortened(result['baseline'])}"
    figure = new_figure(layout_of(html.escape(title), "Ratio", "", height=height_of(len(ratios), 1.6 * ROW_PX)))
    for row, item in enumerate(ratios):
        colour = TRAINING_COLOUR if item["is_clear"] else _UNCLEAR_COLOUR
        has_interval = item["low"] is not None
        figure.add_scatter(
            x=[item["ratio"]],
            y=[row],
            mode="markers+text",
            text=f"{item['ratio']:.2f}",
            textposition="top center",
            cliponaxis=False,
            marker={"size": 13, "symbol": "diamond" if has_interval else "diamond-open", "color": colour},
            error_x=_interval(item["ratio"], item, colour),
            hovertemplate=f"{wrapped(item['words'], 48)}<extra></extra>",
        )
    if ratios:
        figure.add_vline(1, line={"color": PALETTE[5], "width": 1.5, "dash": "dot"})
        ends = [1.0, *(item[end] for item in ratios for end in ("ratio", "low", "high") if item[end] is not None)]
        margin = 0.08 * (max(ends) - min(ends)) or 0.1
        # a line at 1 doesn't widen the axis by itself
        figure.update_xaxes(range=[min(ends) - margin, max(ends) + margin])
    figure.update_yaxes(row_ticks(range(len(ratios)), [_cell_name(item) for item in ratios]))
    return figure.update_layout(showlegend=False)


def _interval(middle: float, ends: Mapping[str, Any], colour: str) -> dict[str, Any] | None:
    if ends["low"] is None:
        return None
    return {
        "type": "data",
        "symmetric": False,
        "array": [ends["high"] - middle],
        "arrayminus": [middle - ends["low"]],
        "color": colour,
        "thickness": 2.5,
        "width": 7,
    }


def _label_colours(labels: Iterable[str]) -> dict[str, str]:
    return {label: PALETTE[place % len(PALETTE)] for place, label in enumerate(dict.fromkeys(labels))}


def _cell_name(cell: Mapping[str, Any]) -> str:
    return f"{cell['label']} · {cell['start']}" if cell["start"] else str(cell["label"])


def _axis_title(measure: Mapping[str, Any]) -> str:
    return "Seconds" if measure["unit"] == "s" else str(measure["unit"]).capitalize()


def _value_words(value: float, measure: Mapping[str, Any]) -> str:
    return time_in_words(value) if measure["unit"] == "s" else f"{value:,.4g} {measure['unit']}"


def _shortened(text: str) -> str:
    return textwrap.shorten(text, 24, placeholder="…") if len(text) > 24 else text
