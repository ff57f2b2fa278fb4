"""A run or a run group as a file for other programs and other people."""

from __future__ import annotations

import json
from typing import Any

from core.analysis.article import ARTICLE
from core.analysis.comparison import compare, markdown
from core.analysis.groups import load_group
from core.analysis.summary import export_csv, export_json, summarise
from core.analysis.tables import as_csv, as_parquet, run_tables
from core.errors import ConfigError
from core.output.report import group_html, run_html
from core.store import Store
from core.words import escaped

FORMATS = ("csv", "json", "parquet", "html", "markdown")
TABLES = ("epochs", "steps", "phases")


def export(store: Store, name: str, to: str, table: str = "") -> str | bytes:
    """Everything about a run or a group in one of `FORMATS`; Parquet is bytes.

    Args:
        name: a run's or a group's id.
        table: for csv and parquet, one of `TABLES`; a run's csv without one holds steps and epochs together.

    Raises:
        StoreError: there is no such run or group.
        ConfigError: a reference group has no runs, so no table.
    """
    is_group = name == ARTICLE.group_id or name.startswith("group-")
    if to == "html":
        return group_html(store, name) if is_group else run_html(store, name)
    if to == "markdown":
        return markdown(compare(load_group(store, name))) + "\n" if is_group else run_markdown(summarise(store, name))
    if to == "json":
        if is_group:
            return json.dumps(compare(load_group(store, name)), indent=2, allow_nan=False) + "\n"
        return export_json(store, name)
    if to == "csv" and not table and not is_group:
        return export_csv(store, name)
    frame = run_tables(store, _run_ids(store, name) if is_group else [name])[table or "epochs"]
    return as_parquet(frame) if to == "parquet" else as_csv(frame)


def _run_ids(store: Store, group_id: str) -> list[str]:
    if group_id == ARTICLE.group_id:
        raise ConfigError("The article tells no steps and epochs of its runs.", fix="Export it as json or markdown.")
    return [member.run_id for member in store.groups.get(group_id).members]


def run_markdown(summary: dict[str, Any]) -> str:
    """A run's epochs and phases as Markdown tables, for a README."""
    # a sign that ends what is shown as it is
    model = " ".join(summary["config"]["model"].replace("`", "'").split())
    phases = {name.removesuffix("_s").replace("_", " "): seconds for name, seconds in summary["phases"].items()}
    lines = [
        f"`{model}` on {escaped(summary['device']['name'] or summary['device']['kind'])}",
        "",
        "| epoch | training loss | validation loss | top-1 (%) | seconds | images/s |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for epoch in summary["epochs"]:
        figures = [
            _number(epoch[key], digits)
            for key, digits in (
                ("train_loss", 4),
                ("val_loss", 4),
                ("val_top1", 2),
                ("seconds", 2),
                ("images_per_s", 1),
            )
        ]
        lines.append(f"| {epoch['epoch']} | {' | '.join(figures)} |")
    lines += ["", f"| {' | '.join([*phases, 'whole run'])} |", f"|{'---:|' * (len(phases) + 1)}"]
    seconds = [*phases.values(), summary["total_s"]]
    lines.append(f"| {' | '.join('–' if value is None else f'{value:.2f} s' for value in seconds)} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
