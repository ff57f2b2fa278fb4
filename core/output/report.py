"""A run or a run group as one HTML file that needs nothing else, no network either."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from core.analysis.comparison import compare, rows_of
from core.analysis.diagnosis import diagnose
from core.analysis.findings import Finding
from core.analysis.groups import load_group
from core.analysis.repeats import STARTS, RunGroup, usual_epoch_s
from core.analysis.spread import diagnose_group
from core.analysis.summary import EPOCH_TITLES, summarise, told_config
from core.charts import figures
from core.config import RunConfig
from core.output.group_charts import phases_by_repeat, ratios_figure, repeats_figure
from core.output.phases import PHASE_COLOURS, PHASE_HELP, PHASE_TITLES, setup_title
from core.output.timing_charts import machine_figure, phases_by_epoch, setup_figure, step_histogram
from core.series import RunSeries
from core.store import Store
from core.words import time_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

COMPARED = ("total_s", "epoch_s")
"""Measures of `compare` that a group's report tells."""
MOST_CLASSES = 50
"""With more classes their names are not told, but their number."""

_VERSIONS = ("python", "torch", "torchvision", "torch_xla", "torch_tpu", "libtpu", "timm", "cuda", "gpu_driver")
_EPOCH_TITLES = {**EPOCH_TITLES, "compile_count": "Programs compiled"}


@dataclass(frozen=True)
class Table:
    """Texts in rows; `sides` has a letter a column: l for names, r for figures, w for sentences.

    A table that is not open is folded; `colours` has one a row, for the mark before it.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    sides: str
    is_open: bool = True
    colours: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """What the template draws; it escapes every text in it."""

    kind: str
    title: str
    state: str
    facts: Mapping[str, str]
    note: str
    trouble: Sequence[str]
    findings: Sequence[tuple[str, Finding]]
    cards: Mapping[str, str]
    strip: Sequence[tuple[str, str, float]]
    results: Sequence[str]
    warnings: Sequence[str]
    charts: Sequence[Markup]
    tables: Sequence[Table]


def run_html(store: Store, run_id: str) -> str:
    """The report of a run in any state.

    Raises:
        StoreError: there is no such run.
    """
    summary, started = summarise(store, run_id), store.get_run(run_id).started
    samples = store.columns(run_id, "MachineSampled")
    series = RunSeries(store, run_id)
    series.update()
    curves = figures(series)
    charts = {
        "phases": phases_by_epoch(summary),
        "loss": curves["loss"],
        "top1": curves["top1"],
        "steps": step_histogram(summary),
        "setup": setup_figure(summary),
        "machine": machine_figure(samples, started or summary["created"]),
    }
    phases = summary["phases"]
    facts = {"Run": run_id, "Created": _when(summary["created"]), **_facts([summary])}
    return _rendered(
        Page(
            kind="Run",
            title=summary["name"],
            state=summary["state"],
            facts={**facts, "Tags": ", ".join(summary["tags"])},
            note=summary["note"],
            trouble=[text for text in (summary["reason"], summary["fix"], summary["error"]) if text],
            findings=_marked(diagnose(summary)),
            cards=_run_cards(summary),
            strip=[
                (PHASE_TITLES[name], PHASE_COLOURS[name], 100 * phases[name] / sum(phases.values()))
                for name in phases
                if phases[name]
            ],
            results=[],
            warnings=[],
            charts=_drawn(charts, wide=("phases", "machine")),
            tables=[*_timing_tables(summary), *_fact_tables(summary)],
        )
    )


def group_html(store: Store, group_id: str) -> str:
    """The report of a run group: how its labels compare, and why.

    Raises:
        StoreError: there is no such group.
    """
    group = load_group(store, group_id)
    results = [compare(group, measure) for measure in COMPARED]
    results = [result for result in results if any(cell["values"] for cell in result["cells"])]
    charts = {"phases": phases_by_repeat(group)}
    for result in results:
        name = result["measure"]["name"]
        charts |= {f"repeats-{name}": repeats_figure(result), f"ratios-{name}": ratios_figure(result)}
    summaries = [repeat.summary for repeat in group.repeats if repeat.summary]
    finished = sum(repeat.state == "finished" for repeat in group.repeats)
    created = {"Created": _when(min(summary["created"] for summary in summaries))} if summaries else {}
    return _rendered(
        Page(
            kind="Run group",
            title=group.name,
            state="",
            facts={"Run group": group_id, **created, **_facts(summaries)},
            note=group.note,
            trouble=[],
            findings=_marked(diagnose_group(group)),
            cards={"Repeats finished": f"{finished} of {len(group.repeats)}", **_group_cards(results)},
            strip=[],
            results=[item["words"] for result in results for item in result["ratios"]],
            warnings=list(dict.fromkeys(warning for result in results for warning in result["warnings"])),
            charts=_drawn(charts, wide=("phases",)),
            tables=[*map(_comparison, results), _members(group)],
        )
    )


def _rendered(page: Page) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report_template.html").render(page=page)


def _drawn(charts: Mapping[str, go.Figure], wide: Sequence[str]) -> list[Markup]:
    """The figures that show something as HTML; the first brings plotly along."""
    import plotly.io as pio

    drawn: list[Markup] = []
    for name, figure in charts.items():
        if not any(trace.x is not None and len(trace.x) for trace in figure.data):
            continue
        figure.update_layout(template="none", font_family="system-ui, sans-serif")
        inner = pio.to_html(
            figure,
            full_html=False,
            include_plotlyjs=not drawn,
            div_id=f"chart-{name}",
            default_height=f"{figure.layout.height or 340}px",
            config={"responsive": True, "displayModeBar": False},
        )
        # plotly escapes what could end its script, and texts in figures are escaped where they are made
        place = "chart wide" if name in wide else "chart"
        drawn.append(Markup('<figure class="{}">{}</figure>').format(place, Markup(inner)))
    return drawn


def _facts(summaries: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What ran on what; runs that differ are told with all that they have."""

    def told(values: Iterable[str]) -> str:
        return " / ".join(dict.fromkeys(filter(None, values)))

    environments = [summary["environment"] for summary in summaries]
    return {
        "Model": told(summary["config"]["model"] for summary in summaries),
        "Data": told(summary["config"]["data"] for summary in summaries),
        "Device": told(
            ", ".join(filter(None, (summary["device"]["kind"], summary["device"]["name"]))) for summary in summaries
        ),
        "Versions": told(
            ", ".join(f"{name} {environment[name]}" for name in _VERSIONS if environment.get(name))
            for environment in environments
        ),
    }


