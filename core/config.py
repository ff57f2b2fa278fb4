"""What a run is made of: the one list of options, their limits and their help texts.

The form, the command line, the stored run and the documentation all read `RunConfig`;
there is no second list of options anywhere.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from core.errors import ConfigError
from core.stages import Trainable, check_stages, parse_stages, stages_in_text

DeviceKind = Literal["cpu", "cuda", "mps", "xla", "tpu", "auto"]
OptimizerName = Literal["adam", "adamw", "sgd"]
ScheduleName = Literal["constant", "cosine", "step", "onecycle"]
Precision = Literal["fp32", "bf16", "fp16", "auto"]
MatmulPrecision = Literal["default", "high", "highest"]
Augmentation = Literal["none", "flip", "crop", "resized_crop"]
AutoAugment = Literal["none", "randaugment", "trivialaugment"]
Sampling = Literal["shuffle", "balanced"]
ClassWeights = Literal["none", "balanced"]
ValDuplicates = Literal["keep", "drop"]
TorchCompile = Literal["off", "on"]
Process = Literal["shared", "own"]
Caches = Literal["use", "anew"]
AUTO = "auto"
"""What a batch size of 0 is called: it is found before the run."""


class RunConfig(BaseModel):
    """One training job, complete and checked; two equal configs train alike."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str = Field(
        "builtin:fashion-mnist",
        min_length=1,
        title="Data",
        description="A folder of class folders, a .zip or .tar of one or its web address, builtin:NAME, "
        "torchvision:NAME, imagenetv2, or hf:REPO.",
    )
    model: str = Field(
        "tf_efficientnet_lite0",
        min_length=1,
        title="Model",
        description="A torchvision or timm model; timm/NAME or torchvision/NAME says which.",
    )
    weights: str = Field(
        "default",
        min_length=1,
        title="Weights",
        description="default (pretrained), none (random start), a weight file, or run:RUN_ID, the best weights of a "
        "run of this model; its last ones with :last behind.",
    )
    trainable: Trainable = Field(
        "all",
        title="What is trained",
        description="head: the new classifier only; last: also the last stages; all: every layer.",
    )
    trainable_from: str = Field(
        "",
        max_length=200,
        title="Trained from epoch",
        description="What is trained from later epochs on, as 2:last,4:all; the first epochs train what is chosen "
        "above (--trainable). Empty: the same in all epochs.",
    )
    device: DeviceKind = Field(
        "auto",
        title="Device",
        description="Where the steps run; auto takes the fastest kind that answers; tpu is torch_tpu, experimental.",
    )
    precision: Precision = Field(
        "fp32",
        title="Precision",
        description="fp32, or mixed precision: bf16, fp16 (fp16 on CUDA only); auto takes what is fastest on the "
        "device, which a CPU finds out by a few steps of the model.",
    )
    matmul_precision: MatmulPrecision = Field(
        "default",
        title="Products in fp32",
        description="default: as the device does by itself (TPUs multiply in bf16, NVIDIA GPUs convolve in TF32); "
        "high: TF32, three passes on a TPU; highest: full fp32.",
    )
    torch_compile: TorchCompile = Field(
        "off",
        title="torch.compile",
        description="on: translate the model's forward with torch.compile first (CPU, CUDA). XLA always compiles.",
    )
    num_devices: int = Field(
        1,
        ge=0,
        le=64,
        title="Devices",
        description="GPUs, or processes on the CPU, that share each batch; 0: all GPUs. A TPU uses all its chips.",
    )
    epochs: int = Field(5, ge=1, le=10_000, title="Epochs", description="Passes over the training images.")
    batch_size: int = Field(
        32,
        ge=0,
        le=8192,
        title="Batch size",
        description="Images in a step, over all devices; auto (0): the largest that fits, found before the run. The "
        "learning rate is not changed with it.",
    )
    image_size: int | None = Field(
        None,
        ge=16,
        le=1024,
        title="Image size",
        description="Side of the square picture in pixels; empty: the model's own.",
    )
    first_image_size: int | None = Field(
        None,
        ge=16,
        le=1024,
        title="First image size",
        description="Side of the training images in the first epoch, in pixels: it grows to the image size, which the "
        "last third of the epochs have. Empty: one size in all epochs. Validation always has the full size.",
    )
    augmentation: Augmentation = Field(
        "flip",
        title="Geometry",
        description="none; flip: mirror at random; crop: also crop at random; "
        "resized_crop: mirror, and enlarge a random part.",
    )
    crop_scale_min: float = Field(
        0.35,
        gt=0,
        le=1,
        title="Smallest crop",
        description="Geometry resized_crop: the least share of an image's area that is seen.",
    )
    color_jitter: float = Field(
        0.0,
        ge=0,
        le=1,
        title="Colour jitter",
        description="Brightness, contrast and saturation each change by a factor of up to 1 ± this.",
    )
    auto_augment: AutoAugment = Field(
        "none",
        title="Automatic augmentation",
        description="randaugment: some random operations of one strength; trivialaugment: one, of random strength.",
    )
    randaugment_ops: int = Field(
        2, ge=1, le=5, title="RandAugment operations", description="RandAugment: operations an image goes through."
    )
    randaugment_magnitude: int = Field(
        9, ge=0, le=30, title="RandAugment magnitude", description="RandAugment: their strength, from 0 to 30."
    )
    random_erasing: float = Field(
        0.0,
        ge=0,
        le=1,
        title="Random erasing",
        description="Probability that a rectangle of an image is painted over.",
    )
    mixup: float = Field(
        0.0,
        ge=0,
        le=10,
        title="MixUp",
        description="Alpha of the blend of two images and their labels; 0: off. With CutMix, a batch takes one.",
    )
    cutmix: float = Field(
        0.0,
        ge=0,
        le=10,
        title="CutMix",
        description="Alpha of pasting a part of another image, labels by area; 0: off. With MixUp, a batch takes one.",
    )
    sampling: Sampling = Field(
        "shuffle",
        title="Sampling",
        description="shuffle: each training image once an epoch; balanced: drawn so that classes come equally often.",
    )
    class_weights: ClassWeights = Field(
        "none",
        title="Class weights",
        description="balanced: the training loss weighs a class by the inverse of its number of images.",
    )
    val_duplicates: ValDuplicates = Field(
        "keep",
        title="Duplicates",
        description="Validation images that are byte for byte in training: keep and warn, or leave out.",
    )
    workers: int = Field(
        0,
        ge=0,
        le=64,
        title="Workers",
        description="Threads that prepare batches; 0: chosen by the number of cores.",
    )
    optimizer: OptimizerName = Field("adamw", title="Optimizer", description="Adam, AdamW or SGD.")
    lr: float = Field(
        3e-4, gt=0, le=100, allow_inf_nan=False, title="Learning rate", description="The peak of the schedule."
    )
    beta1: float = Field(0.9, ge=0, lt=1, title="Beta 1", description="Adam, AdamW: decay of the mean gradient.")
    beta2: float = Field(
        0.999, ge=0, lt=1, title="Beta 2", description="Adam, AdamW: decay of the mean squared gradient."
    )
    momentum: float = Field(0.9, ge=0, lt=1, title="Momentum", description="SGD only.")
    weight_decay: float = Field(
        0.01,
        ge=0,
        le=10,
        title="Weight decay",
        description="Decoupled in AdamW, added to the gradient in Adam and SGD.",
    )
    layer_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        title="Layer decay",
        description="Each layer learns at this share of the learning rate of the layer above it, the head at the full "
        "one; 1: all alike.",
    )
    schedule: ScheduleName = Field(
        "cosine", title="Schedule", description="How the learning rate goes on after the warm-up."
    )
    warmup_epochs: float = Field(
        0.0,
        ge=0,
        le=1000,
        title="Warm-up epochs",
        description="The learning rate rises in a line over these epochs; fractions count.",
    )
    step_epochs: int = Field(
        2,
        ge=1,
        le=10_000,
        title="Step every",
        description="Schedule step: epochs between two cuts of the learning rate.",
    )
    step_factor: float = Field(
        0.1,
        gt=0,
        le=1,
        title="Step factor",
        description="Schedule step: what each cut multiplies the learning rate by.",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        title="Label smoothing",
        description="Share of the target spread evenly over all classes, in training only.",
    )
    clip_grad_norm: float = Field(
        0.0,
        ge=0,
        le=1e6,
        title="Gradient clipping",
        description="The longest that the gradient of all weights together may be; 0: off.",
    )
    accumulate: int = Field(
        1,
        ge=1,
        le=1024,
        title="Accumulation",
        description="Parts in which a batch goes through the model, one after another, to spare memory.",
    )
    ema_decay: float = Field(
        0.0,
        ge=0,
        lt=1,
        title="EMA of the weights",
        description="Decay of a moving average of the weights, which is then what is validated and saved; 0: off.",
    )
    seed: int = Field(
        0,
        ge=0,
        le=2**31 - 1,
        title="Seed",
        description="Fixes the split, the order of images, augmentation and the head's start.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        title="CPU threads",
        description="Threads that torch uses on the CPU; 0: as many as there are cores.",
    )
    val_percent: int = Field(
        20,
        ge=1,
        le=90,
        title="Validation share (percent)",
        description="Of each class, where the data bring no validation folder.",
    )
    log_every: int = Field(
        5,
        ge=1,
        le=10_000,
        title="Log every",
        description="Steps between two logged figures; the device is waited for on these.",
    )
    patience: int = Field(
        0,
        ge=0,
        le=10_000,
        title="Patience",
        description="Epochs without a better validation top-1 after which the run ends; 0: it trains all its epochs.",
    )
    checkpoint_min: float = Field(
        10.0,
        ge=0,
        le=100_000,
        title="Checkpoint every (minutes)",
        description="In a long epoch all that is needed to go on is saved so often, at a logged step; 0: after epochs "
        "alone.",
    )
    time_limit_min: float = Field(
        0.0,
        ge=0,
        le=100_000,
        title="Time limit (minutes)",
        description="The run is stopped and saved after so many minutes, set-up included; 0: no limit.",
    )
    process: Process = Field(
        "shared",
        title="Process",
        description="shared: in the process that was asked, where programs that were compiled for earlier runs are "
        "at hand; own: in a new process.",
    )
    caches: Caches = Field(
        "use",
        title="Caches",
        description="use: pictures and programs that earlier runs left; anew: decode and pack all pictures for this "
        "run alone, and take no kept programs.",
    )

    @field_validator("batch_size", mode="before")
    @classmethod
    def _auto_is_0(cls, value: Any) -> Any:
        return 0 if value == AUTO else value

    @field_validator("trainable_from")
    @classmethod
    def _one_spelling(cls, text: str) -> str:
        return stages_in_text(parse_stages(text))

    @model_validator(mode="after")
    def _parts_agree(self) -> RunConfig:
        if self.warmup_epochs >= self.epochs and self.warmup_epochs > 0:
            raise ValueError(f"warmup_epochs {self.warmup_epochs:g} leaves nothing of {self.epochs} epochs")
        if self.precision == "fp16" and self.device not in ("cuda", "auto"):
            raise ValueError(f"precision fp16 does not work on {self.device}: choose bf16 or fp32")
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch_size {self.batch_size} can't be cut into {self.accumulate} equal parts")
        check_stages(self.trainable, parse_stages(self.trainable_from), self.epochs)
        if self.first_image_size and self.image_size and self.first_image_size >= self.image_size:
            raise ValueError(f"first_image_size {self.first_image_size} is not below image_size {self.image_size}")
        return self


PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "data": "builtin:fashion-mnist",
        "model": "tf_efficientnet_lite0",
        "trainable": "head",
        "image_size": 64,
        "epochs": 3,
        "lr": 3e-3,
        "augmentation": "none",
        "schedule": "constant",
    },
    "blog": {
        "data": "imagenetv2:matched-frequency",
        "model": "torchvision/wide_resnet50_2",
        "trainable": "all",
        "image_size": 224,
        "epochs": 5,
        "batch_size": 32,
        "optimizer": "adam",
        "lr": 1e-5,
        "beta1": 0.9,
        "beta2": 0.999,
        "weight_decay": 0.0,
        "schedule": "constant",
        "augmentation": "none",
    },
    "default": {},
}
"""Preset name to the fields in which it differs from `RunConfig()`.

`blog` is the job of Dajiro, "Colab, PyTorch and TPU" (July 2020).
"""
PRESET_TITLES = {"quick": "Quick start", "blog": "Blog 2020", "default": "Good defaults"}


def make_config(preset: str = "default", **changes: Any) -> RunConfig:
    """A config from a preset and what differs from it.

    Raises:
        ConfigError: no such preset, no such option, or a value out of its limits.
    """
    if preset not in PRESETS:
        raise ConfigError(f"There is no preset '{preset}'.", fix=f"Choose one of {', '.join(PRESETS)}.")
    try:
        return RunConfig(**{**PRESETS[preset], **changes})
    except ValidationError as error:
        problem, fix = _first_problem(error)
        raise ConfigError(problem, fix=fix) from None


