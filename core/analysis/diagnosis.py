"""Where the time of a run went, why, and what to do: small rules over a run's summary, in plain words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from core.analysis.findings import LEAST_S, PHASES, Finding, RunFacts
from core.words import counted, listed, percent_in_words, phase_in_words, time_in_words

LOADED_PERCENT = 15.0
"""Of the processor, from which on other programs count as a load."""
Rule = Callable[[RunFacts], Iterable[Finding]]
FORWARD_SHARE = {"all": 1 / 3, "last": 1 / 2, "head": 1.0}
"""Of a training step's time, by what is trained: a backward pass through every layer takes about two forwards."""
_SLOW_DISKS = {"network": "a network disk", "hdd": "a spinning disk"}
_COPY = "copy the data and the app's home folder to a solid-state disk of this machine"
_ONCE_A_RUN = "It comes once a run, so it weighs less in a longer one."
_PACKED_ANEW = "This run was told to pack its images anew. Let the next one use its caches."
_SETUP_PARTS = {
    "device_start_s": ("starting the device", "The next run in the same process finds it started."),
    "source_s": ("fetching and unpacking the data", "The next run finds them unpacked in the home folder."),
    "scan_s": ("scanning the data", "What was found is remembered: the next run reads changed files only."),
    "cache_build_s": ("decoding and packing images", "The next run with these images will not need it."),
    "cache_open_s": ("opening the image cache", f"If the disk is slow, {_COPY}."),
    "weights_s": ("fetching and loading the weights", "They are downloaded once; the next run has them."),
    "model_s": ("building the model", _ONCE_A_RUN),
    "preflight_s": ("tracing the model before the first step", _ONCE_A_RUN),
    "placement_s": ("moving the model to the device", _ONCE_A_RUN),
}


def diagnose(summary: dict[str, Any]) -> list[Finding]:
    """What is to be known about the time of a run, worst first.

    Args:
        summary: of any run, as `summarise` gives it.

    Returns:
        Findings that explain seconds, most first; then remarks; last how much was computing, which says so where all
        is well. Empty for a run of which no time is known.
    """
    run = RunFacts(summary)
    found = [finding for rule in RULES for finding in rule(run)]
    found.sort(key=lambda finding: -finding.seconds)
    return [*found, *_compute(run, is_well=not any(finding.seconds for finding in found))]


# -- phases ---------------------------------------------------------------------------------------------------------


def _data_wait(run: RunFacts) -> Iterator[Finding]:
    wait_s, packing_s = run.phase_s("data_wait"), run.packing_wait_s()
    if not run.is_much(wait_s):
        return
    sentence, figures = f"{run.of_run(wait_s)} was waiting for images", run.figures(wait_s)
    place, above_s = _standing_out(run.by_epoch("data_wait"))
    if packing_s >= wait_s / 2:
        images, cache_s = int(run.get("cache", "images") or 0), float(run.get("cache", "seconds"))
        packing = f"{counted(images, 'image')} were being packed"
        sentence += f", {time_in_words(packing_s)} of it in epoch 1, while {packing}."
        advice = f"Building the packed cache took {time_in_words(cache_s)} once; the next run will not need it."
        if run.get("config", "caches") == "anew":
            advice = _PACKED_ANEW
        figures |= {"packing_s": packing_s, "images": images}
    else:
        in_one = len(run.epochs) > 1 and above_s >= wait_s / 2
        sentence += f", {time_in_words(above_s)} more in epoch {place + 1} than in others." if in_one else "."
        advice = _loader_advice(run)
    yield Finding("data_wait", wait_s, sentence, advice, "phases", "data_wait", figures)


def _loader_advice(run: RunFacts) -> str:
    disk = _SLOW_DISKS.get(run.get("environment", "disk", "kind"))
    if disk:
        return f"The images lie on {disk}: {_COPY}."
    workers, cores = run.get("environment", "workers") or 0, run.get("environment", "cores") or 0
    if 0 < workers < cores:
        return f"Raise the number of workers from {workers} to {min(2 * workers, cores)}."
    config = run.get("config") or {}
    costly = [
        name
        for name, is_on in (
            ("random resized crops", config.get("augmentation") == "resized_crop"),
            ("automatic augmentation", config.get("auto_augment", "none") != "none"),
            ("colour jitter", bool(config.get("color_jitter"))),
        )
        if is_on
    ]
    if costly:
        return f"All cores prepare images already: train without {listed(costly)}, or on a machine with more cores."
    return "All cores prepare images already: choose a smaller image size, or a machine with more cores."


