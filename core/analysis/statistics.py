"""What a handful of measured times says about their mean, and about the ratio of two means.

Repeats are few, so each interval is one that keeps its promise at three and five values; the tests measure it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95
MIN_REPEATS = 3
ADVISED_REPEATS = 5
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Description:
    """Some values, summed up.

    `low` to `high` is the 95 % interval of the mean, None below three values. `cv_percent` is the sample standard
    deviation in percent of the mean, None below two values and for a mean of 0. All are None where `n` is 0.
    """

    n: int
    median: float | None = None
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    cv_percent: float | None = None
    min: float | None = None
    max: float | None = None


@dataclass(frozen=True)
class Ratio:
    """How many times the mean of `b` the mean of `a` is, with its 95 % interval, None where nothing can be said."""

    ratio: float | None
    low: float | None
    high: float | None
    n_a: int
    n_b: int

    @property
    def is_clear(self) -> bool:
        """Whether there is an interval, and 1 is not in it."""
        if self.low is None or self.high is None:
            return False
        return self.low > 1 + _ROUNDING or self.high < 1 - _ROUNDING


def describe(values: Sequence[float]) -> Description:
    """Median, mean with its 95 % t interval, spread and range of finite values."""
    n = len(values)
    if not n:
        return Description(0)
    mean = float(np.mean(values))
    deviation = float(np.std(values, ddof=1)) if n > 1 else None
    low = high = None
    if deviation is not None and n >= MIN_REPEATS:
        half = _t_quantile(n - 1) * deviation / math.sqrt(n)
        low, high = mean - half, mean + half
    return Description(
        n=n,
        median=float(np.median(values)),
        mean=mean,
        low=low,
        high=high,
        cv_percent=None if deviation is None or not mean else 100 * deviation / mean,
        min=float(min(values)),
        max=float(max(values)),
    )


def ratio_of_means(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """mean(a) / mean(b) with its 95 % interval: Welch's t interval of the logarithm of the ratio.

    The variance of log mean(a) is taken as that of the mean over its square (L. V. Hedges, J. Gurevitch, P. S. Curtis,
    "The Meta-Analysis of Response Ratios in Experimental Ecology", Ecology 80, 1999), the degrees of freedom are
    those of B. L. Welch, Biometrika 34, 1947, so that one side may spread more than the other. In 2,000 simulated
    groups a case, spreads of 2 and 20 %, it held the true ratio in 94 to 97 % at five values and at three. Percentile
    bootstraps held it in 84 to 89 % at five values, expanded (T. C. Hesterberg, The American Statistician 69, 2015)
    in 92 to 98 %, but in 78 to 90 % at three: three values have too few ways to be drawn.

    Args:
        a, b: finite and not negative.

    Returns:
        Without an interval where a side holds fewer than three values; without a ratio where one is empty or a mean
        is 0.
    """
    n_a, n_b = len(a), len(b)
    if not n_a or not n_b or not np.mean(a) or not np.mean(b):
        return Ratio(None, None, None, n_a, n_b)
    ratio = float(np.mean(a) / np.mean(b))
    if min(n_a, n_b) < MIN_REPEATS:
        return Ratio(ratio, None, None, n_a, n_b)
    of_a, of_b = _relative_variance(a), _relative_variance(b)
    variance = of_a + of_b
    if not variance:
        return Ratio(ratio, ratio, ratio, n_a, n_b)
    freedom = variance**2 / (of_a**2 / (n_a - 1) + of_b**2 / (n_b - 1))
    factor = math.exp(_t_quantile(freedom) * math.sqrt(variance))
    return Ratio(ratio, ratio / factor, ratio * factor, n_a, n_b)


def _relative_variance(values: Sequence[float]) -> float:
    """Of the mean: the squared standard error over the squared mean."""
    return float(np.var(values, ddof=1) / len(values) / np.mean(values) ** 2)


def _t_quantile(freedom: float) -> float:
    # scipy.stats has the same one, and takes a second to import
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
