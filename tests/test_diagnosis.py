"""Each rule of the diagnosis: where it speaks, in which words, and where it is silent; summaries are written by hand.

No GPU, TPU or second machine is here: what would be sampled of one is written by hand too.
"""

from __future__ import annotations

from typing import Any

import pytest

from core.analysis.article import ARTICLE
from core.analysis.diagnosis import diagnose
from core.analysis.findings import PHASES, Finding, RunFacts
from core.analysis.repeats import Repeat, RunGroup
from core.analysis.spread import diagnose_group
from core.words import listed, time_in_words

SHAPE = "the shape of images changed from 32 x 3 x 64 x 64 to 24 x 3 x 64 x 64"
NUMBERS = "no shape changed: an operation of the model depends on the numbers themselves"
USUAL = {
    "data_wait": 0.3,
    "transfer": 0.1,
    "compile": 0.0,
    "compute": 18.0,
    "evaluation": 1.4,
    "checkpoint": 0.15,
    "other": 0.05,
}
ENVIRONMENT = {
    "cores": 4,
    "threads": 4,
    "workers": 2,
    "precision": "fp32",
    "matmul_precision": "fp32",
    "disk": {"kind": "ssd", "filesystem": "ext4"},
}


def a_run(*odd: dict[str, float], num_epochs: int = 5, setup: dict[str, float] | None = None, **changes: Any) -> dict:
    """A summary of a run in which nothing is wrong: 5 epochs of 20 s after 3 s of set-up.

    Args:
        odd: seconds of phases in which an epoch differs, epoch by epoch; the last one goes for those that follow.
        setup: seconds of its parts.
        changes: top-level keys; config, environment and machine are added to.
    """
    parts = setup or {"device_start_s": 0.2, "scan_s": 0.8, "model_s": 2.0}
    epochs = []
    for number in range(1, num_epochs + 1):
        phases = {**USUAL, **(odd[min(number, len(odd)) - 1] if odd else {})}
        epochs.append(
            {
                "epoch": number,
                "seconds": sum(phases.values()),
                "phases": {f"{name}_s": phases.get(name, 0.0) for name in PHASES},
            }
        )
    phases = {f"{name}_s": sum(epoch["phases"][f"{name}_s"] for epoch in epochs) for name in PHASES}
    phases["setup_s"] = sum(parts.values())
    summary = {
        "run_id": "a-run",
        "state": "finished",
        "device": {"kind": "cpu", "name": "A CPU"},
        "epochs": epochs,
        "phases": phases,
        "total_s": sum(phases.values()),
        "compile": {"count": 0, "seconds": 0.0},
        "is_warm": True,
        "programs": [],
        "host_fallbacks": [],
        "num_train": 1120,
        "num_val": 280,
        "setup_parts": parts,
        "cache": None,
        "step_times": None,
        "machine": None,
        "forecast": None,
        **changes,
    }
    summary["config"] = {"trainable": "all", "process": "shared", "caches": "use", **changes.get("config", {})}
    summary["environment"] = {**ENVIRONMENT, **changes.get("environment", {})}
    return summary


def sampled(**columns: tuple[float, float]) -> dict[str, Any]:
    """`machine` of a summary: mean and max of each column."""
    return {"samples": 100} | {name: {"mean": mean, "min": 0.0, "max": top} for name, (mean, top) in columns.items()}


def program(epoch: int, count: int, cause: str = "") -> dict[str, Any]:
    return {"phase": "training", "step": 35 * epoch, "epoch": epoch, "count": count, "seconds": 8.5, "cause": cause}


def compiled(*programs: dict[str, Any]) -> dict[str, Any]:
    return {"compile": {"count": sum(item["count"] for item in programs), "seconds": 34.0}, "programs": list(programs)}


def steps(median_s: float, p95_s: float, count: int = 170) -> dict[str, Any]:
    return {"median_s": median_s, "p95_s": p95_s, "steps": count}


def forecast(total_s: float, epoch_s: float = 20.0) -> dict[str, Any]:
    return {"total_s": total_s, "epoch_s": epoch_s, "basis": "12 steps of this model"}


def find(summary: dict[str, Any], rule: str) -> Finding | None:
    return next((finding for finding in diagnose(summary) if finding.rule == rule), None)


NETWORK = {"disk": {"kind": "network", "filesystem": "nfs"}}
TPU = {"xla_runtime": "TPU", "matmul_precision": "bf16"}
SLOW_LOADER, ALL_WORK = {"data_wait": 5.0}, {"workers": 4}

