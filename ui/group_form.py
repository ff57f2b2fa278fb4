"""Making a run group: of configs that are to run, and of runs that are past."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

import pandas as pd
import streamlit as st

from core.analysis.comparison import compare
from core.analysis.repeats import group_of, label_of, start_of
from core.analysis.statistics import ADVISED_REPEATS, MIN_REPEATS
from core.config import RunConfig
from core.devices import list_devices, resolve_kind
from core.devices.xla import wants_tpu
from core.errors import AppError
from core.groups import plan_group, varied
from core.storage.records import PlannedRun
from core.words import counted, time_in_words
from ui import forms, origin
from ui.forecast_card import forecast_of, newest_state
from ui.registry import services
from ui.timing_views import warnings
from ui.words import escaped

STARTS = {"cold": "Cold", "warm": "Warm", "both": "Both"}
START_HELP = (
    "Cold: each run in a new process, with images packed and programs compiled anew. Warm: all runs in this process, "
    "after a short warm-up run of each config. Both: each of them, compared apart."
)
NOT_VARIED = ("device", "process", "caches", "log_every")
"""Device has a choice of its own, cold and warm stand for process and caches, and logging is no part of the job."""
UNKNOWN = "Not known"


@dataclass(frozen=True)
class Comparison:
    """A group that could be started; where it can't, `problem` says why in one line."""

    name: str = ""
    runs: list[PlannedRun] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def comparison_of(
    base: RunConfig, choices: Mapping[str, Sequence[Any]], *, repeats: int, start: Any, seed: int, name: str = ""
) -> Comparison:
    """The runs that compare the values of an option, checked as far as it shows without starting a device."""
    for option, values in choices.items():
        if not values:
            return Comparison(problem=f"No value is chosen for {RunConfig.model_fields[option].title}.")
    try:
        configs = varied(base, choices)
        runs = plan_group(configs, repeats=repeats, start=start, seed=seed)
    except AppError as error:
        return Comparison(problem=str(error))
    for label, config in configs.items():
        if (
            problem := forms.device_problem(config)
            or forms.data_problem(config.data)
            or origin.weights_problem(config, services().store)
        ):
            return Comparison(problem=f"{label}: {problem}")
    if start != "warm" and any(holds_tpu(config) for config in configs.values()):
        return Comparison(
            problem="The TPU belongs to this dashboard's process, so runs in new processes can't open it: compare warm "
            "runs here, and cold ones with python -m core compare while the dashboard is closed."
        )
    plan = {"repeats": repeats, "start": start, "order_seed": seed, "varied": {k: list(v) for k, v in choices.items()}}
    return Comparison(name.strip() or " against ".join(configs), runs, plan)


def holds_tpu(config: RunConfig) -> bool:
    """Whether the run would be on a TPU, which the dashboard's worker opens at its start."""
    return resolve_kind(config.device) == "xla" and wants_tpu()


def compare_form(base: RunConfig | None, data_problem: str) -> None:
    """The folded part of the Train page that compares variants of its form.

    Args:
        base: the form as it stands, None where it can't be trained.
        data_problem: why there are no data; "" where there are.
    """
    with st.expander("Compare several of these", icon=":material/timer:", key="compare"):
        if base is None:
            st.caption("Mend the options first.")
            return
        choices = _choices(base)
        left, right = st.columns(2)
        repeats = left.number_input(
            "Repeats", 1, 100, 5, key="compare_repeats", persist_state="session", help="Of each, for each start."
        )
        seed = right.number_input(
            "Order seed", 0, 10_000, 0, key="compare_seed", persist_state="session",
            help="In each round all run once, in an order drawn from this number, so that heat and other load meet all "
            "alike.",
        )  # fmt: skip
        start = st.segmented_control(
            "Start", list(STARTS), format_func=STARTS.get, default="warm", required=True, key="compare_start",
            persist_state="session", help=START_HELP,
        )  # fmt: skip
        name = st.text_input("Name", placeholder="What is compared", key="compare_name", max_chars=120)
        if repeats < ADVISED_REPEATS:
            words = f"{MIN_REPEATS} repeats are needed to say anything, {ADVISED_REPEATS} are advised."
            (st.warning if repeats < MIN_REPEATS else st.caption)(words)
        comparison = comparison_of(base, choices, repeats=repeats, start=start, seed=seed, name=name)
        problem = data_problem or comparison.problem
        if not problem:
            _outlook(comparison)
        groups = services().store.groups.list_all()
        st.button(
            "Start the comparison", type="primary", icon=":material/play_arrow:", key="start_comparison",
            width="stretch", disabled=bool(problem), on_click=start_group,
            args=(comparison, groups[0].group_id if groups else ""),
        )  # fmt: skip
        if problem:
            st.markdown(f":red[:material/error:] {escaped(problem)}")


