"""What limits a comparison: too few repeats, and repeats that differ in more than what is compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.analysis.repeats import Cell, Repeat, config_of, start_of, text_of
from core.analysis.statistics import ADVISED_REPEATS, MIN_REPEATS
from core.storage.records import ENDED_STATES
from core.words import counted

_FACTS = ("torch", "torchvision", "torch_xla", "timm", "threads", "precision", "matmul_precision")


def limits(cells: Sequence[Cell], base: str, title: str) -> list[str]:
    """Sentences for people, most telling first.

    Args:
        base: the label that the others are compared with.
        title: of the measure.
    """
    return [
        *(warning for cell in cells for warning in _cell_warnings(cell, title)),
        *_label_warnings(cells, base),
        *_machine_warnings(cells),
    ]


def _cell_warnings(cell: Cell, title: str) -> Iterable[str]:
    n, few = len(cell.counted), f"{cell.name}: {counted(len(cell.counted), 'repeat')}"
    if n < MIN_REPEATS:
        yield f"{few}; at least {MIN_REPEATS} are needed to say anything, {ADVISED_REPEATS} are advised."
    elif n < ADVISED_REPEATS:
        yield f"{few}; {ADVISED_REPEATS} are advised, the interval is wide with fewer."
    if going_on := cell.count(lambda repeat: repeat.state not in ENDED_STATES):
        yield f"{cell.name}: {counted(going_on, 'repeat')} not ended yet, left out."
    if unknown := cell.count(lambda repeat: repeat.state == "finished") - n:
        others = ": the figures hold for the others only" if n else ""
        yield f"{cell.name}: {counted(unknown, 'repeat')} without {title}, left out{others}."
    companies = [company for repeat in cell.counted if (company := (repeat.summary or {}).get("company"))]
    if companies:
        names = ", ".join(dict.fromkeys(other["name"] for company in companies for other in company))
        yield f"{cell.name}: {counted(len(companies), 'repeat')} shared the machine with other runs: {names}."
    if differing := _differing(_values_by_fact(cell.counted)):
        yield f"{cell.name}: the repeats differ in {', '.join(differing)}."
    true_starts = [start_of(repeat.summary) for repeat in cell.counted if repeat.summary]
    if cell.start == "cold" and (not_cold := true_starts.count("warm")):
        yield f"{cell.name}: {counted(not_cold, 'repeat')} not cold: nothing was compiled and no image packed."
    if cell.start == "warm" and (not_warm := true_starts.count("cold")):
        yield f"{cell.name}: {counted(not_warm, 'repeat')} not warm: something was compiled or images were packed."


def _label_warnings(cells: Sequence[Cell], base: str) -> Iterable[str]:
    repeats: dict[str, list[Repeat]] = {}
    for cell in cells:
        repeats.setdefault(cell.label, []).extend(cell.counted)
    for label, mine in repeats.items():
        ours, theirs = _values_by_fact(mine), _values_by_fact(repeats.get(base, []))
        names = [name for name in ours if name in theirs and ours[name] != theirs[name]]
        told = [f"{name} ({' or '.join(ours[name])} / {' or '.join(theirs[name])})" for name in names]
        if "device" in names:
            # which device it is named is no difference of its own
            rest = [text for name, text in zip(names, told, strict=True) if name not in ("device", "device name")]
            if rest:
                yield f"{label} and {base} also differ in: {', '.join(rest)}."
        elif len(names) > 1:
            yield f"{label} and {base} differ in more than one thing: {', '.join(told)}."


def _machine_warnings(cells: Sequence[Cell]) -> Iterable[str]:
    labels: dict[str, dict[str, None]] = {}
    for cell in cells:
        for repeat in cell.counted:
            facts = (repeat.summary or {}).get("environment", {})
            if "cpu" in facts:
                machine = f"{facts['cpu']} with {facts['cores']} cores"
                labels.setdefault(machine, {})[cell.label] = None
    if len(labels) > 1:
        told = "; ".join(f"{machine} ({', '.join(names)})" for machine, names in labels.items())
        yield f"The repeats ran on different machines: {told}."


def _values_by_fact(repeats: Sequence[Repeat]) -> dict[str, list[str]]:
    """Config field or fact of the environment to the values that it has in `repeats`, sorted.

    What was measured stands for what was asked: precision auto is the precision that it came to.
    """
    values: dict[str, set[str]] = {}
    for repeat in repeats:
        if repeat.summary:
            environment = repeat.summary["environment"]
            facts = {name: environment[name] for name in _FACTS if name in environment}
            told = {**config_of(repeat.summary), "device name": repeat.summary["device"]["name"], **facts}
            for name, value in told.items():
                values.setdefault(name, set()).add(text_of(value))
    return {name: sorted(texts) for name, texts in values.items()}


def _differing(values: dict[str, list[str]]) -> list[str]:
    return [f"{name} ({', '.join(texts)})" for name, texts in values.items() if len(texts) > 1]
