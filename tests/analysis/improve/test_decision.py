"""The interval of a comparison that may stop after any pair, against integrals and simulated processes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from lm_profiler.analysis.compare.ratio import change
from lm_profiler.analysis.improve.decision import anytime_interval, hopeless, spread


def evidence(logs: NDArray[np.float64], mean: float, told: float) -> float:
    """How much likelier pairs are if their mean differs from ``mean`` than if not, by integrals over all scales.

    The differences are normal with the variance of 20 pairs. The prior of the scale is what six pairs with a sum of
    squares of ``told`` leave of an unknown one.
    """
    scales = np.exp(np.linspace(math.log(1e-3), 0.0, 600))[:, None]
    prior = scales**-6.0 * np.exp(-told / (2.0 * scales**2))  # per logarithm of the scale
    off = np.linspace(-30.0, 30.0, 1_201)  # in scales

    def likelihood(difference: NDArray[np.float64]) -> NDArray[np.float64]:
        far = ((logs - logs.mean()) ** 2).sum() + logs.size * (logs.mean() - mean - difference * scales) ** 2
        return prior * scales**-logs.size * np.exp(-far / (2.0 * scales**2))

    normal = np.exp(-(off**2) / 40.0) / math.sqrt(40.0 * math.pi) * 0.05
    return float((likelihood(off) @ normal).sum() / likelihood(np.zeros(1)).sum())


@pytest.mark.parametrize("pairs", [2, 5])
def test_an_interval_ends_where_the_evidence_against_a_ratio_is_one_in_the_error(pairs: int) -> None:
    logs = 0.03 * np.random.default_rng(3).standard_normal(pairs)
    interval = anytime_interval(np.exp(logs).tolist(), error=0.01, spread=0.02)

    assert interval is not None
    assert interval.ratio == pytest.approx(math.exp(logs.mean()))
    for end in (interval.low, interval.high):
        assert evidence(logs, math.log(end), told=6 * 2 * 0.02**2) == pytest.approx(100.0, rel=0.02)


@pytest.mark.parametrize("processes", [0.01, 0.05])
def test_one_in_twenty_intervals_at_most_is_ever_wrong_of_equal_programs(
    processes: float,
) -> None:
    rng, wrong, series = np.random.default_rng(11), 0, 300
    for _ in range(series):
        ratios = np.exp(processes * math.sqrt(2.0) * rng.standard_normal(20))
        intervals = [anytime_interval(ratios[:n].tolist(), 0.05, processes) for n in range(2, 21)]
        wrong += any(not interval.low <= 1.0 <= interval.high for interval in intervals if interval)

    assert wrong <= 0.05 * series


def test_one_slow_process_does_not_decide() -> None:
    assert anytime_interval([0.3], 0.01, 0.05) is None
    assert change(anytime_interval([0.3, 1.0], 0.01, 0.05)) == "UNCLEAR"
    assert change(anytime_interval([0.3, 1.0, 1.01, 0.99, 1.0], 0.01, 0.01)) == "UNCLEAR"
    assert change(anytime_interval([0.6, 0.61], 0.01, 0.02)) == "FASTER"


def test_processes_are_taken_to_differ_by_5_percent_until_they_have_shown_by_how_much() -> None:
    rng = np.random.default_rng(5)
    settings = [np.exp(rng.normal(level, 0.01, 8)).tolist() for level in (0.0, 1.0, -2.0, 0.5)]

    assert spread([]) == spread([[1.0]]) == 0.05
    assert 0.02 < spread([settings[0][:3]]) < 0.04
    assert spread(settings) == pytest.approx(0.0135, abs=0.002)  # 29 processes, one of which is taken to be 5 % off


def test_what_does_not_look_faster_is_not_worth_more_pairs() -> None:
    assert not hopeless([1.2], 0.05)
    assert hopeless([1.2, 1.1], 0.05)
    assert hopeless([1.0, 1.001, 0.999], 0.001)
    assert not hopeless([1.0, 0.97], 0.02)
