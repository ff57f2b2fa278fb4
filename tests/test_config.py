"""Options are checked once, at the border, and wrong ones are named."""

from __future__ import annotations

import shlex

import pytest

from core.__main__ import _parser
from core.config import PRESETS, RunConfig, as_command, field_errors, make_config
from core.errors import ConfigError


@pytest.mark.parametrize("preset", PRESETS)
def test_the_shown_command_makes_the_same_config(preset: str):
    config = make_config(preset, seed=7)
    arguments = _parser().parse_args(shlex.split(as_command(config))[3:])
    changes = {name: getattr(arguments, name) for name in RunConfig.model_fields if hasattr(arguments, name)}
    assert make_config("default", **changes) == config


def test_the_blog_preset_is_the_job_of_the_article():
    blog = make_config("blog")
    assert (blog.model, blog.batch_size, blog.epochs, blog.trainable) == ("torchvision/wide_resnet50_2", 32, 5, "all")
    assert (blog.optimizer, blog.lr, blog.beta1, blog.beta2) == ("adam", 1e-5, 0.9, 0.999)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 0}, "--epochs can't be 0"),
        ({"lr": float("nan")}, "--lr can't be nan"),
        ({"optimizer": "lion"}, "--optimizer can't be 'lion'"),
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
