"""The part of the live page that refreshes by itself: where the run stands, and how it ended."""

from __future__ import annotations

import time
from typing import Any

import streamlit as st

from core.errors import StoreError
from core.records import RunRecord
from core.words import tweak_in_words
from ui.registry import services
from ui.words import STATE_COLOURS, STATE_WORDS, escaped, percent, phase_in_words, seconds_in_words

SILENT_AFTER_S = 60.0


def show_status(run_id: str, drawn_state: str) -> None:
    """Draw phase, progress, figures and Stop; rerun the page where the state is no longer `drawn_state`."""
    store = services().store
    try:
        record = store.get_run(run_id)
    except StoreError:
        st.rerun()
    if record.state != drawn_state:
        st.rerun()
    left, right = st.columns([5, 1], vertical_alignment="center")
    colour = STATE_COLOURS.get(record.state, "gray")
    left.markdown(f":{colour}-badge[{STATE_WORDS.get(record.state, record.state)}] {_headline(record)}")
    if record.is_active:
        _stop_button(right, run_id)
        st.progress(min(max(float(record.phase.get("progress") or 0.0), 0.0), 1.0))
    _figures(record)
    _compiling(record.phase)
    _changes(run_id)
    if record.state == "failed":
        _failure(run_id)
    elif record.state == "interrupted":
        told = _ended(run_id)
        reason = told.get("reason") or "The process that trained this run ended without finishing it."
        st.warning(f"{reason} {told.get('fix') or ''}".strip(), icon=":material/power_off:")


def _changes(run_id: str) -> None:
    """The last answers to what was asked of the run."""
    told = services().store.events(run_id, kinds=("Tweaked", "TweakRefused"))[-3:]
    for event in told:
        payload = event.payload
        if event.kind == "Tweaked":
            words = f"{tweak_in_words(payload['what'], payload['after'])} from step {payload['step']:,} on"
            st.caption(f":material/tune: {words[:1].upper()}{words[1:]}, before {payload['before']:.3g}")
        else:
            st.caption(f":material/block: {payload['what']} stays: {escaped(payload['why'])}")


def _headline(record: RunRecord) -> str:
    if record.is_active:
        return phase_in_words(record.phase or {"phase": "queued"})
    if record.started and record.ended:
        return f"after {seconds_in_words(record.ended - record.started)}"
    return "before it began"


def _stop_button(place: st.delta_generator.DeltaGenerator, run_id: str) -> None:
    key = f"stopping-{run_id}"
    is_stopping = bool(st.session_state.get(key))
    label = "Stopping" if is_stopping else "Stop"
    if place.button(label, icon=":material/stop:", disabled=is_stopping, width="stretch", key=f"stop-{run_id}"):
        try:
            services().store.request(run_id, "stop")
            st.session_state[key] = True
            st.toast("The run stops after the step it is in.")
        except StoreError as error:
            st.toast(f"{error.problem} {error.fix}")


def _figures(record: RunRecord) -> None:
    series = services().run_series(record.run_id)
    best = series.best_epoch()
    now = time.time()
    began = record.started or record.created
    columns = st.columns(4)
    columns[0].metric(
        "Best validation top-1",
        percent(best["val_top1"] if best else None),
        f"epoch {best['epoch']}" if best else None,
        delta_color="off",
        delta_arrow="off",
    )
    last_loss = series.last("loss")
    columns[1].metric("Training loss", "–" if last_loss is None else f"{last_loss:.3f}")
    columns[2].metric("Elapsed", seconds_in_words((record.ended or now) - began))
    if record.is_active:
        columns[3].metric("Time left", seconds_in_words(record.phase.get("eta_s")))
        if record.heartbeat is not None:
            age = now - record.heartbeat
            st.caption(f"Last sign of life {seconds_in_words(age)} ago")
            if age > SILENT_AFTER_S:
                st.warning("The trainer is silent: it compiles, or it hangs.", icon=":material/hourglass_empty:")
    else:
        throughput = series.last("throughput")
        columns[3].metric("Images/s", "–" if throughput is None else f"{throughput:,.1f}")


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


def _ended(run_id: str) -> dict[str, Any]:
    """What the run told last; empty where it died without a word."""
    ended = services().store.events(run_id, kinds=("RunEnded",))
    return ended[-1].payload if ended else {}


def _failure(run_id: str) -> None:
    told = _ended(run_id)
    reason = told.get("reason") or "The run failed without a word."
    st.error(f"{reason} {told.get('fix') or ''}".strip(), icon=":material/error:")
    if told.get("traceback"):
        with st.expander("Traceback"):
            st.code(told["traceback"], language="text")
