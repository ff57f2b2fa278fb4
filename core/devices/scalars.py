"""Numbers that change from step to step, kept from meeting those that don't."""

from __future__ import annotations

import numpy as np

SMALLEST = float(np.finfo(np.float32).tiny)


def apart(value: float, place: int) -> float:
    """A number within some units in the last place of float32, which equals no other number of a step.

    XLA bakes the numbers 0 and 1 into a program, and feeds equal numbers of a step as one input. So a learning rate
    that reaches 0 or 1, or begins at the weight decay or at BatchNorm's momentum and then leaves it, would compile
    the program anew.

    Args:
        value: 0 or more.
        place: from 1, another one for each number of a step that may change.

    Returns:
        0 becomes some 1e-38, which changes no weight above 1e-30; anything else grows by a factor of at most
        1 + 2 place 2^-23.
    """
    if value < SMALLEST:
        return SMALLEST * place
    near = np.float32(value)
    return float(near + place * np.spacing(near))
