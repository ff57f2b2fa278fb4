"""What the runs page draws: the table, one run, several runs side by side."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pandas as pd
import streamlit as st

from core import charts
from core.analysis.summary import EPOCH_TITLES
from core.config import RunConfig
from core.data.dataset import SKIP_WORDS
from core.errors import AppError, StoreError
from core.output.data_figures import SPLIT_WORDS
from core.running.script import changes_counted, script_of
from core.storage.records import RunRecord
from core.words import counted
from ui import origin
from ui.data_views import callouts, number_cards
from ui.registry import services
from ui.resume_card import resume_card
from ui.timing_views import downloads, run_times
from ui.words import STATE_COLOURS, STATE_WORDS, escaped, percent, seconds_in_words


def runs_table(rows: list[dict[str, Any]]) -> list[str]:
    """Draw the table; returns the ids of the selected runs."""
    frame = pd.DataFrame(
        {
            "Name": [row["name"] for row in rows],
            "State": [STATE_WORDS.get(row["state"], row["state"]) for row in rows],
            "Model": [row["model"] for row in rows],
            "Data": [row["data"] for row in rows],
            "Device": [row["device"] for row in rows],
            "Best top-1": [row["best_val_top1"] for row in rows],
            "Validation top-1": [row["val_top1"] for row in rows],
            "Time": [seconds_in_words(row["total_s"]) for row in rows],
            "Created": [datetime.fromtimestamp(row["created"]) for row in rows],
            "Tags": [row["tags"] for row in rows],
        }
    )
    event = st.dataframe(
        frame,
        # the selection is kept by row number, so another list of runs must begin without one
        key=f"runs_{hash(tuple(row['run_id'] for row in rows))}",
        hide_index=True,
        on_select="rerun",
        selection_mode="multi-row",
        column_config={
            "Best top-1": st.column_config.NumberColumn(format="%.1f %%"),
            "Validation top-1": st.column_config.LineChartColumn(y_min=0, y_max=100),
            "Created": st.column_config.DatetimeColumn(format="D MMM YYYY, HH:mm"),
        },
    )
    return [rows[index]["run_id"] for index in event["selection"]["rows"]]


def run_header(summary: dict[str, Any]) -> None:
    """Name, state, what went wrong, and the figures that matter."""
    state = summary["state"]
    st.subheader(escaped(summary["name"]), anchor=False)
    st.badge(STATE_WORDS.get(state, state), color=STATE_COLOURS.get(state, "gray"))
    _made_from(summary)
    if summary["reason"]:
        st.error(f"**{escaped(summary['reason'])}** {escaped(summary['fix'])}")
    if summary["ended_early"]:
        st.info(escaped(summary["ended_early"]), icon=":material/flag:")
    if state in ("queued", "running", "paused"):
        st.page_link(
            "../pages/live.py", label="Watch it live", icon=":material/monitoring:",
            query_params={"run": summary["run_id"]},
        )  # fmt: skip
    best = summary["best"] or {"epoch": None, "val_top1": None}
    rates = [epoch["images_per_s"] for epoch in summary["epochs"] if epoch["images_per_s"]]
    with st.container(horizontal=True):
        st.metric("Best top-1", percent(best["val_top1"]), border=True, width="content")
        st.metric("Epochs", f"{len(summary['epochs'])} of {summary['planned_epochs']}", border=True, width="content")
        st.metric("Time", seconds_in_words(summary["total_s"]), border=True, width="content")
        st.metric("Images/s", f"{rates[-1]:,.0f}" if rates else "–", border=True, width="content")
        st.metric(
            "Device", summary["device"]["kind"], border=True, width="content", help=summary["device"]["name"] or None
        )


def _made_from(summary: dict[str, Any]) -> None:
    """Which run it was made from, with a link, what it started from, and the changes that it follows."""
    parent = _parent(summary)
    if parent is not None:
        st.page_link(
            "../pages/runs.py", label=f"Made from {escaped(parent.name)} ({parent.run_id})",
            icon=":material/fork_right:", query_params={"run": parent.run_id},
        )  # fmt: skip
    elif summary["forked_from"]:
        st.caption(f":material/fork_right: Made from run {summary['forked_from']}, which was deleted.")
    if start := summary["environment"].get("started_from"):
        st.caption(f":material/model_training: It started from {escaped(start)}.")
    if summary["forked_from"] and (script := summary["script"]):
        st.caption(f":material/playlist_play: It follows {changes_counted(len(script))} made while that one ran.")


def _parent(summary: dict[str, Any]) -> RunRecord | None:
    try:
        return services().store.get_run(summary["forked_from"]) if summary["forked_from"] else None
    except StoreError:
        return None


def run_charts(run_id: str) -> None:
    """The live page's charts, of a run that is drawn once."""
    figures = charts.figures(services().run_series(run_id))
    columns = st.columns(2)
    for index, (name, figure) in enumerate(figures.items()):
        with columns[index % 2]:
            st.plotly_chart(figure, key=f"chart_{run_id}_{name}", config={"displaylogo": False})


