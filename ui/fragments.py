"""The part of the live page that refreshes by itself: where the run stands, and how it ended."""

from __future__ import annotations

import time
from typing import Any

import streamlit as st

from core.errors import StoreError
from core.storage.records import RunRecord
from core.words import tweak_in_words
from ui.control_panel import abort_button, go_on_button, stop_button
from ui.registry import services
from ui.words import (
    STATE_COLOURS,
    STATE_WORDS,
    escaped,
    percent,
    phase_in_words,
    place_in_words,
    seconds_in_words,
    state_of,
)

SILENT_AFTER_S = 60.0
METRIC_WIDTH = 170
"""Pixels: on a telephone two figures stand side by side."""


def standing(record: RunRecord) -> str:
    """Another text whenever the rest of the page must be drawn anew: state and last change."""
    changes = services().store.events(record.run_id, kinds=("Tweaked",))
    return f"{state_of(record)} {changes[-1].id if changes else 0}"


def show_status(run_id: str, drawn: str) -> None:
    """Draw phase, progress, figures, Stop and Abort; rerun the page where it no longer stands as `drawn`."""
    store = services().store
    try:
        record = store.get_run(run_id)
    except StoreError:
        st.rerun()
    if standing(record) != drawn:
        st.rerun()
    state = state_of(record)
    with st.container(horizontal=True, vertical_alignment="center"):
        badge = f":{STATE_COLOURS.get(state, 'gray')}-badge[{STATE_WORDS.get(state, state)}]"
        st.markdown(f"{badge} {_headline(record)}", width="stretch")
        if record.state == "paused":
            go_on_button(record)
        if record.is_active:
            stop_button(record)
        if _is_under_way(record):
            abort_button(record)
    if record.is_active:
        st.progress(min(max(float(record.phase.get("progress") or 0.0), 0.0), 1.0))
    _figures(record)
    _compiling(record.phase)
    _troubles(record)
    _taken_up(run_id)
    _changes(run_id)
    if record.state == "failed":
        _failure(run_id)
    elif record.state == "interrupted":
        told = _ended(run_id)
        reason = told.get("reason") or "The process that trained this run ended without finishing it."
        st.warning(escaped(f"{reason} {told.get('fix') or ''}"), icon=":material/power_off:")
    elif not record.is_active and (early := _last(run_id, "EndedEarly")):
        st.info(escaped(early["why"]), icon=":material/flag:")


def _is_under_way(record: RunRecord) -> bool:
    """Whether it has begun and holds its device."""
    return record.state == "running" or (record.state == "paused" and not record.is_parked)


def _changes(run_id: str) -> None:
    """The last answers to what was asked of the run."""
    lines = []
    for event in services().store.events(run_id, kinds=("Tweaked", "TweakRefused"))[-3:]:
        payload = event.payload
        if event.kind == "Tweaked":
            words = f"{tweak_in_words(payload['what'], payload['after'])} from step {payload['step']:,} on"
            lines.append(f":material/tune: {words[:1].upper()}{words[1:]}, before {payload['before']:.3g}")
        else:
            lines.append(f":material/block: {payload['what']} stays: {escaped(payload['why'])}")
    if lines:
        # one below the other without the space between paragraphs: the charts are what people came for
        st.caption("  \n".join(lines))


def _troubles(record: RunRecord) -> None:
    """That no step ends, and that store or checkpoints can't be written, for as long as it is so."""
    store, run_id, now = services().store, record.run_id, time.time()
    if record.is_active and (why := store.trouble):
        st.warning(
            escaped(
                f"The run store can't be written: {why}. The run goes on, and what it tells is kept in memory and "
                "written when that can be done again; until then it is not shown here."
            ),
            icon=":material/disc_full:",
        )
    stuck = store.events(run_id, kinds=("Stuck",))[-1:]
    if stuck and record.state == "running" and stuck[0].at >= (record.started or 0.0):
        told, steps = stuck[0].payload, services().run_series(run_id).steps["step"]
        if not steps or steps[-1] <= told["step"]:
            lasts_s = max(0.0, now - stuck[0].at) + told["seconds"]
            st.warning(
                f"No step has ended for {seconds_in_words(lasts_s)}; one usually takes "
                f"{seconds_in_words(told['usual_s'])}. Stop saves it as soon as it is heard. Where it hangs for good, "
                "Abort ends a run that has a process of its own; one that shares the dashboard's ends with it. Either "
                "can be resumed from its last checkpoint.",
                icon=":material/hourglass_disabled:",
            )
    if failed := store.events(run_id, kinds=("CheckpointFailed",))[-1:]:
        which = failed[0].payload["which"]
        saved = store.events(run_id, after=failed[0].id, kinds=("CheckpointSaved",))
        if all(event.payload["which"] != which for event in saved):
            told = failed[0].payload
            st.warning(
                escaped(f"The checkpoint after step {told['step']:,} could not be kept: {told['why']}"),
                icon=":material/save:",
            )


