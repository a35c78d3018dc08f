"""Summaries and intervals against numpy, scipy, printed tables and seeded simulations."""

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.simulation import independent, spiky
from lm_profiler.analysis.steps.statistics import (
    FINEST_TARGET,
    median_interval,
    median_rank,
    precise_enough,
    relative_half_width,
    summarise,
)


def test_summary_agrees_with_numpy_and_scipy():
    x = np.random.default_rng(0).lognormal(size=37)
    s = summarise(x)
    assert (s.n, s.min, s.max) == (37, x.min(), x.max())
    assert s.mean == pytest.approx(np.mean(x))
    assert s.std == pytest.approx(stats.tstd(x))
    assert s.cv == pytest.approx(stats.variation(x, ddof=1))
    assert s.median == pytest.approx(np.median(x))
    assert (s.p5, s.p95) == pytest.approx(tuple(stats.scoreatpercentile(x, [5, 95])))


def test_summary_of_a_worked_example():
    s = summarise([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])  # squared deviations from 5 add up to 32
    assert (s.mean, s.median) == (5.0, 4.5)
    assert s.std == pytest.approx(math.sqrt(32 / 7))
    assert (s.ci_low, s.ci_high) == (2.0, 9.0)  # eight values: only the extremes promise 95 %


def test_nothing_is_said_of_no_values():
    s = summarise([])
    assert s.n == 0
    assert s.outliers == 0
    assert {s.mean, s.std, s.cv, s.median, s.ci_low, s.ci_high, s.p5, s.p95, s.min, s.max} == {None}


def test_one_value_has_no_spread():
    s = summarise([0.25])
    assert (s.n, s.mean, s.median, s.min, s.max) == (1, 0.25, 0.25, 0.25, 0.25)
    assert (s.std, s.cv, s.ci_low, s.ci_high) == (None, None, None, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_missing_readings_are_refused(bad):
    with pytest.raises(ValueError, match="1 of 3 are NaN or infinite"):
        summarise([1.0, bad, 2.0])


def test_outliers_are_tukeys_and_stay_in_the_mean():
    quiet = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.02, 0.98, 1.01]
    s = summarise([*quiet, 100.0])
    assert s.outliers == 1
    assert s.mean == pytest.approx(np.mean([*quiet, 100.0]))
    # Quartiles 2 and 4, so the fences stand at -1 and 7: on the fence is inside.
    assert summarise([1.0, 2.0, 3.0, 4.0, 7.0]).outliers == 0
    assert summarise([1.0, 2.0, 3.0, 4.0, 7.001]).outliers == 1


# Order statistics for a 95 % interval of the median, as tables of the sign test give them.
@pytest.mark.parametrize(
    "n, rank",
    [(5, None), (6, 1), (8, 1), (9, 2), (10, 2), (12, 3), (15, 4), (20, 6), (25, 8), (50, 18), (100, 40)],
)
def test_ranks_are_the_printed_ones(n, rank):
    assert median_rank(n) == rank


def test_ten_values_give_the_second_and_the_ninth_with_97_85_percent():
    assert median_interval(np.arange(1.0, 11.0)) == (2.0, 9.0)
    assert 1.0 - 2.0 * stats.binom.cdf(1, 10, 0.5) == pytest.approx(0.9785, abs=5e-5)


def test_rank_is_the_largest_that_keeps_the_promise():
    for n in [*range(1, 120), 1_000, 12_345, 1_000_000]:
        rank = median_rank(n) or 0

        def coverage(r, n=n):
            return 1.0 - 2.0 * stats.binom.cdf(r - 1, n, 0.5)

        assert rank == 0 or coverage(rank) >= 0.95 - 1e-9
        assert coverage(rank + 1) < 0.95 + 1e-9


@pytest.mark.parametrize("kind", [independent, spiky])
@pytest.mark.parametrize("n", [6, 10, 20, 51])
def test_interval_covers_the_median_of_independent_steps(kind, n):
    rng = np.random.default_rng(7)
    runs = [kind(rng, n) for _ in range(2000)]
    intervals = [median_interval(run.times_s) for run in runs]
    hits = [low <= run.median_s <= high for run, (low, high) in zip(runs, intervals, strict=True)]
    assert np.mean(hits) >= 0.93


def test_half_width_is_a_share_of_the_median():
    x = np.arange(1.0, 11.0)
    assert relative_half_width(x) == pytest.approx((9.0 - 2.0) / 2 / 5.5)
    assert relative_half_width(x[:5]) is None
    assert relative_half_width(np.zeros(10)) is None


def test_measuring_stops_when_the_interval_is_narrow_enough():
    quiet = 0.1 + 1e-6 * np.arange(10)
    assert precise_enough(quiet, 0.005)
    assert not precise_enough(quiet[:9], 0.005)
    assert not precise_enough(np.linspace(0.1, 0.2, 10), 0.005)


def test_no_promise_is_finer_than_half_a_percent():
    x = np.linspace(0.0997, 0.1003, 11)  # ±0.2 %
    assert 0.001 < relative_half_width(x) < FINEST_TARGET
    assert precise_enough(x, 0.001)