SPEAKS = [
    (
        "data_wait",
        a_run({"data_wait": 70.5}, {}, cache={"images": 1400, "seconds": 74.0}),
        "41 % of this run (72 s) was waiting for images, 70 s of it in epoch 1, while 1,400 images were being packed.",
        "Building the packed cache took 74 s once; the next run will not need it.",
    ),
    (
        "data_wait",
        a_run({"data_wait": 70.5}, {}, cache={"images": 1400, "seconds": 74.0}, config={"caches": "anew"}),
        "41 % of this run (72 s) was waiting for images, 70 s of it in epoch 1, while 1,400 images were being packed.",
        "This run was told to pack its images anew. Let the next one use its caches.",
    ),
    (
        "data_wait",
        a_run({"data_wait": 20.0}, num_epochs=1, cache={"images": 1400, "seconds": 74.0}),
        "47 % of this run (20 s) was waiting for images, 20 s of it in epoch 1, while 1,400 images were being packed.",
        "Building the packed cache took 74 s once; the next run will not need it.",
    ),
    (
        "data_wait",
        a_run(SLOW_LOADER),
        "20 % of this run (25 s) was waiting for images.",
        "Raise the number of workers from 2 to 4.",
    ),
    (
        "data_wait",
        a_run({}, {}, {"data_wait": 15.3}, {}),
        "14 % of this run (16 s) was waiting for images, 15 s more in epoch 3 than in others.",
        "Raise the number of workers from 2 to 4.",
    ),
    (
        "data_wait",
        a_run(SLOW_LOADER, environment=NETWORK),
        "20 % of this run (25 s) was waiting for images.",
        "The images lie on a network disk: copy the data and the app's home folder to a solid-state disk of this "
        "machine.",
    ),
    (
        "data_wait",
        a_run(SLOW_LOADER, environment=ALL_WORK, config={"augmentation": "resized_crop", "color_jitter": 0.4}),
        "20 % of this run (25 s) was waiting for images.",
        "All cores prepare images already: train without random resized crops and colour jitter, or on a machine with "
        "more cores.",
    ),
    (
        "data_wait",
        a_run(SLOW_LOADER, environment=ALL_WORK),
        "20 % of this run (25 s) was waiting for images.",
        "All cores prepare images already: choose a smaller image size, or a machine with more cores.",
    ),
    (
        "setup_source",
        a_run(setup={"source_s": 125.0, "model_s": 2.0}),
        "55 % of this run (2:05 min) was fetching and unpacking the data.",
        "The next run finds them unpacked in the home folder.",
    ),
    (
        "setup_scan",
        a_run(setup={"scan_s": 12.0}),
        "11 % of this run (12 s) was scanning the data.",
        "What was found is remembered: the next run reads changed files only.",
    ),
    (
        "setup_cache_build",
        a_run(setup={"cache_build_s": 25.0}),
        "20 % of this run (25 s) was decoding and packing images.",
        "The next run with these images will not need it.",
    ),
    (
        "setup_cache_build",
        a_run(setup={"cache_build_s": 25.0}, config={"caches": "anew"}),
        "20 % of this run (25 s) was decoding and packing images.",
        "This run was told to pack its images anew. Let the next one use its caches.",
    ),
    (
        "setup_weights",
        a_run(setup={"weights_s": 11.0}),
        "10 % of this run (11 s) was fetching and loading the weights.",
        "They are downloaded once; the next run has them.",
    ),
    (
        "setup_model",
        a_run(setup={"model_s": 11.0}),
        "10 % of this run (11 s) was building the model.",
        "It comes once a run, so it weighs less in a longer one.",
    ),
    (
        "setup_device_start",
        a_run(setup={"device_start_s": 11.0}, config={"process": "own"}),
        "10 % of this run (11 s) was starting the device.",
        "A process of its own starts the device each time; the shared process starts it once.",
    ),
    (
        "setup_preflight",
        a_run(setup={"preflight_s": 11.0}),
        "10 % of this run (11 s) was tracing the model before the first step.",
        "It comes once a run, so it weighs less in a longer one.",
    ),
    (
        "setup",
        a_run(setup={"scan_s": 4.0, "model_s": 4.0, "placement_s": 4.0}),
        "11 % of this run (12 s) was set-up; no part of it stands out.",
        "It comes once a run, so it weighs less in a longer one.",
    ),
    (
        "compile",
        a_run({"compile": 34.0}, {}, **compiled(program(1, 2))),
        "25 % of this run (34 s) went into compiling 2 programs.",
        "Stay in this process: the next run of the same shapes compiles nothing.",
    ),
    (
        "compile",
        a_run({"compile": 17.0}, {}, {"compile": 17.0}, {}, **compiled(program(1, 2), program(3, 2, SHAPE))),
        f"25 % of this run (34 s) went into compiling 4 programs, 2 of them in epoch 3 because {SHAPE}.",
        "Each new shape is compiled anew: keep every batch of a run the same shape.",
    ),
    (
        "compile",
        a_run({"compile": 6.8}, **compiled(*(program(epoch, 1, NUMBERS) for epoch in range(2, 6)))),
        "25 % of this run (34 s) went into compiling 4 programs, 4 of them from epoch 2 on because an operation of the "
        "model depends on the numbers themselves.",
        "Choose another model of this size; docs/models-on-xla.md tells how models compile.",
    ),
    (
        "evaluation",
        a_run({"evaluation": 4.0}),
        "17 % of this run (20 s) was evaluation, the pass over 280 validation images; that is 2.7 times the 7.5 s to "
        "be expected from the speed of training (an estimate).",
        "Evaluation reads images too. Raise the number of workers from 2 to 4. Or lower the validation share.",
    ),
    (
        "evaluation",
        a_run({"evaluation": 6.0}, num_val=1120),
        "24 % of this run (30 s) was evaluation, the pass over 1,120 validation images.",
        "Validate on fewer images: lower the validation share, or thin out the validation folder.",
    ),
    (
        "checkpoint",
        a_run({"checkpoint": 4.0}, environment=NETWORK),
        "16 % of this run (20 s) was writing checkpoints, 4.0 s an epoch.",
        "Checkpoints go to a network disk: move the app's home folder to a faster one.",
    ),
    (
        "checkpoint",
        a_run({"checkpoint": 4.0}),
        "16 % of this run (20 s) was writing checkpoints, 4.0 s an epoch.",
        "The disk of the app's home folder is slow or busy: move the folder to a faster one.",
    ),
    (
        "transfer",
        a_run({"transfer": 3.0}),
        "13 % of this run (15 s) was handing images to the device.",
        "Choose a larger batch size, so that fewer transfers are made, or a smaller image size.",
    ),
    (
        "other",
        a_run({"other": 0.8}),
        "4 % of this run (4.0 s) was other work, chiefly writing down figures.",
        "Raise log every, so that fewer steps are logged, and let no other run share the device.",
    ),
    (
        "uneven_epochs",
        a_run({}, {}, {}, {"compute": 27.0}, {}),
        "Epoch 4 took 29 s, the others 20 s; 9.0 s more went into compute.",
        "Look at the machine during this epoch: other programs, heat and a lower clock slow it down.",
    ),
    (
        "cold",
        a_run(
            {"compile": 34.0, "data_wait": 40.3},
            {},
            is_warm=False,
            cache={"images": 1400, "seconds": 74.0},
            **compiled(program(1, 2)),
        ),
        "This run was cold: a warm one will not need 34 s of compiling and 40 s of packing images.",
        "Start it once more to see its warm time, and compare warm runs with warm ones.",
    ),
    (
        "cold",
        a_run(setup={"cache_build_s": 20.0}, is_warm=False, config={"caches": "anew"}),
        "This run was cold: a warm one will not need 20 s of packing images.",
        "It was told to be cold: compare it with cold runs only.",
    ),
    (
        "host_fallbacks",
        a_run(host_fallbacks=["aten::nonzero", "aten::unique"]),
        "The device leaves 2 operations to the host in every step: aten::nonzero and aten::unique.",
        "Choose another model of this size, or another device.",
    ),
    (
        "other_load",
        a_run(machine=sampled(other_cpu_percent=(35.2, 80.0))),
        "Other programs used 35 % of the processor on average, 80 % at most.",
        "Close them and run again before you compare this time with another.",
    ),
    (
        "other_load",
        a_run(environment={"load_at_start": {"cpu_percent": 85.0, "load_1m": 4.8}}),
        "Other programs kept the processor 85 % busy when this run started.",
        "Close them and run again before you compare this time with another.",
    ),
    (
        "gpu_slowed",
        a_run(
            machine=sampled(
                gpu_percent=(95, 100), gpu_throttled=(0.3, 1), gpu_temperature_c=(80, 88), gpu_clock_mhz=(1350, 1980)
            )
        ),
        "The GPU slowed itself down for 30 % of the time, was up to 88 °C hot and ran at 1,350 of 1,980 MHz on "
        "average.",
        "Cool it better or let it rest, then run again; compare times at the same clock only.",
    ),
    (
        "device_idle",
        a_run(machine=sampled(gpu_percent=(31, 70))),
        "The GPU was busy for 31 % of the time, though images were there: the host is too slow.",
        "Choose a larger batch size, so that each step gives the device more to do.",
    ),
    (
        "device_idle",
        a_run(machine=sampled(tpu_duty_percent=(31, 70))),
        "The TPU was busy for 31 % of the time, though images were there: the host is too slow.",
        "Choose a larger batch size, so that each step gives the device more to do.",
    ),
    (
        "memory",
        a_run(machine=sampled(memory_percent=(70, 95))),
        "The machine's memory was 95 % full at most.",
        "Close other programs, or use fewer workers: a machine without free memory slows everything down.",
    ),
    (
        "cpu_threads",
        a_run(config={"threads": 2}, environment={"threads": 2}),
        "Computing used 2 threads of a processor with 4 cores.",
        "Set the number of CPU threads to 0, that is to all cores.",
    ),
    (
        "cpu_threads",
        a_run(environment={"threads": 1, "physical_cores": 2}),
        "Computing used 1 thread of a processor with 4 cores.",
        "Something outside limits it, such as OMP_NUM_THREADS or a container: raise that limit.",
    ),
    (
        "uneven_steps",
        a_run(step_times=steps(0.2, 0.5)),
        "One step in twenty took 0.5 s or longer, 2.5 times the median of 0.2 s.",
        "Slow steps at even distances point to the loading of images, scattered ones to other programs.",
    ),
    (
        "tpu_precision",
        a_run(environment=TPU),
        "This run is in fp32, but the TPU multiplies in bf16.",
        "Compare it with bf16 on a GPU, or choose products in fp32: highest.",
    ),
    (
        "forecast",
        a_run(forecast=forecast(60.0, 11.0)),
        "The forecast said 60 s, the run took 1:43 min: 72 % longer. The difference lies in the epochs.",
        "It rested on 12 steps of this model; the phases show what was different.",
    ),
    (
        "forecast",
        a_run(setup={"source_s": 60.0}, forecast=forecast(103.0)),
        "The forecast said 1:43 min, the run took 2:40 min: 55 % longer. The difference lies outside the epochs.",
        "It rested on 12 steps of this model; the phases show what was different.",
    ),
    (
        "forecast",
        a_run(forecast=forecast(206.0, 40.0)),
        "The forecast said 3:26 min, the run took 1:43 min: 50 % shorter. The difference lies in the epochs.",
        "It rested on 12 steps of this model; the phases show what was different.",
    ),
    (
        "compute",
        a_run(),
        "87 % of this run (90 s) was computing: nothing of note stood in its way.",
        "Only less work or a faster device shortens it: smaller images, fewer trained layers, bf16.",
    ),
]
IS_SILENT = [
    ("data_wait", a_run({"data_wait": 1.0})),
    ("data_wait", a_run({"data_wait": 0.4, "compute": 0.4, "evaluation": 0.1}, num_epochs=1)),
    ("setup_model", a_run(setup={"model_s": 5.0})),
    ("setup", a_run(setup={"model_s": 12.0})),
    ("compile", a_run({"compile": 4.0}, {}, **compiled(program(1, 2)))),
    ("evaluation", a_run({"evaluation": 2.2})),
    ("evaluation", a_run({"evaluation": 4.0}, config={"trainable": "head"})),
    ("checkpoint", a_run({"checkpoint": 1.0})),
    ("transfer", a_run({"transfer": 2.0})),
    ("other", a_run({"other": 0.18})),
    ("uneven_epochs", a_run({}, {}, {}, {"compute": 22.5}, {})),
    ("uneven_epochs", a_run({"compute": 27.0}, num_epochs=1)),
    ("cold", a_run({"compile": 34.0}, {}, is_warm=True, **compiled(program(1, 2)))),
    ("cold", a_run({"compile": 34.0}, {}, is_warm=False, config={"process": "own"}, **compiled(program(1, 2)))),
    ("host_fallbacks", a_run(host_fallbacks=[])),
    ("other_load", a_run(machine=sampled(other_cpu_percent=(14.0, 80.0)))),
    ("gpu_slowed", a_run(machine=sampled(gpu_percent=(30, 90), gpu_temperature_c=(70, 80), gpu_clock_mhz=(600, 1980)))),
    ("device_idle", a_run(machine=sampled(gpu_percent=(55, 70)))),
    ("device_idle", a_run(SLOW_LOADER, machine=sampled(gpu_percent=(31, 70)))),
    ("device_idle", a_run(setup={"source_s": 60.0}, machine=sampled(gpu_percent=(31, 70)))),
    ("memory", a_run(machine=sampled(memory_percent=(70, 91)))),
    ("other_load", a_run(environment={"load_at_start": {"cpu_percent": 40.0, "load_1m": 1.1}})),
    ("cpu_threads", a_run(environment={"threads": 2, "physical_cores": 2})),
    ("cpu_threads", a_run(environment={"threads": 1}, device={"kind": "cuda", "name": "A GPU"})),
    ("uneven_steps", a_run(step_times=steps(0.2, 0.39))),
    ("uneven_steps", a_run(step_times=steps(0.2, 0.5, count=19))),
    ("tpu_precision", a_run(environment={**TPU, "precision": "bf16"})),
    ("tpu_precision", a_run(environment={**TPU, "matmul_precision": "fp32 (six passes of bf16)"})),
    ("tpu_precision", a_run(environment={"xla_runtime": "CPU"})),
    ("forecast", a_run(forecast=forecast(80.0))),
    ("forecast", a_run(forecast=forecast(60.0), state="stopped")),
    ("compute", a_run({"compute": 0.0})),
]


