"""The progress bar of the command line, on stderr."""

from __future__ import annotations

import contextlib
import sys
from typing import Self

from tqdm import tqdm

from core.events import (
    PHASE_WORDS,
    TRYING_RATES,
    EpochEnded,
    Event,
    ImageLost,
    PhaseChanged,
    ProgressMade,
    RunPrepared,
    StepLogged,
)


class WorkBar:
    """Follows work outside a run, such as a download or a scan."""

    def __init__(self) -> None:
        self._bar = tqdm(total=None, unit="", file=sys.stderr, disable=None, leave=False)
        self._what = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._bar.close()

    def tell(self, what: str, done: int, total: int) -> None:
        """Show how far this work is, with a bar of its own."""
        if what != self._what:
            self._what = what
            self._bar.set_description(what)
            self._bar.reset(total=total or None)
        self._bar.update(done - self._bar.n)


class ProgressBar(WorkBar):
    """Follows a run's events: first the reading of its data, then one bar over all its steps."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self._epochs, self._is_prepared = epochs, False

    def follow(self, event: Event) -> None:
        """Show an event; where the terminal or the pipe is gone nothing is shown, and nothing else happens."""
        with contextlib.suppress(OSError):
            self._show(event)

    def _show(self, event: Event) -> None:
        if isinstance(event, PhaseChanged):
            self._bar.set_description(PHASE_WORDS[event.phase])
        elif isinstance(event, ProgressMade) and (not self._is_prepared or event.what == TRYING_RATES):
            self.tell(event.what, event.done, event.total)
        elif isinstance(event, ImageLost):
            tqdm.write(f"{event.file} can't be read any more: {event.why}", file=sys.stderr)
        elif isinstance(event, RunPrepared):
            self._is_prepared = True
            self._bar.reset(total=event.steps_per_epoch * self._epochs)
        elif isinstance(event, StepLogged):
            self._bar.update(event.step - self._bar.n)
            self._bar.set_postfix(loss=f"{event.loss:.3f}", refresh=False)
        elif isinstance(event, EpochEnded):
            figures = f"validation loss {event.val_loss:.4f}, top-1 {event.val_top1:.2f} %"
            tqdm.write(f"epoch {event.epoch} of {self._epochs}: {figures}", file=sys.stderr)
