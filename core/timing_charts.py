"""The charts of where time went: of one run, and of the repeats of a group.

Backgrounds are transparent and text colours open, as in `core.charts`. A chart of which nothing is known has no traces.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from core.analysis.comparison import STARTS, Repeat, RunGroup
from core.charts import PALETTE, TRAINING_COLOUR, VALIDATION_COLOUR, base_layout
from core.words import time_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

PHASE_TITLES = {
    "setup_s": "Set-up",
    "data_wait_s": "Data wait",
    "transfer_s": "Transfer",
    "compile_s": "Compile",
    "compute_s": "Compute",
    "evaluation_s": "Evaluation",
    "checkpoint_s": "Checkpoint",
    "other_s": "Other",
}
PHASE_HELP = {
    "setup_s": "Starting the device, fetching and scanning the data, building the model, opening the image cache.",
    "data_wait_s": "The trainer had no batch; what loader threads did meanwhile does not count.",
    "transfer_s": "Handing batches to the device; on CUDA only the call, since the copy itself is queued.",
    "compile_s": "XLA or torch.compile building programs, taken out of the phase in which it fell.",
    "compute_s": "Forward, backward and optimizer, with the wait for their figures.",
    "evaluation_s": "The pass over the validation images, with its own data wait.",
    "checkpoint_s": "Writing the best and the last weights.",
    "other_s": "The rest, chiefly writing down figures.",
}
PHASE_COLOURS = {
    "setup_s": "#9671d8",
    "data_wait_s": "#de770c",
    "transfer_s": "#114ba8",
    "compile_s": "#ba1434",
    "compute_s": "#22816a",
    "evaluation_s": "#92c3f3",
    "checkpoint_s": "#d5cb9c",
    "other_s": "#9ea3a6",
}
"""Told apart with each kind of colour blindness; what one can do something about, data wait and compile, stands out."""
SETUP_TITLES = {
    "device_start_s": "Starting the device",
    "source_s": "Fetching the data",
    "scan_s": "Scanning the data",
    "cache_build_s": "Packing images",
    "cache_open_s": "Opening the cache",
    "model_s": "Building the model",
    "preflight_s": "Tracing the model",
    "placement_s": "Placing the model",
}
MOST_POINTS = 600
"""A chart of the machine shows means over neighbouring samples where there are more."""

_UNCLEAR_COLOUR = PHASE_COLOURS["other_s"]
_LEAST_S = 1e-3
_WHOLE = "whole_s"
_GAP = 1.7
_ROW_PX = 26
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


def setup_title(name: str) -> str:
    """ "scan_s" -> "Scanning the data"; a part that is not known by its name."""
    return SETUP_TITLES.get(name) or name.removesuffix("_s").replace("_", " ").capitalize()


# -- one run ------------------------------------------------------------------------------------------------------


def phases_by_epoch(summary: dict[str, Any]) -> go.Figure:
    """A stacked bar for set-up, one for each epoch, and one for the rest of the run; in seconds.

    Args:
        summary: of any run, as `summarise` gives it; of one that goes on, what is known so far.
    """
    bars = _run_bars(summary)
    figure = _stacked([phases for _, phases in bars], [f"of {name.lower()}" for name, _ in bars])
    figure.update_layout(_layout("Where the time went, epoch by epoch", "", "Seconds", height=380))
    figure.update_xaxes(_bar_ticks([name for name, _ in bars]))
    return figure


def setup_figure(summary: dict[str, Any]) -> go.Figure:
    """The parts of set-up, longest first, as horizontal bars."""
    parts = sorted(_known(summary["setup_parts"]).items(), key=lambda part: -part[1])
    names = [setup_title(name) for name, _ in parts]
    seconds = [part for _, part in parts]
    words = [f"{time_in_words(part)}, {100 * part / sum(seconds):.0f} %" for part in seconds]
    figure = _figure(_layout("Set-up, part by part", "Seconds", "", height=_height(len(parts))))
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
    figure.update_yaxes(_row_ticks(range(len(parts)), names))
    return figure.update_layout(showlegend=False, bargap=0.3)


def step_histogram(summary: dict[str, Any]) -> go.Figure:
    """How many settled steps took how long, with the median and the 95th percentile."""
    times = summary["step_times"]
    if times is None:
        return _figure(_layout("Step times", "", "", height=300))
    # milliseconds where seconds would begin with a zero
    unit, scale = ("ms", 1000) if times["median_s"] < 1 else ("s", 1)
    edges, longer = scale * np.array(times["histogram"]["edges_s"]), times["histogram"].get("longer", 0)
    title = f"Step times: {times['steps']:,} settled steps" + (f", {longer:,} longer than shown" if longer else "")
    figure = _figure(_layout(title, f"Step time ({unit})", "Steps", height=300))
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


def machine_figure(samples: Sequence[tuple[float, Mapping[str, Any]]], start: float) -> go.Figure:
    """What processor, memory and accelerator did over the run, a panel for each unit.

    Args:
        samples: (Unix time, payload of `MachineSampled`), in the order of time.
        start: Unix time of the run's start.
    """
    import pandas as pd
    from plotly.subplots import make_subplots

    table = pd.DataFrame([dict(payload) for _, payload in samples], dtype=float)
    table["at_s"] = [at - start for at, _ in samples]
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
    figure.update_layout(_layout("The machine during the run", "", "", height=int(180 + 70 * sum(heights))))
    for row, unit in enumerate(units, start=1):
        limits = {"range": [0, 101]} if unit == "percent" else {"rangemode": "tozero", "nticks": 3}
        figure.update_yaxes(title={"text": unit.capitalize() if unit == "percent" else unit}, row=row, **limits)
    figure.update_xaxes(zeroline=False, automargin=True, hoverformat=".2~f")
    figure.update_xaxes(title=x_title, row=max(len(units), 1))
    return figure.update_layout(hovermode="x unified")


# -- a group ------------------------------------------------------------------------------------------------------


def repeats_figure(result: dict[str, Any]) -> go.Figure:
    """Every repeat as a point, and the mean with its 95 % interval, a row for each label and start.

    Args:
        result: of `compare`.
    """
    measure, cells = result["measure"], result["cells"]
    figure = _figure(_layout(measure["title"], _axis_title(measure), "", height=_height(len(cells), 2 * _ROW_PX)))
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
            hovertemplate=f"<b>{_wrapped(name)}</b><br>%{{customdata[1]}}<br>run %{{customdata[0]}}<extra></extra>",
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
            hovertemplate=f"{_wrapped(cell['words'], 48)}<extra></extra>",
        )
    figure.update_yaxes(_row_ticks(range(len(cells)), [_cell_name(cell) for cell in cells]))
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
            bars.append(repeat.phases or {_WHOLE: repeat.total_s or 0.0})
            of.append(f"of run {html.escape(repeat.run_id)}<br>{_wrapped(name, 48)}")
    figure = _stacked(bars, of, places, orientation="h")
    height = _height(len(bars) + len(cells)) + 60
    figure.update_layout(_layout("Where the time went, repeat by repeat", "Seconds", "", height=height))
    return figure.update_yaxes(_row_ticks(middles, cells, high=max(places, default=0.0) + 0.6))


def ratios_figure(result: dict[str, Any]) -> go.Figure:
    """Each label's ratio to the baseline with its 95 % interval, around the line at 1; grey where it is not clear.

    Args:
        result: of `compare`.
    """
    ratios = [item for item in result["ratios"] if item["ratio"] is not None]
    title = f"{result['measure']['title']}: ratio to {_shortened(result['baseline'])}"
    figure = _figure(_layout(html.escape(title), "Ratio", "", height=_height(len(ratios), 1.6 * _ROW_PX)))
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
            hovertemplate=f"{_wrapped(item['words'], 48)}<extra></extra>",
        )
    if ratios:
        figure.add_vline(1, line={"color": PALETTE[5], "width": 1.5, "dash": "dot"})
        ends = [1.0, *(item[end] for item in ratios for end in ("ratio", "low", "high") if item[end] is not None)]
        margin = 0.08 * (max(ends) - min(ends)) or 0.1
        # a line at 1 doesn't widen the axis by itself
        figure.update_xaxes(range=[min(ends) - margin, max(ends) + margin])
    figure.update_yaxes(_row_ticks(range(len(ratios)), [_cell_name(item) for item in ratios]))
    return figure.update_layout(showlegend=False)


# -- parts of charts ----------------------------------------------------------------------------------------------


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
    return [(name, phases) for name, phases in bars if _known(phases) or name.startswith("Epoch")]


def _stacked(
    bars: Sequence[Mapping[str, float]], of: Sequence[str], places: Any = None, orientation: str = "v"
) -> go.Figure:
    """A trace for each phase that took time.

    Args:
        bars: phases of each bar.
        of: of what a percentage of each bar is told, in words.
        places: where each bar stands; 0, 1, 2 ... where None.
    """
    # a legend names a single phase too
    figure = _figure({"barmode": "stack", "bargap": 0.25, "showlegend": True})
    places = range(len(bars)) if places is None else places
    for phase, title in (PHASE_TITLES | {_WHOLE: "Whole run, phases not known"}).items():
        shown = [index for index, phases in enumerate(bars) if phase in _known(phases)]
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


def _known(phases: Mapping[str, float]) -> dict[str, float]:
    """Those that took time; what is below a millisecond is rounding."""
    return {name: seconds for name, seconds in phases.items() if seconds >= _LEAST_S}


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


def _row_ticks(
    places: Iterable[float], names: Iterable[str], low: float = -0.6, high: float | None = None
) -> dict[str, Any]:
    """Rows from the top down, named."""
    places = list(places)
    bottom = len(places) - 0.4 if high is None else high
    return {
        "tickvals": places,
        "ticktext": [_wrapped(name) for name in names],
        "range": [bottom, low],
        "showgrid": False,
        "automargin": True,
    }


def _curve(name: str, x: Any, y: Any, colour: str, unit: str) -> dict[str, Any]:
    return {
        "name": name,
        "x": x.round(3).tolist(),
        "y": y.round(2).tolist(),
        "mode": "lines",
        "line": {"color": colour, "width": 1.6},
        "hovertemplate": f"%{{y:.4~g}} {'%' if unit == 'percent' else unit}",
    }


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


def _figure(layout: dict[str, Any]) -> go.Figure:
    import plotly.graph_objects as go

    return go.Figure(layout=layout)


def _layout(title: str, x_title: str, y_title: str, *, height: int) -> dict[str, Any]:
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


def _height(rows: int, row_px: float = _ROW_PX) -> int:
    return int(100 + row_px * max(rows, 1))


def _label_colours(labels: Iterable[str]) -> dict[str, str]:
    return {label: PALETTE[place % len(PALETTE)] for place, label in enumerate(dict.fromkeys(labels))}


def _cell_name(cell: Mapping[str, Any]) -> str:
    return f"{cell['label']} · {cell['start']}" if cell["start"] else str(cell["label"])


def _axis_title(measure: Mapping[str, Any]) -> str:
    return "Seconds" if measure["unit"] == "s" else str(measure["unit"]).capitalize()


def _value_words(value: float, measure: Mapping[str, Any]) -> str:
    return time_in_words(value) if measure["unit"] == "s" else f"{value:,.4g} {measure['unit']}"


def _wrapped(text: str, width: int = 20) -> str:
    """The text in lines; three at the most where it is a label. plotly reads tags in texts, so they are escaped."""
    lines = textwrap.wrap(text, width, max_lines=3 if width < 30 else None, placeholder="…")
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def _shortened(text: str) -> str:
    return textwrap.shorten(text, 24, placeholder="…") if len(text) > 24 else text
