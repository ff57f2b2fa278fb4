"""System: what this machine has and lacks for training and for the dashboard, and what to do about it."""

from __future__ import annotations

import streamlit as st

from ui import system_views
from ui.registry import services

st.title("System", anchor=False)
checkups = services().checkups
checkup = checkups.last or checkups.start()
st.button(
    "Look again",
    icon=":material/refresh:",
    disabled=checkup.state == "running",
    on_click=checkups.start,
    help="Versions, a matrix product on each device that no run has, memory, disk, database, backup, network and "
    "tunnel. The same on the command line: python -m core doctor",
)
if checkup.state == "running":
    st.fragment(system_views.show_progress, run_every=0.5)(checkup)
elif checkup.report is None:
    st.error(checkup.problem, icon=":material/error:")
else:
    report = checkup.report
    system_views.summary(checkup, report)
    system_views.wrong([finding for finding in report.findings if finding.state != "ok"])
    st.subheader("In order", anchor=False)
    system_views.fine([finding for finding in report.findings if finding.state == "ok"])
st.subheader("Folders", anchor=False)
system_views.folders(services().store.home, list(services().roots.folders))
