"""Is B faster than A? A ratio of mean steps with its interval, and one word."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from lm_profiler.analysis.steps.statistics import Interval, finite, student
from lm_profiler.record.process_spread import ASSUMED_SPREAD, ProcessSpread

Change = Literal["FASTER", "SLOWER", "SAME", "UNCLEAR"]

MARGIN = 0.01  # a change of less than 1 % is not called one

# the confidence of a comparison's intervals: equal programs must be called different in fewer than 5 % of all tries,
# and steps that do not follow the model use up part of these 5 %
CONFIDENCE = 0.97

_OF_95 = NormalDist().inv_cdf(0.975)

WIDEST = 10.0  # an interval whose ends lie a factor of ten apart says nothing


@dataclass(frozen=True)
class RatioInterval:
    """B over A (above 1: B takes longer), with its interval."""

    ratio: float
    low: float
    high: float
    confidence: float = CONFIDENCE


def single_interval(
    a: Interval, b: Interval, confidence: float = CONFIDENCE, spread: ProcessSpread = ASSUMED_SPREAD
) -> RatioInterval | None:
    """Return the ratio of the mean steps of one run each, B over A; None if one is not positive, or it is too wide.

    A process keeps its memory layout, its cores and its neighbours from its first step to its last (Kalibera & Jones
    2013, ISMM, section 4): the means' own intervals are widened by how far processes differ.
    """
    if min(a.mean, b.mean) <= 0.0:
        return None
    normal = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    own = [normal / _OF_95 * (side.known_to or 0.0) for side in (a, b)]
    between = student(spread.freedom, confidence) * math.sqrt(2.0) * spread.std
    return _told(b.mean / a.mean, math.hypot(*own, between), confidence)


def repeats_interval(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> RatioInterval | None:
    """Return the ratio of geometric means, B over A, of one figure per run, with Student's t interval of logarithms.

    Two or three runs say little about how runs differ: Student's quantile knows that, a bootstrap of so few does not
    (Georges et al., OOPSLA 2007, section 3). Both sides are taken to scatter alike, which lets a side with a single run
    borrow from the other, and holds the stated share of false alarms for any numbers of runs; Welch's interval does not
    where one side has two. None for one run against one, and as ``single_interval``.
    """
    x, y = finite(a), finite(b)
    if not x.size or not y.size or max(x.size, y.size) < 2 or min(x.min(), y.min()) <= 0.0:
        return None
    x, y = np.log(x), np.log(y)
    freedom = x.size + y.size - 2
    variance = sum(float(((side - side.mean()) ** 2).sum()) for side in (x, y)) / freedom
    half_width = student(freedom, confidence) * math.sqrt(variance * (1.0 / x.size + 1.0 / y.size))
    return _told(math.exp(float(y.mean() - x.mean())), half_width, confidence)


def change(interval: RatioInterval | None) -> Change:
    """FASTER or SLOWER where the interval excludes 1 and the change exceeds ``MARGIN``, SAME where all of it lies
    within ±``MARGIN`` of 1 (an equivalence, not an absence of proof), else UNCLEAR."""
    if interval is None:
        return "UNCLEAR"
    if interval.high < 1.0 and interval.ratio < 1.0 - MARGIN:
        return "FASTER"
    if interval.low > 1.0 and interval.ratio > 1.0 + MARGIN:
        return "SLOWER"
    if interval.low >= 1.0 - MARGIN and interval.high <= 1.0 + MARGIN:
        return "SAME"
    return "UNCLEAR"


def minimum_detectable_effect(interval: RatioInterval) -> float:
    """Return the smallest true change, as a share, that would be called in four of five tries with data like these.

    (z + 0.842) / z half widths for a normal estimate, where z is the quantile that belongs to the interval's confidence
    (Lehr 1992, Statistics in Medicine 11:1099). That assumes that the data repeat.
    """
    half_width = (interval.high - interval.low) / 2.0
    z = NormalDist().inv_cdf((1.0 + interval.confidence) / 2.0)
    return max(MARGIN, abs(interval.ratio - 1.0), (z + NormalDist().inv_cdf(0.8)) / z * half_width)


def detectable(spread: ProcessSpread, runs: int) -> float:
    """Return the same for ``runs`` per side, of processes that differ by ``spread``; several runs measure it."""
    off = spread.std * math.sqrt(2.0 / runs)
    reach = student(2.0 * runs - 2.0 if runs > 1 else spread.freedom, CONFIDENCE)
    return max(MARGIN, math.expm1(off * (reach + NormalDist().inv_cdf(0.8))))


def _told(ratio: float, half_width: float, confidence: float) -> RatioInterval | None:
    """Return the interval with this half width in logarithms; None where it is too wide."""
    if 2.0 * half_width > math.log(WIDEST):
        return None
    return RatioInterval(ratio, ratio * math.exp(-half_width), ratio * math.exp(half_width), confidence)
