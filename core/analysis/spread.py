"""Why the repeats of a group differ, and why its labels do, in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy import stats

from core.analysis.diagnosis import LOADED_PERCENT, diagnose, multiplies_fp32_in_bf16
from core.analysis.findings import LEAST_S, PHASES, Finding, RunFacts
from core.analysis.repeats import Repeat, RunGroup
from core.analysis.statistics import MIN_REPEATS, ratio_of_means
from core.words import counted, listed, percent_in_words, phase_in_words, time_in_words

AGREE_PERCENT = 5.0
MIN_FOR_OUTLIERS = 5
"""Repeats: of fewer, the median deviation is that of one or two of them."""
_VERSIONS = ("python", "torch", "torchvision", "torch_xla", "libtpu", "timm", "gpu_driver", "cuda")
_MACHINE = ("cpu", "cores", "threads", "memory_gib")


def diagnose_group(group: RunGroup) -> list[Finding]:
    """What is to be known about the times of a group: what explains most seconds first, then remarks.

    Repeats that did not finish are named and left out. Empty for a group without repeats.
    """
    cells: dict[tuple[str, str], list[Repeat]] = {}
    for repeat in group.repeats:
        if repeat.state == "finished" and repeat.total_s:
            cells.setdefault((repeat.label, repeat.start), []).append(repeat)
    ordered = [sorted(cell, key=_total) for cell in cells.values()]
    found = [finding for cell in ordered for finding in _cell(cell)]
    found += [*_labels(ordered), *_unfinished(group), *_precision(ordered), *_single(ordered)]
    return sorted(found, key=lambda finding: (-finding.seconds, finding.rule == "agreement"))


def _cell(cell: list[Repeat]) -> Iterator[Finding]:
    """The repeats of one label and start, fastest first."""
    noisy = _outliers(cell)
    rest = [repeat for repeat in cell if repeat not in noisy]
    for repeat in noisy:
        yield _noisy(repeat, rest)
    if len(rest) > 1:
        yield _spread(rest, f"The {'other ' if noisy else ''}{len(rest)} repeats of {_name(rest)}")


def _spread(cell: list[Repeat], name: str) -> Finding:
    fast, slow = cell[0], cell[-1]
    whole_s = _total(slow) - _total(fast)
    percent = 100 * whole_s / _total(fast)
    figures: dict[str, float | int | str] = {"repeats": len(cell), "spread_percent": percent}
    if percent < AGREE_PERCENT:
        # rounded up, since "within" must hold
        return Finding("agreement", 0, f"{name} agree within {max(1, math.ceil(percent))} %.", "", "group", "", figures)
    phase, why, advice = _why(slow, fast)
    between = f"{time_in_words(_total(fast))} to {time_in_words(_total(slow))}"
    sentence = f"{name} differ by {percent_in_words(percent)} ({between}){why}"
    return Finding("spread", whole_s, sentence, advice, "group", phase, figures)


def _single(cells: list[list[Repeat]]) -> Iterator[Finding]:
    names = [_name(cell) for cell in cells if len(cell) == 1]
    if names:
        sentence = f"There is but one run of {listed(names)}, so that a spread isn't known."
        yield Finding("one_repeat", 0, sentence, f"Run at least {MIN_REPEATS} repeats of each.", "group")


def _outliers(cell: list[Repeat]) -> list[Repeat]:
    """Repeats that took far longer: beyond the median by 3 robust standard deviations, and by 5 %."""
    if len(cell) < MIN_FOR_OUTLIERS:
        return []
    totals = np.array([_total(repeat) for repeat in cell])
    median, deviation = np.median(totals), stats.median_abs_deviation(totals, scale="normal")
    limit = median + max(3 * deviation, AGREE_PERCENT / 100 * median)
    return [repeat for repeat in cell if _total(repeat) > limit]


def _noisy(repeat: Repeat, rest: list[Repeat]) -> Finding:
    middle = rest[len(rest) // 2]
    whole_s = _total(repeat) - _total(middle)
    phase, why, advice = _why(repeat, middle)
    percent = 100 * whole_s / _total(middle)
    sentence = (
        f"One repeat of {_name([repeat])} ({repeat.run_id}) is noisy: it took {time_in_words(_total(repeat))}, "
        f"{percent_in_words(percent)} longer than the middle one of the others ({time_in_words(_total(middle))}){why}"
    )
    figures: dict[str, float | int | str] = {"run_id": repeat.run_id, "above_percent": percent}
    return Finding("noisy_repeat", whole_s, sentence, advice, "group", phase, figures)


def _why(slow: Repeat, fast: Repeat) -> tuple[str, str, str]:
    """The phase in which most of the difference lies, the words that end the sentence with it, and advice."""
    if not slow.phases or not fast.phases:
        advice = "Run the same config here, where phases are recorded."
        return "", ". No phases were recorded, so that nothing can be said about its cause.", advice
    differences = {phase: slow.phases.get(f"{phase}_s", 0.0) - fast.phases.get(f"{phase}_s", 0.0) for phase in PHASES}
    whole_s, base = _total(slow) - _total(fast), _total(fast) / 100
    first, *second = _main(differences, whole_s)
    points = {phase: counted(round(differences[phase] / base), "point") for phase in (first, *second)}
    words = f"; {points[first]} of that lie in {phase_in_words(first)}"
    if differences[first] > whole_s:
        words = f"; {phase_in_words(first)} alone takes {points[first]} more"
    words += "".join(f", {points[phase]} in {phase_in_words(phase)}" for phase in second) + "."
    causes = _causes(slow, fast)
    if causes:
        sentences, advices = zip(*causes, strict=True)
        return first, " ".join([words, *sentences]), advices[0]
    if first == "compute":
        advice = "Run more repeats, on a machine on which nothing else runs."
        return first, f"{words} Nothing that was recorded explains it.", advice
    told = diagnose(slow.summary or {})
    own = next((finding.advice for finding in told if finding.phase == first and finding.advice), "")
    return first, words, own or f"Look at the {phase_in_words(first)} of the slowest run ({slow.run_id})."


def _causes(slow: Repeat, fast: Repeat) -> list[tuple[str, str]]:
    """What the slower run's own facts have that the faster one's have not, each as a sentence and its advice."""
    one, two = RunFacts(slow.summary or {}), RunFacts(fast.summary or {})
    found = []
    load, other_load = one.machine("other_cpu_percent") or 0, two.machine("other_cpu_percent") or 0
    if load >= max(LOADED_PERCENT, other_load + 10):
        used = f"{load:.0f} % of the processor in the slower run, {other_load:.0f} % in the faster"
        sentence = f"Other programs used {used}."
        found.append((sentence, "Close other programs and run the repeats again."))
    throttled, other_throttled = one.machine("gpu_throttled") or 0, two.machine("gpu_throttled") or 0
    if throttled >= other_throttled + 0.05:
        sentence = f"The GPU slowed itself down for {100 * throttled:.0f} % of the slower run."
        found.append((sentence, "Let the GPU cool down between repeats."))
    clock, other_clock = one.machine("gpu_clock_mhz") or 0, two.machine("gpu_clock_mhz") or 0
    if 0 < clock < 0.95 * other_clock:
        sentence = f"The GPU ran at {clock:,.0f} MHz in the slower run, at {other_clock:,.0f} MHz in the faster."
        found.append((sentence, "Let the GPU cool down between repeats, or fix its clock."))
    if one.get("is_warm") is False and two.get("is_warm") is True:
        found.append(("The slower run was cold, the faster warm.", "Compare warm runs with warm ones."))
    again, other_again = (sum(program["count"] for program in run.recompiles()) for run in (one, two))
    if again > other_again:
        sentence = f"The slower run compiled {counted(again, 'program')} anew: {one.recompiles()[0]['cause']}."
        found.append((sentence, "Keep every batch of a run the same shape."))
    for names, advice in (
        (_VERSIONS, "Run all repeats with the same packages."),
        (_MACHINE, "Run all repeats on the same machine."),
    ):
        pairs = {name: (one.get("environment", name), two.get("environment", name)) for name in names}
        differing = [f"{name} {a} against {b}" for name, (a, b) in pairs.items() if a and b and a != b]
        if differing:
            found.append((f"The slower run had {listed(differing)}.", advice))
    return found


def _labels(cells: list[list[Repeat]]) -> Iterator[Finding]:
    """Each label against the fastest one of the same start."""
    for start in dict.fromkeys(cell[0].start for cell in cells):
        ranked = sorted((cell for cell in cells if cell[0].start == start), key=_mean)
        for cell in ranked[1:]:
            if _mean(cell) - _mean(ranked[0]) >= LEAST_S:
                yield _slower(cell, ranked[0])


def _slower(cell: list[Repeat], fastest: list[Repeat]) -> Finding:
    whole_s = _mean(cell) - _mean(fastest)
    sentence = (
        f"{_name(cell)} took {time_in_words(whole_s)} longer than {_name(fastest)} "
        f"({time_in_words(_mean(cell))} against {time_in_words(_mean(fastest))} on average)"
    )
    phase = ""
    if all(repeat.phases for repeat in [*cell, *fastest]):
        differences = {phase: _mean(cell, phase) - _mean(fastest, phase) for phase in PHASES}
        main = _main(differences, whole_s)
        phase = main[0]
        sentence += f": {listed([f'{time_in_words(differences[name])} in {phase_in_words(name)}' for name in main])}"
    ratio = ratio_of_means([_total(repeat) for repeat in cell], [_total(repeat) for repeat in fastest])
    advice = ""
    if ratio.low is None:
        sentence += f". With fewer than {MIN_REPEATS} runs of each, this may be chance"
        advice = f"Run at least {MIN_REPEATS} repeats of each."
    elif not ratio.is_clear:
        sentence += ". The runs of each differ so much among themselves that this may be chance"
        advice = "Run more repeats of each."
    figures: dict[str, float | int | str] = {"seconds": whole_s, "ratio": ratio.ratio or 0.0}
    return Finding("labels", whole_s, f"{sentence}.", advice, "group", phase, figures)


def _unfinished(group: RunGroup) -> Iterator[Finding]:
    left_out = [repeat for repeat in group.repeats if repeat.state in ("failed", "interrupted", "stopped")]
    if left_out:
        names = listed([f"{_name([repeat])} ({repeat.run_id}, {repeat.state})" for repeat in left_out])
        sentence = f"Of {counted(len(group.repeats), 'repeat')}, {len(left_out)} did not finish: {names}."
        advice = "What didn't finish is not counted. Open it to see why, and start it once more."
        yield Finding("unfinished", 0, sentence, advice, "group", "", {"count": len(left_out)})


def _precision(cells: list[list[Repeat]]) -> Iterator[Finding]:
    runs = {cell[0].label: RunFacts(cell[0].summary) for cell in cells if cell[0].summary}
    in_fp32 = [label for label, run in runs.items() if run.get("environment", "precision") == "fp32"]
    in_bf16 = [label for label in in_fp32 if multiplies_fp32_in_bf16(runs[label])]
    others = [label for label in in_fp32 if label not in in_bf16]
    if in_bf16 and others:
        sentence = f"{listed(in_fp32)} are in fp32, but the TPU of {listed(in_bf16)} multiplies in bf16."
        advice = "Compare at equal precision: bf16 on both, or products in fp32: highest on the TPU."
        yield Finding("tpu_precision", 0, sentence, advice, "group", "compute")


def _main(differences: dict[str, float], whole_s: float) -> list[str]:
    """The phases that make the difference, most first: the largest, and a second where it is a fifth of it or more."""
    first, second = sorted(differences, key=lambda phase: -differences[phase])[:2]
    return [first, second] if differences[second] >= 0.2 * whole_s else [first]


def _total(repeat: Repeat) -> float:
    return repeat.total_s or 0.0


def _mean(cell: list[Repeat], phase: str = "") -> float:
    """The mean of totals, or of a phase."""
    values = [repeat.phases.get(f"{phase}_s", 0.0) if phase else _total(repeat) for repeat in cell]
    return float(np.mean(values))


def _name(cell: list[Repeat]) -> str:
    """ "xla, cold" """
    return ", ".join(filter(None, [cell[0].label, cell[0].start]))
