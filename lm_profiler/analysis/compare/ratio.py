"""Is B faster than A? A ratio of mean steps with its interval, and one word."""

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

MARGIN = 0.01  # a change of less than 1 % is not called one

# The same for SAME where processes differ by several per cent: no number of runs that anybody makes shows there that a
# change is below 1 %. The word comes with the bound that was shown.
SAME_WITHIN = 0.05

# the confidence of a comparison's intervals: equal programs must be called different in fewer than 5 % of all tries,
# and steps that do not follow the model use up part of these 5 %
CONFIDENCE = 0.97

_NORMAL_95 = NormalDist().inv_cdf(0.975)

# in four of five tries
_POWER = NormalDist().inv_cdf(0.8)

WIDEST = 10.0  # an interval whose ends lie a factor of ten apart says nothing


@dataclass(frozen=True)
class RatioInterval:
    """B over A (above 1: B takes longer), with its interval."""

    ratio: float
    low: float
    high: float
    confidence: float = CONFIDENCE

    @property
    def largest_change(self) -> float:
        """The largest change, as a share in either direction, that the interval allows."""
        return max(self.high - 1.0, 1.0 - self.low)


def single_interval(
    a: Interval,
    b: Interval,
    confidence: float = CONFIDENCE,
    spread: ProcessSpread = ASSUMED_SPREAD,
    bias: float = 0.0,
) -> RatioInterval | None:
    """Return the ratio of the mean steps of one run each, B over A; None if one is not positive, or it is too wide.

    A process keeps its memory layout, its cores and its neighbours from its first step to its last (Kalibera & Jones
    2013, ISMM, section 4): the means' own intervals are widened by how far processes differ, and by ``bias``, the
    standard deviation of what else may set the sides apart, as a share.
    """
    if min(a.mean, b.mean) <= 0.0:
        return None
    normal = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    within_a = normal / _NORMAL_95 * (a.relative_half_width or 0.0)
    within_b = normal / _NORMAL_95 * (b.relative_half_width or 0.0)
    processes = (
        student_quantile(spread.freedom, confidence) * math.sqrt(2.0) * spread.std
    )
    half_width = math.hypot(within_a, within_b, processes, normal * bias)
    return _interval_around(b.mean / a.mean, half_width, confidence)


def repeats_interval(
    a: Sequence[float],
    b: Sequence[float],
    confidence: float = CONFIDENCE,
    bias: float = 0.0,
) -> RatioInterval | None:
    """Return the ratio of geometric means, B over A, of one figure per run, with Student's t interval of logarithms.

    Two or three runs hardly show how runs differ: Student's quantile allows for that, a bootstrap of so few does not
    (Georges et al., OOPSLA 2007, section 3). Both sides are taken to scatter alike, which lets a side with a single run
    borrow from the other, and holds the stated share of false alarms for any numbers of runs; Welch's interval does not
    where one side has two. ``bias`` is as in ``single_interval``. There is no interval in the cases that are listed
    there, nor of one run against one.
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
    variance = (_squares(logs_a) + _squares(logs_b)) / freedom
    variance_of_difference = variance * (1.0 / logs_a.size + 1.0 / logs_b.size)
    by_chance = student_quantile(freedom, confidence) * math.sqrt(
        variance_of_difference
    )
    normal = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    half_width = math.hypot(by_chance, normal * bias)
    ratio = math.exp(float(logs_b.mean() - logs_a.mean()))
    return _interval_around(ratio, half_width, confidence)


def _squares(logs: Series) -> float:
    return float(((logs - logs.mean()) ** 2).sum())


def change_word(interval: RatioInterval | None, same_within: float = MARGIN) -> Change:
    """Return the word for an interval of B over A.

    FASTER or SLOWER if the interval excludes 1 and the change exceeds ``MARGIN``; SAME if all of it lies within
    ±``same_within`` of 1 (an equivalence, not an absence of proof); else UNCLEAR.
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
    """Return the smallest true change, as a share, that would be called in four of five tries with data like these.

    (z + 0.842) / z half widths for a normal estimate, where z is the quantile that belongs to the interval's confidence
    (Lehr 1992, Statistics in Medicine 11:1099). That assumes that the data repeat.
    """
    half_width = (interval.high - interval.low) / 2.0
    z = NormalDist().inv_cdf((1.0 + interval.confidence) / 2.0)
    return max(MARGIN, abs(interval.ratio - 1.0), (z + _POWER) / z * half_width)


def detectable(spread: ProcessSpread, runs: int) -> float:
    """Return the same for ``runs`` per side, of processes that differ by ``spread``; several runs measure it."""
    standard_error = spread.std * math.sqrt(2.0 / runs)
    freedom = spread.freedom
    if runs > 1:
        freedom = 2.0 * runs - 2.0
    return max(
        MARGIN,
        math.expm1(standard_error * (student_quantile(freedom, CONFIDENCE) + _POWER)),
    )


def _interval_around(
    ratio: float, half_width: float, confidence: float
) -> RatioInterval | None:
    """Return the interval with this half width in logarithms; None if it is too wide."""
    if 2.0 * half_width > math.log(WIDEST):
        return None
    factor = math.exp(half_width)
    return RatioInterval(
        ratio, low=ratio / factor, high=ratio * factor, confidence=confidence
    )
