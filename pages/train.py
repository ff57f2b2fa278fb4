"""Train: the form, what it comes to, and Start."""

from __future__ import annotations

from typing import Any

import streamlit as st

from core.config import RunConfig, as_command, field_errors
from core.errors import AppError
from ui import forecast_card, forms, group_form
from ui.registry import services


def start(newest_run: str) -> None:
    """Queue the form as it stands; `newest_run` is what the page showed when it was drawn."""
    store, worker = services().store, services().worker
    try:
        config = RunConfig(**forms.values())
        run_id = store.create_run(config, request_token=forms.request_token(config, newest_run))
        if not store.get_run(run_id).is_active:
            # a tab drawn long ago: the run of that press is over, so this press means another
            run_id = store.create_run(config, request_token=forms.request_token(config, newest_run_id()))
        worker.wake()
        st.session_state["started_run"] = run_id
    except (AppError, ValueError) as error:
        st.session_state["start_problem"] = str(error)


def newest_run_id() -> str:
    runs = services().store.list_runs()
    return runs[0].run_id if runs else ""


def draw_form(problems: dict[str, str]) -> None:
    with st.container(border=True):
        st.subheader("Data", anchor=False)
        forms.field("data", problems, options=forms.data_options(services().store))
        if words := forms.data_caption(st.session_state[forms.key_of("data")]):
            st.caption(words)
        st.page_link("../pages/data.py", label="Look at these data", icon=":material/photo_library:")
        forms.field("val_percent", problems)
        for title in ("Augmentation", "Classes and feeding"):
            forms.section(title, problems)
    with st.container(border=True):
        st.subheader("Model", anchor=False)
        models = forms.known_models()
        forms.field("model", problems, options=list(models))
        st.caption(forms.model_caption(st.session_state[forms.key_of("model")], models))
        columns = st.columns(2)
        with columns[0]:
            forms.field("weights", problems, options=["default", "none"])
        with columns[1]:
            forms.field("image_size", problems)
        forms.field("trainable", problems)
    with st.container(border=True):
        st.subheader("Device", anchor=False)
        forms.device_cards()
        columns = st.columns(2)
        with columns[0]:
            forms.field("precision", problems)
        with columns[1]:
            forms.field("threads", problems)
        for title in ("Speed and memory", "Cold or warm"):
            forms.section(title, problems)
    with st.container(border=True):
        st.subheader("Hyperparameters", anchor=False)
        draw_hyperparameters(problems)


def draw_hyperparameters(problems: dict[str, str]) -> None:
    optimizer = forms.OPTIMIZER_FIELDS[st.session_state[forms.key_of("optimizer")]]
    schedule = forms.SCHEDULE_FIELDS.get(st.session_state[forms.key_of("schedule")], ())
    for group in (
        ("epochs", "batch_size"),
        ("optimizer",),
        ("lr", *optimizer),
        ("schedule",),
        ("warmup_epochs", *schedule),
        ("label_smoothing", "seed", "log_every"),
    ):
        columns = st.columns(min(2, len(group)))
        for index, name in enumerate(group):
            with columns[index % 2 if len(group) > 1 else 0]:
                forms.field(name, problems)
    for title in ("Steadier training", "When to end"):
        forms.section(title, problems)


def draw_start(values: dict[str, Any], problems: dict[str, str]) -> None:
    config = None if problems else RunConfig(**values)
    with st.container(border=True):
        st.subheader("This run", anchor=False)
        reasons = [
            f"{RunConfig.model_fields[name].title}: {words}" if name else f"These options clash: {words}"
            for name, words in problems.items()
        ]
        if no_data := forms.data_problem(values["data"]):
            reasons.append(no_data)
        if config and (problem := forms.device_problem(config)):
            reasons.append(problem)
        if config:
            st.caption("Learning rate")
            st.plotly_chart(forms.schedule_figure(config), key="lr_preview", config={"displayModeBar": False})
            st.caption("The same from the command line")
            st.code(as_command(config), language="bash", wrap_lines=True)
            forecast_card.draw_forecast(config, not reasons)
        st.button(
            "Start", type="primary", key="start", width="stretch", disabled=bool(reasons), on_click=start,
            args=(newest_run_id(),),
        )  # fmt: skip
        for reason in reasons:
            st.markdown(f":red[:material/error:] {reason.rstrip('.')}.")
        if problem := st.session_state.pop("start_problem", None):
            st.error(problem)
        group_form.compare_form(config, no_data)


if st.session_state.pop("started_run", None):
    st.switch_page("../pages/live.py")
group_form.go_to_made_group()
st.title("Train", anchor=False)
forms.fill_in()
forms.preset_choice()
problems = field_errors(forms.values())
left, right = st.columns([3, 2], gap="medium")
with left:
    draw_form(problems)
with right:
    draw_start(forms.values(), problems)