def run_tables(summary: dict[str, Any]) -> None:
    """Epochs, phases, data, config and environment, a tab each."""
    epochs, phases, data, config, environment = st.tabs(
        ["Epochs", "Where the time went", "Data", "Config", "Environment"]
    )
    with epochs:
        if summary["epochs"]:
            frame = pd.DataFrame(summary["epochs"])[list(EPOCH_TITLES)].rename(columns=EPOCH_TITLES)
            st.dataframe(frame.round(3), hide_index=True)
        else:
            st.caption("No epoch has ended.")
    with phases:
        run_times(summary)
    with data:
        _data(summary)
    with config:
        _config(summary)
    with environment:
        st.json(summary["environment"] or {}, expanded=True)


def _data(summary: dict[str, Any]) -> None:
    """What the scan of this run found, which files were lost since, and which image went where."""
    store, run_id, told = services().store, summary["run_id"], summary["data"]
    if not told:
        st.caption("What its data held is not known.")
        return
    used = {SPLIT_WORDS.get(split, split): num for split, num in told["used"].items()}
    skipped = told["skipped_by_reason"]
    left_out = {"Skipped": sum(skipped.values()), "Not pictures": told["ignored"]}
    number_cards({**used, "Classes": len(summary["classes"]), **left_out})
    if skipped:
        st.caption("Skipped: " + " · ".join(f"{num:,} {SKIP_WORDS.get(why, why)}" for why, num in skipped.items()))
    lost = [event.payload for event in store.events(run_id, kinds=("ImageLost",))]
    callouts([*(f"{image['file']} was lost: {image['why']}" for image in lost), *told["warnings"]], told["hints"])
    split = store.run_folder(run_id) / "split.csv"
    if split.exists():
        st.download_button(
            "Which image went where",
            lambda: split.read_bytes(),
            f"{run_id}-split.csv",
            "text/csv",
            icon=":material/download:",
            on_click="ignore",
        )


def _config(summary: dict[str, Any]) -> None:
    """All options; what differs from the run it was made from comes first, marked."""
    frame, parent = _config_frame({"Value": summary["config"]}), _parent(summary)
    if found := summary["environment"].get("batch_size"):
        st.caption(f"The batch size was found before the run: {found:,}, {summary['environment']['batch_size_is']}.")
    if parent is not None:
        theirs = _config_frame({"Value": parent.config.model_dump()})["Value"]
        differs = frame["Value"] != theirs
        words = counted(int(differs.sum()), "option") if differs.any() else "Nothing"
        st.caption(f"{words} {'differs' if differs.sum() < 2 else 'differ'} from the run it was made from.")
        frame["Field"] = frame["Field"].where(~differs, "● " + frame["Field"])
        frame["There"] = theirs.where(differs, "")
        frame = pd.concat([frame[differs], frame[~differs]])
    st.dataframe(frame, hide_index=True)


def _is_auto(name: str, value: Any) -> bool:
    return name == "batch_size" and value == 0


