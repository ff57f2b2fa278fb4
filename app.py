"""The dashboard's ASGI app: `streamlit run app.py`."""

from __future__ import annotations

import os

# OpenMP reads this when torch is loaded; spinning threads would starve the pages on a small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What a browser asks to be fetched must not come from this machine or its neighbours.
os.environ.setdefault("FINETUNE_ADDRESSES", "public")

import streamlit as st
from starlette.middleware import Middleware
from starlette.routing import Route

from ui.gate import Gate
from ui.registry import lifespan
from ui.routes import plotly_js, run_series
from ui.upload_routes import UPLOAD_ROUTES

# Streamlit looks for this very form; anything else would run as a plain script, without the gate.
app = st.App(
    "ui/main.py",
    lifespan=lifespan,
    middleware=[Middleware(Gate)],
    routes=[
        Route("/api/plotly.min.js", plotly_js),
        Route("/api/runs/{run_id}/series", run_series),
        *UPLOAD_ROUTES,
    ],
)
