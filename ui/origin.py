"""The run that the training form was filled from, and the runs whose weights it can start from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import streamlit as st

from core.config import RunConfig, as_command
from core.errors import AppError
from core.running.script import changes_counted, script_in_words
from core.store import Store
from ui import forms
from ui.registry import services
from ui.words import escaped

FOLLOW_KEY = "follow_changes"
MOST_WEIGHTS = 50
"""Runs whose weights the form offers, the newest ones."""


def fill_from(
    run_id: str, name: str, config: dict[str, Any], *, script: Sequence[dict[str, Any]] = (), weights: str = ""
) -> None:
    """Set every field to a run's value, from which changes are marked.

    Args:
        script: the changes that were made while it ran.
        weights: what it starts from instead, "" for what the run did.
    """
    st.session_state[forms.AGAIN_KEY] = {"run_id": run_id, "name": name, "config": config, "script": list(script)}
    st.session_state[FOLLOW_KEY] = False
    forms.take({**config, **({"weights": weights} if weights else {})})


def draw_origin() -> None:
    """Which run the form was filled from, and whether the changes that were made to it are followed."""
    again = _again()
    if not again:
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(f":material/replay: As **{escaped(again['name'])}** ({again['run_id']}) was; changes are marked.")
        st.button("Back to the preset", type="tertiary", on_click=forms.take_preset, key="leave_run")
    if script := again["script"]:
        st.checkbox(
            f"Follow {changes_counted(len(script))} made while it ran", key=FOLLOW_KEY, persist_state="session",
            help="Each is made again before the step at which it was made.",
        )  # fmt: skip
        st.caption("\n".join(f"- {escaped(words)}" for words in script_in_words(script)))


def made_from() -> dict[str, Any]:
    """What `Store.create_run` is told of the run that the form was filled from, or whose weights it starts from."""
    from core.models.from_run import run_of

    again = _again()
    follows = bool(again) and bool(st.session_state.get(FOLLOW_KEY))
    return {
        "forked_from": again.get("run_id") or run_of(st.session_state[forms.key_of("weights")]),
        "script": again["script"] if follows else [],
    }


def command(config: RunConfig) -> str:
    """The command line that trains what Start would."""
    again = _again()
    # a command line can't say again that an option is the model's own
    if not again or any(value is None and again["config"][name] is not None for name, value in config):
        return as_command(config)
    words = ["--again", again["run_id"], *(["--follow-changes"] if made_from()["script"] else [])]
    return as_command(config, start=RunConfig(**again["config"]), words=words)


def weights_options(store: Store, model: str) -> dict[str, str]:
    """What a model can start from, and what it is shown as: also the best weights of runs of this model."""
    from core.models.catalogue import resolve

    def place_of(name: str) -> tuple[str, str]:
        try:
            return resolve(name)
        except AppError:
            return "", name

    runs = store.list_runs()
    alike = {name for name in {record.config.model for record in runs} if place_of(name) == place_of(model)}
    kept = (
        record
        for record in runs
        if record.config.model in alike and (store.run_folder(record.run_id) / "best.safetensors").is_file()
    )
    named = {f"run:{record.run_id}": f"{record.name} · {record.run_id[-6:]}" for record in islice(kept, MOST_WEIGHTS)}
    return {"default": "default", "none": "none", **named}


def weights_problem(config: RunConfig, store: Store) -> str:
    """Why the weights can't or may not be started from, seen without reading them; "" where they can."""
    from core.models.from_run import check_weights

    return forms.problem_of(lambda: services().roots.check_weights(config.weights)) or forms.problem_of(
        lambda: check_weights(config.weights, store.home / "runs", config.model)
    )


def _again() -> dict[str, Any]:
    found: dict[str, Any] = st.session_state.get(forms.AGAIN_KEY) or {}
    return found