@pytest.mark.parametrize(("rule", "summary", "sentence", "advice"), SPEAKS)
def test_a_rule_says_what_it_found_and_what_to_do(rule, summary, sentence, advice):
    found = find(summary, rule)
    assert found is not None
    assert (found.sentence, found.advice) == (sentence, advice)
    assert found.chart in {"phases", "epochs", "steps", "machine", "programs", "setup"}
    assert found.phase in {"", *PHASES}


@pytest.mark.parametrize(("rule", "summary"), IS_SILENT)
def test_a_rule_is_silent_below_its_limit(rule, summary):
    assert find(summary, rule) is None


def test_each_rule_has_a_case_of_both_kinds():
    spoken = {rule for rule, *_ in SPEAKS}
    silent = {rule for rule, _ in IS_SILENT}
    assert {rule for rule in spoken - silent if not rule.startswith("setup_")} == set()
    assert silent <= spoken


@pytest.mark.parametrize(
    ("phase", "summary"),
    [
        ("data_wait", a_run(SLOW_LOADER, setup={"model_s": 9.0})),
        ("data_wait", a_run({"data_wait": 70.5}, {}, cache={"images": 1400, "seconds": 74.0}, is_warm=False)),
        (
            "compile",
            a_run({"compile": 17.0}, {}, {"compile": 17.0}, {}, **compiled(program(1, 2), program(3, 2, SHAPE))),
        ),
        ("checkpoint", a_run({"checkpoint": 4.0, "data_wait": 1.5})),
        ("checkpoint", a_run({}, {}, {"checkpoint": 20.0}, {})),
        ("evaluation", a_run({"evaluation": 3.0}, setup={"model_s": 9.0})),
        ("setup", a_run({"data_wait": 1.5}, setup={"source_s": 60.0})),
        ("transfer", a_run({"transfer": 3.0})),
        ("other", a_run({"other": 2.0}, setup={"model_s": 6.0})),
    ],
)
def test_what_went_wrong_comes_first_and_computing_last(phase, summary):
    found = diagnose(summary)
    assert found[0].phase == phase and found[0].seconds > 0
    assert found[-1].rule == "compute" and not found[-1].sentence.endswith("its way.")


