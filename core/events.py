"""What a trainer tells: one frozen dataclass a fact, named in the past tense.

Inside the trainer events are types; in the store they are their `kind` and a JSON object, since a
page may have re-imported these classes after an edit.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Phases:
    """Where wall time went, in seconds; the parts add up to the time they describe."""

    setup_s: float = 0.0
    data_wait_s: float = 0.0
    transfer_s: float = 0.0
    compile_s: float = 0.0
    compute_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    other_s: float = 0.0

    def total_s(self) -> float:
        return float(sum(asdict(self).values()))

    def __add__(self, other: Phases) -> Phases:
        mine, theirs = asdict(self), asdict(other)
        return Phases(**{name: mine[name] + theirs[name] for name in mine})

    def __sub__(self, other: Phases) -> Phases:
        mine, theirs = asdict(self), asdict(other)
        return Phases(**{name: mine[name] - theirs[name] for name in mine})


@dataclass(frozen=True)
class PhaseChanged:
    """The trainer began something else; `phase` is a word of `PHASE_WORDS`."""

    phase: str
    epoch: int = 0
    detail: str = ""


@dataclass(frozen=True)
class ProgressMade:
    """So much of some long work is done; shown while it lasts and not kept. `total` is 0 where it isn't known."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class ImageLost:
    """An image that was readable before the run is so no more; another of the training set stands for it."""

    file: str
    why: str


@dataclass(frozen=True)
class CacheBuilt:
    """Pictures were decoded and packed for this run; `seconds` from the first to the last, partly beside training."""

    images: int
    seconds: float


@dataclass(frozen=True)
class MachineSampled:
    """What the machine was doing in the last second or so; None where it can't be read.

    CPU figures are percent of the whole machine: all processes, those of this run, and all others.
    """

    cpu_percent: float | None = None
    own_cpu_percent: float | None = None
    other_cpu_percent: float | None = None
    memory_percent: float | None = None
    own_memory_gib: float | None = None
    gpu_percent: float | None = None
    gpu_clock_mhz: float | None = None
    gpu_temperature_c: float | None = None
    gpu_power_w: float | None = None
    gpu_memory_gib: float | None = None
    gpu_throttled: float | None = None
    tpu_duty_percent: float | None = None
    tpu_memory_gib: float | None = None


@dataclass(frozen=True)
class ForecastMade:
    """How long the run was expected to take; bounds hold the true value 19 times in 20, None where none are known."""

    basis: str
    epoch_s: float
    total_s: float
    epoch_low_s: float | None = None
    epoch_high_s: float | None = None
    total_low_s: float | None = None
    total_high_s: float | None = None


@dataclass(frozen=True)
class ProbeMeasured:
    """A few steps were timed in the place of a run: seconds of each settled training and evaluation step."""

    step_s: list[float]
    evaluation_step_s: list[float]
    steps_per_epoch: int
    evaluation_steps: int
    setup_s: float
    compile_s: float


@dataclass(frozen=True)
class RangeTested:
    """Some steps were trained, each with a higher learning rate, in the place of a run.

    Attributes:
        losses: of the training batch at each rate; the last one may be no number.
        smoothed: the same without their noise.
        suggestion: the rate to train with, of two digits; None where `why` says why there is none.
        steepest, lowest: where the smoothed loss falls most quickly, and where it is lowest.
        careful: a rate for who would rather be careful, a tenth of `lowest`, or the suggestion where that is lower.
    """

    lrs: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float | None = None
    steepest: float | None = None
    lowest: float | None = None
    careful: float | None = None
    why: str = ""


@dataclass(frozen=True)
class RunPrepared:
    """Data, model and device are ready; `data` counts what the scan found."""

    device_kind: str
    device_name: str
    classes: list[str]
    num_train: int
    num_val: int
    steps_per_epoch: int
    num_params: int
    num_trainable: int
    image_size: int
    environment: dict[str, Any] = field(default_factory=dict)
    setup_parts: dict[str, float] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProgramCompiled:
    """The device compiled in this step.

    `cause` is empty in the first step of a phase; `is_planned`: the config has such changes between epochs.
    """

    phase: str
    step: int
    epoch: int
    count: int
    seconds: float
    cause: str = ""
    is_planned: bool = False


@dataclass(frozen=True)
class HostFallback:
    """Operations of the model that the device leaves to the host, step after step, which is slow."""

    ops: list[str]


@dataclass(frozen=True)
class StepLogged:
    """A step whose figures were fetched: means over the images since the step logged before.

    `seconds` and `data_wait_s` are of all `steps` since then; `left_out` says why they don't count as settled.
    """

    step: int
    epoch: int
    loss: float
    top1: float
    lr: float
    images: int
    seconds: float
    data_wait_s: float
    images_per_s: float | None
    compiles: int
    steps: int = 1
    left_out: str = ""