def _setup(run: RunFacts) -> Iterator[Finding]:
    setup_s, parts = run.phase_s("setup"), run.get("setup_parts") or {}
    large = {name: seconds for name, seconds in parts.items() if run.is_much(seconds)}
    for name, seconds in large.items():
        part = name.removesuffix("_s")
        words, advice = _SETUP_PARTS.get(name, (phase_in_words(part), _ONCE_A_RUN))
        if name == "device_start_s" and run.get("config", "process") == "own":
            advice = "A process of its own starts the device each time; the shared process starts it once."
        if name == "cache_build_s" and run.get("config", "caches") == "anew":
            advice = _PACKED_ANEW
        sentence = f"{run.of_run(seconds)} was {words}."
        yield Finding(f"setup_{part}", seconds, sentence, advice, "setup", "setup", run.figures(seconds))
    if run.is_much(setup_s) and not large:
        sentence = f"{run.of_run(setup_s)} was set-up; no part of it stands out."
        yield Finding("setup", setup_s, sentence, _ONCE_A_RUN, "setup", "setup", run.figures(setup_s))


def _compile(run: RunFacts) -> Iterator[Finding]:
    seconds, count, again = run.phase_s("compile"), int(run.get("compile", "count") or 0), run.recompiles()
    if not again and not (count and run.is_much(seconds)):
        return
    sentence, advice = f"{run.of_run(seconds)} went into compiling {counted(count, 'program')}", _stay(run)
    if planned := sum(program["count"] for program in run.planned_programs()):
        sentence += f", {planned:,} of them for what later epochs do otherwise"
    if again:
        num_again, epochs = sum(program["count"] for program in again), {program["epoch"] for program in again}
        cause = again[0]["cause"]
        where = f"in epoch {min(epochs)}" if len(epochs) == 1 else f"from epoch {min(epochs)} on"
        sentence += f", {num_again:,} of them {where} because {cause.removeprefix('no shape changed: ')}"
        advice = "Choose another model of this size; docs/models-on-xla.md tells how models compile."
        if cause.startswith("the shape"):
            advice = "Each new shape is compiled anew: keep every batch of a run the same shape."
    figures = {**run.figures(seconds), "count": count, "recompiles": sum(program["count"] for program in again)}
    yield Finding("compile", seconds, f"{sentence}.", advice, "programs", "compile", figures)


def _stay(run: RunFacts) -> str:
    if run.get("config", "caches") == "anew":
        return "This run was told to compile anew. Let the next one use its caches."
    if run.keeps_programs():
        return "Compiled programs are kept on disk: the next run of the same shapes will find them."
    if run.get("config", "process") == "own":
        return "A process of its own compiles anew each time; a second run in the shared process compiles nothing."
    return "Stay in this process: the next run of the same shapes compiles nothing."


def _evaluation(run: RunFacts) -> Iterator[Finding]:
    seconds, epochs_s = run.phase_s("evaluation"), run.total_s - run.phase_s("setup")
    num_train, num_val = run.get("num_train") or 0, run.get("num_val") or 0
    forward = FORWARD_SHARE.get(str(run.get("config", "trainable")), FORWARD_SHARE["all"])
    expected_s = forward * run.phase_s("compute") * num_val / num_train if num_train else 0.0
    # training on small images, or of the head alone, says little of a pass over whole ones
    is_slow = 0 < 1.5 * expected_s <= seconds and run.is_much(seconds) and not run.changes_between_epochs
    if seconds < LEAST_S or not (is_slow or seconds >= 0.2 * epochs_s):
        return
    sentence = f"{run.of_run(seconds)} was evaluation, the pass over {counted(num_val, 'validation image')}"
    advice = "Validate on fewer images: lower the validation share, or thin out the validation folder."
    if is_slow:
        expected = f"the {time_in_words(expected_s)} to be expected from the speed of training (an estimate)"
        sentence += f"; that is {seconds / expected_s:.1f} times {expected}"
        advice = f"Evaluation reads images too. {_loader_advice(run)} Or lower the validation share."
    figures = {**run.figures(seconds), "expected_s": expected_s}
    yield Finding("evaluation", seconds, f"{sentence}.", advice, "epochs", "evaluation", figures)


