"""The range test on the Train page: asked for, followed, drawn, and its learning rate taken into the form."""

from __future__ import annotations

import streamlit as st

from core.analysis.summary import summarise
from core.config import RunConfig
from core.storage.records import RunRecord
from core.trials.lr_curve import range_figure, same_test, suggestion_in_words
from core.trials.lr_finder import WORK
from core.words import lr_in_words
from ui import forms
from ui.probes import follow_probe, start_probe
from ui.registry import services
from ui.words import escaped

HELP = (
    "About 100 steps are trained, each with a higher learning rate than the one before, and nothing of them is kept. "
    "The loss falls most quickly at a good rate."
)


def draw_lr_finder(config: RunConfig | None, is_ready: bool) -> None:
    """A button that starts a range test of the form's run, or how far it is, or what it said.

    Args:
        config: of the form; None where a field is out of its limits.
        is_ready: whether such a run could be started.
    """
    test = newest_test(config) if config is not None else None
    if test is not None and test.is_active:
        st.fragment(follow_probe, run_every=0.5)(
            test.run_id, words="Learning rates are being tried. {where}", shown=("phase", "detail"), key="stop_lr"
        )
        return
    st.button(
        "Find a learning rate", icon=":material/search_insights:", key="find_lr", help=HELP,
        disabled=not is_ready or config is None, on_click=start_probe, args=(config, WORK),
    )  # fmt: skip
    if test is not None:
        _draw_told(test)


def newest_test(config: RunConfig) -> RunRecord | None:
    """The newest range test that tells of a run of this config; None where there is none."""
    records = services().store.list_runs(with_probes=True)
    return next((record for record in records if record.work == WORK and same_test(record.config, config)), None)


def _draw_told(test: RunRecord) -> None:
    summary = summarise(services().store, test.run_id, with_machine=False)
    told = summary["range_test"]
    if told is None:
        if test.state != "stopped":
            words = f"{summary['reason'] or 'The test was interrupted.'} {summary['fix']}".strip()
            st.markdown(f":red[:material/error:] {escaped(words)}")
        return
    st.plotly_chart(range_figure(told), key=f"range_{test.run_id}", config={"displayModeBar": False})
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(escaped(suggestion_in_words(told)))
        for name, kind in (("suggestion", "primary"), ("careful", "secondary")):
            if told[name] is not None and (name == "suggestion" or told[name] < told["suggestion"]):
                st.button(
                    f"Use {lr_in_words(told[name])}", key=f"use_{name}", type=kind, on_click=_use, args=(told[name],),
                    disabled=st.session_state[forms.key_of("lr")] == told[name],
                )  # fmt: skip


def _use(lr: float) -> None:
    st.session_state[forms.key_of("lr")] = lr
