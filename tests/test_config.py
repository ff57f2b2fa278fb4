"""Options are checked once, at the border, and wrong ones are named."""

from __future__ import annotations

import shlex

import pytest

from core.commands.options import parser
from core.config import PRESETS, RunConfig, as_command, field_errors, make_config
from core.errors import ConfigError


@pytest.mark.parametrize("preset", PRESETS)
def test_the_shown_command_makes_the_same_config(preset: str):
    config = make_config(preset, seed=7)
    arguments = parser().parse_args(shlex.split(as_command(config))[3:])
    changes = {name: getattr(arguments, name) for name in RunConfig.model_fields if hasattr(arguments, name)}
    assert make_config("default", **changes) == config


AUGMENTED = {
    "augmentation": "resized_crop",
    "crop_scale_min": 0.08,
    "color_jitter": 0.4,
    "auto_augment": "randaugment",
    "randaugment_ops": 3,
    "randaugment_magnitude": 12,
    "random_erasing": 0.25,
    "mixup": 0.2,
    "cutmix": 1.0,
    "sampling": "balanced",
    "class_weights": "balanced",
    "val_duplicates": "drop",
    "workers": 4,
}


def test_the_shown_command_names_augmentation_sampling_and_weights():
    config = make_config("default", **AUGMENTED)
    arguments = parser().parse_args(shlex.split(as_command(config))[3:])
    assert {name: getattr(arguments, name) for name in AUGMENTED} == AUGMENTED


def test_the_shown_command_names_what_changes_from_epoch_to_epoch_and_from_layer_to_layer():
    changes = {"trainable": "head", "trainable_from": "2:last,4:all", "first_image_size": 96, "layer_decay": 0.75}
    arguments = parser().parse_args(shlex.split(as_command(make_config(**changes)))[3:])
    assert {name: getattr(arguments, name) for name in changes} == changes


def test_a_run_that_was_stored_before_there_were_such_options_has_none_of_them():
    old = make_config().model_dump(exclude={"trainable_from", "first_image_size", "layer_decay"})
    assert make_config(**old) == make_config()


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_augments_beyond_flips_or_changes_the_sampling(preset: str):
    config = make_config(preset)
    assert config.augmentation in ("none", "flip") and config.auto_augment == "none"
    assert (config.color_jitter, config.random_erasing, config.mixup, config.cutmix) == (0, 0, 0, 0)
    assert (config.sampling, config.class_weights, config.val_duplicates) == ("shuffle", "none", "keep")


def test_the_blog_preset_is_the_job_of_the_article():
    blog = make_config("blog")
    assert (blog.model, blog.batch_size, blog.epochs, blog.trainable) == ("torchvision/wide_resnet50_2", 32, 5, "all")
    assert (blog.optimizer, blog.lr, blog.beta1, blog.beta2) == ("adam", 1e-5, 0.9, 0.999)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 0}, "--epochs can't be 0"),
        ({"lr": float("nan")}, "--lr can't be nan"),
        ({"crop_scale_min": 0}, "--crop-scale-min can't be 0"),
        ({"color_jitter": 1.1}, "--color-jitter can't be 1.1"),
        ({"randaugment_ops": 6}, "--randaugment-ops can't be 6"),
        ({"randaugment_magnitude": 31}, "--randaugment-magnitude can't be 31"),
        ({"mixup": float("inf")}, "--mixup can't be inf"),
        ({"optimizer": "lion"}, "--optimizer can't be 'lion'"),
        ({"layer_decay": 0}, "--layer-decay can't be 0"),
        ({"first_image_size": 8}, "--first-image-size can't be 8"),
        ({"trainable_from": "4:body"}, "--trainable-from can't be '4:body': '4:body' names none of head, last, all"),
        ({"epochs": 2, "warmup_epochs": 3}, "warmup_epochs 3 leaves nothing"),
        ({"precision": "fp16", "device": "cpu"}, "fp16 does not work on cpu"),
        ({"colour": 1}, "no option --colour"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(changes: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        make_config(**changes)


def test_each_wrong_field_has_its_own_words():
    assert set(field_errors({"epochs": 0, "batch_size": -1})) == {"epochs", "batch_size"}
    assert field_errors({}) == {}