def _taken_up(run_id: str) -> None:
    """From where a resumed run goes on, and what holds since."""
    if told := _last(run_id, "RunContinued"):
        st.caption(f":material/restart_alt: Taken up after step {told['step']:,}, in epoch {told['epoch']:,}.")
        for rule in told.get("rules") or []:
            st.caption(f"- {escaped(rule)}")


def _headline(record: RunRecord) -> str:
    if record.state == "paused":
        place = place_in_words({**record.phase, "detail": ""})
        return f"{place[:1].upper()}{place[1:]}"
    if record.is_active:
        return phase_in_words(record.phase or {"phase": "queued"})
    if record.started and record.ended:
        return f"after {seconds_in_words(record.ended - record.started)}"
    return "before it began"


def _figures(record: RunRecord) -> None:
    series = services().run_series(record.run_id)
    best = series.best_epoch()
    now = time.time()
    began = record.started or record.created
    last_loss = series.last("loss")
    # the clock may have been put back since the run began
    until = record.ended or (None if record.state == "queued" else record.last_seen) or now
    figures = {
        "Training loss": "–" if last_loss is None else f"{last_loss:.3f}",
        "Elapsed": seconds_in_words(max(0.0, until - began)),
    }
    if record.is_active:
        figures["Time left"] = seconds_in_words(record.phase.get("eta_s"))
    else:
        throughput = series.last("throughput")
        figures["Images/s"] = "–" if throughput is None else f"{throughput:,.1f}"
    with st.container(horizontal=True, horizontal_alignment="distribute"):
        st.metric(
            "Best validation top-1", percent(best["val_top1"] if best else None),
            f"epoch {best['epoch']}" if best else None, delta_color="off", delta_arrow="off", width=METRIC_WIDTH,
        )  # fmt: skip
        for title, value in figures.items():
            st.metric(title, value, width=METRIC_WIDTH)
    if _is_under_way(record) and record.heartbeat is not None:
        age = max(0.0, now - record.heartbeat)
        st.caption(f"Last sign of life {seconds_in_words(age)} ago")
        if age > SILENT_AFTER_S:
            st.warning("The trainer is silent: it compiles, or it hangs.", icon=":material/hourglass_empty:")


def _compiling(phase: dict[str, Any]) -> None:
    """Programs compiled so far, and what should not have been: a program late in the run, work left to the host."""
    if count := phase.get("compile_count"):
        programs = f"{count} program{'s' if count > 1 else ''}"
        st.caption(f"Compiled {programs} in {seconds_in_words(phase.get('compile_s'))}")
    if phase.get("recompiled"):
        words = str(phase["recompiled"])
        st.warning(f"{words[:1].upper()}{words[1:]}.", icon=":material/build:")
    if ops := phase.get("fallbacks"):
        st.warning(
            f"This device has no form of its own for {', '.join(ops)} of this model: the host computes it in every "
            "step, which is slow. The figures are right all the same.",
            icon=":material/speed:",
        )


def _last(run_id: str, kind: str) -> dict[str, Any]:
    """What the run's last event of this kind told; empty where there is none."""
    events = services().store.events(run_id, kinds=(kind,))
    return events[-1].payload if events else {}


def _ended(run_id: str) -> dict[str, Any]:
    """What the run told last; empty where it died without a word."""
    return _last(run_id, "RunEnded")


def _failure(run_id: str) -> None:
    told = _ended(run_id)
    reason = told.get("reason") or "The run failed without a word."
    st.error(escaped(f"{reason} {told.get('fix') or ''}"), icon=":material/error:")
    if told.get("traceback"):
        with st.expander("Traceback"):
            st.code(told["traceback"], language="text")
