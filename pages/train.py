"""Train: the form, what it comes to, and Start."""

from __future__ import annotations

from typing import Any

import streamlit as st

from core.config import RunConfig, field_errors
from core.errors import AppError
from ui import forecast_card, forms, group_form, lr_finder_view, origin
from ui.queue_view import queue_line
from ui.registry import services
from ui.words import escaped


def start(newest_run: str) -> None:
    """Queue the form as it stands; `newest_run` is what the page showed when it was drawn."""
    store, worker = services().store, services().worker
    try:
        config, made_from = RunConfig(**forms.values()), origin.made_from()
        run_id = store.create_run(config, request_token=forms.request_token(config, newest_run, made_from), **made_from)
        if not store.get_run(run_id).is_active:
            # a tab drawn long ago: the run of that press is over, so this press means another
            token = forms.request_token(config, newest_run_id(), made_from)
            run_id = store.create_run(config, request_token=token, **made_from)
        worker.wake()
        st.session_state["started_run"] = run_id
    except (AppError, ValueError) as error:
        st.session_state["start_problem"] = str(error)


def newest_run_id() -> str:
    return services().store.newest_run_id()


def reasons_of(values: dict[str, Any], problems: dict[str, str]) -> list[str]:
    """Why the form can't be started, in a sentence each."""
    reasons = [
        f"{RunConfig.model_fields[name].title}: {words}" if name else f"These options clash: {words}"
        for name, words in problems.items()
    ]
    reasons.append(forms.data_problem(values["data"]))
    if not problems:
        config = RunConfig(**values)
        reasons += [forms.device_problem(config), origin.weights_problem(config, services().store)]
    return [reason for reason in reasons if reason]


def draw_form(problems: dict[str, str], is_ready: bool) -> None:
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
            weights = origin.weights_options(services().store, st.session_state[forms.key_of("model")])
            forms.field("weights", problems, options=list(weights), words=lambda name: weights.get(name, name))
        with columns[1]:
            forms.field("image_size", problems)
        forms.field("trainable", problems)
        forms.section("From epoch to epoch", problems)
        if not problems and (words := forms.epochs_caption(RunConfig(**forms.values()), models)):
            st.caption(words)
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
        draw_hyperparameters(problems, is_ready)


def draw_hyperparameters(problems: dict[str, str], is_ready: bool) -> None:
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
        if "lr" in group:
            lr_finder_view.draw_lr_finder(None if problems else RunConfig(**forms.values()), is_ready)
    for title in ("Steadier training", "When to save and to end"):
        forms.section(title, problems)


def draw_start(values: dict[str, Any], problems: dict[str, str], reasons: list[str]) -> None:
    config = None if problems else RunConfig(**values)
    with st.container(border=True):
        st.subheader("This run", anchor=False)
        if config:
            st.caption("Learning rate")
            st.plotly_chart(forms.schedule_figure(config), key="lr_preview", config={"displayModeBar": False})
            st.caption("The same from the command line")
            st.code(origin.command(config), language="bash", wrap_lines=True)
            forecast_card.draw_forecast(config, not reasons)
        st.button(
            "Start", type="primary", key="start", width="stretch", disabled=bool(reasons), on_click=start,
            args=(newest_run_id(),),
        )  # fmt: skip
        queue_line()
        for reason in reasons:
            st.markdown(f":red[:material/error:] {escaped(reason.rstrip('.'))}.")
        if problem := st.session_state.pop("start_problem", None):
            st.error(escaped(problem))
        group_form.compare_form(config, forms.data_problem(values["data"]))


if st.session_state.pop("started_run", None):
    st.switch_page("../pages/live.py")
group_form.go_to_made_group()
st.title("Train", anchor=False)
forms.fill_in()
forms.preset_choice()
origin.draw_origin()
problems = field_errors(forms.values())
reasons = reasons_of(forms.values(), problems)
left, right = st.columns([3, 2], gap="medium")
with left:
    draw_form(problems, not reasons)
with right:
    draw_start(forms.values(), problems, reasons)
