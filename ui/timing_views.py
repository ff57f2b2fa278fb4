"""Where time went, as the pages show it: what a run and a group have in common, and the times of one run."""

from __future__ import annotations

import html
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd
import streamlit as st

from core.analysis.diagnosis import diagnose
from core.analysis.findings import Finding
from core.output import timing_charts
from core.output.exports import TABLES, export
from core.output.phases import PHASE_COLOURS, PHASE_HELP, PHASE_TITLES
from core.words import time_in_words
from ui.registry import services
from ui.words import escaped

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_FINDINGS = 4
MOST_WARNINGS = 6
DOWNLOADS = {
    "csv": ("CSV", "csv", "text/csv"),
    "parquet": ("Parquet", "parquet", "application/vnd.apache.parquet"),
    "json": ("JSON", "json", "application/json"),
    "html": ("HTML report", "html", "text/html"),
    "markdown": ("Markdown", "md", "text/markdown"),
}
"""Format to its title, the ending of its file, and its type."""
PROGRAM_TITLES = {
    "step": "Step",
    "phase": "In",
    "count": "Programs",
    "seconds": "Seconds",
    "cause": "Cause",
}
_ANCHORS = {"epochs": "phases"}
"""Where the charts stand that have no anchor of their own name."""
LEFT_OUT_WHY = {
    "first steps": "memory and caches settle in them",
    "compiling": "programs were compiled in them or just before",
    "packing images": "images were still being packed beside them",
}


def section(anchor: str, figure: go.Figure) -> None:
    """A chart under its own title, as a heading that links can jump to."""
    st.subheader(escaped(html.unescape(figure.layout.title.text)), anchor=anchor)
    figure.update_layout(title={"text": ""}, margin={"t": 28})
    st.plotly_chart(figure, key=f"chart_{anchor}", config={"displayModeBar": False})


def findings(found: Sequence[Finding], anchor_of: Callable[[Finding], str], shown: Container[str]) -> None:
    """What is to be known, a card each; only the first few are unfolded.

    Args:
        anchor_of: where a finding can be seen.
        shown: the anchors that are on the page.
    """
    for finding in found[:MOST_FINDINGS]:
        _card(finding, anchor_of(finding), shown)
    rest = found[MOST_FINDINGS:]
    if rest:
        with st.expander(f"{len(rest)} more"):
            for finding in rest:
                _card(finding, anchor_of(finding), shown)


def _card(finding: Finding, anchor: str, shown: Container[str]) -> None:
    with st.container(border=True, gap="xsmall"):
        icon = ":orange[:material/timer:]" if finding.seconds else ":gray[:material/info:]"
        st.markdown(f"{icon} **{escaped(finding.sentence)}**")
        link = f"[See it below](#{anchor})" if anchor in shown else ""
        if words := " ".join(filter(None, [escaped(finding.advice), link])):
            st.markdown(words)


def warnings(sentences: Sequence[str]) -> None:
    """What limits a comparison, in one box; many are folded."""
    if sentences:
        st.warning(_bullets(sentences[:MOST_WARNINGS]), icon=":material/warning:")
    if rest := sentences[MOST_WARNINGS:]:
        with st.expander(f"{len(rest)} more"):
            st.markdown(_bullets(rest))


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {escaped(sentence)}" for sentence in sentences)


def phase_help() -> None:
    """What is in each phase, behind a button."""
    rows = "".join(
        f'<p style="margin:0 0 .6rem"><span style="color:{PHASE_COLOURS[name]}">■</span> '
        f"<b>{title}</b><br>{PHASE_HELP[name]}</p>"
        for name, title in PHASE_TITLES.items()
    )
    with st.popover("What the phases mean", icon=":material/help:", type="tertiary"):
        st.html(rows)


def downloads(name: str, *, has_tables: bool = True) -> None:
    """Buttons for a run or a group in each format.

    Args:
        name: the id of a run or a group.
        has_tables: whether it has epochs, steps and phases, which csv and parquet hold.
    """
    store, table = services().store, ""
    if has_tables:
        table = st.segmented_control(
            "Table", TABLES, format_func=str.capitalize, default="epochs", required=True, key=f"table_{name}",
            help="What CSV and Parquet hold; the other formats hold everything.",
        )  # fmt: skip
    with st.container(horizontal=True, gap="small"):
        for to, (title, ending, mime) in DOWNLOADS.items():
            is_table = to in ("csv", "parquet")
            if is_table and not has_tables:
                continue
            st.download_button(
                title,
                partial(export, store, name, to, table if is_table else ""),
                f"{name}-{table}.{ending}" if is_table else f"{name}.{ending}",
                mime,
                icon=":material/download:",
                key=f"download_{to}_{name}",
                on_click="ignore",
            )


