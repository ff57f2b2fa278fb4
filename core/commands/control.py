"""The command line of a run that goes on: what is asked of it, and its answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from core.control import Wish, check_wish
from core.errors import ConfigError
from core.running.guard import end_overdue
from core.storage.records import RunRecord, StoredEvent
from core.store import Store

ANSWER_S = 15.0
"""How long an answer is waited for; it comes at the next step, which may compile."""
LOOK_S = 0.1
ANSWERS = ("Tweaked", "TweakRefused", "Paused", "Resumed", "RunEnded")
ENDINGS = ("stop", "abort")


def control_command(
    store: Store, run_id: str, wishes: Sequence[Wish], ask: str | None, *, should_free: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Ask, and wait for the answers.

    What changes nothing now is noted at once: a pause of a run that is paused, a change of one that stands still.

    Args:
        ask: pause, resume, stop, abort or None.
        should_free: a pause is to free the device.

    Returns:
        The JSON object (`acknowledged`, `answers`), and the lines to print.

    Raises:
        ConfigError: nothing is asked for, or what can't be.
        StoreError: there is no such run, or it doesn't go on.
    """
    record = store.get_run(run_id)
    _check(record, wishes, ask, should_free=should_free)
    cursor = store.last_event(run_id)
    for wish in wishes:
        store.request(run_id, "change", {"what": wish.what, "value": wish.value})
    if ask is not None:
        store.request(run_id, ask, {"free": True} if should_free else None)
    noted, due = _sorted(record, store.get_run(run_id).state, wishes, ask, should_free=should_free)
    answers = list(noted)
    deadline = time.monotonic() + ANSWER_S
    while due and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        if ask == "abort":
            end_overdue(store, run_id)
        for event in store.events(run_id, after=cursor, kinds=ANSWERS):
            cursor = event.id
            met = next((answers_it for answers_it in due if answers_it(event)), None)
            if met:
                due.remove(met)
            # others may ask something of the run too; how it ended is an answer to all
            if met or _has_ended(event):
                answers.append({"event": event.kind, **event.payload})
            if _has_ended(event):
                due = []
                break
    lines = [_in_words(answer) for answer in answers]
    late = f"No answer within {ANSWER_S:g} s; what was asked for holds from the run's next step on."
    return {"acknowledged": not due, "answers": answers}, [*lines, late] if due else lines


def _check(record: RunRecord, wishes: Sequence[Wish], ask: str | None, *, should_free: bool) -> None:
    if should_free and ask != "pause":
        raise ConfigError("--free says how to pause.", fix="Give --pause --free.")
    if not wishes and ask is None:
        raise ConfigError("Nothing is asked of the run.", fix="See python -m core control --help.")
    if wishes and ask in ENDINGS:
        raise ConfigError(f"No step comes after --{ask}, so nothing can change.", fix="Give changes to resume instead.")
    for wish in wishes:
        check_wish(wish, record.config)


def _sorted(
    before: RunRecord, state: str, wishes: Sequence[Wish], ask: str | None, *, should_free: bool
) -> tuple[list[dict[str, Any]], list[Callable[[StoredEvent], bool]]]:
    """What is noted and has no other answer, and tests for the events that answer the rest.

    Args:
        before: the run as it was when this was asked, and `state` how it is after that.
    """
    stood = before.state == "paused"
    is_free = before.state == "queued" or before.is_parked
    noted: list[dict[str, Any]] = []
    due: list[Callable[[StoredEvent], bool]] = []
    for wish in wishes:
        if is_free or ask == "pause" or (stood and ask != "resume"):
            noted.append({"event": "Noted", "what": wish.what, "value": wish.value, "state": state})
        else:
            due.append(partial(_fulfils, wish))
    is_so = (ask == "pause" and stood and not should_free) or (ask == "resume" and before.state == "running")
    if ask is not None and (is_free or is_so):
        noted.append({"event": "Noted", "state": state})
    elif ask is not None:
        due.append(_has_ended if ask in ENDINGS else partial(_stands, ask, should_free))
    return noted, due


def _fulfils(wish: Wish, event: StoredEvent) -> bool:
    """Whether the event answers this wish, not that of somebody else."""
    told, value = event.payload, wish.value
    if event.kind == "TweakRefused":
        return bool(told["what"] == wish.what and told["value"] == value)
    if event.kind != "Tweaked" or told["what"] != ("lr" if wish.what == "lr_factor" else wish.what):
        return False
    if wish.what == "lr_factor":
        return bool(told["factor"] == value)
    # an epoch that goes on is finished, so that a run may get more than was asked for
    return told["after"] >= value if wish.what == "epochs" else math.isclose(told["after"], value)


def _stands(ask: str, should_free: bool, event: StoredEvent) -> bool:
    """Whether the event says that the run stands still, or goes on, as asked."""
    if ask == "resume":
        return event.kind == "Resumed"
    return event.kind == "Paused" and (not should_free or bool(event.payload["is_freed"]))


def _has_ended(event: StoredEvent) -> bool:
    return event.kind == "RunEnded" and event.payload["state"] != "paused"


def _in_words(answer: dict[str, Any]) -> str:
    if answer["event"] == "Tweaked":
        return f"{answer['what']}: {answer['before']:g} -> {answer['after']:g} from step {answer['step']} on."
    if answer["event"] == "TweakRefused":
        return f"{answer['what']} stays: {answer['why']}"
    if answer["event"] == "RunEnded":
        return f"The run has ended: {answer['state']}. {answer['reason']}".rstrip()
    if answer["event"] == "Noted" and "what" in answer:
        return f"{answer['what']}: {answer['value']:g} from the next step on, when the run goes on."
    if answer["event"] == "Noted" and answer["state"] == "queued":
        return "The run is queued: the dashboard takes it up, or python -m core resume here."
    if answer["event"] == "Noted":
        return f"The run is {answer['state']}."
    if answer["event"] == "Paused" and answer["is_freed"]:
        return f"Paused at step {answer['step']}; it is saved, and its device is free."
    return f"{answer['event']} at step {answer['step']}."