def _config_frame(configs: dict[str, dict[str, Any]], *, only_different: bool = False) -> pd.DataFrame:
    names = [
        name
        for name in RunConfig.model_fields
        if not only_different or len({str(config[name]) for config in configs.values()}) > 1
    ]
    columns: dict[str, list[Any]] = {"Field": [RunConfig.model_fields[name].title for name in names]}
    for title, config in configs.items():
        columns[title] = [
            "automatic" if config[name] is None or _is_auto(name, config[name]) else str(config[name]) for name in names
        ]
    return pd.DataFrame(columns)


def run_tools(summary: dict[str, Any]) -> None:
    """Name, note, tags, downloads and deletion."""
    store, run_id = services().store, summary["run_id"]
    with st.expander("Name, note and tags", icon=":material/edit:"), st.form(f"edit_{run_id}", border=False):
        name = st.text_input("Name", summary["name"], max_chars=120)
        note = st.text_area("Note", summary["note"])
        tags = st.text_input("Tags", ", ".join(summary["tags"]), help="Separated by commas.")
        if st.form_submit_button("Save"):
            try:
                store.rename(run_id, name)
                store.set_note(run_id, note)
                store.set_tags(run_id, tags.split(","))
            except AppError as error:
                st.error(escaped(str(error)))
            else:
                st.rerun()
    downloads(run_id)
    _forks(summary)
    is_active = summary["state"] in ("queued", "running", "paused")
    if st.button("Delete", icon=":material/delete:", disabled=is_active, help="Stop it first." if is_active else None):
        _ask_delete(run_id, summary["name"])


def _forks(summary: dict[str, Any]) -> None:
    """The ways to make another run of this one, and to take it up again."""
    store, run_id = services().store, summary["run_id"]
    has_weights = (store.run_folder(run_id) / "best.safetensors").is_file()
    with st.container(horizontal=True):
        again = st.button(
            "Run again with changes", icon=":material/replay:", help="Opens Train, filled from this run."
        )  # fmt: skip
        warm = st.button(
            "Start from its weights", icon=":material/fork_right:", disabled=not has_weights,
            help="Opens Train, filled from this run and with its best weights to start from."
            if has_weights else "It has no best checkpoint.",
        )  # fmt: skip
    if again or warm:
        origin.fill_from(
            run_id, summary["name"], summary["config"],
            script=script_of(store, run_id), weights=f"run:{run_id}" if warm else "",
        )  # fmt: skip
        st.switch_page("../pages/train.py")
    record = store.get_run(run_id)
    if not record.is_active:
        resume_card(record)


@st.dialog("Delete this run?")
def _ask_delete(run_id: str, name: str) -> None:
    st.markdown(f"**{escaped(name)}** ({run_id}) goes with its figures and checkpoints. This can't be undone.")
    with st.container(horizontal=True):
        if st.button("Delete for good", type="primary", on_click=_delete, args=(run_id,)):
            st.rerun()
        if st.button("Keep it"):
            st.rerun()


def _delete(run_id: str) -> None:
    try:
        services().store.delete(run_id)
    except AppError as error:
        st.toast(escaped(str(error)), icon=":material/error:")
    else:
        st.query_params.pop("run", None)


def compare(summaries: list[dict[str, Any]]) -> None:
    """Curves of several runs in one chart, and the config fields in which they differ."""
    titles = {summary["run_id"]: f"{summary['name']} · {summary['run_id'][-6:]}" for summary in summaries}
    st.subheader(f"{len(summaries)} runs side by side", anchor=False)
    metrics = {"val_top1": "Validation top-1", "val_loss": "Validation loss", "train_loss": "Training loss"}
    metric = st.segmented_control(
        "Curve", list(metrics), format_func=metrics.get, default="val_top1", required=True, key="compare_metric"
    )
    series = [(titles[summary["run_id"]], services().run_series(summary["run_id"])) for summary in summaries]
    st.plotly_chart(charts.compare_figure(series, metric), key="compare_chart", config={"displaylogo": False})
    frame = _config_frame({titles[s["run_id"]]: s["config"] for s in summaries}, only_different=True)
    if frame.empty:
        st.caption("Their configs are equal.")
    else:
        st.caption("Where their configs differ")
        st.dataframe(frame, hide_index=True)
