"""Timings: the repeats of a run group compared, with what made them fast or slow."""

from __future__ import annotations

from typing import Any

import streamlit as st

from core.analysis.article import ARTICLE
from core.analysis.comparison import compare
from core.analysis.groups import loaded
from core.analysis.repeats import RunGroup
from core.analysis.spread import diagnose_group
from core.output import group_charts
from core.storage.records import GroupRecord
from ui import group_views, timing_views
from ui.registry import services
from ui.words import escaped


def draw_group(group: RunGroup, record: GroupRecord | None) -> None:
    result = compare_as_asked(group)
    group_views.answer(result)
    figures = {
        "repeats": group_charts.repeats_figure(result),
        "ratios": group_charts.ratios_figure(result),
        "phases": group_charts.phases_by_repeat(group),
    }
    drawn = {anchor: figure for anchor, figure in figures.items() if figure.data}
    if found := diagnose_group(group):
        st.subheader("Why", anchor=False)
        timing_views.findings(found, lambda finding: "phases" if finding.phase else "repeats", drawn)
    if result["warnings"]:
        st.subheader("What limits the answer", anchor=False)
        timing_views.warnings(result["warnings"])
    for anchor, figure in drawn.items():
        timing_views.section(anchor, figure)
        if anchor == "repeats":
            group_views.cells_table(result)
        if anchor == "phases" and any(repeat.phases for repeat in group.repeats):
            timing_views.phase_help()
    st.subheader("Runs", anchor=False)
    group_views.members_table(group, record)
    st.subheader("Export", anchor=False)
    timing_views.downloads(group.group_id, has_tables=record is not None)


def compare_as_asked(group: RunGroup) -> dict[str, Any]:
    measure, accuracy, baseline = group_views.controls(group)
    return compare(group, measure, accuracy=accuracy, baseline=baseline)


st.title("Timings", anchor=False)
store = services().store
records = store.groups.list_all()
group_id = group_views.choose(records)
record = next((record for record in records if record.group_id == group_id), None)
group = ARTICLE if record is None else loaded(store, record)
for words in filter(None, [group.note, group_views.plan_in_words(record) if record else ""]):
    st.caption(escaped(words))
if not records:
    st.info(
        "Nothing has been compared here yet; these are the times that an article gave. Compare several configs on "
        "Train, or select past runs on Runs.",
        icon=":material/timer:",
    )
if record is not None and record.is_active:
    st.fragment(group_views.show_progress, run_every=1.0)(group_id, group_views.num_ended(record))
if group.repeats:
    draw_group(group, record)
else:
    st.info("None of its runs is there any more.")
if record is not None:
    group_views.delete_button(record)
