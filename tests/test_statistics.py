"""What few measured times say, held against scipy and against truths that are known because they were drawn."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from core.analysis.statistics import Description, Ratio, describe, ratio_of_means

GROUPS = 1000
COVERAGE_PERCENT = (92.0, 98.0)
SPREADS = [(0.02, 0.02), (0.2, 0.2), (0.02, 0.2), (0.2, 0.02)]


def times(kind: str, spread: float, n: int, generator: np.random.Generator) -> np.ndarray:
    """(GROUPS, n) times whose true mean is 1."""
    if kind == "normal":
        return generator.normal(1.0, spread, (GROUPS, n))
    sigma = np.sqrt(np.log1p(spread**2))
    return generator.lognormal(-(sigma**2) / 2, sigma, (GROUPS, n))


def percent_holding_1(intervals: list[Description] | list[Ratio]) -> float:
    return 100 * float(np.mean([interval.low <= 1.0 <= interval.high for interval in intervals]))


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("kind", ["normal", "lognormal"])
@pytest.mark.parametrize("spread", [0.02, 0.2])
def test_the_interval_of_a_mean_holds_the_true_mean_in_95_percent_of_groups(n, kind, spread):
    groups = times(kind, spread, n, np.random.default_rng(7))
    assert COVERAGE_PERCENT[0] <= percent_holding_1([describe(group) for group in groups]) <= COVERAGE_PERCENT[1]


@pytest.mark.parametrize(("n_a", "n_b"), [(5, 5), (3, 3), (5, 3)])
@pytest.mark.parametrize("kind", ["normal", "lognormal"])
@pytest.mark.parametrize("spreads", SPREADS)
def test_the_interval_of_a_ratio_holds_the_true_ratio_in_95_percent_of_groups(n_a, n_b, kind, spreads):
    generator = np.random.default_rng(7)
    a, b = times(kind, spreads[0], n_a, generator), times(kind, spreads[1], n_b, generator)
    ratios = [ratio_of_means(*pair) for pair in zip(a, b, strict=True)]
    assert COVERAGE_PERCENT[0] <= percent_holding_1(ratios) <= COVERAGE_PERCENT[1]


def test_a_plain_bootstrap_would_call_too_many_equal_devices_different():
    generator = np.random.default_rng(7)
    a, b = times("normal", 0.1, 5, generator), times("normal", 0.1, 5, generator)
    drawn = stats.bootstrap(
        (a, b),
        lambda a, b, axis: a.mean(axis) / b.mean(axis),
        n_resamples=999,
        method="percentile",
        axis=1,
        rng=generator,
    )
    low, high = drawn.confidence_interval
    assert 100 * np.mean((low <= 1) & (high >= 1)) < COVERAGE_PERCENT[0]


def test_the_interval_of_a_mean_is_scipys():
    values = [12.1, 11.4, 13.0, 12.2, 11.9]
    described = describe(values)
    expected = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert (described.low, described.high) == pytest.approx(expected)
    assert described.cv_percent == pytest.approx(100 * stats.variation(values, ddof=1))
    assert (described.n, described.median, described.min, described.max) == (5, 12.1, 11.4, 13.0)
    assert described.mean == pytest.approx(12.12)


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.6])
def test_the_interval_of_a_ratio_is_that_of_welchs_test_on_logarithms(factor):
    a = factor * np.array([12.1, 12.0, 12.3, 12.2, 11.9, 12.2])
    b = np.array([12.0, 12.3, 12.0, 12.1])
    welch = stats.ttest_ind(np.log(a), np.log(b), equal_var=False)
    expected = np.exp(welch.confidence_interval(0.95))
    ratio = ratio_of_means(a, b)
    assert ratio.ratio == pytest.approx(a.mean() / b.mean())
    # the two differ by the curvature of the logarithm over the spread only
    assert (ratio.low, ratio.high) == pytest.approx(tuple(expected), rel=2e-4)
    assert ratio.is_clear == (welch.pvalue < 0.05)


def test_swapping_the_sides_inverts_the_ratio():
    a, b = [3.0, 3.3, 2.9], [2.0, 2.2, 2.1, 2.4]
    there, back = ratio_of_means(a, b), ratio_of_means(b, a)
    assert (1 / back.ratio, 1 / back.high, 1 / back.low) == pytest.approx((there.ratio, there.low, there.high))
    assert (there.n_a, there.n_b) == (back.n_b, back.n_a) == (3, 4)


@pytest.mark.filterwarnings("error")
def test_equal_times_have_an_interval_of_no_width():
    described = describe([0.1] * 3)
    assert (described.low, described.mean, described.high) == pytest.approx((0.1, 0.1, 0.1))
    assert described.cv_percent == pytest.approx(0.0)
    same, slower = ratio_of_means([0.1] * 3, [0.1] * 5), ratio_of_means([3.0] * 3, [2.0] * 3)
    assert (same.low, same.high) == pytest.approx((1.0, 1.0)) and not same.is_clear
    assert (slower.low, slower.ratio, slower.high) == (1.5, 1.5, 1.5) and slower.is_clear


@pytest.mark.filterwarnings("error")
def test_one_side_without_spread_leaves_the_spread_of_the_other():
    ratio = ratio_of_means([2.0, 2.0, 2.0], [1.0, 1.1, 0.9])
    assert 0 < ratio.low < 2.0 < ratio.high and ratio.ratio == pytest.approx(2.0)


@pytest.mark.filterwarnings("error")
def test_fewer_than_three_times_have_no_interval():
    assert describe([]) == Description(0)
    assert describe([4.0]) == Description(1, median=4.0, mean=4.0, min=4.0, max=4.0)
    two = describe([4.0, 5.0])
    assert (two.median, two.mean, two.low, two.high, two.min, two.max) == (4.5, 4.5, None, None, 4.0, 5.0)
    assert two.cv_percent == pytest.approx(100 * np.sqrt(0.5) / 4.5)
    for a, b in (([4.0], [2.0] * 5), ([4.0] * 5, [2.0, 2.0])):
        ratio = ratio_of_means(a, b)
        assert (ratio.ratio, ratio.low, ratio.high, ratio.is_clear) == (2.0, None, None, False)


@pytest.mark.filterwarnings("error")
def test_there_is_no_ratio_to_nothing():
    zeros, ones = [0.0] * 5, [1.0] * 5
    for a, b in ((ones, zeros), (zeros, ones), ([], ones), (ones, [])):
        assert ratio_of_means(a, b) == Ratio(None, None, None, len(a), len(b))
    assert describe(zeros).cv_percent is None
