"""The entry script: page config and navigation."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import streamlit as st  # noqa: E402

st.set_page_config(page_title="Fine-tune", page_icon=":material/tune:", layout="wide")
page = st.navigation(
    [
        st.Page("../pages/train.py", title="Train", icon=":material/model_training:", default=True),
        st.Page("../pages/data.py", title="Data", icon=":material/photo_library:"),
        st.Page("../pages/live.py", title="Live", icon=":material/monitoring:"),
        st.Page("../pages/runs.py", title="Runs", icon=":material/history:"),
        st.Page("../pages/timings.py", title="Timings", icon=":material/timer:"),
    ]
)
page.run()
