"""Is B faster than A? A ratio of medians with its interval, and one word."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lm_profiler.analysis.steps.rank_tests import unbiased_lag1
from lm_profiler.analysis.steps.statistics import clipped, finite
from lm_profiler.record.extras import require

Change = Literal["FASTER", "SLOWER", "SAME", "UNCLEAR"]

MARGIN = 0.01
"""A change of less than 1 % is not called one."""

FEWEST_VALUES = 6
"""Below six values a side the bootstrap's interval is no wider than the data: nothing is claimed."""

CONFIDENCE = 0.97
"""Of a comparison's intervals: equal programs are to be called different in fewer than 5 % of all tries, and steps that
are not what a model of them says take their share of that."""

PROCESS_SPREAD = 0.01
"""By how much (std of the logarithm) processes of one program are taken to differ where only one of each has run."""

WIDEST = 10.0
"""An interval whose ends lie a factor of ten apart says nothing."""

_RESAMPLES = 10_000
_LARGEST_LAG1 = 0.9


@dataclass(frozen=True)
class RatioInterval:
    """B over A (above 1: B takes longer), with its interval."""

    ratio: float
    low: float
    high: float
    confidence: float = CONFIDENCE


def ratio_interval(
    a: Sequence[ArrayLike],
    b: Sequence[ArrayLike],
    confidence: float = CONFIDENCE,
    process_spread: float = PROCESS_SPREAD,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> RatioInterval | None:
    """Ratio of medians, B over A. ``a`` and ``b`` are runs, at least one a side (several are repeats), in seconds.

    Of one run against one, a percentile bootstrap over their steps, widened by `process_spread`, which their steps
    cannot show: a process keeps its memory layout, its cores and its neighbours from its first step to its last
    (Kalibera & Jones 2013, ISMM, section 4). With repeats, what the runs' own medians say, see ``repeats_interval``.
    None where nothing can be said: fewer than six steps in a single run, a time that is not positive, an interval
    wider than ``WIDEST``.

    Raises:
        ValueError: for NaN or infinite values.
    """
    if max(len(a), len(b)) > 1:
        medians_a, medians_b = ([float(np.median(finite(run))) for run in runs] for runs in (a, b))
        return repeats_interval(medians_a, medians_b, confidence)
    x, y = finite(a[0]), finite(b[0])
    if min(x.size, y.size) < FEWEST_VALUES or min(x.min(), y.min()) <= 0.0:
        return None
    rng = np.random.default_rng(seed)
    processes = process_spread * math.sqrt(2.0) * rng.standard_normal(resamples)
    off = _deviations(rng, y, resamples) - _deviations(rng, x, resamples) + processes
    tail = (1.0 - confidence) / 2.0
    low, high = (float(q) for q in np.quantile(off, [tail, 1.0 - tail]))
    return _told(float(np.median(y) / np.median(x)), low, high, confidence)


def repeats_interval(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> RatioInterval | None:
    """Ratio of geometric means, B over A, of one figure a run, with Student's t interval of the logarithms.

    Runs differ by more than their steps do, and two or three runs say little about by how much: Student's quantile
    knows that, a bootstrap of so few does not (Georges et al., OOPSLA 2007, section 3). Both sides are taken to
    scatter alike, which lets a side with a single run borrow from the other, and holds the stated share of false
    alarms for any numbers of runs; Welch's interval does not where one side has two. None for one run against one,
    a figure that is not positive, or an interval wider than ``WIDEST``.

    Raises:
        ValueError: for NaN or infinite values.
        MissingExtra: scipy is not installed.
    """
    x, y = finite(a), finite(b)
    if not x.size or not y.size or max(x.size, y.size) < 2 or min(x.min(), y.min()) <= 0.0:
        return None
    x, y = np.log(x), np.log(y)
    half_width = _half_width(x, y, confidence)
    return _told(math.exp(float(y.mean() - x.mean())), -half_width, half_width, confidence)


def change(interval: RatioInterval | None) -> Change:
    """One word: FASTER or SLOWER where the interval excludes 1 and the change exceeds ``MARGIN``.

    SAME where the whole interval lies within ±``MARGIN`` of 1 (an equivalence, not an absence of proof), else
    UNCLEAR.
    """
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
    """The smallest true change, as a share, that ``change`` would call in four of five tries with data like these.

    The change must clear the interval with a power of 80 %: (z + 0.842) / z half widths for a normal estimate, where z
    is the quantile that belongs to the interval's confidence (Lehr 1992, Statistics in Medicine 11:1099). Nothing under
    ``MARGIN`` is called, and between A and A what was seen is seen again.
    """
    half_width = (interval.high - interval.low) / 2.0
    z = NormalDist().inv_cdf((1.0 + interval.confidence) / 2.0)
    return max(MARGIN, abs(interval.ratio - 1.0), (z + NormalDist().inv_cdf(0.8)) / z * half_width)


def _told(ratio: float, low: float, high: float, confidence: float) -> RatioInterval | None:
    """The interval from ``low`` to ``high``, logarithms relative to ``ratio``; None where it says nothing."""
    if high - low > math.log(WIDEST):
        return None
    return RatioInterval(ratio, ratio * math.exp(low), ratio * math.exp(high), confidence)


def _deviations(rng: np.random.Generator, x: NDArray[np.float64], resamples: int) -> NDArray[np.float64]:
    """How far resampled medians of ``x`` lie from its own, in logarithms (Efron & Tibshirani 1993, chapter 13).

    Widened by what lag-1 autocorrelation adds to the variance of a mean (Bayley & Hammersley 1946). The correlation
    counts one standard error higher than it seems: of ten steps it can hardly be told, and a false alarm costs more
    than a wide interval.
    """
    r = unbiased_lag1(clipped(x))
    r = min(r + math.sqrt((1.0 - r * r) / x.size), _LARGEST_LAG1)
    off = np.log(_resampled_medians(rng, np.sort(x), resamples) / np.median(x))
    return np.asarray(off * math.sqrt((1.0 + r) / (1.0 - r)), dtype=np.float64)


def _resampled_medians(rng: np.random.Generator, ordered: NDArray[np.float64], resamples: int) -> NDArray[np.float64]:
    """Medians of ``resamples`` draws with replacement of as many values as there are, without drawing them all.

    Value i is drawn where a uniform number falls into [i / n, (i + 1) / n), and the middle one of n uniform numbers
    has a beta distribution (David & Nagaraja 2003, Order Statistics, section 2.1); of an even n, the upper middle one
    given the lower has one too.
    """
    n, half = ordered.size, ordered.size // 2
    lower = rng.beta((n + 1) // 2, half + 1, size=resamples)
    upper = lower if n % 2 else lower + (1.0 - lower) * rng.beta(1, half, size=resamples)
    low, high = (ordered[np.minimum((u * n).astype(np.intp), n - 1)] for u in (lower, upper))
    return np.asarray((low + high) / 2.0, dtype=np.float64)


def _half_width(x: NDArray[np.float64], y: NDArray[np.float64], confidence: float) -> float:
    require("scipy", "compare")
    from scipy.special import stdtrit  # here: whoever compares single runs need not wait for it

    freedom = x.size + y.size - 2
    variance = sum(float(((side - side.mean()) ** 2).sum()) for side in (x, y)) / freedom
    return float(stdtrit(freedom, (1.0 + confidence) / 2.0)) * math.sqrt(variance * (1.0 / x.size + 1.0 / y.size))
