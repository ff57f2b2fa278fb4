"""What a run came to: one dict a run, one row a run, and files for other programs."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from core.config import AUTO
from core.events import Phases
from core.machine.telemetry import summary_of
from core.series import best_index, finite
from core.storage.records import RunRecord, StoredEvent
from core.storage.step_blocks import Columns
from core.store import Store
from core.training.step_times import StepTimes

EPOCH_KEYS = (
    "epoch",
    "train_loss",
    "train_top1",
    "val_loss",
    "val_top1",
    "val_top5",
    "seconds",
    "images_per_s",
    "phases",
    "lr",
    "compile_count",
    "settled_steps",
    "left_out",
    "device_idle_s",
)
EPOCH_TITLES = {
    "epoch": "Epoch",
    "train_loss": "Training loss",
    "train_top1": "Training top-1 (%)",
    "val_loss": "Validation loss",
    "val_top1": "Validation top-1 (%)",
    "val_top5": "Validation top-5 (%)",
    "seconds": "Seconds",
    "images_per_s": "Images/s",
}
CSV_COLUMNS = (
    "row",
    "epoch",
    "step",
    "train_loss",
    "train_top1",
    "val_loss",
    "val_top1",
    "val_top5",
    "lr",
    "seconds",
    "images",
    "images_per_s",
    "compiles",
    *Phases.__dataclass_fields__,
)
_SUMMARY_KINDS = (
    "CacheBuilt", "EndedEarly", "EpochEnded", "ForecastMade", "HostFallback", "ProbeMeasured", "ProgramCompiled",
    "RangeTested", "RanBeside", "RunContinued", "RunEnded", "RunPrepared", "Tweaked",
)  # fmt: skip


def summarise(store: Store, run_id: str, *, with_machine: bool = True) -> dict[str, Any]:
    """A run as the command line prints it; plain JSON values, also of a run that goes on or was killed.

    Times are seconds, accuracies percent, `created` Unix time; what isn't known (yet) is None, a figure that
    was not finite too. A resumed run sums the times of its parts; a part that was killed counts its epochs.

    Args:
        with_machine: `machine` is None without it: of a long run there are many samples to read.

    Raises:
        StoreError: there is no such run.
    """
    record = store.get_run(run_id)
    events = store.events(run_id, kinds=_SUMMARY_KINDS)
    prepared: dict[str, Any] = _last(events, "RunPrepared") or {}
    ended = _last(events, "RunEnded")
    epochs = _epochs(events)
    phases, count, compile_s = _times(events)
    failed = record.state in ("failed", "interrupted") and ended is not None
    return {
        "run_id": record.run_id,
        "name": record.name,
        "state": record.state,
        "created": record.created,
        "config": record.config.model_dump(),
        "device": {
            "kind": prepared.get("device_kind") or record.device_kind or record.config.device,
            "name": prepared.get("device_name", ""),
        },
        "purpose": record.purpose,
        "forked_from": record.forked_from,
        "script": record.script,
        "epochs": epochs,
        "best": _best(epochs),
        "total_s": _total_s(record, events),
        "phases": asdict(phases),
        "compile": {"count": count, "seconds": compile_s},
        "is_warm": ended["is_warm"] if ended and "is_warm" in ended else None,
        "cache": _cache(events),
        "step_times": _step_times(events),
        "machine": _machine(store, run_id) if with_machine else None,
        "forecast": _last(events, "ForecastMade"),
        "probe": _last(events, "ProbeMeasured"),
        "range_test": _last(events, "RangeTested"),
        "programs": [event.payload for event in events if event.kind == "ProgramCompiled"],
        "host_fallbacks": sorted(
            {op for event in events if event.kind == "HostFallback" for op in event.payload["ops"]}
        ),
        "num_train": prepared.get("num_train"),
        "num_val": prepared.get("num_val"),
        "classes": prepared.get("classes", []),
        "num_params": prepared.get("num_params"),
        "num_trainable": prepared.get("num_trainable"),
        "image_size": prepared.get("image_size"),
        "batch_size": prepared.get("environment", {}).get("batch_size") or record.config.batch_size or None,
        "steps_per_epoch": prepared.get("steps_per_epoch"),
        "setup_parts": prepared.get("setup_parts", {}),
        "environment": prepared.get("environment", {}),
        "data": prepared.get("data", {}),
        "reason": ended["reason"] if failed and ended else "",
        "fix": ended["fix"] if failed and ended else "",
        "error": ended["error"] if failed and ended else "",
        "planned_epochs": _planned_epochs(record, events),
        "tweaks": [event.payload for event in events if event.kind == "Tweaked"],
        "ended_early": (_last(events, "EndedEarly") or {"why": ""})["why"],
        "company": list(
            {event.payload["run_id"]: event.payload for event in events if event.kind == "RanBeside"}.values()
        ),
        "note": record.note,
        "tags": record.tags,
    }


def _planned_epochs(record: RunRecord, events: list[StoredEvent]) -> int:
    """How many epochs the run is to have, by its config or as was asked for last while it went on."""
    tweaks = [event.payload for event in events if event.kind == "Tweaked"]
    asked = [tweak["after"] for tweak in tweaks if tweak["what"] == "epochs"]
    return int(asked[-1]) if asked else record.config.epochs


def told_config(summary: dict[str, Any]) -> dict[str, Any]:
    """A run's config for people: a batch size that was found is told with what it came to."""
    config: dict[str, Any] = summary["config"]
    if config.get("batch_size") != 0:
        return config
    return {**config, "batch_size": f"auto: {summary['batch_size']}" if summary.get("batch_size") else AUTO}


