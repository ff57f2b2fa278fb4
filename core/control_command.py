"""The command line of a run that goes on: what is asked of it, and its answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from core.control import Wish, check_wish
from core.errors import ConfigError
from core.guard import end_overdue
from core.store import Store

ANSWER_S = 15.0
"""How long an answer is waited for; it comes at the next step, which may compile."""
LOOK_S = 0.1
ANSWERS = ("Tweaked", "TweakRefused", "Paused", "Resumed", "RunEnded")


def control_command(
    store: Store, run_id: str, wishes: Sequence[Wish], ask: str | None, *, should_free: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Ask, and wait for the answers.

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
    if not wishes and ask is None:
        raise ConfigError("Nothing is asked of the run.", fix="See python -m core control --help.")
    if should_free and ask != "pause":
        raise ConfigError("--free says how to pause.", fix="Give --pause --free.")
    for wish in wishes:
        check_wish(wish, record.config)
    cursor = store.last_event(run_id)
    for wish in wishes:
        store.request(run_id, "change", {"what": wish.what, "value": wish.value})
    if ask is not None:
        store.request(run_id, ask, {"free": True} if should_free else None)
        if record.state == "queued" or record.is_parked:
            # nobody trains it, so that nobody answers
            answer = {"event": "Noted", "state": store.get_run(run_id).state}
            return {"acknowledged": True, "answers": [answer]}, [_in_words(answer)]
    expected = len(wishes) + (ask is not None)
    deadline = time.monotonic() + ANSWER_S
    answers: list[dict[str, Any]] = []
    while len(answers) < expected and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        if ask == "abort":
            end_overdue(store, run_id)
        told = store.events(run_id, after=cursor, kinds=ANSWERS)
        answers = [{"event": event.kind, **event.payload} for event in told]
        if any(answer["event"] == "RunEnded" for answer in answers):
            break
    is_heard = len(answers) >= expected
    lines = [_in_words(answer) for answer in answers]
    return {"acknowledged": is_heard, "answers": answers}, lines if is_heard else [*lines, "No answer yet."]


def _in_words(answer: dict[str, Any]) -> str:
    if answer["event"] == "Tweaked":
        return f"{answer['what']}: {answer['before']:g} -> {answer['after']:g} from step {answer['step']} on."
    if answer["event"] == "TweakRefused":
        return f"{answer['what']} stays: {answer['why']}"
    if answer["event"] == "RunEnded":
        return f"The run has ended: {answer['state']}. {answer['reason']}".rstrip()
    if answer["event"] == "Noted":
        return f"The run is {answer['state']}."
    if answer["event"] == "Paused" and answer["is_freed"]:
        return f"Paused at step {answer['step']}; it is saved, and its device is free."
    return f"{answer['event']} at step {answer['step']}."
