"""Summaries and intervals against numpy, scipy and seeded simulations."""

import math

import numpy as np
import pytest
from raised import refusal
from scipy import stats
from stored_texts import assert_stored

from lm_profiler.analysis.steps.statistics import Interval, mean_interval, median_interval, summarise_times


def test_the_summary_agrees_with_numpy_and_scipy():
    times_s = np.random.default_rng(0).lognormal(size=37)
    summary = summarise_times(times_s)
    assert summary.n == 37
    assert summary.min == times_s.min()
    assert summary.max == times_s.max()
    assert summary.mean == pytest.approx(np.mean(times_s))
    assert summary.std == pytest.approx(stats.tstd(times_s))
    assert summary.cv == pytest.approx(stats.variation(times_s, ddof=1))
    assert summary.median == pytest.approx(np.median(times_s))
    assert (summary.p5, summary.p95) == pytest.approx(tuple(stats.scoreatpercentile(times_s, [5, 95])))


def test_the_interval_of_the_mean_is_that_of_the_model_of_the_steps():
    without_model = summarise_times([1.0, 2.0])
    assert (without_model.mean_low, without_model.mean_high) == (None, None)
    with_model = summarise_times([1.0, 2.0], Interval(1.5, 1.0, 2.5))
    assert (with_model.mean_low, with_model.mean_high) == (1.0, 2.5)


def test_of_no_reading_nothing_is_known():
    summary = summarise_times([])
    assert summary.n == 0
    assert set(summary.model_dump(exclude={"n"}).values()) == {None}


def test_a_single_reading_has_no_scatter():
    summary = summarise_times([0.25])
    assert summary.n == 1
    assert summary.mean == summary.median == summary.min == summary.max == 0.25
    assert summary.std is None
    assert summary.cv is None


def test_readings_that_are_no_numbers_are_refused():
    bads = (math.nan, math.inf, -math.inf)
    messages = {f"{bad}": refusal(ValueError, lambda bad=bad: summarise_times([1.0, bad, 2.0])) for bad in bads}
    assert_stored("analysis/refused: missing readings", messages)


def test_fewer_than_three_values_have_no_interval():
    assert mean_interval([1.0, 2.0]) is None
    found = mean_interval([-1.0, 1.0, -1.5, 1.5, 0.1, -0.1])
    assert found.low < 0.0 < found.high
    assert found.relative_half_width is None
    found = mean_interval(np.full(20, 3.0))
    assert 0.0 < found.relative_half_width < 0.001


@pytest.mark.parametrize("steps", [3, 10, 50])
def test_the_interval_of_independent_values_is_near_students(steps):
    """It allows for a correlation that was not there, so it is wider, the fewer the values the more."""
    rng, widths = np.random.default_rng(1), []
    for _ in range(50):
        x = rng.normal(1.0, 0.02, steps)
        student = stats.t.interval(0.95, steps - 1, x.mean(), x.std(ddof=1) / math.sqrt(steps))
        found = mean_interval(x)
        assert found.mean == x.mean()
        assert found.high - found.mean == pytest.approx(found.mean - found.low)
        widths.append((found.high - found.low) / (student[1] - student[0]))
    assert 0.9 < np.median(widths) < {3: 5.0, 10: 4.0, 50: 1.3}[steps]


@pytest.mark.parametrize("n, ends", [(5, None), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (20, (6, 15)), (100, (40, 61))])
def test_the_interval_of_a_median_is_that_of_the_tables(n: int, ends: tuple[int, int] | None) -> None:
    """Conover, Practical Nonparametric Statistics, table A3: the order statistics of at least 95 %."""
    assert median_interval(np.random.default_rng(0).permutation(n) + 1.0) == ends