def list_rows(store: Store) -> list[dict[str, Any]]:
    """All runs, newest first, a flat dict each; `val_top1` holds the validation top-1 of each epoch."""
    rows = []
    records = store.list_runs()
    run_ids = [record.run_id for record in records]
    told = store.glance(run_ids, {"RunPrepared": ("device_kind",), "RunEnded": ("total_s",)})
    epochs = store.columns_of_all(run_ids, "EpochEnded")
    for record in records:
        events = told[record.run_id]
        prepared: dict[str, Any] = _last(events, "RunPrepared") or {}
        scores = _scores(epochs[record.run_id])
        best = best_index(scores)
        rows.append(
            {
                "run_id": record.run_id,
                "name": record.name,
                "state": record.state,
                "model": record.config.model,
                "data": record.config.data,
                "device": prepared.get("device_kind") or record.device_kind or record.config.device,
                "best_val_top1": None if best is None else scores[best],
                "total_s": _total_s(record, events),
                "created": record.created,
                "val_top1": scores,
                "tags": record.tags,
            }
        )
    return rows


def export_json(store: Store, run_id: str) -> str:
    """The run's summary with its logged steps under `steps`, a line each, as one JSON object without NaN.

    Raises:
        StoreError: there is no such run.
    """
    summary = json.dumps(summarise(store, run_id), indent=2, allow_nan=False).removesuffix("\n}")
    steps = ",\n    ".join(json.dumps(event.payload) for event in store.iter_events(run_id, ("StepLogged",)))
    return f'{summary},\n  "steps": [\n    {steps}\n  ]\n}}\n'


def export_csv(store: Store, run_id: str) -> str:
    """The run's steps and epochs in the order in which they came; column `row` is step or epoch.

    Raises:
        StoreError: there is no such run.
    """
    store.get_run(run_id)
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for event in store.iter_events(run_id, ("StepLogged", "EpochEnded")):
        payload = event.payload
        if event.kind == "StepLogged":
            loss, top1 = payload["loss"], payload["top1"]
            writer.writerow({"row": "step", **payload, "train_loss": loss, "train_top1": top1})
        else:
            compiles = payload.get("compile_count")
            writer.writerow({"row": "epoch", **payload, **payload["phases"], "compiles": compiles})
    return text.getvalue()