def _checkpoint(run: RunFacts) -> Iterator[Finding]:
    seconds = run.phase_s("checkpoint")
    if not run.is_much(seconds):
        return
    sentence = f"{run.of_run(seconds)} was writing checkpoints"
    if run.epochs:
        sentence += f", {time_in_words(seconds / len(run.epochs))} an epoch"
    disk = _SLOW_DISKS.get(run.get("environment", "disk", "kind"), "a slow disk")
    advice = f"Checkpoints go to {disk}: move the app's home folder to a faster one."
    if disk == "a slow disk":
        advice = "The disk of the app's home folder is slow or busy: move the folder to a faster one."
    yield Finding("checkpoint", seconds, f"{sentence}.", advice, "epochs", "checkpoint", run.figures(seconds))


def _transfer(run: RunFacts) -> Iterator[Finding]:
    seconds = run.phase_s("transfer")
    if run.is_much(seconds, 10):
        sentence = f"{run.of_run(seconds)} was handing images to the device."
        advice = "Choose a larger batch size, so that fewer transfers are made, or a smaller image size."
        yield Finding("transfer", seconds, sentence, advice, "phases", "transfer", run.figures(seconds))


def _other(run: RunFacts) -> Iterator[Finding]:
    seconds = run.phase_s("other")
    if run.is_much(seconds, 1):
        sentence = f"{run.of_run(seconds)} was other work, chiefly writing down figures."
        advice = "Raise log every, so that fewer steps are logged, and let no other run share the device."
        yield Finding("other", seconds, sentence, advice, "phases", "other", run.figures(seconds))


def _uneven_epochs(run: RunFacts) -> Iterator[Finding]:
    seconds = [float(epoch["seconds"]) for epoch in run.epochs]
    place, above_s = _standing_out(seconds)
    if len(seconds) < 2 or above_s < max(LEAST_S, 0.25 * (seconds[place] - above_s)) or run.changes_between_epochs:
        return
    differences = {}
    for phase in PHASES:
        values = run.by_epoch(phase)
        differences[phase] = values[place] - float(np.median(values[:place] + values[place + 1 :]))
    phase = max(differences, key=lambda name: differences[name])
    told: dict[str, Rule] = {"data_wait": _data_wait, "compile": _compile}
    if phase in told and any(told[phase](run)):
        return
    slow, usual, part = map(time_in_words, (seconds[place], seconds[place] - above_s, differences[phase]))
    sentence = f"Epoch {place + 1} took {slow}, the others {usual}; {part} more went into {phase_in_words(phase)}."
    advice = "Look at the machine during this epoch: other programs, heat and a lower clock slow it down."
    figures: dict[str, float | int | str] = {"epoch": place + 1, "seconds": seconds[place], "above_s": above_s}
    # not more than the phase itself, whose own rule says more
    yield Finding("uneven_epochs", min(above_s, differences[phase]), sentence, advice, "epochs", phase, figures)


def _compute(run: RunFacts, *, is_well: bool) -> Iterator[Finding]:
    seconds = run.phase_s("compute")
    if not seconds:
        return
    sentence = f"{run.of_run(seconds)} was computing{': nothing of note stood in its way' if is_well else ''}."
    advice = "Only less work or a faster device shortens it: smaller images, fewer trained layers, bf16."
    yield Finding("compute", seconds, sentence, advice, "phases", "compute", run.figures(seconds))


def _standing_out(values: list[float]) -> tuple[int, float]:
    """The place of the largest value, and how far it lies above the median of the others; 0 where there are none."""
    if len(values) < 2:
        return 0, 0.0
    place = int(np.argmax(values))
    return place, values[place] - float(np.median(values[:place] + values[place + 1 :]))


# -- remarks --------------------------------------------------------------------------------------------------------