def _marked(findings: Iterable[Finding]) -> list[tuple[str, Finding]]:
    """Each with the colour of its phase, which is empty where it is about none."""
    return [(PHASE_COLOURS.get(f"{finding.phase}_s", ""), finding) for finding in findings]


# -- a run --------------------------------------------------------------------------------------------------------


def _run_cards(summary: dict[str, Any]) -> dict[str, str]:
    epochs, best, times, compiled = (summary[name] for name in ("epochs", "best", "step_times", "compile"))
    rates = [epoch["images_per_s"] for epoch in epochs if epoch["images_per_s"]]
    cards = {
        "Whole run": _seconds(summary["total_s"]),
        "Epochs": f"{len(epochs)} of {summary['config']['epochs']}",
        "Epoch, median": _epoch_time(epochs),
        "Step, median": _seconds(times["median_s"] if times else None),
        "Throughput": f"{median(rates):,.0f} images/s" if rates else "–",
        "Best top-1": f"{best['val_top1']:.1f} %" if best else "–",
        "Start": {True: "warm", False: "cold", None: "–"}[summary["is_warm"]],
    }
    if summary["num_train"] is not None:
        took = f" in {_seconds(compiled['seconds'])}" if compiled["count"] else ""
        cards["Programs compiled"] = f"{compiled['count']:,}{took}"
        cards["Images"] = f"{summary['num_train']:,} + {summary['num_val']:,}"
        cards["Parameters"] = f"{summary['num_params']:,}"
    return {name: text for name, text in cards.items() if text != "–"}


