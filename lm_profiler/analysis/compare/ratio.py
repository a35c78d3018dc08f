"""Decides whether B is faster than A, from the ratio of mean steps and its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from lm_profiler.analysis.steps.statistics import (
    Interval,
    Series,
    require_finite,
    student_quantile,
)
from lm_profiler.record.process_spread import ASSUMED_SPREAD, ProcessSpread

Change = Literal["FASTER", "SLOWER", "SAME", "UNCLEAR"]

MARGIN = 0.01  # smaller changes are never called FASTER or SLOWER

# Sides are the SAME if the change is certainly below this. It is larger than ``MARGIN``, because where processes differ
# by several percent, no realistic number of runs shows that a change is below 1 %.
SAME_WITHIN = 0.05

# The confidence of intervals. Equal programs must be called different in fewer than 5 % of comparisons; the rest is
# reserved for steps that do not follow the model.
CONFIDENCE = 0.97

_NORMAL_95 = NormalDist().inv_cdf(0.975)

# A detectable effect is detected with a probability (the power) of 80 %. This is the normal quantile of that.
_QUANTILE_OF_POWER = NormalDist().inv_cdf(0.8)

WIDEST = 10.0  # an interval with a larger ratio of its ends is not reported


@dataclass(frozen=True)
class RatioInterval:
    """The ratio of B to A (above 1: B takes longer), with its interval."""

    ratio: float
    low: float
    high: float
    confidence: float = CONFIDENCE

    @property
    def largest_change(self) -> float:
        """The largest change, in either direction and as a share, that the interval allows."""
        return max(self.high - 1.0, 1.0 - self.low)


def single_interval(
    a: Interval,
    b: Interval,
    confidence: float = CONFIDENCE,
    spread: ProcessSpread = ASSUMED_SPREAD,
    bias: float = 0.0,
) -> RatioInterval | None:
    """Return the ratio of the mean steps of two single runs, B over A.

    A process keeps its memory layout, its cores and the programs beside it from the first step to the last (Kalibera &
    Jones 2013, ISMM, section 4). So the interval includes the spread of processes.

    Args:
        a: the mean step of A, with its interval.
        b: the mean step of B.
        confidence: of the interval that is returned.
        spread: how much the means of processes of the same program differ.
        bias: the standard deviation of other differences between the sides, as a share.

    Returns:
        the ratio; None if a mean is not positive, or if the interval is too wide.
    """
    if min(a.mean, b.mean) <= 0.0:
        return None
    normal_quantile = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    # The half widths that each source of uncertainty alone would cause. Within a run it is known from a 95 % interval;
    # two processes differ by sqrt(2) times the spread of one.
    from_95 = normal_quantile / _NORMAL_95
    within_a = from_95 * (a.relative_half_width or 0.0)
    within_b = from_95 * (b.relative_half_width or 0.0)
    student = student_quantile(spread.freedom, confidence)
    between_processes = student * math.sqrt(2.0) * spread.std
    by_bias = normal_quantile * bias
    half_width = math.hypot(within_a, within_b, between_processes, by_bias)
    return _interval_around(b.mean / a.mean, half_width, confidence)


def repeats_interval(
    a: Sequence[float],
    b: Sequence[float],
    confidence: float = CONFIDENCE,
    bias: float = 0.0,
) -> RatioInterval | None:
    """Return the ratio of geometric means, B over A, of a figure with one value per run.

    The interval is Student's t interval of the logarithms. It accounts for the small number of runs, which a bootstrap
    would not (Georges et al., OOPSLA 2007, section 3). The variance is assumed to be equal on both sides. So a side
    with a single run can use that of the other side, and the share of false alarms is correct for any numbers of runs,
    unlike with Welch's interval if one side has two.

    Args:
        a: the values of A's runs.
        b: the values of B's runs.
        confidence: of the interval that is returned.
        bias: the standard deviation of other differences between the sides, as a share.

    Returns:
        the ratio; None if each side has only one run, if a value is not positive, or if the interval is too wide.
    """
    values_a = require_finite(a)
    values_b = require_finite(b)
    has_values = values_a.size > 0 and values_b.size > 0
    if not has_values or max(values_a.size, values_b.size) < 2:
        return None
    if min(values_a.min(), values_b.min()) <= 0.0:
        return None
    logs_a = np.log(values_a)
    logs_b = np.log(values_b)
    freedom = logs_a.size + logs_b.size - 2
    variance = (_sum_of_squares(logs_a) + _sum_of_squares(logs_b)) / freedom
    variance_of_difference = variance * (1.0 / logs_a.size + 1.0 / logs_b.size)
    standard_error = math.sqrt(variance_of_difference)
    half_by_chance = student_quantile(freedom, confidence) * standard_error
    half_by_bias = NormalDist().inv_cdf((1.0 + confidence) / 2.0) * bias
    half_width = math.hypot(half_by_chance, half_by_bias)
    ratio = math.exp(float(logs_b.mean() - logs_a.mean()))
    return _interval_around(ratio, half_width, confidence)


def _sum_of_squares(logs: Series) -> float:
    """Return the sum of squares about the mean."""
    return float(((logs - logs.mean()) ** 2).sum())


def change_word(interval: RatioInterval | None, same_within: float = MARGIN) -> Change:
    """Return the word for an interval of the ratio of B to A.

    FASTER or SLOWER if the interval excludes 1 and the change exceeds ``MARGIN``; SAME if the whole interval is within
    ±``same_within`` of 1, which proves that the change is small; otherwise UNCLEAR.
    """
    if interval is None:
        return "UNCLEAR"
    if interval.high < 1.0 and interval.ratio < 1.0 - MARGIN:
        return "FASTER"
    if interval.low > 1.0 and interval.ratio > 1.0 + MARGIN:
        return "SLOWER"
    if interval.low >= 1.0 - same_within and interval.high <= 1.0 + same_within:
        return "SAME"
    return "UNCLEAR"


def minimum_detectable_effect(interval: RatioInterval) -> float:
    """Return the smallest true change, as a share, that would be detected in 80 % of comparisons with data like these.

    It is the largest of three: the change that follows from the width of the interval, the observed change, and
    ``MARGIN``.
    """
    half_width = (interval.high - interval.low) / 2.0
    quantile = NormalDist().inv_cdf((1.0 + interval.confidence) / 2.0)
    # for a normal estimate (Lehr 1992, Statistics in Medicine 11:1099)
    change_by_width = (quantile + _QUANTILE_OF_POWER) / quantile * half_width
    # Users read this figure if the verdict is UNCLEAR. The observed change was not detected then, so it would be wrong
    # to state that a smaller one can be.
    observed_change = abs(interval.ratio - 1.0)
    # A change below MARGIN is never called FASTER or SLOWER.
    return max(MARGIN, observed_change, change_by_width)


def detectable(spread: ProcessSpread, runs: int) -> float:
    """Return the smallest detectable change of a future comparison with ``runs`` per side, for a known ``spread``."""
    standard_error = spread.std * math.sqrt(2.0 / runs)
    freedom = spread.freedom
    if runs > 1:  # the runs themselves will show the spread
        freedom = 2.0 * runs - 2.0
    quantile = student_quantile(freedom, CONFIDENCE)
    detectable_log = standard_error * (quantile + _QUANTILE_OF_POWER)
    return max(MARGIN, math.expm1(detectable_log))


def _interval_around(
    ratio: float, half_width: float, confidence: float
) -> RatioInterval | None:
    """Return an interval around ``ratio`` with a half width in logarithms; None if it is too wide."""
    if 2.0 * half_width > math.log(WIDEST):
        return None
    factor = math.exp(half_width)
    return RatioInterval(
        ratio, low=ratio / factor, high=ratio * factor, confidence=confidence
    )
