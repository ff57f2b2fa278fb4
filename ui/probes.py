"""What is tried in the place of a run, from the Train page: begun, followed and stopped."""

from __future__ import annotations

import contextlib
from typing import Any

import streamlit as st

from core.config import RunConfig
from core.errors import AppError, StoreError
from ui.registry import services
from ui.words import escaped, phase_in_words


def start_probe(config: RunConfig, work: str = "") -> None:
    """Queue it; `work` as `RunRecord` has it."""
    try:
        services().store.create_run(config, purpose="probe", work=work)
    except AppError as error:
        st.toast(escaped(str(error)), icon=":material/error:")
    else:
        services().worker.wake()


def follow_probe(run_id: str, *, words: str, shown: tuple[str, ...], key: str) -> None:
    """Where it stands, with a way to stop it; reruns the page when it has ended.

    Args:
        words: what is done, with `{where}` for how far it is.
        shown: what of the run's phase tells that; not the epoch, of which a few steps are made.
        key: of the button.
    """
    try:
        record = services().store.get_run(run_id)
    except StoreError:
        st.rerun()
    if not record.is_active:
        st.rerun()
    phase: dict[str, Any] = {name: record.phase.get(name) for name in shown}
    st.markdown(f":material/hourglass_top: {words.format(where=escaped(phase_in_words(phase)))}")
    st.button("Stop", icon=":material/stop:", key=key, on_click=_stop, args=(run_id,))


def _stop(run_id: str) -> None:
    # it may have ended meanwhile
    with contextlib.suppress(StoreError):
        services().store.request(run_id, "stop")
