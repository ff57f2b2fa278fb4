"""What the timings page draws of a run group: its progress, the answer, the figures behind it, its runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pandas as pd
import streamlit as st

from core.analysis.article import ARTICLE
from core.analysis.comparison import MEASURES, TIME_TO_ACCURACY, fastest_label
from core.analysis.repeats import RunGroup
from core.analysis.statistics import MIN_REPEATS
from core.errors import AppError, StoreError
from core.storage.records import ACTIVE_STATES, GroupRecord
from core.words import counted, time_in_words
from ui.registry import services
from ui.words import STATE_WORDS, escaped, phase_in_words

START_TITLES = {"cold": "Cold", "warm": "Warm", "": "Start not known"}
START_COLOURS = {"cold": "blue", "warm": "orange", "": "gray"}
START_HELP = {
    "cold": "In a new process, with images packed and programs compiled anew.",
    "warm": "In a process in which such a run went before, with its caches.",
    "": "Nobody wrote down which of these runs were cold.",
}
_GROUP_KEY = "timings_group"


def choose(records: Sequence[GroupRecord]) -> str:
    """The id of the group to show; the address names it, and the widget writes the address."""
    groups = {
        **{record.group_id: f"{record.name} · {_day(record.created)}" for record in records},
        ARTICLE.group_id: ARTICLE.name,
    }
    wanted = st.query_params.get("group")
    if wanted and wanted not in groups:
        st.info(f"There is no group {escaped(wanted)} any more; this is the newest one.")
    st.session_state[_GROUP_KEY] = wanted if wanted in groups else next(iter(groups))
    st.query_params["group"] = st.session_state[_GROUP_KEY]
    return str(st.selectbox("Group", list(groups), format_func=groups.get, key=_GROUP_KEY, on_change=_write_address))


def _write_address() -> None:
    st.query_params["group"] = st.session_state[_GROUP_KEY]


def _day(created: float) -> str:
    at = datetime.fromtimestamp(created)
    return f"{at.day} {at:%b %Y, %H:%M}"


def plan_in_words(record: GroupRecord) -> str:
    """How a group was put together, as "5 repeats of each, cold and warm; the order was drawn from 0"."""
    if not record.plan:
        return f"{counted(len(record.members), 'run')} that were gathered."
    plan = record.plan
    start = {"both": "cold and warm"}.get(plan["start"], plan["start"])
    return f"{counted(plan['repeats'], 'repeat')} of each, {start}; order drawn from {plan['order_seed']}."


def num_ended(record: GroupRecord) -> int:
    return sum(member.state not in ACTIVE_STATES for member in record.members)


def show_progress(group_id: str, drawn: int) -> None:
    """How far a group is; reruns the page when more than `drawn` of its runs have ended."""
    store = services().store
    try:
        record = store.groups.get(group_id)
    except StoreError:
        st.rerun()
    if num_ended(record) != drawn:
        st.rerun()
    total = len(record.members)
    with st.container(border=True):
        st.progress(drawn / total, text=f"{drawn} of {total} runs done")
        running = next((member.run_id for member in record.members if member.state in ("running", "paused")), None)
        if running:
            run = store.get_run(running)
            st.markdown(f"Now **{escaped(run.name)}**: {escaped(phase_in_words(run.phase))}")
        else:
            st.markdown("The next run waits for the worker.")
        with st.container(horizontal=True, vertical_alignment="center"):
            if st.button(
                "Stop group",
                icon=":material/stop:",
                key=f"stop_{group_id}",
                help="The run in progress is stopped and saved, those that wait are not begun.",
            ):
                _stop(record)
            if running:
                st.page_link(
                    "../pages/live.py",
                    label="Watch it live",
                    icon=":material/monitoring:",
                    query_params={"run": running},
                )


def _stop(record: GroupRecord) -> None:
    # the last first, so that none begins when the one before it has stopped
    for member in reversed(record.members):
        with contextlib.suppress(StoreError):  # those that have ended
            services().store.request(member.run_id, "stop")
    st.toast("The group stops after the step it is in.")


def controls(group: RunGroup) -> tuple[str, float | None, str]:
    """What is compared, the accuracy to reach where that matters, and with which label."""
    known = known_measures(group)
    labels = list(dict.fromkeys(repeat.label for repeat in group.repeats))
    key = group.group_id
    with st.container(horizontal=True, gap="small"):
        measure = st.selectbox(
            "What is compared", known, format_func=lambda name: MEASURES[name].title, key=f"measure_{key}", width=240
        )
        accuracy = None
        if measure == TIME_TO_ACCURACY:
            accuracy = st.number_input(
                "Top-1 to reach (%)", 0.0, 100.0, default_accuracy(group), 1.0, "%g", key=f"accuracy_{key}", width=200
            )
        baseline = labels[0]
        if len(labels) > 1:
            place = labels.index(fastest_label(group))
            baseline = st.selectbox(
                "Compared with", labels, place, key=f"baseline_{key}", width=240, help="What ratios are taken to."
            )
    return measure, accuracy, baseline


def known_measures(group: RunGroup) -> list[str]:
    """The measures that say something about any finished repeat; the time of the whole run always."""
    finished = [repeat for repeat in group.repeats if repeat.state == "finished"]
    known = [name for name, measure in MEASURES.items() if any(measure.value(repeat, 0.0) for repeat in finished)]
    return list(dict.fromkeys(["total_s", *known]))


def default_accuracy(group: RunGroup) -> float:
    """The highest whole percent that every finished repeat reached at some time."""
    best = [
        max((epoch["val_top1"] for epoch in repeat.epochs if epoch["val_top1"] is not None), default=0.0)
        for repeat in group.repeats
        if repeat.state == "finished"
    ]
    return float(math.floor(min(best, default=0.0)))


def answer(result: dict[str, Any]) -> None:
    """What can be said, large and plain: a card a ratio, or a card a cell where there is but one label."""
    told = [(item["start"], *headline(item)) for item in result["ratios"]]
    told = told or [(cell["start"], *_parted(cell["words"])) for cell in result["cells"]]
    grid = st.grid("auto", min_column_width=320, gap="small")
    for start, large, small in told:
        with grid.cell(), st.container(border=True, gap="xsmall", height="stretch"):
            st.badge(START_TITLES[start], color=START_COLOURS[start], help=START_HELP[start])
            st.markdown(f"#### {escaped(large)}")
            st.markdown(escaped(small))


def headline(ratio: dict[str, Any]) -> tuple[str, str]:
    """The answer that a ratio of `compare` gives, and what stands behind it."""
    words = ratio["words"]
    if min(ratio["n_a"], ratio["n_b"]) < MIN_REPEATS:
        return "Nothing can be said", words
    if ratio["is_clear"]:
        return _parted(words)
    return "No clear difference", words.removeprefix("No clear difference: ")


def _parted(words: str) -> tuple[str, str]:
    """What is said, and the interval behind it."""
    said, bracket, interval = words.rpartition(" (95 % ")
    return (said, f"95 % {interval.replace(')', '', 1)}") if bracket else (interval, "")


def cells_table(result: dict[str, Any]) -> None:
    """The figures of each label, a table a start."""
    unit = result["measure"]["unit"]
    titles = {
        "label": "Label",
        "n": "Repeats",
        "failed": "Unfinished",
        "median": "Median",
        "mean": "Mean",
        "low": "95 % from",
        "high": "95 % to",
        "cv_percent": "Spread",
        "min": "Min",
        "max": "Max",
    }
    number = st.column_config.NumberColumn(format="%.4g")
    for start in dict.fromkeys(cell["start"] for cell in result["cells"]):
        cells = [cell for cell in result["cells"] if cell["start"] == start]
        st.caption(f"{START_TITLES[start]}, in {unit}")
        st.dataframe(
            pd.DataFrame(cells)[list(titles)].rename(columns=titles),
            hide_index=True,
            placeholder="–",
            key=f"cells_{result['group_id']}_{start}",
            column_config={
                **dict.fromkeys(("Median", "Mean", "Min", "Max"), number),
                "95 % from": st.column_config.NumberColumn(
                    format="%.4g", help="The mean lies between these two with 95 % certainty; known from 3 repeats on."
                ),
                "95 % to": number,
                "Spread": st.column_config.NumberColumn(
                    format="%.1f %%", help="The standard deviation of the repeats, in percent of their mean."
                ),
            },
        )


def members_table(group: RunGroup, record: GroupRecord | None) -> None:
    """The repeats, each with a link to its run; a group without a record has runs that nobody can open."""
    best = [max((epoch["val_top1"] or 0 for epoch in repeat.epochs), default=None) for repeat in group.repeats]
    devices = [(repeat.summary or {}).get("device", {}) for repeat in group.repeats]
    frame = pd.DataFrame(
        {
            "Run": [f"runs?run={repeat.run_id}" if record else None for repeat in group.repeats],
            "Label": [repeat.label for repeat in group.repeats],
            "Start": [START_TITLES[repeat.start] for repeat in group.repeats],
            "State": [STATE_WORDS.get(repeat.state, repeat.state) for repeat in group.repeats],
            "Time": ["–" if repeat.total_s is None else time_in_words(repeat.total_s) for repeat in group.repeats],
            "Best top-1": best,
            "Device": [device.get("name") or None for device in devices],
        }
    )
    st.dataframe(
        frame.dropna(axis="columns", how="all"),
        hide_index=True,
        placeholder="–",
        column_config={
            "Run": st.column_config.LinkColumn(display_text=r"run=(.*)"),
            "Best top-1": st.column_config.NumberColumn(format="%.1f %%"),
        },
    )
    warm_ups = [] if record is None else [member for member in record.members if member.purpose != "train"]
    if warm_ups:
        st.caption(f"{len(warm_ups)} warm-up run{'s' if len(warm_ups) > 1 else ''} went before; they don't count.")


def delete_button(record: GroupRecord) -> None:
    is_active = record.is_active
    help_words = "Stop it first." if is_active else "Its runs stay."
    if st.button("Delete group", icon=":material/delete:", disabled=is_active, help=help_words):
        _ask_delete(record.group_id, record.name)


@st.dialog("Delete this group?")
def _ask_delete(group_id: str, name: str) -> None:
    st.markdown(f"**{escaped(name)}** is forgotten as a group. Its runs stay, with all their figures.")
    with st.container(horizontal=True):
        if st.button("Delete the group", type="primary", on_click=_delete, args=(group_id,)):
            st.rerun()
        if st.button("Keep it"):
            st.rerun()


def _delete(group_id: str) -> None:
    try:
        services().store.groups.delete(group_id)
    except AppError as error:
        st.toast(escaped(str(error)), icon=":material/error:")
    else:
        st.query_params.pop("group", None)