def field_errors(values: dict[str, Any]) -> dict[str, str]:
    """The problem of each field that is out of its limits; "" keys what concerns several fields."""
    try:
        RunConfig(**values)
    except ValidationError as error:
        return {str(item["loc"][0]) if item["loc"] else "": _words(item["msg"]) for item in error.errors()}
    return {}


def as_command(config: RunConfig, *, start: RunConfig | None = None, words: Sequence[str] = ()) -> str:
    """The command line that trains the same run.

    Args:
        start: from which its options start, where not from the defaults.
        words: options that come first.
    """
    start = start or RunConfig()
    line = ["python", "-m", "core", "train", *words]
    for name in RunConfig.model_fields:
        value = getattr(config, name)
        if value != getattr(start, name):
            line += [f"--{name.replace('_', '-')}", value_in_words(name, value)]
    return shlex.join(line)


def value_in_words(name: str, value: Any) -> str:
    """An option's value as the command line takes it."""
    if name == "batch_size" and value == 0:
        return AUTO
    return f"{value:g}" if isinstance(value, float) else str(value)


def _first_problem(error: ValidationError) -> tuple[str, str]:
    item = error.errors()[0]
    if not item["loc"]:
        return f"These options clash: {_words(item['msg'])}.", "Change one of them."
    name = str(item["loc"][0])
    option = f"--{name.replace('_', '-')}"
    if item["type"] == "extra_forbidden":
        return f"There is no option {option}.", "See python -m core train --help."
    return f"{option} can't be {item['input']!r}: {_words(item['msg'])}.", "Choose a value within the limits."


def _words(message: str) -> str:
    return message.removeprefix("Value error, ").replace("Input should be", "it should be").rstrip(".")
