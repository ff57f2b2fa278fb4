"""The queue: what trains beside the run on the page, what waits and for what, and its order."""

from __future__ import annotations

from typing import Any

import streamlit as st

from core.errors import AppError
from core.running.waiting import Entry, entries_of, take_out
from core.storage.records import RunRecord
from core.words import counted
from ui.registry import services
from ui.words import escaped, phase_in_words

MOST_SHOWN = 20
_SAID_KEY = "queue_said"
MOVES = (
    ("first", "Start next", "vertical_align_top"),
    ("up", "Up", "arrow_upward"),
    ("down", "Down", "arrow_downward"),
)  # fmt: skip


def show_queue(run_id: str) -> None:
    """Draw the queue and what trains beside this run; nothing where there is neither."""
    if said := st.session_state.pop(_SAID_KEY, ""):
        st.toast(escaped(said))
    others = [record for record in services().store.under_way() if record.run_id != run_id]
    entries = entries_of(services().store)
    for record in others:
        _draw_other(record)
    if not entries:
        return
    with st.expander(f"Queue: {queue_in_words(entries)}", icon=":material/queue:", expanded=True, key="queue"):
        for number, entry in enumerate(entries[:MOST_SHOWN], start=1):
            _draw_entry(entry, number, len(entries), is_here=any(run.run_id == run_id for run in entry.runs))
        more = f"{len(entries) - MOST_SHOWN} more stand behind these. " if len(entries) > MOST_SHOWN else ""
        st.caption(f"{more}Each trains with the options that it was queued with, whatever the form says since.")


def queue_in_words(entries: list[Entry]) -> str:
    """ "1 run waits", "5 runs wait" """
    count = sum(len(entry.runs) for entry in entries)
    return f"{counted(count, 'run')} wait{'s' if count == 1 else ''}"


def queue_line() -> None:
    """In one line how many runs a new one would stand behind; nothing where the queue is empty."""
    if entries := entries_of(services().store):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f":material/queue: {queue_in_words(entries)}.")
            st.page_link("../pages/live.py", label="See the queue")


def _draw_other(record: RunRecord) -> None:
    words = "A probe" if record.purpose == "probe" else f"**{escaped(record.name)}**"
    with st.container(horizontal=True, vertical_alignment="center", wrap=False):
        st.markdown(
            f":material/sync: {words} :gray-badge[{record.device_kind}] {escaped(phase_in_words(record.phase))}",
            width="stretch",
        )
        if record.purpose != "probe":
            st.page_link(
                "../pages/live.py", label="Show", icon=":material/monitoring:", query_params={"run": record.run_id}
            )  # fmt: skip


def _draw_entry(entry: Entry, number: int, total: int, *, is_here: bool) -> None:
    kinds = " ".join(f":gray-badge[{kind}]" for kind in entry.kinds)
    more = f" · {counted(len(entry.runs), 'run')}" if len(entry.runs) > 1 else ""
    here = " · this run" if is_here else ""
    with st.container(horizontal=True, vertical_alignment="center", wrap=False, key=f"queued_{entry.entry_id}"):
        st.markdown(
            f"{number}\\. **{escaped(entry.name)}**{more}{here} {kinds}  \n:small[:gray[{escaped(entry.waits_for)}]]",
            width="stretch",
        )
        with st.container(horizontal=True, width="content", wrap=False, gap="small"):
            for to, words, icon in MOVES if total > 1 else ():
                is_there = number == (total if to == "down" else 1)
                _button(entry, to, words, icon, _move, disabled=is_there)
            _button(entry, "remove", "Take out of the queue", "close", _remove)


def _button(entry: Entry, to: str, words: str, icon: str, act: Any, *, disabled: bool = False) -> None:
    st.button(
        "", icon=f":material/{icon}:", key=f"queue_{to}_{entry.entry_id}", help=words, type="tertiary",
        disabled=disabled, on_click=act, args=(entry.entry_id, to),
    )  # fmt: skip


def _move(entry_id: str, to: str) -> None:
    try:
        services().store.move(entry_id, to)
    except AppError as error:
        _say(str(error))
    else:
        services().worker.wake()


def _remove(entry_id: str, to: str) -> None:
    try:
        count = take_out(services().store, entry_id)
    except AppError as error:
        _say(str(error))
    else:
        _say(f"{counted(count, 'run')} taken out of the queue.")
        services().worker.wake()


def _say(words: str) -> None:
    # a callback of a fragment may draw nothing itself
    st.session_state[_SAID_KEY] = words