def test_problems_come_by_their_seconds_before_remarks():
    found = diagnose(a_run({"data_wait": 2.0, "checkpoint": 4.0}, host_fallbacks=["aten::nonzero"]))
    assert [finding.rule for finding in found] == ["checkpoint", "data_wait", "host_fallbacks", "compute"]
    assert [finding.seconds for finding in found] == [20.0, 10.0, 0, 90.0]


def test_a_run_in_which_all_is_well_has_that_one_finding():
    assert [finding.rule for finding in diagnose(a_run())] == ["compute"]


def test_an_epoch_that_its_phase_has_told_of_is_not_told_of_twice():
    assert find(a_run({"data_wait": 70.5}, {}, cache={"images": 1400, "seconds": 74.0}), "uneven_epochs") is None
    assert find(a_run({}, {}, {"checkpoint": 20.0}, {}), "uneven_epochs") is not None


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"config": {"process": "own"}}, "A process of its own compiles anew each time"),
        ({"config": {"caches": "anew"}}, "This run was told to compile anew."),
        ({"environment": {"compiled_programs": "kept for later processes"}}, "Compiled programs are kept on disk"),
    ],
)
def test_compiling_is_spared_in_the_way_that_works_here(changes, advice):
    found = find(a_run({"compile": 34.0}, {}, **compiled(program(1, 2)), **changes), "compile")
    assert found is not None and found.advice.startswith(advice)


