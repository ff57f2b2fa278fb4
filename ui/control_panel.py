"""What can be asked of a run while it goes on: another pace, a pause, going on, and its end."""

from __future__ import annotations

import contextlib
from typing import Any

import streamlit as st

from core.config import RunConfig
from core.control import Wish, check_wish
from core.errors import AppError
from core.running.script import values_now
from core.storage.records import RunRecord
from ui.registry import services
from ui.words import escaped

FIELDS = ("lr", "weight_decay", "epochs", "patience", "log_every")
LR_TIMES = (0.1, 0.5, 2.0)
"""What the buttons multiply the learning rate by."""
ABORTS_KEY = "asks_abort"


def control_panel(run: RunRecord) -> None:
    """Pause, and what can be changed; each holds from the next step on."""
    values = present_values(run)
    with st.expander("Change this run", icon=":material/tune:", key=f"control_{run.run_id}"):
        if run.state == "running":
            _pause_button(run)
        elif not run.is_parked:
            _free_button(run)
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"Learning rate {values['lr']:.3g}")
            for times in LR_TIMES:
                st.button(
                    f"× {times:g}", key=f"times_{times}_{run.run_id}", on_click=_multiply_lr,
                    args=(run, values["lr_factor"], times), help="From the next step on; the schedule goes on from it.",
                )  # fmt: skip
        with st.form(f"change_{run.run_id}", border=False, clear_on_submit=True):
            columns = st.columns(len(FIELDS))
            asked = {name: _field(column, name, run, values) for name, column in zip(FIELDS, columns, strict=True)}
            st.caption(
                "The learning rate is that of the next step, and the schedule goes on from it in proportion; with "
                "another number of epochs the schedule is that of the new number."
            )
            if st.form_submit_button("Change from the next step on"):
                wishes = [Wish(name, float(value)) for name, value in asked.items() if value is not None]
                if not wishes:
                    st.toast("Nothing was filled in.")
                elif problem := _ask_changes(run, wishes):
                    st.error(escaped(problem), icon=":material/error:")


def present_values(run: RunRecord) -> dict[str, float]:
    """What holds now of each option that can be changed, see `values_now`."""
    store = services().store
    steps = services().run_series(run.run_id).steps["step"]
    prepared = store.events(run.run_id, kinds=("RunPrepared",))[-1:]
    steps_per_epoch = prepared[0].payload["steps_per_epoch"] if prepared else 0
    return values_now(store, run, int(steps[-1]) if steps else 0, steps_per_epoch)


def stop_button(run: RunRecord) -> None:
    """End the run after its step, saved whole."""
    key = _once("stopping", run)
    is_stopping = bool(st.session_state.get(key))
    label = "Stopping" if is_stopping else "Stop"
    if st.button(label, icon=":material/stop:", disabled=is_stopping, key=f"stop-{run.run_id}"):
        try:
            services().store.request(run.run_id, "stop")
            st.session_state[key] = True
            st.toast("The run stops after the step it is in, and is saved.")
        except AppError as error:
            st.toast(escaped(str(error)), icon=":material/error:")


def abort_button(run: RunRecord) -> None:
    """Ask whether the run is to end without being saved; the page draws the question, see `abort_question`."""
    is_aborting = bool(st.session_state.get(_once("aborting", run)))
    label = "Aborting" if is_aborting else "Abort"
    if st.button(label, icon=":material/cancel:", disabled=is_aborting, key=f"abort-{run.run_id}", type="tertiary"):
        # a dialog of the status would be gone with its next refresh
        st.session_state[ABORTS_KEY] = run.run_id
        st.rerun()


def abort_question(run: RunRecord) -> None:
    """Draw the question, where it was asked for."""
    if st.session_state.pop(ABORTS_KEY, None) == run.run_id and run.is_active:
        _question(run)


