"""The figures of runs as tables for other programs: one row a step, an epoch or a phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import islice
from typing import TYPE_CHECKING, Any

from core.analysis.summary import EPOCH_KEYS, summarise
from core.events import EpochEnded, Phases, StepLogged
from core.store import Store

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
RUN_COLUMNS = {"run_id": "string", "name": "string", "device": "string"}
"""What each table begins with."""

_TYPES = {"int": "Int64", "str": "string"}
STEP_COLUMNS = {field.name: _TYPES.get(str(field.type), "float64") for field in fields(StepLogged)}
PIECE = 20_000
"""Logged steps that are made a table of at once."""
EPOCH_COLUMNS = {
    **{
        field.name: _TYPES.get(str(field.type), "float64")
        for field in fields(EpochEnded)
        if field.name in EPOCH_KEYS and field.name not in ("phases", "left_out")
    },
    "settled_steps": "Int64",
    "left_out_steps": "Int64",
    **dict.fromkeys(Phases.__dataclass_fields__, "float64"),
}
PHASE_COLUMNS = {"part": "string", "phase": "string", "seconds": "float64"}


def run_tables(store: Store, run_ids: Sequence[str]) -> dict[str, pd.DataFrame]:
    """The logged steps, the epochs and the phases of runs, in the order of `run_ids`; what isn't known is missing.

    A step or an epoch that was trained again after a resume is there once, as trained last.

    Returns:
        `epochs` and `steps`, columns as in the JSON files, the phases of an epoch beside it; and `phases`: `part` is
        set-up (whose phases are its parts), epoch 1, epoch 2 ... or run.

    Raises:
        StoreError: one of the runs is not there.
    """
    summaries = [summarise(store, run_id) for run_id in run_ids]
    return {
        "epochs": _frame(summaries, EPOCH_COLUMNS, _epoch_rows),
        "steps": _joined([_steps(store, summary) for summary in summaries]),
        "phases": _frame(summaries, PHASE_COLUMNS, _phase_rows),
    }


def as_csv(frame: pd.DataFrame) -> str:
    """Comma-separated, with a header, without row numbers; what is missing is empty."""
    text: str = frame.to_csv(index=False, lineterminator="\n")
    return text


def as_parquet(frame: pd.DataFrame) -> bytes:
    """A Parquet file, types included."""
    content: bytes = frame.to_parquet(engine="pyarrow", index=False)
    return content


def _frame(summaries: Iterable[Row], columns: dict[str, str], rows_of: Callable[[Row], Iterable[Row]]) -> pd.DataFrame:
    import pandas as pd

    rows = [
        {"run_id": summary["run_id"], "name": summary["name"], "device": summary["device"]["kind"], **row}
        for summary in summaries
        for row in rows_of(summary)
    ]
    types = RUN_COLUMNS | columns
    return pd.DataFrame(rows, columns=list(types)).astype(types)


def _epoch_rows(summary: Row) -> Iterator[Row]:
    for epoch in summary["epochs"]:
        yield {**epoch, **epoch["phases"], "left_out_steps": sum(epoch["left_out"].values())}


def _steps(store: Store, summary: Row) -> pd.DataFrame:
    """Put together from pieces: a million rows as objects would take gigabytes."""
    events = store.iter_events(summary["run_id"], ("StepLogged",))
    pieces = iter(lambda: [event.payload for event in islice(events, PIECE)], [])
    return (
        _joined([_step_frame(summary, rows) for rows in pieces])
        .drop_duplicates("step", keep="last")
        .sort_values("step", ignore_index=True)
    )


def _step_frame(summary: Row, rows: Sequence[Row]) -> pd.DataFrame:
    return _frame([summary], STEP_COLUMNS, lambda _: rows)


def _joined(pieces: Sequence[pd.DataFrame]) -> pd.DataFrame:
    import pandas as pd

    return pd.concat([_frame([], STEP_COLUMNS, lambda _: []), *pieces], ignore_index=True)


def _phase_rows(summary: Row) -> Iterator[Row]:
    parts = {
        "set-up": summary["setup_parts"],
        **{f"epoch {epoch['epoch']}": epoch["phases"] for epoch in summary["epochs"]},
        "run": summary["phases"],
    }
    for part, phases in parts.items():
        for phase, seconds in phases.items():
            yield {"part": part, "phase": phase.removesuffix("_s"), "seconds": seconds}
