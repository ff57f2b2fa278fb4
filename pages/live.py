"""Live: the run that trains now, else the last one."""

from __future__ import annotations

import streamlit as st

from core.records import RunRecord
from ui.control_panel import control_panel
from ui.fragments import show_status
from ui.live_chart import live_chart
from ui.registry import services


def _chosen(runs: list[RunRecord]) -> RunRecord:
    wanted = st.query_params.get("run")
    for run in runs:
        if run.run_id == wanted:
            return run
    if wanted:
        st.info(f"There is no run {wanted} any more; this is the latest one.")
    order = {"running": 0, "paused": 0, "queued": 1}
    return min(runs, key=lambda run: order.get(run.state, 2))


runs = services().store.list_runs()
if not runs:
    st.title("Live")
    st.info("Nothing has been trained here yet.", icon=":material/monitoring:")
    st.page_link("../pages/train.py", label="Set up a run", icon=":material/model_training:")
    st.stop()

run = _chosen(runs)
st.title(run.name)
st.caption(f"{run.config.model} · {run.config.data} · {run.run_id}")
st.fragment(show_status, run_every=1.0 if run.is_active else None)(run.run_id, run.state)
if run.state in ("running", "paused"):
    control_panel(run)
live_chart(run.run_id)