def _choices(base: RunConfig) -> dict[str, list[Any]]:
    """What differs: the option and its values, as far as they were given."""
    kinds = {info.kind: info.name for info in list_devices() if info.available}
    what = st.segmented_control(
        "What differs", ["device", "option"], format_func={"device": "Device", "option": "Another option"}.get,
        default="device", required=True, key="compare_what", persist_state="session",
    )  # fmt: skip
    if what == "device":
        chosen = st.pills(
            "Devices", list(kinds), selection_mode="multi", default=list(kinds), key="compare_devices",
            format_func=lambda kind: f"{kind.upper()} · {kinds[kind]}", persist_state="session",
        )  # fmt: skip
        return {"device": [kind for kind in kinds if kind in chosen]}
    names = [name for name in RunConfig.model_fields if name not in NOT_VARIED]
    name = st.selectbox(
        "Option", names, names.index("batch_size"), format_func=lambda name: str(RunConfig.model_fields[name].title),
        key="compare_option", persist_state="session",
    )  # fmt: skip
    info, key = RunConfig.model_fields[name], f"compare_values_{name}"
    if get_origin(info.annotation) is Literal:
        allowed = get_args(info.annotation)
        chosen = st.pills(
            "Values", allowed, selection_mode="multi", default=getattr(base, name), help=info.description, key=key,
            format_func=lambda choice: forms.CHOICE_WORDS.get(choice, choice), persist_state="session",
        )  # fmt: skip
        return {name: [choice for choice in allowed if choice in chosen]}
    text = st.text_input(
        "Values, separated by commas", placeholder=f"{getattr(base, name)}, …", help=info.description, key=key,
        persist_state="session",
    )  # fmt: skip
    return {name: list(dict.fromkeys(value.strip() for value in text.split(",") if value.strip()))}


def _outlook(comparison: Comparison) -> None:
    """How many runs, in which order, and for how long."""
    total_s, num_known = forecast_sum(comparison.runs)
    words = f"**{counted(len(comparison.runs), 'run')}**"
    if num_known == len(comparison.runs):
        words += f", about {time_in_words(total_s)} in all"
    elif num_known:
        words += f"; {num_known} of them take about {time_in_words(total_s)}, of the others nothing is known yet"
    st.markdown(f"{words}.")
    frame = pd.DataFrame(
        [(run.label, run.start, str(run.repeat) if run.purpose == "train" else "warm-up") for run in comparison.runs],
        columns=["Label", "Start", "Repeat"],
        index=range(1, len(comparison.runs) + 1),
    )
    with st.popover("In this order", type="tertiary", icon=":material/format_list_numbered:"):
        st.dataframe(frame, width=320)


def forecast_sum(runs: Sequence[PlannedRun]) -> tuple[float, int]:
    """The seconds of all runs that a forecast is known for, and how many these are."""
    state = newest_state(services().store.list_runs(with_probes=True))
    told = [forecast_of(run.config, state) for run in runs]
    known = [forecast.total_s for forecast in told if forecast is not None]
    return sum(known), len(known)


def start_group(comparison: Comparison, newest_group: str) -> None:
    """Queue the runs of a comparison; a second press on the same page makes no second group.

    Args:
        newest_group: the newest group's id when the page was drawn.
    """
    started: dict[str, str] = st.session_state.setdefault("started_groups", {})
    token = f"{newest_group}|{comparison}"
    try:
        if token not in started:
            started[token] = services().store.groups.create(comparison.name, comparison.runs, plan=comparison.plan)
            services().worker.wake()
        st.session_state["made_group"] = started[token]
    except AppError as error:
        st.toast(escaped(str(error)), icon=":material/error:")


def past_runs_form(summaries: Sequence[dict[str, Any]]) -> None:
    """Make a group of runs that were selected, with what makes them hard to compare."""
    starts = {"cold": "Cold", "warm": "Warm", "": UNKNOWN}
    ids = [summary["run_id"] for summary in summaries]
    with st.container(border=True):
        st.subheader("Make a group of these", anchor=False)
        name = st.text_input("Name", "Past runs", max_chars=120, key="past_name")
        st.caption("Runs of one label are repeats of each other. Labels and starts can be changed.")
        frame = st.data_editor(
            pd.DataFrame(
                {
                    "Label": label_of(summaries),
                    "Start": [starts[start_of(summary)] for summary in summaries],
                    "Run": [f"{summary['name']} · {summary['run_id'][-6:]}" for summary in summaries],
                }
            ),
            hide_index=True,
            disabled=["Run"],
            key=f"past_{hash(tuple(ids))}",
            column_config={
                "Label": st.column_config.TextColumn(required=True, max_chars=120),
                "Start": st.column_config.SelectboxColumn(options=list(starts.values()), required=True),
            },
        )
        labels = [str(label).strip() or "?" for label in frame["Label"]]
        asked = [next(start for start, title in starts.items() if title == told) for told in frame["Start"]]
        warnings(compare(group_of(name, summaries, labels, asked))["warnings"])
        members = list(zip(ids, labels, asked, strict=True))
        st.button(
            "Make the group", type="primary", icon=":material/timer:", disabled=not name.strip(),
            on_click=_make_group, args=(name.strip(), members),
        )  # fmt: skip


def _make_group(name: str, members: list[tuple[str, str, str]]) -> None:
    try:
        st.session_state["made_group"] = services().store.groups.of_past_runs(name, members)
    except AppError as error:
        st.toast(escaped(str(error)), icon=":material/error:")


def go_to_made_group() -> None:
    """Leave for the timings page where a press has just made a group."""
    if group_id := st.session_state.pop("made_group", None):
        st.switch_page("../pages/timings.py", query_params={"group": group_id})
