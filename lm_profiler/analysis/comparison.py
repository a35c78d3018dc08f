"""Is B faster than A? A ratio of medians with its interval, and one word."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks import unbiased_lag1
from lm_profiler.analysis.statistics import clipped, finite

Change = Literal["FASTER", "SLOWER", "SAME", "UNCLEAR"]

MARGIN = 0.01
"""A change of less than 1 % is not called one."""

FEWEST_VALUES = 6
"""Below six values a side the bootstrap's interval is no wider than the data: nothing is claimed."""

_RESAMPLES = 2000

Runs = Sequence[float] | Sequence[Sequence[float]] | NDArray[np.float64]


@dataclass(frozen=True)
class RatioInterval:
    """Median of B over median of A (above 1: B is slower), with its bootstrap interval."""

    ratio: float
    low: float
    high: float
    confidence: float = 0.95


def ratio_interval(
    a: Runs, b: Runs, confidence: float = 0.95, resamples: int = _RESAMPLES, seed: int = 0
) -> RatioInterval | None:
    """Ratio of medians, B over A, with a percentile bootstrap interval (Efron & Tibshirani 1993, chapters 13
    and 16).

    `a` and `b` are seconds, either one run's or a list of runs (repeats). Of several runs, whole runs are
    drawn first and steps within them second, so that differences between processes count (Davison & Hinkley
    1997, section 3.8). Of a single run they cannot: the interval then speaks of these two processes only.
    With two or three runs a side it is still too narrow. Steps are drawn in blocks where neighbours resemble
    each other; below twenty steps that cannot be made up for. None with fewer than six values on a side, or
    where a median is not positive.

    Raises:
        ValueError: for NaN or infinite values.
    """
    runs_a, runs_b = _as_runs(a), _as_runs(b)
    pooled_a, pooled_b = np.concatenate(runs_a), np.concatenate(runs_b)
    if min(pooled_a.size, pooled_b.size) < FEWEST_VALUES:
        return None
    median_a, median_b = float(np.median(pooled_a)), float(np.median(pooled_b))
    if median_a <= 0.0 or median_b <= 0.0:
        return None
    rng = np.random.default_rng(seed)
    drawn_a, drawn_b = _medians(rng, runs_a, resamples), _medians(rng, runs_b, resamples)
    tail = (1.0 - confidence) / 2.0
    low, high = (float(q) for q in np.quantile(drawn_b / drawn_a, [tail, 1.0 - tail]))
    return RatioInterval(median_b / median_a, low, high, confidence)


def change(interval: RatioInterval | None, margin: float = MARGIN) -> Change:
    """One word: FASTER or SLOWER where the interval excludes 1 and the change exceeds `margin`.

    SAME where the whole interval lies within ±`margin` of 1 (an equivalence, not an absence of proof), else
    UNCLEAR.
    """
    if interval is None:
        return "UNCLEAR"
    if interval.high < 1.0 and interval.ratio < 1.0 - margin:
        return "FASTER"
    if interval.low > 1.0 and interval.ratio > 1.0 + margin:
        return "SLOWER"
    if 1.0 - margin <= interval.low and interval.high <= 1.0 + margin:
        return "SAME"
    return "UNCLEAR"


def _as_runs(values: Runs) -> list[NDArray[np.float64]]:
    nested = len(values) > 0 and np.ndim(values[0]) > 0
    runs = [finite(run) for run in values] if nested else [finite(values)]
    return [run for run in runs if run.size] or [np.empty(0)]


def _medians(rng: np.random.Generator, runs: list[NDArray[np.float64]], resamples: int) -> NDArray[np.float64]:
    if len(runs) == 1:
        return np.asarray(np.median(_resampled(rng, runs[0], resamples), axis=1), dtype=np.float64)
    medians = np.empty(resamples)
    for i in range(resamples):
        chosen = rng.integers(len(runs), size=len(runs))
        medians[i] = np.median(np.concatenate([_resampled(rng, runs[j], 1)[0] for j in chosen]))
    return medians


def _resampled(rng: np.random.Generator, x: NDArray[np.float64], resamples: int) -> NDArray[np.float64]:
    """`resamples` rows of x drawn in circular blocks, so that the steps of a block stay as alike as they
    were.

    The blocks' length is the best for an AR(1) process (Carlstein 1986); 1 where steps are independent.
    """
    n = x.size
    r = unbiased_lag1(clipped(x))
    length = max(1, min(round((math.sqrt(6.0) * r / (1.0 - r * r)) ** (2.0 / 3.0) * n ** (1.0 / 3.0)), n // 2))
    starts = rng.integers(n, size=(resamples, -(-n // length)))
    where = (starts[:, :, None] + np.arange(length)) % n
    return np.asarray(x[where.reshape(resamples, -1)[:, :n]], dtype=np.float64)


def minimum_detectable_effect(interval: RatioInterval, margin: float = MARGIN) -> float:
    """The smallest true change, as a share, that ``change`` would call in four of five tries with data like these.

    The change must clear the interval with a power of 80 %: (1.960 + 0.842) / 1.960 half widths for a normal estimate
    at 95 % (Lehr 1992, Statistics in Medicine 11:1099, by the same quantiles). Nothing under the ``margin`` is called,
    and between A and A what was seen is seen again.
    """
    half_width = (interval.high - interval.low) / 2.0
    return max(margin, abs(interval.ratio - 1.0), (1.959964 + 0.841621) / 1.959964 * half_width)