def test_a_run_that_goes_on_tells_of_what_is_known_so_far():
    summary = a_run(SLOW_LOADER, num_epochs=2, state="running", is_warm=None)
    summary["phases"]["setup_s"] = 0.0
    assert [finding.sentence for finding in diagnose(summary)] == [
        "19 % of this run so far (10 s) was waiting for images.",
        "6 % of this run so far (3.0 s) was set-up; no part of it stands out.",
        "69 % of this run so far (36 s) was computing.",
    ]


@pytest.mark.parametrize("state", ["queued", "running", "failed", "interrupted"])
def test_a_run_without_figures_has_no_findings(state):
    empty = {"state": state, "epochs": [], "phases": {f"{phase}_s": 0.0 for phase in PHASES}, "total_s": None}
    assert diagnose(empty) == diagnose({}) == []


def test_figures_back_the_sentence():
    found = find(a_run({"data_wait": 70.5}, {}, cache={"images": 1400, "seconds": 74.0}), "data_wait")
    assert found is not None
    assert found.figures == pytest.approx(
        {"seconds": 71.7, "percent": 41.4, "packing_s": 70.2, "images": 1400}, rel=1e-3
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.02, "20 ms"), (3.25, "3.2 s"), (9.96, "10 s"), (99.4, "99 s"), (99.6, "1:40 min"), (3725, "1:02:05 h")],
)
def test_seconds_are_told_as_people_do(seconds, words):
    assert time_in_words(seconds) == words