@st.dialog("Abort this run?")
def _question(run: RunRecord) -> None:
    saved = [
        event.payload
        for event in services().store.events(run.run_id, kinds=("CheckpointSaved",))
        if event.payload["which"] in ("state", "last")
    ]
    kept = f"what came after step {saved[-1]['step']:,} is lost" if saved else "it has kept nothing yet"
    if saved and not saved[-1].get("step"):
        kept = f"what came after epoch {saved[-1]['epoch']:,} is lost"
    st.markdown(f"It ends at once and nothing is saved: {kept}. Stop saves it first.")
    with st.container(horizontal=True):
        if st.button("Abort now", type="primary", on_click=_abort, args=(run,)):
            st.rerun()
        if st.button("Let it go on"):
            st.rerun()


def _abort(run: RunRecord) -> None:
    # where it has ended meanwhile, the status says so
    with contextlib.suppress(AppError):
        services().store.request(run.run_id, "abort")
        st.session_state[_once("aborting", run)] = True


def _once(what: str, run: RunRecord) -> str:
    """The session key of something that is asked once of each start of a run."""
    return f"{what}-{run.run_id}-{run.started}"


def go_on_button(run: RunRecord) -> None:
    """For a paused run: have it go on from where it stands, or, where it left its device, from what it saved."""
    words = "It is taken up from what it saved, before all that wait." if run.is_parked else "From where it stands."
    if (
        st.button("Go on", icon=":material/play_arrow:", type="primary", key=f"go_on_{run.run_id}", help=words)
        and _ask(run.run_id, "resume")
    ):  # fmt: skip
        services().worker.wake()


def _pause_button(run: RunRecord) -> None:
    free_key = f"free_{run.run_id}"
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button(
            "Pause", icon=":material/pause:", key=f"pause_{run.run_id}", on_click=_pause, args=(run.run_id, free_key),
            help="After the step it is in. Time does not count while a run stands still.",
        )  # fmt: skip
        st.checkbox(
            "Free the device meanwhile",
            key=free_key,
            help="The run is saved whole and leaves its device, so that others can train; going on sets it up anew. "
            "Otherwise it keeps its device and goes on at once.",
        )


def _free_button(run: RunRecord) -> None:
    """For a run that stands still on its device."""
    st.button(
        "Free the device", icon=":material/logout:", key=f"free_now_{run.run_id}", on_click=_ask,
        args=(run.run_id, "pause", {"free": True}),
        help="The run is saved whole and leaves its device, so that others can train; going on sets it up anew.",
    )  # fmt: skip


def _pause(run_id: str, free_key: str) -> None:
    _ask(run_id, "pause", {"free": True} if st.session_state.get(free_key) else None)


def _field(place: Any, name: str, run: RunRecord, values: dict[str, float]) -> float | None:
    info = RunConfig.model_fields[name]
    value: float | None = place.number_input(
        str(info.title), value=None, placeholder=f"{values[name]:.4g}", help=info.description,
        key=f"change_{name}_{run.run_id}", **({"format": "%g"} if info.annotation is float else {"step": 1}),
    )  # fmt: skip
    return value


def _multiply_lr(run: RunRecord, factor: float, times: float) -> None:
    """Ask for so many times the present rate; a press before the answer to another one counts on that."""
    key = f"asked_factor_{run.run_id}"
    told, asked = st.session_state.get(key, (factor, factor))
    wanted = (asked if told == factor else factor) * times
    if problem := _ask_changes(run, [Wish("lr_factor", wanted)]):
        st.toast(escaped(problem), icon=":material/error:")
    else:
        st.session_state[key] = (factor, wanted)


def _ask_changes(run: RunRecord, wishes: list[Wish]) -> str:
    """Ask for all of them, or say why one can't be and ask for none."""
    try:
        for wish in wishes:
            check_wish(wish, run.config)
        for wish in wishes:
            services().store.request(run.run_id, "change", {"what": wish.what, "value": wish.value})
    except AppError as error:
        return str(error)
    st.toast("Asked for." if run.state == "running" else "Noted: it holds from the next step on, when the run goes on.")
    return ""


def _ask(run_id: str, what: str, payload: dict[str, Any] | None = None) -> bool:
    """Put the request into the store; what came of it shows in the status."""
    try:
        services().store.request(run_id, what, payload)
    except AppError as error:
        st.toast(escaped(str(error)), icon=":material/error:")
        return False
    st.toast("Asked for.")
    return True
