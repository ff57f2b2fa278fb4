"""What can be asked of a run while it goes on: another pace, a pause, and going on."""

from __future__ import annotations

from typing import Any

import streamlit as st

from core.config import RunConfig
from core.control import Wish, check_wish
from core.errors import AppError
from core.records import RunRecord
from ui.registry import services
from ui.words import escaped

FIELDS = ("lr", "weight_decay", "epochs", "patience", "log_every")


def control_panel(run: RunRecord) -> None:
    """Pause or go on, and a form of what can be changed; each holds from the next step on."""
    is_paused = run.state == "paused"
    with st.expander("Change this run", icon=":material/tune:"):
        asked, words, icon = ("resume", "Go on", "play_arrow") if is_paused else ("pause", "Pause", "pause")
        st.button(
            words, icon=f":material/{icon}:", key=f"{asked}_{run.run_id}", on_click=_ask, args=(run.run_id, asked),
            help="Time does not count while a run stands still. It keeps its device.",
        )  # fmt: skip
        with st.form(f"change_{run.run_id}", border=False):
            columns = st.columns(len(FIELDS))
            values = {name: _field(column, name, run) for name, column in zip(FIELDS, columns, strict=True)}
            st.caption(
                "The learning rate is that of the next step, and the schedule goes on from it in proportion; with "
                "another number of epochs the schedule is that of the new number."
            )
            if st.form_submit_button("Change from the next step on"):
                _change(run, {name: value for name, value in values.items() if value is not None})


def _field(place: Any, name: str, run: RunRecord) -> float | None:
    info = RunConfig.model_fields[name]
    value: float | None = place.number_input(
        str(info.title), value=None, placeholder=f"{getattr(run.config, name):g}", help=info.description,
        key=f"change_{name}_{run.run_id}", **({"format": "%g"} if info.annotation is float else {"step": 1}),
    )  # fmt: skip
    return value


def _change(run: RunRecord, values: dict[str, float]) -> None:
    try:
        wishes = [Wish(name, float(value)) for name, value in values.items()]
        for wish in wishes:
            check_wish(wish, run.config)
        for wish in wishes:
            services().store.request(run.run_id, "change", {"what": wish.what, "value": wish.value})
    except AppError as error:
        st.error(escaped(str(error)))
    else:
        st.toast("Asked for." if wishes else "Nothing was filled in.")


def _ask(run_id: str, what: str) -> None:
    try:
        services().store.request(run_id, what)
    except AppError as error:
        st.toast(escaped(str(error)), icon=":material/error:")