def test_a_list_ends_in_and():
    assert [listed([]), listed(["a"]), listed(["a", "b", "c"])] == ["", "a", "a, b and c"]


def test_packing_waits_no_longer_than_packing_went_on():
    assert RunFacts(a_run({"data_wait": 70.5}, {}, cache={"images": 9, "seconds": 2.0})).packing_wait_s() == 2.0


# -- groups ---------------------------------------------------------------------------------------------------------


def a_repeat(summary: dict[str, Any], run_id: str, *, label: str = "cpu", start: str = "warm") -> Repeat:
    return Repeat(
        label=label,
        start=start,
        run_id=run_id,
        state=summary["state"],
        total_s=summary["total_s"],
        phases=summary["phases"],
        epochs=summary["epochs"],
        summary=summary,
    )


def group_of(*summaries: dict[str, Any], label: str = "cpu", start: str = "warm") -> list[Repeat]:
    return [a_repeat(item, f"{label}-{n}", label=label, start=start) for n, item in enumerate(summaries, start=1)]


def told(*repeats: Repeat) -> list[tuple[str, str, str]]:
    found = diagnose_group(RunGroup("g", "A group", list(repeats)))
    assert {finding.chart for finding in found} <= {"group"}
    return [(finding.rule, finding.sentence, finding.advice) for finding in found]


def computing(*epoch_seconds: float, **changes: Any) -> list[dict[str, Any]]:
    return [a_run({"compute": seconds}, **changes) for seconds in epoch_seconds]


def test_repeats_that_agree_are_said_to():
    assert told(*group_of(*computing(18.0, 18.1, 18.4))) == [
        ("agreement", "The 3 repeats of cpu, warm agree within 2 %.", "")
    ]


def test_a_spread_names_the_phase_and_takes_the_advice_of_the_slowest_run():
    repeats = group_of(a_run(), a_run({"compute": 18.4}), a_run({"data_wait": 10.3, "compute": 18.4}))
    assert told(*repeats) == [
        (
            "spread",
            "The 3 repeats of cpu, warm differ by 50 % (1:43 min to 2:35 min); 49 points of that lie in data wait.",
            "Raise the number of workers from 2 to 4.",
        )
    ]


