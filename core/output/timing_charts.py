"""The charts of where the time of a run went.

Backgrounds are transparent and text colours open, as in `core.charts`. A chart of which nothing is known has no traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from core.charts import VALIDATION_COLOUR
from core.output.chart_parts import height_of, known, layout_of, new_figure, row_ticks, stacked
from core.output.phases import PHASE_COLOURS, setup_title
from core.words import time_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_POINTS = 600
"""A chart of the machine shows means over neighbouring samples where there are more."""

_CPU_COLUMNS = {"own_cpu_percent": ("CPU, this run", "#22816a"), "other_cpu_percent": ("CPU, others", "#de770c")}
_MACHINE_COLUMNS = {
    "memory_percent": ("Memory", "percent", "#9671d8"),
    "gpu_percent": ("GPU busy", "percent", "#4f8fe0"),
    "gpu_throttled": ("GPU slowed", "percent", "#ba1434"),
    "tpu_duty_percent": ("TPU busy", "percent", "#4f8fe0"),
    "own_memory_gib": ("Run's memory", "GiB", "#b5658f"),
    "gpu_memory_gib": ("GPU memory", "GiB", "#92c3f3"),
    "tpu_memory_gib": ("TPU memory", "GiB", "#92c3f3"),
    "gpu_temperature_c": ("GPU temperature", "°C", "#c2a13a"),
    "gpu_power_w": ("GPU power", "W", "#e0566f"),
    "gpu_clock_mhz": ("GPU clock", "MHz", "#9ea3a6"),
}
"""Column of `MachineSampled` to its name, the panel it is drawn in, and its colour."""


def phases_by_epoch(summary: dict[str, Any]) -> go.Figure:
    """A stacked bar for set-up, one for each epoch, and one for the rest of the run; in seconds.

    Args:
        summary: of any run, as `summarise` gives it; of one that goes on, what is known so far.
    """
    bars = _run_bars(summary)
    figure = stacked([phases for _, phases in bars], [f"of {name.lower()}" for name, _ in bars])
    figure.update_layout(layout_of("Where the time went, epoch by epoch", "", "Seconds", height=380))
    figure.update_xaxes(_bar_ticks([name for name, _ in bars]))
    return figure


def setup_figure(summary: dict[str, Any]) -> go.Figure:
    """The parts of set-up, longest first, as horizontal bars."""
    parts = sorted(known(summary["setup_parts"]).items(), key=lambda part: -part[1])
    names = [setup_title(name) for name, _ in parts]
    seconds = [part for _, part in parts]
    words = [f"{time_in_words(part)}, {100 * part / sum(seconds):.0f} %" for part in seconds]
    figure = new_figure(layout_of("Set-up, part by part", "Seconds", "", height=height_of(len(parts))))
    if parts:
        figure.add_bar(
            x=seconds,
            y=list(range(len(parts))),
            orientation="h",
            marker_color=PHASE_COLOURS["setup_s"],
            text=words,
            textposition="auto",
            customdata=names,
            hovertemplate="<b>%{customdata}</b><br>%{x:.3~f} s<br>%{text} of set-up<extra></extra>",
        )
    figure.update_yaxes(row_ticks(range(len(parts)), names))
    return figure.update_layout(showlegend=False, bargap=0.3)


def step_histogram(summary: dict[str, Any]) -> go.Figure:
    """How many settled steps took how long, with the median and the 95th percentile."""
    times = summary["step_times"]
    if times is None:
        return new_figure(layout_of("Step times", "", "", height=300))
    # milliseconds where seconds would begin with a zero
    unit, scale = ("ms", 1000) if times["median_s"] < 1 else ("s", 1)
    edges, longer = scale * np.array(times["histogram"]["edges_s"]), times["histogram"].get("longer", 0)
    title = f"Step times: {times['steps']:,} settled steps" + (f", {longer:,} longer than shown" if longer else "")
    figure = new_figure(layout_of(title, f"Step time ({unit})", "Steps", height=300))
    figure.add_bar(
        x=(edges[:-1] + edges[1:]) / 2,
        y=times["histogram"]["counts"],
        width=np.diff(edges),
        customdata=np.stack([edges[:-1], edges[1:]], axis=1),
        marker={"color": PHASE_COLOURS["compute_s"], "line_width": 0},
        hovertemplate=f"%{{customdata[0]:.4~g}} to %{{customdata[1]:.4~g}} {unit}<br>%{{y:,}} steps<extra></extra>",
    )
    told = []
    for words, name, dash, line in (
        ("Median", "median_s", "solid", "solid"),
        ("95 % within", "p95_s", "dot", "dotted"),
    ):
        value = scale * times[name]
        told.append(f"{words} {float(f'{value:.3g}'):,g} {unit} ({line} line)")
        # it may lie among the steps that are longer than shown
        if value <= edges[-1]:
            figure.add_vline(value, line={"dash": dash, "width": 1.5, "color": VALIDATION_COLOUR})
    figure.update_layout(title_subtitle={"text": ", ".join(told), "font_size": 12}, margin_t=66)
    return figure.update_layout(showlegend=False, bargap=0)


def machine_figure(samples: Mapping[str, ArrayLike], start: float) -> go.Figure:
    """What processor, memory and accelerator did over the run, a panel for each unit.

    Args:
        samples: see `summary_of`.
        start: Unix time of the run's start.
    """
    import pandas as pd
    from plotly.subplots import make_subplots

    table = pd.DataFrame({name: column for name, column in samples.items() if name != "id"}, dtype=float)
    table["at_s"] = table.pop("at") - start
    table = table.groupby(np.arange(len(table)) // -(-max(len(table), 1) // MOST_POINTS)).mean()
    if "gpu_throttled" in table:
        table["gpu_throttled"] = 100 * table["gpu_throttled"].replace(0, np.nan)
    columns = [name for name in table if table[name].notna().any()]
    lines = {name: told for name, told in _MACHINE_COLUMNS.items() if name in columns}
    cpu = {name: told for name, told in _CPU_COLUMNS.items() if name in columns}
    units = list(dict.fromkeys([*(["percent"] if cpu else []), *(unit for _, unit, _ in lines.values())]))
    minutes, x_title = (table["at_s"] / 60, "Minutes") if table["at_s"].max() > 120 else (table["at_s"], "Seconds")

    heights = [2.4 if unit == "percent" else 1.0 for unit in units]
    figure = make_subplots(max(len(units), 1), 1, shared_xaxes=True, vertical_spacing=0.05, row_heights=heights or None)
    for name, (title, colour) in cpu.items():
        figure.add_scatter(**_curve(title, minutes, table[name], colour, "percent"), stackgroup="cpu", row=1, col=1)
    for name, (title, unit, colour) in lines.items():
        figure.add_scatter(**_curve(title, minutes, table[name], colour, unit), row=units.index(unit) + 1, col=1)
    figure.update_layout(layout_of("The machine during the run", "", "", height=int(180 + 70 * sum(heights))))
    for row, unit in enumerate(units, start=1):
        limits = {"range": [0, 101]} if unit == "percent" else {"rangemode": "tozero", "nticks": 3}
        figure.update_yaxes(title={"text": unit.capitalize() if unit == "percent" else unit}, row=row, **limits)
    figure.update_xaxes(zeroline=False, automargin=True, hoverformat=".2~f")
    figure.update_xaxes(title=x_title, row=max(len(units), 1))
    return figure.update_layout(hovermode="x unified")


def _run_bars(summary: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Bar by bar its name and its phases; together they are all the time that is known."""
    setup_s = summary["phases"]["setup_s"] or sum(summary["setup_parts"].values())
    epochs = [(f"Epoch {epoch['epoch']}", epoch["phases"]) for epoch in summary["epochs"]]
    rest = {
        name: seconds - sum(phases[name] for _, phases in epochs)
        for name, seconds in summary["phases"].items()
        if name != "setup_s"
    }
    bars = [("Set-up", {"setup_s": setup_s}), *epochs, ("Rest", rest)]
    return [(name, phases) for name, phases in bars if known(phases) or name.startswith("Epoch")]


def _bar_ticks(names: Sequence[str]) -> dict[str, Any]:
    """Set-up, some epochs and the rest, as many as stand side by side on a phone."""
    epochs = [place for place, name in enumerate(names) if name.startswith("Epoch")]
    every = -(-len(epochs) // 6)
    others = [place for place in range(len(names)) if place not in epochs]
    shown = [
        place
        for number, place in enumerate(epochs, start=1)
        if number % every == 0 and all(abs(place - other) > every / 2 for other in others)
    ]
    places = sorted([*others, *shown])
    texts = [names[place].removeprefix("Epoch ") for place in places]
    return {"tickvals": places, "ticktext": texts, "title": "Epoch" if epochs else "", "showgrid": False}


def _curve(name: str, x: Any, y: Any, colour: str, unit: str) -> dict[str, Any]:
    return {
        "name": name,
        "x": x.round(3).tolist(),
        "y": y.round(2).tolist(),
        "mode": "lines",
        "line": {"color": colour, "width": 1.6},
        "hovertemplate": f"%{{y:.4~g}} {'%' if unit == 'percent' else unit}",
    }
