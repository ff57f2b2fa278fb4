"""What is trained in which epoch: stages, read from one line of text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

Trainable = Literal["head", "last", "all"]
TRAINABLE: tuple[Trainable, ...] = get_args(Trainable)
"""Each is a part of the next one."""
TRAINABLE_WORDS: dict[Trainable, str] = {"head": "the head alone", "last": "the last stages", "all": "all layers"}


@dataclass(frozen=True)
class Stage:
    """From the beginning of this epoch on, this is trained."""

    epoch: int
    trainable: Trainable


def parse_stages(text: str) -> list[Stage]:
    """ "2:last,4:all" -> from epoch 2 on the last stages, from epoch 4 on all layers.

    Args:
        text: EPOCH:WHAT, any number of times, with commas, semicolons or spaces between; empty for none.

    Raises:
        ValueError: it is no such list, or its epochs don't grow from 2 on.
    """
    stages: list[Stage] = []
    # a space that belongs to a stage is none between two
    for item in filter(None, re.split(r"[,;\s]+", re.sub(r"\s*:\s*", ":", text))):
        match = re.fullmatch(r"(\d+):(\w+)", item, re.ASCII)
        if not match:
            raise ValueError(f"'{item}' is not an epoch, a colon and what is trained from it on, such as 4:all")
        epoch, what = int(match[1]), match[2].lower()
        if what not in TRAINABLE:
            raise ValueError(f"'{item}' names none of {', '.join(TRAINABLE)}")
        if epoch < 2:
            raise ValueError(f"'{item}' begins before epoch 2: what the first epoch trains is said by trainable")
        if stages and epoch <= stages[-1].epoch:
            raise ValueError(f"'{item}' does not come after epoch {stages[-1].epoch}")
        stages.append(Stage(epoch, TRAINABLE[TRAINABLE.index(what)]))
    return stages


def stages_in_text(stages: list[Stage]) -> str:
    """The one spelling of these stages: "2:last,4:all"."""
    return ",".join(f"{stage.epoch}:{stage.trainable}" for stage in stages)


def check_stages(trainable: Trainable, stages: list[Stage], epochs: int) -> None:
    """Refuse stages that a run never comes to, or that change nothing.

    Raises:
        ValueError: there is one.
    """
    before = trainable
    for stage in stages:
        if stage.epoch > epochs:
            raise ValueError(f"trainable_from names epoch {stage.epoch}, and the run has {epochs}")
        if stage.trainable == before:
            raise ValueError(f"trainable_from {stage.epoch}:{before} changes nothing: {before} was trained before")
        before = stage.trainable


def trainable_at(trainable: Trainable, trainable_from: str, epoch: int) -> Trainable:
    """What is trained in an epoch.

    Args:
        trainable: in the first one.
        trainable_from: as `parse_stages` takes it.
    """
    begun = [stage.trainable for stage in parse_stages(trainable_from) if stage.epoch <= epoch]
    return begun[-1] if begun else trainable


def widest(trainable: Trainable, trainable_from: str) -> Trainable:
    """What is trained at any time: the parts that the optimizer knows."""
    return max((trainable, *(stage.trainable for stage in parse_stages(trainable_from))), key=TRAINABLE.index)
