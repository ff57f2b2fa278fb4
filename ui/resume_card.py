"""Taking up a run that ended: what would hold from then on, before it is asked for."""

from __future__ import annotations

from typing import Any

import streamlit as st

from core.config import RunConfig
from core.errors import AppError, StoreError
from core.running.script import changes_counted
from core.storage.records import RunRecord
from ui.control_panel import present_values
from ui.registry import services
from ui.words import escaped

CHANGES = ("lr", "epochs")


def resume_card(run: RunRecord) -> None:
    """A folded card, for runs that ended."""
    card = st.expander("Resume", icon=":material/restart_alt:", key=f"resume_{run.run_id}", on_change="rerun")
    # what was kept is read to say what would hold, so not before anybody asks
    if card.open:
        with card:
            st.fragment(_card)(run.run_id)


def _card(run_id: str) -> None:
    from core.running.resume import plan_resume, resume

    store = services().store
    try:
        run = store.get_run(run_id)
    except StoreError:
        st.rerun()
    changes, device = _wishes(run)
    try:
        plan = plan_resume(store, run_id, changes=changes, device=device)
        if plan.script and not _follows(run_id, len(plan.script)):
            plan = plan_resume(store, run_id, changes=changes, device=device, follow=False)
    except AppError as error:
        # that all its epochs are trained is no mistake before anything was asked for
        words = escaped(str(error))
        st.markdown(f":red[:material/error:] {words}" if changes or device else f":material/info: {words}")
        st.button("Resume", disabled=True, key=f"resume_now_{run_id}")
        return
    st.markdown("\n".join(f"- {escaped(rule)}" for rule in plan.rules))
    if st.button("Resume", type="primary", icon=":material/restart_alt:", key=f"resume_now_{run_id}"):
        try:
            resume(store, plan)
        except AppError as error:
            st.markdown(f":red[:material/error:] {escaped(str(error))}")
            return
        services().worker.wake()
        st.switch_page("../pages/live.py", query_params={"run": run_id})


def _wishes(run: RunRecord) -> tuple[dict[str, float], str]:
    """Another learning rate, number of epochs and device, as far as they are filled in."""
    values = present_values(run)
    *places, last = st.columns(len(CHANGES) + 1)
    asked = {name: _field(place, name, run, values) for name, place in zip(CHANGES, places, strict=True)}
    device = last.selectbox(
        "Device", ["", *_kinds()], key=f"resume_device_{run.run_id}",
        format_func=lambda kind: kind or f"As before ({run.device_kind or run.config.device})",
    )  # fmt: skip
    return {name: float(value) for name, value in asked.items() if value is not None}, device or ""


def _field(place: Any, name: str, run: RunRecord, values: dict[str, float]) -> float | None:
    info = RunConfig.model_fields[name]
    shape: dict[str, Any] = {"format": "%g"} if info.annotation is float else {"step": 1}
    value: float | None = place.number_input(
        str(info.title), value=None, placeholder=f"{values[name]:.4g}", help=info.description,
        key=f"resume_{name}_{run.run_id}", **shape,
    )  # fmt: skip
    return value


def _kinds() -> list[str]:
    from core.devices import list_devices

    return [info.kind for info in list_devices() if info.available]


def _follows(run_id: str, count: int) -> bool:
    return st.checkbox(
        f"Follow {changes_counted(count)} that came after that step",
        value=True,
        key=f"resume_follow_{run_id}",
        help="Those that were made while it ran and went with the steps that it makes again, and those of its script.",
    )