def run_times(summary: dict[str, Any]) -> None:
    """Why a run took the time it took, and every chart of it."""
    store, run_id = services().store, summary["run_id"]
    samples = store.columns(run_id, "MachineSampled")
    figures = {
        "phases": timing_charts.phases_by_epoch(summary),
        "setup": timing_charts.setup_figure(summary),
        "steps": timing_charts.step_histogram(summary),
        "machine": timing_charts.machine_figure(samples, store.get_run(run_id).started or summary["created"]),
    }
    drawn = {anchor: figure for anchor, figure in figures.items() if figure.data}
    if not drawn:
        st.caption("No times are known yet.")
        return
    findings(diagnose(summary), lambda finding: _ANCHORS.get(finding.chart, finding.chart), [*drawn, "programs"])
    _forecast(summary)
    for anchor, figure in drawn.items():
        section(anchor, figure)
        if anchor == "phases":
            _phase_figures(summary)
        elif anchor == "steps":
            st.caption(_steps_in_words(summary["step_times"]))
    _programs(summary)


def _forecast(summary: dict[str, Any]) -> None:
    """What was said beforehand, beside what came out."""
    told, took = summary["forecast"], summary["total_s"]
    if not told:
        return
    between = ""
    if told["total_low_s"] is not None:
        between = f"{time_in_words(told['total_low_s'])} to {time_in_words(told['total_high_s'])}"
    with st.container(horizontal=True, gap="small"):
        words = f"From {told['basis']}." + (f" With 95 % certainty {between}." if between else "")
        st.metric("Forecast", time_in_words(told["total_s"]), border=True, width="content", help=words)
        if summary["state"] == "finished" and took:
            off = 100 * (took / told["total_s"] - 1)
            delta = f"{off:+.0f} % to the forecast"
            st.metric("It took", time_in_words(took), delta, "off", border=True, width="content", delta_arrow="off")


def _phase_figures(summary: dict[str, Any]) -> None:
    total_s = sum(summary["phases"].values())
    if total_s:
        rows = [(PHASE_TITLES[name], seconds, 100 * seconds / total_s) for name, seconds in summary["phases"].items()]
        frame = pd.DataFrame(rows, columns=["Phase", "Seconds", "Percent"])
        st.dataframe(
            frame,
            hide_index=True,
            column_config={
                "Seconds": st.column_config.NumberColumn(format="%.2f"),
                "Percent": st.column_config.ProgressColumn(format="%.1f %%", min_value=0, max_value=100),
            },
        )
    phase_help()


def _steps_in_words(times: dict[str, Any]) -> str:
    """Which steps were counted, how long they took, and which were left out and why."""
    longer = times["histogram"].get("longer", 0)
    sentences = [
        f"{times['steps']:,} settled steps: half took {time_in_words(times['median_s'])} or less, 95 % took "
        f"{time_in_words(times['p95_s'])} or less, the longest {time_in_words(times['max_s'])}"
        + (f" ({longer:,} longer than the chart is wide)." if longer else ".")
    ]
    left_out = [
        f"{reason} {num:,} ({LEFT_OUT_WHY[reason]})" if reason in LEFT_OUT_WHY else f"{reason} {num:,}"
        for reason, num in times["left_out"].items()
        if num
    ]
    if left_out:
        sentences.append(f"Left out: {', '.join(left_out)}.")
    return " ".join(sentences)


def _programs(summary: dict[str, Any]) -> None:
    """What was compiled, when and why, and whether the run began warm."""
    st.subheader("Programs", anchor="programs")
    if summary["is_warm"] is not None:
        words = "Warm: nothing was compiled and no image packed." if summary["is_warm"] else (
            "Cold: programs were compiled or images packed, which the next run of this kind need not do again "
            "in the same process."
        )  # fmt: skip
        st.caption(words)
    if summary["host_fallbacks"]:
        st.caption(f"Left to the host in every step: {escaped(', '.join(summary['host_fallbacks']))}.")
    if summary["programs"]:
        frame = pd.DataFrame(summary["programs"])[list(PROGRAM_TITLES)].rename(columns=PROGRAM_TITLES)
        frame["Cause"] = frame["Cause"].replace("", "the first of its kind")
        st.dataframe(frame.round(2), hide_index=True)
    else:
        st.caption("No program was compiled.")