def _cold(run: RunFacts) -> Iterator[Finding]:
    if run.get("is_warm") is not False:
        return
    can_keep = run.keeps_programs() or run.get("config", "process") != "own"
    spared = {
        "compiling": run.phase_s("compile") if can_keep else 0.0,
        "packing images": float(run.get("setup_parts", "cache_build_s") or 0) + run.packing_wait_s(),
    }
    words = [f"{time_in_words(seconds)} of {what}" for what, seconds in spared.items() if seconds >= LEAST_S]
    if words:
        sentence = f"This run was cold: a warm one will not need {listed(words)}."
        advice = "Start it once more to see its warm time, and compare warm runs with warm ones."
        if run.get("config", "caches") == "anew":
            advice = "It was told to be cold: compare it with cold runs only."
        yield Finding("cold", 0, sentence, advice, "phases", "", {"seconds": sum(spared.values())})


def _host_fallbacks(run: RunFacts) -> Iterator[Finding]:
    if ops := run.get("host_fallbacks"):
        sentence = f"The device leaves {counted(len(ops), 'operation')} to the host in every step: {listed(ops)}."
        advice = "Choose another model of this size, or another device."
        yield Finding("host_fallbacks", 0, sentence, advice, "steps", "compute", {"count": len(ops)})


def _other_load(run: RunFacts) -> Iterator[Finding]:
    mean, highest = run.machine("other_cpu_percent"), run.machine("other_cpu_percent", "max")
    advice = "Close them and run again before you compare this time with another."
    at_start = run.get("environment", "load_at_start", "cpu_percent") or 0
    if mean is None and at_start >= 50:
        sentence = f"Other programs kept the processor {at_start:.0f} % busy when this run started."
        yield Finding("other_load", 0, sentence, advice, "machine", "", {"at_start_percent": at_start})
    if mean is not None and highest is not None and mean >= LOADED_PERCENT:
        sentence = f"Other programs used {mean:.0f} % of the processor on average, {highest:.0f} % at most."
        yield Finding("other_load", 0, sentence, advice, "machine", "", {"mean_percent": mean, "max_percent": highest})


def _gpu_slowed(run: RunFacts) -> Iterator[Finding]:
    throttled, hottest = run.machine("gpu_throttled") or 0, run.machine("gpu_temperature_c", "max") or 0
    clock, highest = run.machine("gpu_clock_mhz") or 0, run.machine("gpu_clock_mhz", "max") or 0
    # an idle GPU lowers its clock, and should
    has_dropped = clock < 0.85 * highest and (run.machine("gpu_percent") or 0) >= 50
    facts = [
        *([f"slowed itself down for {100 * throttled:.0f} % of the time"] if throttled >= 0.05 else []),
        *([f"was up to {hottest:.0f} °C hot"] if hottest >= 85 else []),
        *([f"ran at {clock:,.0f} of {highest:,.0f} MHz on average"] if has_dropped else []),
    ]
    if facts:
        advice = "Cool it better or let it rest, then run again; compare times at the same clock only."
        figures: dict[str, float | int | str] = {"throttled": throttled, "temperature_c": hottest, "clock_mhz": clock}
        yield Finding("gpu_slowed", 0, f"The GPU {listed(facts)}.", advice, "machine", "compute", figures)


def _gpu_idle(run: RunFacts) -> Iterator[Finding]:
    is_tpu = run.machine("gpu_percent") is None
    busy = run.machine("tpu_duty_percent" if is_tpu else "gpu_percent")
    # the samples also cover phases in which the device has nothing to do
    is_computing = run.percent(run.phase_s("compute")) >= 70
    if busy is not None and busy < 50 and is_computing and not run.is_much(run.phase_s("data_wait")):
        name = "TPU" if is_tpu else "GPU"
        sentence = f"The {name} was busy for {busy:.0f} % of the time, though images were there: the host is too slow."
        advice = "Choose a larger batch size, so that each step gives the device more to do."
        yield Finding("device_idle", 0, sentence, advice, "machine", "compute", {"busy_percent": busy})


def _starved(run: RunFacts) -> Iterator[Finding]:
    """By the device's own account: what it stood idle between steps, and neither data nor compiling was the reason."""
    idle_s = sum(epoch.get("device_idle_s") or 0.0 for epoch in run.epochs)
    starved_s = idle_s - run.phase_s("data_wait") - run.phase_s("compile")
    if run.is_much(starved_s, 15):
        sentence = f"For {run.of_run(starved_s)} the device waited for the host to send its next step."
        advice = "Choose a larger batch size, so that each step gives the device more to do."
        yield Finding("device_starved", starved_s, sentence, advice, "steps", "compute", run.figures(starved_s))