def test_a_spread_over_two_phases_names_both():
    [(_, sentence, _)] = told(*group_of(a_run(), a_run({"data_wait": 5.3, "compute": 21.0})))
    assert sentence.endswith(
        "differ by 39 % (1:43 min to 2:23 min); 24 points of that lie in data wait, 15 points in compute."
    )


def test_a_phase_that_differs_by_more_than_the_total_is_told_alone():
    [(_, sentence, _)] = told(*group_of(a_run(), a_run({"data_wait": 5.3, "compute": 15.0})))
    assert sentence.endswith("differ by 10 % (1:43 min to 1:53 min); data wait alone takes 24 points more.")


UNEXPLAINED = "The 2 repeats of cpu, warm differ by 29 % (1:43 min to 2:13 min); 29 points of that lie in compute."


@pytest.mark.parametrize(
    ("slow", "fast", "cause", "advice"),
    [
        (
            {},
            {},
            "Nothing that was recorded explains it.",
            "Run more repeats, on a machine on which nothing else runs.",
        ),
        (
            {"machine": sampled(other_cpu_percent=(40, 80))},
            {"machine": sampled(other_cpu_percent=(3, 20))},
            "Other programs used 40 % of the processor in the slower run, 3 % in the faster.",
            "Close other programs and run the repeats again.",
        ),
        (
            {"machine": sampled(gpu_throttled=(0.3, 1))},
            {"machine": sampled(gpu_throttled=(0, 0))},
            "The GPU slowed itself down for 30 % of the slower run.",
            "Let the GPU cool down between repeats.",
        ),
        (
            {"machine": sampled(gpu_clock_mhz=(1350, 1980))},
            {"machine": sampled(gpu_clock_mhz=(1755, 1980))},
            "The GPU ran at 1,350 MHz in the slower run, at 1,755 MHz in the faster.",
            "Let the GPU cool down between repeats, or fix its clock.",
        ),
        (
            {"is_warm": False},
            {"is_warm": True},
            "The slower run was cold, the faster warm.",
            "Compare warm runs with warm ones.",
        ),
        (
            compiled(program(1, 2), program(3, 2, SHAPE)),
            compiled(program(1, 2)),
            f"The slower run compiled 2 programs anew: {SHAPE}.",
            "Keep every batch of a run the same shape.",
        ),
        (
            {"environment": {"torch": "2.8.0", "threads": 2}},
            {"environment": {"torch": "2.9.1", "threads": 4}},
            "The slower run had torch 2.8.0 against 2.9.1. The slower run had threads 2 against 4.",
            "Run all repeats with the same packages.",
        ),
    ],
)
def test_a_spread_names_the_cause_by_which_slowest_and_fastest_differ(slow, fast, cause, advice):
    found = told(*group_of(a_run({"compute": 24.0}, **slow), a_run(**fast)))
    assert found == [("spread", f"{UNEXPLAINED} {cause}", advice)]


def test_one_noisy_repeat_among_five_is_named_with_its_phase_and_leads():
    runs = [*computing(18.0, 18.1, 18.2, 18.1), a_run({"data_wait": 8.3})]
    found = diagnose_group(RunGroup("g", "A group", group_of(*runs)))
    assert [(finding.rule, finding.phase) for finding in found] == [("noisy_repeat", "data_wait"), ("agreement", "")]
    assert found[0].sentence == (
        "One repeat of cpu, warm (cpu-5) is noisy: it took 2:23 min, 38 % longer than the middle one of the others "
        "(1:44 min); data wait alone takes 39 points more."
    )
    assert found[1].sentence == "The other 4 repeats of cpu, warm agree within 1 %."


@pytest.mark.parametrize("seconds", [(18.0, 18.1, 18.2, 24.0), (18.0, 18.0, 18.0, 18.0, 18.8), (16, 18, 20, 22, 24)])
def test_no_repeat_is_called_noisy_where_few_or_where_all_are_or_where_it_hardly_matters(seconds):
    assert "noisy_repeat" not in [rule for rule, *_ in told(*group_of(*computing(*seconds)))]


