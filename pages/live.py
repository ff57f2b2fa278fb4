"""Live: the run that trains now, else the last one."""

from __future__ import annotations

import streamlit as st

from core.storage.records import RunRecord
from ui.control_panel import abort_question, control_panel
from ui.fragments import show_status, standing
from ui.live_chart import live_chart
from ui.queue_view import show_queue
from ui.registry import services
from ui.resume_card import resume_card
from ui.words import escaped, state_of


def _chosen(runs: list[RunRecord]) -> RunRecord:
    wanted = st.query_params.get("run")
    for run in runs:
        if run.run_id == wanted:
            return run
    if wanted:
        st.info(f"There is no run {escaped(wanted)} any more; this is the latest one.")
    order = {"running": 0, "paused": 0, "queued": 1, "parked": 2}
    return min(runs, key=lambda run: order.get(state_of(run), 3))


runs = services().store.list_runs()
if not runs:
    st.title("Live")
    st.info("Nothing has been trained here yet.", icon=":material/monitoring:")
    st.page_link("../pages/train.py", label="Set up a run", icon=":material/model_training:")
    st.stop()

run = _chosen(runs)
st.title(escaped(run.name), anchor=False)
st.caption(escaped(f"{run.config.model} · {run.config.data} · {run.run_id}"))
st.fragment(show_status, run_every=1.0 if run.is_active else None)(run.run_id, standing(run))
if run.state in ("running", "paused"):
    control_panel(run)
    abort_question(run)
elif not run.is_active:
    resume_card(run)
queue = st.fragment(show_queue, run_every=1.0 if any(other.is_active for other in runs) else None)
# who waits looks for the queue, all others for the charts
if run.state == "queued":
    queue(run.run_id)
live_chart(run.run_id)
if run.state != "queued":
    queue(run.run_id)
