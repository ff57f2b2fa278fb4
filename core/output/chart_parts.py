"""What the charts of times share: stacked bars of phases, named rows, and texts that stay inside."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core.charts import PALETTE, base_layout
from core.output.phases import PHASE_COLOURS, PHASE_TITLES
from core.words import time_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROW_PX = 26
WHOLE = "whole_s"
"""In place of phases that are not known."""
LEAST_S = 1e-3


def stacked(
    bars: Sequence[Mapping[str, float]], of: Sequence[str], places: Any = None, orientation: str = "v"
) -> go.Figure:
    """A trace for each phase that took time.

    Args:
        bars: phases of each bar.
        of: of what a percentage of each bar is told, in words.
        places: where each bar stands; 0, 1, 2 ... where None.
    """
    # a legend names a single phase too
    figure = new_figure({"barmode": "stack", "bargap": 0.25, "showlegend": True})
    places = range(len(bars)) if places is None else places
    for phase, title in (PHASE_TITLES | {WHOLE: "Whole run, phases not known"}).items():
        shown = [index for index, phases in enumerate(bars) if phase in known(phases)]
        if not shown:
            continue
        seconds, where = [bars[index][phase] for index in shown], [places[index] for index in shown]
        percents = [100 * bars[index][phase] / sum(bars[index].values()) for index in shown]
        words = [
            f"{time_in_words(took)}, {percent:.1f} % {of[index]}"
            for index, took, percent in zip(shown, seconds, percents, strict=True)
        ]
        x, y = (where, seconds) if orientation == "v" else (seconds, where)
        figure.add_bar(
            name=title,
            x=x,
            y=y,
            orientation=orientation,
            marker={"color": PHASE_COLOURS.get(phase, PALETTE[0]), "line_width": 0},
            customdata=words,
            hovertemplate=f"<b>{title}</b><br>%{{customdata}}<extra></extra>",
        )
    return figure


def known(phases: Mapping[str, float]) -> dict[str, float]:
    """Those that took time; what is below a millisecond is rounding."""
    return {name: seconds for name, seconds in phases.items() if seconds >= LEAST_S}


def row_ticks(
    places: Iterable[float], names: Iterable[str], low: float = -0.6, high: float | None = None
) -> dict[str, Any]:
    """Rows from the top down, named."""
    places = list(places)
    bottom = len(places) - 0.4 if high is None else high
    return {
        "tickvals": places,
        "ticktext": [wrapped(name) for name in names],
        "range": [bottom, low],
        "showgrid": False,
        "automargin": True,
    }


def new_figure(layout: dict[str, Any]) -> go.Figure:
    import plotly.graph_objects as go

    return go.Figure(layout=layout)


def layout_of(title: str, x_title: str, y_title: str, *, height: int) -> dict[str, Any]:
    """As other charts, but for the legend: below, where many names find place on a phone too."""
    layout = base_layout(title, x_title, y_title)
    # ticks that aren't seen keep the labels off the plot
    whole = {"xref": "container", "yref": "container"}
    ticks = {"ticks": "outside", "ticklen": 5, "tickcolor": "rgba(0,0,0,0)", "automargin": True}
    return {
        **layout,
        "height": height,
        "hovermode": "closest",
        "xaxis": {**layout["xaxis"], **ticks},
        "yaxis": {**layout["yaxis"], **ticks},
        "legend": {"orientation": "h", "traceorder": "normal", "x": 0.02, "y": 0, "yanchor": "bottom", **whole},
    }


def height_of(rows: int, row_px: float = ROW_PX) -> int:
    return int(100 + row_px * max(rows, 1))


def wrapped(text: str, width: int = 20) -> str:
    """The text in lines; three at the most where it is a label. plotly reads tags in texts, so they are escaped."""
    lines = textwrap.wrap(text, width, max_lines=3 if width < 30 else None, placeholder="…")
    return "<br>".join(html.escape(line, quote=False) for line in lines)
