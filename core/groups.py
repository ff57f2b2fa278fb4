"""Run groups: which runs make a fair comparison, in which order, and running them one after another."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from core.config import RunConfig, make_config
from core.errors import ConfigError, StoreError
from core.events import Event
from core.schedule import changes_between_epochs
from core.storage.records import PlannedRun
from core.store import Store
from core.worker import train_queued

GroupStart = Literal["cold", "warm", "both"]
MOST_RUNS = 1000


def varied(base: RunConfig, choices: Mapping[str, Sequence[Any]]) -> dict[str, RunConfig]:
    """One config for each combination of values, by a label that says in what it differs.

    Args:
        choices: option to its values; a text is read as the command line would.

    Raises:
        ConfigError: no such option, or a value out of its limits.
    """
    configs: dict[str, RunConfig] = {}
    for values in itertools.product(*choices.values()):
        changes = dict(zip(choices, values, strict=True))
        config = make_config(**{**base.model_dump(), **changes})
        names = [str(changes["device"])] if list(changes) == ["device"] else [f"{k} {v}" for k, v in changes.items()]
        configs[", ".join(names) or base.device] = config
    return configs


def plan_group(
    configs: Mapping[str, RunConfig], *, repeats: int, start: GroupStart, seed: int = 0, cold_first: bool = False
) -> list[PlannedRun]:
    """The runs of a group in their order.

    In each round every config runs once for each start, in an order drawn anew, so that heat, other load and whatever
    else drifts meets all alike. A cold repeat has a process of its own and makes its caches anew. Warm repeats share
    one process; a warm-up run goes before them for each config, and doesn't count: of one epoch, or of all where
    later epochs compile programs of their own.

    Args:
        configs: by label.
        repeats: of each config, for each start.
        cold_first: the rounds of cold repeats come before the warm ones: a TPU belongs to the process that is warm.

    Raises:
        ConfigError: nothing to compare, or too much.
    """
    starts = ("cold", "warm") if start == "both" else (start,)
    if repeats < 1 or repeats * len(configs) * len(starts) > MOST_RUNS:
        raise ConfigError(
            f"{repeats} repeats of {len(configs)} configs can't be run.",
            fix=f"Choose 1 repeat or more, and {MOST_RUNS:,} runs at the most.",
        )
    if len(configs) * len(starts) < 2:
        raise ConfigError(
            "There is one config alone, so nothing to compare.", fix="Vary an option, or compare cold with warm."
        )
    draw = random.Random(seed)
    warm_ups = [
        PlannedRun(_warming(_placed(config, "warm")), label, "warm", 0, "warm-up")
        for label, config in configs.items()
        if "warm" in starts
    ]
    blocks = [[one] for one in starts] if cold_first else [list(starts)]
    runs: list[PlannedRun] = []
    for block in blocks:
        if "warm" in block:
            runs += warm_ups
        for repeat in range(1, repeats + 1):
            cells = [(label, one) for label in configs for one in block]
            draw.shuffle(cells)
            runs += [PlannedRun(_placed(configs[label], one), label, one, repeat) for label, one in cells]
    return runs


def _warming(config: RunConfig) -> RunConfig:
    if changes_between_epochs(config):
        return config
    return config.model_copy(update={"epochs": 1, "warmup_epochs": 0.0})


def _placed(config: RunConfig, start: str) -> RunConfig:
    if start == "cold":
        return config.model_copy(update={"process": "own", "caches": "anew"})
    return config.model_copy(update={"process": "shared", "caches": "use"})


def run_group(
    store: Store,
    group_id: str,
    *,
    on_run: Callable[[int, int, str], None] = lambda number, total, run_id: None,
    on_event: Callable[[Event], None] = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train a group's waiting runs in this process and its children; one that fails does not stop the others.

    Args:
        on_run: called before each run with its number from 1, how many there are, and its id.
        should_stop: the active run is stopped and saved, and the rest is not begun.
    """
    members = store.groups.get(group_id).members
    for number, member in enumerate(members, start=1):
        # it may have been stopped or deleted meanwhile
        if not _waits(store, member.run_id):
            continue
        if not should_stop():
            on_run(number, len(members), member.run_id)
            state = train_queued(store, member.run_id, on_event=on_event, should_stop=should_stop)
            if state is None:
                raise ConfigError("Another run holds the device.", fix="Wait for it, or stop it.")
        if _waits(store, member.run_id):
            store.request(member.run_id, "stop")


def _waits(store: Store, run_id: str) -> bool:
    try:
        return store.get_run(run_id).state == "queued"
    except StoreError:
        return False
