"""The entry script: page config and navigation."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import streamlit as st  # noqa: E402

from ui.sessions import COOKIE_PREFIX  # noqa: E402

# a picture of our own: a browser fetches that of an icon's name from elsewhere
st.set_page_config(page_title="Fine-tune", page_icon=str(Path(__file__).with_name("icon.png")), layout="wide")
page = st.navigation(
    [
        st.Page("../pages/train.py", title="Train", icon=":material/model_training:", default=True),
        st.Page("../pages/data.py", title="Data", icon=":material/photo_library:"),
        st.Page("../pages/live.py", title="Live", icon=":material/monitoring:"),
        st.Page("../pages/runs.py", title="Runs", icon=":material/history:"),
        st.Page("../pages/timings.py", title="Timings", icon=":material/timer:"),
        st.Page("../pages/system.py", title="System", icon=":material/health_and_safety:"),
    ]
)
st.session_state["is_page_opened"] = st.session_state.get("shown_page") != page.title
st.session_state["shown_page"] = page.title
if any(name.startswith(COOKIE_PREFIX) for name in st.context.cookies):
    with st.sidebar:
        # an address of the gate's, not a page: Streamlit's own links would look for one
        st.html('<a href="/logout" style="color: inherit; font-size: 0.875rem">Log out</a>')
page.run()