def _memory(run: RunFacts) -> Iterator[Finding]:
    highest = run.machine("memory_percent", "max")
    if highest is not None and highest >= 92:
        sentence = f"The machine's memory was {highest:.0f} % full at most."
        advice = "Close other programs, or use fewer workers: a machine without free memory slows everything down."
        yield Finding("memory", 0, sentence, advice, "machine", "", {"max_percent": highest})


def _cpu_threads(run: RunFacts) -> Iterator[Finding]:
    threads, cores = run.get("environment", "threads") or 0, run.get("environment", "cores") or 0
    chosen = run.get("config", "threads") or 0
    # torch leaves out the second thread of a core by itself, and rightly
    usual = run.get("environment", "physical_cores") or cores / 2
    if run.get("device", "kind") == "cpu" and 0 < threads < (cores if chosen else usual):
        sentence = f"Computing used {counted(threads, 'thread')} of a processor with {counted(cores, 'core')}."
        advice = "Set the number of CPU threads to 0, that is to all cores."
        if not chosen:
            advice = "Something outside limits it, such as OMP_NUM_THREADS or a container: raise that limit."
        yield Finding("cpu_threads", 0, sentence, advice, "machine", "compute", {"threads": threads, "cores": cores})


def _uneven_steps(run: RunFacts) -> Iterator[Finding]:
    median, p95 = run.get("step_times", "median_s") or 0, run.get("step_times", "p95_s") or 0
    # below 20 steps the slowest twentieth is not even one
    if median and p95 >= 2 * median and run.get("step_times", "steps") >= 20 and not run.changes_between_epochs:
        sentence = (
            f"One step in twenty took {time_in_words(p95)} or longer, "
            f"{p95 / median:.1f} times the median of {time_in_words(median)}."
        )
        advice = "Slow steps at even distances point to the loading of images, scattered ones to other programs."
        yield Finding("uneven_steps", 0, sentence, advice, "steps", "", {"median_s": median, "p95_s": p95})


def _tpu_precision(run: RunFacts) -> Iterator[Finding]:
    if multiplies_fp32_in_bf16(run):
        sentence = "This run is in fp32, but the TPU multiplies in bf16."
        advice = "Compare it with bf16 on a GPU, or choose products in fp32: highest."
        yield Finding("tpu_precision", 0, sentence, advice, "steps", "compute")


def multiplies_fp32_in_bf16(run: RunFacts) -> bool:
    """Whether this is a TPU at its default, which is faster than what fp32 means elsewhere."""
    at = run.get("environment") or {}
    return (at.get("precision"), at.get("matmul_precision")) == ("fp32", "bf16")


def _forecast(run: RunFacts) -> Iterator[Finding]:
    said, took = run.get("forecast", "total_s"), run.get("total_s")
    if not said or not took or run.get("state") != "finished" or abs(took / said - 1) <= 0.3:
        return
    sentence = (
        f"The forecast said {time_in_words(said)}, the run took {time_in_words(took)}: "
        f"{percent_in_words(100 * abs(took / said - 1))} {'longer' if took > said else 'shorter'}."
    )
    epoch_said, epochs = run.get("forecast", "epoch_s"), [epoch["seconds"] for epoch in run.epochs]
    if epoch_said and epochs:
        where = "outside the epochs" if abs(np.median(epochs) / epoch_said - 1) <= 0.3 else "in the epochs"
        sentence += f" The difference lies {where}."
    basis = run.get("forecast", "basis")
    advice = f"It rested on {basis}; the phases show what was different." if basis else "See the phases."
    yield Finding("forecast", 0, sentence, advice, "epochs", "", {"forecast_s": said, "total_s": took})


RULES: tuple[Rule, ...] = (
    _data_wait,
    _setup,
    _compile,
    _evaluation,
    _checkpoint,
    _transfer,
    _other,
    _uneven_epochs,
    _cold,
    _host_fallbacks,
    _other_load,
    _gpu_slowed,
    _gpu_idle,
    _starved,
    _memory,
    _cpu_threads,
    _uneven_steps,
    _tpu_precision,
    _forecast,
)
"""Phases first: of findings that explain equal time, the first one leads."""
