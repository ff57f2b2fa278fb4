"""Runs: all of them, one of them, or several side by side."""

from __future__ import annotations

import streamlit as st

from core.analysis.summary import list_rows, summarise
from core.errors import AppError
from ui import group_form, run_views
from ui.registry import services
from ui.words import escaped


def draw_run(run_id: str) -> None:
    try:
        summary = summarise(services().store, run_id)
    except AppError as error:
        st.error(f"**{escaped(error.problem)}** Choose one from the table.")
        return
    with st.container(border=True):
        run_views.run_header(summary)
        run_views.run_charts(run_id)
        run_views.run_tables(summary)
        run_views.run_tools(summary)


group_form.go_to_made_group()
st.title("Runs", anchor=False)
rows = list_rows(services().store)
selected = run_views.runs_table(rows) if rows else []
# a selection counts when it is made: a link to another run leads there although a row stays selected
if selected != st.session_state.get("runs_selected"):
    st.session_state["runs_selected"] = selected
    if len(selected) == 1:
        st.query_params["run"] = selected[0]
if len(selected) > 1:
    st.query_params.pop("run", None)
    summaries = [summarise(services().store, run_id) for run_id in selected]
    run_views.compare(summaries)
    group_form.past_runs_form(summaries)
elif run_id := st.query_params.get("run"):
    draw_run(run_id)
elif rows:
    st.caption("Select one run to see it, or several to compare them.")
if not rows:
    st.info("There are no runs yet. Start one on the page Train.", icon=":material/history:")
    st.page_link("../pages/train.py", label="Train", icon=":material/model_training:")