def test_the_slower_label_is_told_with_the_phases_that_make_the_difference():
    runs = [a_run({"compile": 18.0, "compute": 18.6}, {"compute": 18.6}) for _ in range(3)]
    found = told(*group_of(*computing(18.0, 18.02, 18.04)), *group_of(*runs, label="xla"))
    assert found[0] == (
        "labels",
        "xla, warm took 21 s longer than cpu, warm (2:04 min against 1:43 min on average): 18 s in compile.",
        "",
    )


def test_labels_that_take_the_same_time_are_not_ranked():
    found = told(*group_of(*computing(18.0, 18.1)), *group_of(*computing(18.0, 18.1), label="xla"))
    assert [rule for rule, *_ in found] == ["agreement", "agreement"]


def test_labels_are_compared_within_the_same_start_only():
    found = told(*group_of(*computing(18.0, 18.1)), *group_of(*computing(24.0, 24.1), label="xla", start="cold"))
    assert [rule for rule, *_ in found] == ["agreement", "agreement"]


def test_labels_whose_runs_overlap_may_differ_by_chance():
    found = told(*group_of(*computing(16.0, 18.0, 22.0)), *group_of(*computing(17.0, 18.5, 23.0), label="xla"))
    [sentence] = [sentence for rule, sentence, _ in found if rule == "labels"]
    assert sentence.endswith("The runs of each differ so much among themselves that this may be chance.")


def test_repeats_without_phases_allow_the_spread_and_no_cause():
    found = [(finding.rule, finding.sentence, finding.advice) for finding in diagnose_group(ARTICLE)]
    assert found == [
        (
            "spread",
            "The 3 repeats of TPU differ by 58 % (7:58 min to 12:35 min). No phases were recorded, so that nothing can "
            "be said about its cause.",
            "Run the same config here, where phases are recorded.",
        ),
        (
            "labels",
            "GPU took 89 s longer than TPU (11:12 min against 9:43 min on average). With fewer than 3 runs of each, "
            "this may be chance.",
            "Run at least 3 repeats of each.",
        ),
        ("agreement", "The 2 repeats of GPU agree within 2 %.", ""),
    ]


def test_repeats_that_did_not_finish_are_named_and_not_counted():
    found = told(*group_of(a_run(), a_run(), a_run(state="failed"), {**a_run(), "state": "stopped", "total_s": 5.0}))
    assert found == [
        (
            "unfinished",
            "Of 4 repeats, 2 did not finish: cpu, warm (cpu-3, failed) and cpu, warm (cpu-4, stopped).",
            "What didn't finish is not counted. Open it to see why, and start it once more.",
        ),
        ("agreement", "The 2 repeats of cpu, warm agree within 1 %.", ""),
    ]


def test_a_single_run_has_no_spread():
    assert told(*group_of(a_run(), start="")) == [
        (
            "one_repeat",
            "There is but one run of cpu, so that a spread isn't known.",
            "Run at least 3 repeats of each.",
        )
    ]


def test_a_tpu_at_unequal_precision_is_told_of():
    tpu = group_of(*computing(18.0, 18.1, environment=TPU), label="tpu")
    cpu, in_bf16 = computing(18.0, 18.1), computing(18.0, 18.1, environment={"precision": "bf16"})
    [(_, sentence, advice)] = [item for item in told(*tpu, *group_of(*cpu)) if item[0] == "tpu_precision"]
    assert sentence == "tpu and cpu are in fp32, but the TPU of tpu multiplies in bf16."
    assert advice == "Compare at equal precision: bf16 on both, or products in fp32: highest on the TPU."
    assert "tpu_precision" not in [rule for rule, *_ in told(*tpu, *group_of(*in_bf16))]
    assert "tpu_precision" not in [rule for rule, *_ in told(*tpu)]


def test_an_empty_group_has_no_findings():
    assert diagnose_group(RunGroup("g", "A group", [])) == []


def test_a_device_that_waits_for_its_host_is_told_by_its_own_account():
    epochs = [{"epoch": 1, "phases": {"compute_s": 60.0}, "device_idle_s": 44.0, "seconds": 60.0}]
    phases = {"compute_s": 60.0, "data_wait_s": 4.0, "compile_s": 10.0, "setup_s": 26.0}
    found = {finding.rule: finding for finding in diagnose({"state": "finished", "epochs": epochs, "phases": phases})}
    expected = "For 30 % of this run (30 s) the device waited for the host to send its next step."
    assert found["device_starved"].sentence == expected
    epochs[0]["device_idle_s"] = 15.0
    assert "device_starved" not in {finding.rule for finding in diagnose({"epochs": epochs, "phases": phases})}