def _timing_tables(summary: dict[str, Any]) -> list[Table]:
    epochs, phases, setup = summary["epochs"], summary["phases"], summary["setup_parts"]
    total = sum(phases.values())
    titles = {name: title for name, title in _EPOCH_TITLES.items() if any(epoch[name] is not None for epoch in epochs)}
    tables = [
        Table(
            "Where the time went",
            ("Phase", "Time", "Share", "What is in it"),
            [(PHASE_TITLES[name], *_time_and_share(name, phases), PHASE_HELP[name]) for name in phases if total],
            "lrrw",
            colours=list(PHASE_COLOURS.values()),
        ),
        Table(
            "Epochs",
            list(titles.values()),
            [[_figure(epoch[name]) for name in titles] for epoch in epochs],
            "r" * len(titles),
        ),
        Table(
            "Set-up",
            ("Part", "Time", "Share"),
            [(setup_title(name), *_time_and_share(name, setup)) for name in setup],
            "lrr",
        ),
    ]
    return [table for table in tables if table.rows]


def _fact_tables(summary: dict[str, Any]) -> list[Table]:
    fields, classes = RunConfig.model_fields, summary["classes"]
    config = [
        (fields[name].title or name, "automatic" if value is None else _text(value))
        for name, value in told_config(summary).items()
    ]
    environment = [(name.replace("_", " "), _text(value)) for name, value in summary["environment"].items()]
    data = [
        ("Images to train on", _figure(summary["num_train"])),
        ("Images to validate on", _figure(summary["num_val"])),
        ("Image size (px)", _figure(summary["image_size"])),
        ("Steps in an epoch", _figure(summary["steps_per_epoch"])),
        ("Parameters", _figure(summary["num_params"])),
        ("Parameters trained", _figure(summary["num_trainable"])),
        ("Classes", ", ".join(classes) if len(classes) <= MOST_CLASSES else f"{len(classes):,}"),
    ]
    tables = {"Data and model": data if classes else [], "Config": config, "Environment": environment}
    return [Table(title, ("Name", "Value"), rows, "lw", is_open=False) for title, rows in tables.items() if rows]


# -- a group ------------------------------------------------------------------------------------------------------


def _group_cards(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The mean of each label and start, of the first measure."""
    return {
        f"{result['measure']['title']}, mean: " + ", ".join(filter(None, (cell["label"], cell["start"]))): _seconds(
            cell["mean"]
        )
        for result in results[:1]
        for cell in result["cells"]
    }


def _comparison(result: dict[str, Any]) -> Table:
    head, *rows = rows_of(result)
    return Table(f"{result['measure']['title']}, compared", head, rows, "llrrrrr")


def _members(group: RunGroup) -> Table:
    rows = [
        (
            repeat.label,
            STARTS[repeat.start],
            repeat.run_id,
            repeat.state,
            _seconds(repeat.total_s),
            _epoch_time(repeat.epochs),
            _figure(max((epoch["val_top1"] for epoch in repeat.epochs if epoch["val_top1"] is not None), default=None)),
        )
        for repeat in group.repeats
    ]
    head = ("Label", "Start", "Run", "State", "Whole run", "Epoch, median", "Best top-1 (%)")
    return Table("Repeats", head, rows, "llllrrr")


# -- words --------------------------------------------------------------------------------------------------------


def _when(at: float) -> str:
    local = datetime.fromtimestamp(at).astimezone()
    return f"{local.day} {local:%B %Y, %H:%M %Z}"


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else time_in_words(seconds)


def _epoch_time(epochs: Sequence[Mapping[str, Any]]) -> str:
    """The median; of several epochs without the first, which compiles and packs."""
    return _seconds(usual_epoch_s(epochs))


def _time_and_share(name: str, phases: Mapping[str, float]) -> tuple[str, str]:
    total = sum(phases.values())
    return _seconds(phases[name]), f"{100 * phases[name] / total:.1f} %" if total else "–"


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _text(value: Any) -> str:
    """A value of a config or an environment, nested ones too."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {_text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
