"""Which steps compiled a program, and why one did that should not have."""

from __future__ import annotations

from collections.abc import Callable

from core.devices.base import Device
from core.events import Event, ProgramCompiled

Shapes = dict[str, tuple[int, ...]]


class CompileWatch:
    """Tells of every program that the device compiles.

    The first step of a phase is expected to compile; whatever compiles later has a cause, which is named.

    Args:
        emit: is handed a `ProgramCompiled`.
    """

    def __init__(self, device: Device, emit: Callable[[Event], None]) -> None:
        self._device, self._emit = device, emit
        self._count, self._seconds = device.compile_count(), device.compile_seconds()
        self._known: dict[str, Shapes] = {}
        self._announced: list[str] = []

    def announce(self, changes: list[str]) -> None:
        """The next step of training is another one than before, for these reasons: what it compiles has a cause."""
        self._announced = changes

    def look(self, phase: str, step: int, epoch: int, shapes: Shapes) -> tuple[int, float]:
        """What was compiled since the last look: programs and seconds.

        Args:
            phase: training or evaluation.
            shapes: of all that the step was fed with, by name.
        """
        count, seconds = self._device.compile_count() - self._count, self._device.compile_seconds() - self._seconds
        before, self._known[phase] = self._known.get(phase), shapes
        announced: list[str] = []
        if phase == "training":
            announced, self._announced = self._announced, []
        if not count:
            return 0, 0.0
        self._count += count
        self._seconds += seconds
        is_planned = bool(announced) and before is not None
        cause = " and ".join(announced) if is_planned else _cause(before, shapes)
        self._emit(ProgramCompiled(phase, step, epoch, count, seconds, cause, is_planned))
        return count, seconds


def _cause(before: Shapes | None, now: Shapes) -> str:
    if before is None:
        return ""
    changed = [
        f"{name} changed from {_in_words(before.get(name))} to {_in_words(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if changed:
        return "the shape of " + ", of ".join(changed)
    return "no shape changed: an operation of the model depends on the numbers themselves"


def _in_words(shape: tuple[int, ...] | None) -> str:
    return " x ".join(str(side) for side in shape) if shape is not None else "nothing"
