"""How long the run in the form will take, as far as it is known, and the way to find out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from core.analysis.forecast import SAME, forecast_for
from core.analysis.summary import summarise
from core.config import RunConfig
from core.devices import resolve_kind
from core.errors import AppError
from core.events import ForecastMade
from core.storage.records import RunRecord
from core.words import forecast_in_words
from ui.probes import follow_probe, start_probe
from ui.registry import services
from ui.words import escaped

Job = tuple[Any, ...]


def job_of(config: RunConfig) -> Job:
    """What two runs share when one of them tells how long the other takes; their epochs may differ."""
    return tuple(getattr(config, name) for name in SAME)


def newest_state(records: Sequence[RunRecord]) -> str:
    """Another text whenever a run or a probe came or ended."""
    return str(hash(tuple((record.run_id, record.state) for record in records)))


def forecast_of(config: RunConfig, state: str) -> ForecastMade | None:
    """The store's forecast for a config on a device that is there; remembered while `state` stays the same.

    Raises:
        DeviceError: the device is not there.
    """
    kind = resolve_kind(config.device)
    return _forecast(str(services().store.home), job_of(config), config.epochs, kind, state, config)


@st.cache_data(max_entries=200, show_spinner=False)
def _forecast(home: str, job: Job, epochs: int, kind: str, state: str, _config: RunConfig) -> ForecastMade | None:
    return forecast_for(services().store, _config, kind)


def draw_forecast(config: RunConfig, is_ready: bool) -> None:
    """The forecast in words, or a button that lets a few steps be timed first.

    Args:
        is_ready: whether such a run could be started.
    """
    try:
        records = services().store.list_runs(with_probes=True)
        forecast = forecast_of(config, newest_state(records))
    except AppError:
        return  # the page says why it can't be started
    st.caption("How long it will take")
    if forecast is not None:
        st.markdown(f":material/timer: {escaped(forecast_in_words(forecast))}")
        return
    kind = resolve_kind(config.device)
    probe = next(
        (
            record
            for record in records
            if record.purpose == "probe"
            and not record.work
            and job_of(record.config) == job_of(config)
            and (record.device_kind or resolve_kind(record.config.device)) == kind
        ),
        None,
    )
    if probe is not None and probe.is_active:
        st.fragment(follow_probe, run_every=0.5)(
            probe.run_id, words="A few steps are being timed. {where}.", shown=("phase",), key="stop_probe"
        )
        return
    if probe is not None and probe.state in ("failed", "interrupted"):
        told = summarise(services().store, probe.run_id)
        words = f"{told['reason'] or 'Timing was interrupted.'} {told['fix']}".strip()
        st.markdown(f":red[:material/error:] {escaped(words)}")
    else:
        st.markdown("No run like this one has ended here yet.")
    st.button(
        "Time a few steps first", icon=":material/timer:", key="start_probe", disabled=not is_ready,
        on_click=start_probe, args=(config,), help="Some steps are trained and timed, and nothing of them is kept.",
    )  # fmt: skip