def _scores(epochs: Columns) -> list[float | None]:
    """Validation top-1 by epoch; one that was trained again after a resume counts once, as trained last."""
    by_epoch = dict(zip(epochs["epoch"].tolist(), epochs["val_top1"].tolist(), strict=True))
    return [finite(by_epoch[epoch]) for epoch in sorted(by_epoch)]


def _last(events: list[StoredEvent], kind: str) -> dict[str, Any] | None:
    return next((event.payload for event in reversed(events) if event.kind == kind), None)


def _machine(store: Store, run_id: str) -> dict[str, Any] | None:
    return summary_of(store.columns(run_id, "MachineSampled"))


def _epochs(events: list[StoredEvent]) -> list[dict[str, Any]]:
    """An epoch that was trained again after a resume counts once, as trained last."""
    epochs = {
        event.payload["epoch"]: {
            **event.payload,
            "settled_steps": sum(event.payload.get("step_times", {}).values()),
            "left_out": event.payload.get("left_out", {}),
        }
        for event in events
        if event.kind == "EpochEnded"
    }
    return [{key: epochs[number].get(key) for key in EPOCH_KEYS} for number in sorted(epochs)]


def _cache(events: list[StoredEvent]) -> dict[str, Any] | None:
    built = [event.payload for event in events if event.kind == "CacheBuilt" and event.payload["images"]]
    if not built:
        return None
    return {"images": sum(told["images"] for told in built), "seconds": sum(told["seconds"] for told in built)}


def _step_times(events: list[StoredEvent]) -> dict[str, Any] | None:
    """Over all epochs: what `StepTimes.summary` gives, and how many steps were left out of it, by reason."""
    epochs = [event.payload for event in events if event.kind == "EpochEnded"]
    summary = StepTimes(epoch.get("step_times", {}) for epoch in epochs).summary()
    if summary is None:
        return None
    left_out: Counter[str] = Counter()
    for epoch in epochs:
        left_out.update(epoch["left_out"])
    return {**summary, "left_out": dict(left_out)}


def _best(epochs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first epoch with the highest validation top-1; None before the first epoch ends."""
    index = best_index([epoch["val_top1"] for epoch in epochs])
    return None if index is None else {key: epochs[index][key] for key in ("epoch", "val_top1")}


def _parts(events: list[StoredEvent]) -> list[list[StoredEvent]]:
    """The events of each start of the run: a RunContinued but for the first, a RunPrepared and, unless it was killed,
    a RunEnded.
    """
    parts: list[list[StoredEvent]] = []
    is_open = is_prepared = False
    for event in events:
        if not is_open or (event.kind in ("RunContinued", "RunPrepared") and is_prepared):
            parts.append([])
            is_prepared = False
        parts[-1].append(event)
        is_prepared = is_prepared or event.kind == "RunPrepared"
        is_open = event.kind != "RunEnded"
    return parts


def _times(events: list[StoredEvent]) -> tuple[Phases, int, float]:
    phases, count, compile_s = Phases(), 0, 0.0
    for part in _parts(events):
        ended = _last(part, "RunEnded")
        if ended:
            phases += Phases(**ended["phases"])
            count += ended["compile_count"]
            compile_s += ended["compile_s"]
        else:
            epochs = [event.payload for event in part if event.kind == "EpochEnded"]
            done = sum((Phases(**epoch["phases"]) for epoch in epochs), Phases())
            done -= sum((Phases(**epoch.get("earlier", {})) for epoch in epochs), Phases())
            phases += done
            count += sum(epoch["compile_count"] for epoch in epochs)
            compile_s += done.compile_s
    return phases, count, compile_s


def _total_s(record: RunRecord, events: list[StoredEvent]) -> float | None:
    begun_or_ended = [event for event in events if event.kind in ("RunPrepared", "RunEnded")]
    if not record.is_active and begun_or_ended and begun_or_ended[-1].kind == "RunEnded":
        told = [event.payload["total_s"] for event in begun_or_ended if event.kind == "RunEnded"]
        if len(told) == len(_parts(begun_or_ended)):
            return float(sum(told))
    until = record.ended or record.heartbeat
    return max(0.0, until - record.started) if record.started and until else None
