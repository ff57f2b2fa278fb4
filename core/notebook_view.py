"""A run as a notebook shows it: a line of state, and all charts in one figure that is drawn anew as they grow."""

from __future__ import annotations

import html
import time
from typing import TYPE_CHECKING, Any

import psutil

from core.charts import chart_specs, figures
from core.errors import AppError
from core.events import PHASE_WORDS
from core.series import RunSeries
from core.storage.records import RunRecord
from core.store import Store
from core.words import time_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLUMNS, ROW_PX = 2, 270
GREY, GRID = "#7f8a93", "rgba(127,138,147,0.25)"
"""Read on a light and on a dark page; a notebook doesn't tell which it is."""


class RunView:
    """A run under a notebook's cell.

    Raises:
        AppError: IPython is missing, or there is no such run.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._display: Any = notebook_display()
        if self._display is None:
            fix = "Run it in a cell, or follow the run on the dashboard."
            raise AppError("This is no notebook, so charts can't be shown.", fix=fix)
        self._store, self._run_id = store, run_id
        self._series = RunSeries(store, run_id)
        self._series.update()
        self._line: Any = None
        self._figure: Any = None
        self._drawn = ""

    def draw(self) -> bool:
        """Bring line and figure up to date; False once the run has ended and all of it is drawn."""
        # the record before the series: what comes after the end is not missed
        record = self._store.get_run(self._run_id)
        is_dead = record.is_active and record.pid is not None and has_ended(record.pid)
        self._series.update()
        died = f"Its process has died; python -m core resume {self._run_id} takes it up. " if is_dead else ""
        self._tell(f"{died}{line_of(record, self._series)}")
        cursor = str(self._series.since(self._drawn)["cursor"])
        if cursor != self._drawn and self._series.steps["step"]:
            self._drawn = cursor
            bundle = mime_bundle(together(self._series))
            if self._figure is None:
                self._figure = self._display(bundle, raw=True, display_id=True)
            else:
                self._figure.update(bundle, raw=True)
        return record.is_active and not is_dead

    def leave(self) -> None:
        """Say that nobody looks any more."""
        record = self._store.get_run(self._run_id)
        self._tell(f"No longer watched, and not touched. {line_of(record, self._series)}")

    def _tell(self, line: str) -> None:
        bundle = {"text/plain": line, "text/html": f"<p>{html.escape(line)}</p>"}
        if self._line is None:
            self._line = self._display(bundle, raw=True, display_id=True)
        else:
            self._line.update(bundle, raw=True)


def notebook_display() -> Any:
    """IPython's `display` where this is a notebook or IPython's own shell; None elsewhere."""
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:
        return None
    return display if get_ipython() is not None else None


def has_ended(pid: int) -> bool:
    """Whether there is no such process, or one that only waits to be buried."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def line_of(record: RunRecord, series: RunSeries) -> str:
    """Where a run stands, such as "Training, epoch 2 of 3, step 41 of 96 · training loss 0.412 · 12 s, 8.1 s left"."""
    phase = record.phase
    place = [
        f"{name} {phase[name]:,} of {phase[f'{name}s']:,}"
        for name in ("epoch", "step")
        if phase.get(name) and phase.get(f"{name}s")
    ]
    if record.state == "running":
        state = PHASE_WORDS.get(str(phase.get("phase") or ""), "Running")
    else:
        state = record.state.capitalize()
        place = place if record.is_active else []
    best, loss = series.best_epoch(), series.last("loss")
    took_s = (record.ended or time.time()) - (record.started or record.created)
    left_s = phase.get("eta_s") if record.state == "running" else None
    left = f", {time_in_words(left_s)} left" if left_s else ""
    parts = [
        f"{record.name} ({record.run_id})",
        ", ".join([state, *place]),
        f"training loss {loss:.3f}" if loss is not None else "",
        f"best validation top-1 {best['val_top1']:.1f} %, epoch {best['epoch']}" if best else "",
        f"{time_in_words(max(0.0, took_s))}{left}",
    ]
    return " · ".join(filter(None, parts))


def together(series: RunSeries) -> go.Figure:
    """The dashboard's charts of a run, two in a row, as one figure."""
    from plotly.subplots import make_subplots

    specs, drawn = chart_specs(series.has_top5), figures(series)
    rows = -(-len(specs) // COLUMNS)
    figure = make_subplots(rows, COLUMNS, subplot_titles=[spec.title for spec in specs], vertical_spacing=0.36 / rows)
    named: set[str] = set()
    for place, spec in enumerate(specs):
        row, column = place // COLUMNS + 1, place % COLUMNS + 1
        one = drawn[spec.id]
        for trace in one.data:
            # one curve of a kind stands for all in the legend; a chart of one curve is named by its title
            is_told = trace.name in ("Training", "Validation") and trace.name not in named
            named.add(trace.name)
            figure.add_trace(trace.update(showlegend=is_told, legendgroup=trace.name), row, column)
        for shape in one.layout.shapes:
            figure.add_vline(shape.x0, line=shape.line, row=row, col=column)
        for words in one.layout.annotations:
            figure.add_annotation({**words.to_plotly_json(), "yref": "y domain"}, row=row, col=column)
        for axis, update in ((one.layout.xaxis, figure.update_xaxes), (one.layout.yaxis, figure.update_yaxes)):
            update(axis.to_plotly_json(), row=row, col=column)
    figure.update_xaxes(gridcolor=GRID, linecolor=GRID)
    figure.update_yaxes(gridcolor=GRID, linecolor=GRID)
    return figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": GREY, "size": 11},
        height=ROW_PX * rows + 60,
        margin={"l": 56, "r": 16, "t": 60, "b": 44},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.03, "yanchor": "bottom"},
        uirevision=series.run_id,
    )


def mime_bundle(figure: go.Figure) -> dict[str, Any]:
    """The figure in the forms that plotly gives to the notebook at hand, with plotly.js from its usual address."""
    import plotly.io as pio

    # "notebook" would put 4.5 MB of plotly.js into the saved notebook
    names = ["notebook_connected" if name == "notebook" else name for name in str(pio.renderers.default).split("+")]
    bundle: dict[str, Any] = {}
    for name in filter(None, names):
        renderer = pio.renderers[name]
        if hasattr(renderer, "to_mimebundle"):
            bundle |= renderer.to_mimebundle(figure.to_dict())
    return bundle or pio.renderers["plotly_mimetype"].to_mimebundle(figure.to_dict())
