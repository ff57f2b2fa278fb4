"""The times of all steps of a run in little memory: counts in bins whose widths are in proportion to the time.

A quantile read from them is off by at most half a percent, and the counts of epochs can be added (Masson, Rim and
Lee, "DDSketch", 2019).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

GROWTH = 1.01
"""Each bin's upper edge, over its lower one; bin 0 begins at one microsecond."""
SHORTEST_S = 1e-6
MAX_BARS = 40


class StepTimes:
    """How many steps took how long.

    Args:
        counts: of an earlier `counts()`, or of several.
    """

    def __init__(self, counts: Iterable[Mapping[str, int]] = ()) -> None:
        self._counts: Counter[int] = Counter()
        for more in counts:
            self._counts.update({int(bin): count for bin, count in more.items()})

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, seconds: float) -> None:
        self._counts[max(0, math.floor(math.log(max(seconds, SHORTEST_S) / SHORTEST_S, GROWTH)))] += 1

    def counts(self) -> dict[str, int]:
        """Steps by the number of their bin, as text, since it goes into JSON."""
        return {str(bin): self._counts[bin] for bin in sorted(self._counts)}

    def quantile(self, share: float) -> float:
        """The time in seconds that `share` of the steps stay below, from 0 to 1.

        Raises:
            ValueError: there are no steps.
        """
        if not self._counts:
            raise ValueError("no steps")
        rank, seen = share * (len(self) - 1), 0
        for bin in sorted(self._counts):
            seen += self._counts[bin]
            if seen > rank:
                break
        return float(SHORTEST_S * GROWTH ** (bin + 0.5))

    def summary(self) -> dict[str, Any] | None:
        """Median, 95th percentile, shortest and longest in seconds, and a histogram; None without steps."""
        if not self._counts:
            return None
        names = {"median_s": 0.5, "p95_s": 0.95, "min_s": 0.0, "max_s": 1.0}
        return {
            **{name: self.quantile(share) for name, share in names.items()},
            "steps": len(self),
            "histogram": self._histogram(),
        }

    def _histogram(self) -> dict[str, Any]:
        """Bars of equal width, at least a bin wide; what takes over four times the median is counted as `longer`."""
        bins = sorted(self._counts)
        middles = SHORTEST_S * GROWTH ** (np.array(bins) + 0.5)
        counts = np.array([self._counts[bin] for bin in bins])
        is_shown = middles <= 4 * self.quantile(0.5)
        shown = middles[is_shown]
        low, high = shown[0] / math.sqrt(GROWTH), shown[-1] * math.sqrt(GROWTH)
        num_bars = max(1, min(MAX_BARS, math.floor((high - low) / (shown[-1] * (GROWTH - 1)))))
        bars, edges = np.histogram(shown, bins=num_bars, range=(low, high), weights=counts[is_shown])
        longer = int(counts[~is_shown].sum())
        return {"edges_s": edges.tolist(), "counts": [int(bar) for bar in bars], "longer": longer}