@dataclass(frozen=True)
class EpochEnded:
    """An epoch with its validation; accuracies in percent, k/N with the true N.

    Attributes:
        phases: where its `seconds` went; of these, `earlier` were spent before the run was taken up again in its midst.
        step_times: settled steps by the number of their bin, see `StepTimes`.
        left_out: steps that don't count as settled, by reason.
        device_idle_s: how long the device had nothing to do between training steps, None where it can't tell.
    """

    epoch: int
    step: int
    train_loss: float
    train_top1: float
    val_loss: float
    val_top1: float
    val_top5: float | None
    seconds: float
    images_per_s: float | None
    phases: Phases
    compile_count: int
    lr: float
    step_times: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    device_idle_s: float | None = None
    earlier: Phases = field(default_factory=Phases)


@dataclass(frozen=True)
class StageBegan:
    """From this step on, an epoch's first one, the config asks for something else: `changes`, in sentences."""

    step: int
    epoch: int
    changes: list[str]


@dataclass(frozen=True)
class Tweaked:
    """An option was changed while the run went on; it holds from this step on.

    For lr these are the rates of this step, and `factor` is what multiplies the schedule from now on.
    """

    step: int
    epoch: int
    what: str
    before: float
    after: float
    factor: float | None = None


@dataclass(frozen=True)
class TweakRefused:
    """A change that was asked for could not be made; `why` is a sentence."""

    step: int
    epoch: int
    what: str
    value: float
    why: str


@dataclass(frozen=True)
class Paused:
    """The run stands still after this step; time does not count until it goes on.

    A run that freed its device has left it, saved whole, and is taken up again from there.
    """

    step: int
    epoch: int
    is_freed: bool = False


@dataclass(frozen=True)
class Resumed:
    """The run goes on after it stood still for so many seconds."""

    step: int
    epoch: int
    seconds: float


@dataclass(frozen=True)
class RunContinued:
    """The run is taken up again from what was kept after this step; `rules` say in sentences what holds from here."""

    step: int
    epoch: int
    rules: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Stuck:
    """No step has ended for so long, many times what one usually takes; told once until the next one ends."""

    step: int
    epoch: int
    seconds: float
    usual_s: float


@dataclass(frozen=True)
class RanBeside:
    """Another run of the same store was under way beside this one, on another device."""

    run_id: str
    name: str
    device_kind: str


@dataclass(frozen=True)
class EndedEarly:
    """The run ends before its last epoch by an option of its own; `why` is a sentence."""

    why: str


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint lies on disk; `which` is best, last, or state: all that is needed to go on after this step."""

    which: str
    epoch: int
    path: str
    step: int = 0


@dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint could not be written, and the run goes on; `why` is a sentence."""

    which: str
    epoch: int
    step: int
    why: str


@dataclass(frozen=True)
class RunEnded:
    """The last event of a run that was not killed; `is_warm`: nothing was compiled and no image packed."""

    state: str
    total_s: float
    phases: Phases
    compile_count: int
    compile_s: float
    reason: str = ""
    fix: str = ""
    error: str = ""
    traceback: str = ""
    is_warm: bool | None = None


Event = (
    PhaseChanged
    | ProgressMade
    | ImageLost
    | CacheBuilt
    | MachineSampled
    | ForecastMade
    | ProbeMeasured
    | RangeTested
    | RunPrepared
    | ProgramCompiled
    | HostFallback
    | StepLogged
    | EpochEnded
    | StageBegan
    | Tweaked
    | TweakRefused
    | Paused
    | Resumed
    | RunContinued
    | Stuck
    | RanBeside
    | EndedEarly
    | CheckpointSaved
    | CheckpointFailed
    | RunEnded
)

PHASE_WORDS = {
    "queued": "Waiting for the device",
    "loading_data": "Loading data",
    "building_model": "Building model",
    "starting_device": "Starting device",
    "compiling": "Compiling",
    "training": "Training",
    "validating": "Validating",
    "saving": "Saving",
    "paused": "Paused",
    "ended": "Ended",
}

TRYING_RATES = "learning rates"
"""What a range test has as the `what` of its `ProgressMade`: progress that is told after set-up too."""


def progress_in_words(what: str, done: int, total: int) -> str:
    """ "reading images: 1,200 of 20,000"; bytes are told in MB."""
    if what == "downloading":
        return f"downloading: {done / 1e6:,.0f}{f' of {total / 1e6:,.0f}' if total else ''} MB"
    return f"{what}: {done:,}{f' of {total:,}' if total else ''}"


def recompile_in_words(event: ProgramCompiled) -> str:
    """ "step 12 (training) compiled anew, 3.1 s: the shape of images changed from ... to ..." """
    return f"step {event.step} ({event.phase}) compiled anew, {event.seconds:.1f} s: {event.cause}"


def kind_of(event: Event) -> str:
    """The event's name in the store."""
    return type(event).__name__


def payload_of(event: Event) -> dict[str, Any]:
    """The event as plain JSON values; a number that is not finite is None, since JSON has neither NaN nor infinity."""
    payload: dict[str, Any] = _finite(asdict(event))
    return payload


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
