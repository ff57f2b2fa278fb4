"""What people ask of a run while it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from core.config import RunConfig, make_config
from core.errors import ConfigError

CHANGEABLE = ("lr", "lr_factor", "weight_decay", "epochs", "patience", "log_every")
"""What can be changed: `lr_factor` multiplies the schedule; all others are options of the config."""
MOST_LR_FACTOR = 1e12
"""Late in a cosine even a usual rate is many thousand times the schedule's."""


@dataclass(frozen=True)
class Wish:
    """A change that is asked for; `what` is one of `CHANGEABLE`."""

    what: str
    value: float


class Control(Protocol):
    """What people ask of the run, read between steps."""

    def should_stop(self) -> bool: ...

    def is_aborted(self) -> bool:
        """Whether it is to end without saving; `should_stop` says so too then."""

    def should_free(self) -> bool:
        """Whether a pause is to free the device: the run is saved and left, to be taken up again."""

    def wishes(self) -> list[Wish]:
        """The changes asked for since the last call."""

    def wait_while_paused(self) -> None:
        """Return when the run may go on, or is to free its device."""

    def should_pause(self) -> bool: ...


def check_wish(wish: Wish, config: RunConfig) -> None:
    """Refuse a change that can't be made in a run of this config.

    Raises:
        ConfigError: no such option can be changed, or the value is out of its limits.
    """
    if wish.what not in CHANGEABLE:
        raise ConfigError(f"{wish.what} can't be changed in a run.", fix=f"Choose one of {', '.join(CHANGEABLE)}.")
    if wish.what == "lr_factor":
        if not 0 < wish.value <= MOST_LR_FACTOR:
            raise ConfigError(f"A factor of {wish.value:g} can't be.", fix=f"Choose above 0, up to {MOST_LR_FACTOR:g}.")
        return
    kind = type(getattr(config, wish.what))
    if kind is int and wish.value != int(wish.value):
        raise ConfigError(f"{wish.what} can't be {wish.value:g}: it is a whole number.", fix="Choose one.")
    make_config(**{**config.model_dump(), wish.what: kind(wish.value)})
