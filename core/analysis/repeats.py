"""What is compared: runs with a label and a start, and those that belong together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

STARTS = {"cold": "cold", "warm": "warm", "": "not known"}
NOT_COMPARED = ("seed", "process", "caches")
"""Options in which repeats of one config may differ."""


@dataclass(frozen=True)
class Repeat:
    """One run of a group. start: "cold", "warm" or "" (not known); phases may be empty."""

    label: str
    start: str
    run_id: str
    state: str
    total_s: float | None
    phases: dict[str, float]
    epochs: list[dict[str, Any]]
    summary: dict[str, Any] | None = None


@dataclass(frozen=True)
class RunGroup:
    """Repeats to compare, labelled by what differs; `note` says what is to be known of them, as a source."""

    group_id: str
    name: str
    repeats: list[Repeat]
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """The repeats of one label and start; `counted` are those that finished and have the measure."""

    label: str
    start: str
    repeats: list[Repeat] = field(default_factory=list)
    counted: list[Repeat] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.label}, {self.start}" if self.start else self.label

    def count(self, is_meant: Callable[[Repeat], bool]) -> int:
        """Its repeats for which this holds."""
        return sum(map(is_meant, self.repeats))


def group_of(
    name: str,
    summaries: Sequence[dict[str, Any]],
    labels: Sequence[str],
    starts: Sequence[str],
    group_id: str = "",
    note: str = "",
) -> RunGroup:
    """A group of runs, each with its summary (see `summarise`), label and start."""
    repeats = [
        Repeat(
            label=label,
            start=start,
            run_id=summary["run_id"],
            state=summary["state"],
            total_s=summary["total_s"],
            phases=summary["phases"],
            epochs=summary["epochs"],
            summary=summary,
        )
        for summary, label, start in zip(summaries, labels, starts, strict=True)
    ]
    return RunGroup(group_id, name, repeats, note)


def label_of(summaries: Sequence[dict[str, Any]], fields: Sequence[str] | None = None) -> list[str]:
    """A label a run: "cpu" where runs differ in the device only, else as "device cpu, precision bf16".

    Args:
        fields: the config fields to name; None: those in which the runs differ.
    """
    configs = [config_of(summary) for summary in summaries]
    if fields is None:
        names = dict.fromkeys(name for config in configs for name in config)
        fields = [name for name in names if len({text_of(config.get(name)) for config in configs}) > 1]
    if list(fields) in ([], ["device"]):
        return [text_of(config["device"]) for config in configs]
    return [", ".join(f"{name} {text_of(config.get(name))}" for name in fields) for config in configs]


def usual_epoch_s(epochs: Sequence[Mapping[str, Any]]) -> float | None:
    """Median seconds of the epochs after the first, which compiles and packs; of the first where there is no other."""
    seconds = [float(epoch["seconds"]) for epoch in epochs]
    return median(seconds[1:] or seconds) if seconds else None


def start_of(summary: dict[str, Any]) -> str:
    """ "warm", "cold", or "" where it isn't known."""
    return {True: "warm", False: "cold"}.get(summary["is_warm"], "")


def config_of(summary: dict[str, Any]) -> dict[str, Any]:
    """The run's config without what repeats may differ in; `device` is the kind that the run was on."""
    config = {name: value for name, value in summary["config"].items() if name not in NOT_COMPARED}
    # that was found where the config says automatic
    found = (summary.get("environment") or {}).get("batch_size") or config.get("batch_size")
    return {**config, "device": summary["device"]["kind"], "batch_size": found}


def text_of(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
