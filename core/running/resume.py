"""Taking up a run that ended, from what it kept: the rule first, then the deed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import RunConfig, make_config
from core.control import Wish, check_wish
from core.devices import resolve_kind
from core.errors import ConfigError, StoreError
from core.running.script import script_in_words, script_of
from core.schedule import lr_at
from core.storage.records import RunRecord
from core.store import Store
from core.training.state import SavedState, read_state, state_files


@dataclass(frozen=True)
class ResumePlan:
    """What resuming a run would come to.

    Attributes:
        step, epoch: after which step it goes on, and in which epoch; 0 and 1 where it kept nothing and begins anew.
        epochs: how many it will have in all.
        config: that holds from then on, but for `changes`.
        changes: what is changed before its next step, see `core.control`.
        script: changes that are made again at their steps.
        rules: all of this in words, a sentence each.
    """

    run_id: str
    step: int
    epoch: int
    epochs: int
    config: RunConfig
    changes: dict[str, float]
    script: list[dict[str, Any]]
    rules: list[str]


def plan_resume(
    store: Store, run_id: str, *, changes: Mapping[str, float] | None = None, device: str = "", follow: bool = True
) -> ResumePlan:
    """Say from where a run would go on, and what would hold then; nothing is changed.

    Args:
        changes: an option of `control.CHANGEABLE` to its new value.
        device: another device kind, "" for the run's own.
        follow: changes that people made after what was kept are made again at their steps.

    Raises:
        StoreError: there is no such run, or it is active or no run for people.
        ConfigError: a change can't be, or nothing would be left to train.
        DeviceError: `device` does not answer here.
        CheckpointError: it kept a state, and none that can be read.
    """
    record = store.get_run(run_id)
    _check_ended(record)
    folder = store.run_folder(run_id)
    kept = read_state(folder)
    changes = dict(changes or {})
    if device:
        # or the run would be of a device that it can't have from then on
        resolve_kind(device)
    config = make_config(**{**record.config.model_dump(), **({"device": device} if device else {})})
    before = config.model_copy(update=kept.config) if kept else config
    for what, value in changes.items():
        check_wish(Wish(what, value), before)
    epochs = int(changes.get("epochs", before.epochs))
    if kept is None:
        script = [dict(change) for change in record.script] if follow else []
        return ResumePlan(
            run_id, 0, 1, epochs, config, changes, script,
            ["It kept no state, so it begins anew.", *_changes_in_words(changes)],
        )  # fmt: skip
    _check_epochs(kept, epochs, is_finished=record.state == "finished")
    if epochs < kept.position.epoch:
        # it died after its last checkpoint: what it had no time to write is told again, and its end
        rules = [*_where(kept, folder), "All its epochs are trained: only its end is missing."]
        return ResumePlan(run_id, kept.position.step, kept.position.epoch, epochs, config, changes, [], rules)
    script = _script(store, record, kept) if follow else []
    rules = [*_where(kept, folder), *_what_holds(store, record, kept, before, changes)]
    rules += _device_rule(kept, device)
    left_out = [] if follow else _script(store, record, kept)
    rules += [f"Made again: {words}" for words in script_in_words(script)]
    rules += [f"Left out: {words}" for words in script_in_words(left_out)]
    if before.time_limit_min:
        rules.append("The time limit counts anew.")
    at = kept.position
    return ResumePlan(run_id, at.step, at.epoch, epochs, config, changes, script, rules)


def resume(store: Store, plan: ResumePlan, *, own: bool = False) -> None:
    """Queue the run, before all others.

    Args:
        own: this process will train it itself.

    Raises:
        StoreError: it has become active meanwhile.
    """
    store.requeue(plan.run_id, config=plan.config, changes=plan.changes, script=plan.script, rules=plan.rules, own=own)


def _check_ended(record: RunRecord) -> None:
    if record.purpose != "train":
        raise StoreError(f"Run {record.run_id} is a {record.purpose}, which isn't resumed.", fix="Start it anew.")
    if record.is_active and not record.is_parked:
        raise StoreError(f"Run {record.run_id} is {record.state}.", fix="Stop it first, or let it go on.")


def _check_epochs(kept: SavedState, epochs: int, *, is_finished: bool) -> None:
    at = kept.position
    # a whole epoch is behind it where the next one has not begun
    done = at.epoch - 1
    least = at.epoch if at.place else done
    if epochs < least:
        raise ConfigError(f"Epochs can't be {epochs}: it is in epoch {least}.", fix=f"Choose {least} or more.")
    if not at.place and epochs == done and is_finished:
        raise ConfigError(f"All its {done} epochs are trained.", fix=f"Ask for more, as --epochs {done + 1}.")


def _script(store: Store, record: RunRecord, kept: SavedState) -> list[dict[str, Any]]:
    """What people changed after the state was kept, and what is still to come of the run's own script."""
    made = [change for change in script_of(store, record.run_id) if change["step"] > kept.position.step]
    known = {(change["step"], change["what"]) for change in made}
    to_come = [change for change in record.script if change["step"] > kept.position.step]
    others = [change for change in to_come if (change["step"], change["what"]) not in known]
    return sorted([*made, *others], key=lambda change: int(change["step"]))


def _where(kept: SavedState, folder: Path) -> list[str]:
    at = kept.position
    when = time.strftime("%d %B, %H:%M", time.localtime(kept.at))
    epoch = f"in epoch {at.epoch}, batch {at.place}" if at.place else f"epoch {at.epoch - 1} is whole"
    words = [f"It goes on after step {at.step:,} ({epoch}), as kept on {when}."]
    if state_files(folder)[0].name != f"state-{at.step:09d}.pt":
        words.append("What was kept later can't be read.")
    return words


def _what_holds(
    store: Store, record: RunRecord, kept: SavedState, before: RunConfig, changes: dict[str, float]
) -> list[str]:
    """The rule of another learning rate or number of epochs, with the rates of the next step."""
    words = _changes_in_words({name: value for name, value in changes.items() if not name.startswith("lr")})
    steps_per_epoch = _steps_per_epoch(store, record)
    if not steps_per_epoch:
        return words
    step, factor = kept.position.step + 1, kept.lr_factor
    rate = factor * lr_at(before, step, steps_per_epoch)
    after = before.model_copy(update={"epochs": int(changes["epochs"])}) if "epochs" in changes else before
    planned = lr_at(after, step, steps_per_epoch)
    new = changes.get("lr", changes.get("lr_factor", factor) * planned)
    if "epochs" in changes:
        words.append(f"The schedule is that of {after.epochs} epochs from here on.")
    if new == rate:
        return [*words, f"The learning rate of step {step:,} is {rate:.3g}, as it would have been."]
    words.append(f"The learning rate of step {step:,} is {new:.3g} in place of {rate:.3g}.")
    if "lr" in changes or "lr_factor" in changes:
        words.append(f"From there the schedule goes on in proportion: {new / planned:.3g} times its rates.")
    return words


def _changes_in_words(changes: Mapping[str, float]) -> list[str]:
    return [
        f"{RunConfig.model_fields[name].title}: {value:g}." for name, value in changes.items() if name != "lr_factor"
    ]


def _device_rule(kept: SavedState, device: str) -> list[str]:
    if not device or device in (kept.device_kind, "auto"):
        return []
    return [f"It goes on on {device} in place of {kept.device_kind}: figures are equal up to rounding."]


def _steps_per_epoch(store: Store, record: RunRecord) -> int:
    told = store.events(record.run_id, kinds=("RunPrepared",))
    return int(told[-1].payload["steps_per_epoch"]) if told else 0
