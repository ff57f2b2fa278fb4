"""The changes that were made to a run while it went on, to be made again of themselves in another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.control import CHANGEABLE, Control, Wish
from core.schedule import lr_at
from core.storage.records import RunRecord
from core.store import Store
from core.words import tweak_in_words

Change = dict[str, Any]
"""`step` from which on, `what` (one of `control.CHANGEABLE`) and `value`."""


def script_of(store: Store, run_id: str) -> list[Change]:
    """The changes that made the run what it is, in their order; those that were undone when it was taken up again from
    a step before, or begun anew, don't count.

    Learning rates are told by what multiplies the schedule, which is exact: a run of the same config that follows the
    script trains as this one did, bit by bit on the CPU.

    Raises:
        StoreError: there is no such run.
    """
    store.get_run(run_id)
    script: list[Change] = []
    goes_on = False
    for event in store.events(run_id, kinds=("Tweaked", "RunContinued", "RunPrepared")):
        told = event.payload
        if event.kind == "RunContinued":
            script, goes_on = [change for change in script if change["step"] <= told["step"]], True
        elif event.kind == "RunPrepared":
            # it had kept nothing, so it began anew
            script, goes_on = script if goes_on else [], False
        elif told["what"] == "lr" and told.get("factor") is not None:
            script.append({"step": told["step"], "what": "lr_factor", "value": told["factor"]})
        else:
            script.append({"step": told["step"], "what": told["what"], "value": told["after"]})
    return script


def changes_counted(count: int) -> str:
    """ "the change", "the 3 changes" """
    return "the change" if count == 1 else f"the {count:,} changes"


def script_in_words(script: Sequence[Change]) -> list[str]:
    """A line a change: "From step 12 on: learning rate 0.5 times the schedule's." """
    return [f"From step {change['step']:,} on: {_change_in_words(change)}." for change in script]


def _change_in_words(change: Change) -> str:
    if change["what"] == "lr_factor":
        return f"learning rate {change['value']:.3g} times the schedule's"
    return tweak_in_words(change["what"], change["value"])


class Scripted:
    """A control whose wishes are those of a script, where its steps come, and what people ask besides.

    Its `wishes` must be called once before each step, as the loop does.

    Args:
        control: what people ask.
        script: see `script_of`.
        first_step: the step before which `wishes` is called first; what the script holds for earlier ones was done.
    """

    def __init__(self, control: Control, script: Sequence[Change], first_step: int = 1) -> None:
        self._control, self._step = control, first_step
        self._due: dict[int, list[Wish]] = {}
        for change in script:
            self._due.setdefault(int(change["step"]), []).append(Wish(change["what"], float(change["value"])))

    def should_stop(self) -> bool:
        return self._control.should_stop()

    def is_aborted(self) -> bool:
        return self._control.is_aborted()

    def should_free(self) -> bool:
        return self._control.should_free()

    def wishes(self) -> list[Wish]:
        due = self._due.get(self._step, [])
        self._step += 1
        return [*due, *self._control.wishes()]

    def wait_while_paused(self) -> None:
        self._control.wait_while_paused()

    def should_pause(self) -> bool:
        return self._control.should_pause()


def values_now(store: Store, record: RunRecord, step: int, steps_per_epoch: int) -> dict[str, float]:
    """What holds in a run that goes on: of each option that can be changed, and `lr_factor`.

    Args:
        step: its last one, 0 before the first; `lr` is this step's rate.
        steps_per_epoch: 0 where it isn't known yet; `lr` is then the schedule's peak.
    """
    config, factor = record.config, 1.0
    for change in script_of(store, record.run_id):
        what, value = change["what"], change["value"]
        if what == "lr_factor":
            factor = value
        elif what == "lr":
            factor = value / lr_at(config, change["step"], steps_per_epoch) if steps_per_epoch else value / config.lr
        else:
            config = config.model_copy(update={what: type(getattr(config, what))(value)})
    lr = lr_at(config, max(step, 1), steps_per_epoch) if steps_per_epoch else config.lr
    others = {name: getattr(config, name) for name in CHANGEABLE if name not in ("lr", "lr_factor")}
    return {"lr": factor * lr, "lr_factor": factor, **others}
