"""Rank tests for level changes in a short, noisy, mildly autocorrelated series."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

SIGNIFICANCE = 0.01
"""Verdicts are rare events on a quiet machine: one per cent, not five."""

_LONGEST_SIMULATED = 60
_ROUNDING = 1e-12  # of a value: what is left of a constant when its mean is taken off


@dataclass(frozen=True)
class ChangePoint:
    """The level changes by the share `change` from index `at` on."""

    at: int
    change: float


def ranks(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 1, ties averaged (as scipy.stats.rankdata, without importing it)."""
    _, where, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2.0)[where], dtype=np.float64)


def lag1_autocorrelation(x: NDArray[np.float64]) -> float | None:
    """Lag-1 sample autocorrelation (Box & Jenkins 1976); None for fewer than 3 or constant
    values.
    """
    if x.size < 3:
        return None
    centred = x - x.mean()
    power = float(centred @ centred)
    rounding = x.size * (_ROUNDING * float(np.abs(x).max())) ** 2
    return float(centred[1:] @ centred[:-1]) / power if power > rounding else None


def unbiased_lag1(x: NDArray[np.float64]) -> float:
    """Lag-1 autocorrelation corrected for its small-sample bias, (1 + 3 r) / n (Kendall 1954), within 0 to
    0.9.

    A negative one earns no credit; 0 where there is none.
    """
    r = lag1_autocorrelation(x)
    return 0.0 if r is None else min(max(r + (1.0 + 3.0 * r) / x.size, 0.0), 0.9)


def inflation(residuals: NDArray[np.float64]) -> float:
    """By how much an AR(1) process inflates the variance of a mean, (1 + r) / (1 - r) (Bayley & Hammersley
    1946).
    """
    r = unbiased_lag1(residuals)
    return (1.0 + r) / (1.0 - r)


def change_point(x: NDArray[np.float64], smallest: float) -> ChangePoint | None:
    """Pettitt's change-point test (Applied Statistics 28:126, 1979), its variance inflated for
    autocorrelation.

    None where no change is significant, or where the medians differ by less than the share `smallest`.
    """
    n = x.size
    if n < 4:
        return None
    scores = 2.0 * np.cumsum(ranks(x))[:-1] - np.arange(1, n) * (n + 1.0)
    at = int(np.argmax(np.abs(scores))) + 1
    before, after = x[:at], x[at:]
    level = float(np.median(before))
    change = float(np.median(after)) / level - 1.0 if level > 0 else 0.0
    p_value = _pettitt_p(n, abs(float(scores[at - 1])) / math.sqrt(_inflation(before, after)))
    if p_value > SIGNIFICANCE or abs(change) < smallest:
        return None
    return ChangePoint(at, change)


def prefix_differs(before: NDArray[np.float64], after: NDArray[np.float64], smallest: float) -> bool:
    """Whether a prefix lies elsewhere than the rest: Mann-Whitney (1947), normal approximation, two-sided.

    Variance inflated for autocorrelation; medians must differ by at least the share `smallest`.
    """
    m, n = before.size, after.size
    level = float(np.median(after)) if n else 0.0
    if m == 0 or level <= 0 or abs(float(np.median(before)) / level - 1.0) < smallest:
        return False
    u = float(ranks(np.concatenate([before, after]))[:m].sum()) - m * (m + 1) / 2.0
    spread = math.sqrt(m * n * (m + n + 1) / 12.0 * _inflation(before, after))
    return math.erfc(abs(u - m * n / 2.0) / spread / math.sqrt(2.0)) <= SIGNIFICANCE


def _inflation(before: NDArray[np.float64], after: NDArray[np.float64]) -> float:
    """Inflation left once the change is taken out, be it a step or a straight line; the better fit counts.

    Of a slow decay the residuals from a step are themselves correlated, which would hide the decay.
    """
    step = np.concatenate([before - np.median(before), after - np.median(after)])
    whole = np.concatenate([before, after])
    if whole.size < 4:
        return inflation(step)
    time = np.arange(whole.size) - (whole.size - 1) / 2.0
    line = whole - whole.mean() - time * float(time @ whole) / float(time @ time)
    return min(inflation(step), inflation(line))


def _pettitt_p(n: int, statistic: float) -> float:
    """Chance of a larger statistic without a change: simulated for short series, Pettitt's own tail
    beyond.
    """
    if n > _LONGEST_SIMULATED:
        return min(1.0, 2.0 * math.exp(-6.0 * statistic**2 / (n**3 + n**2)))
    null = _pettitt_null(n)
    larger = null.size - int(np.searchsorted(null, statistic))
    return (1.0 + larger) / (1.0 + null.size)


@lru_cache(maxsize=64)
def _pettitt_null(n: int) -> NDArray[np.float64]:
    """Sorted statistics of random orders of 1..n: exact but for 5,000 draws, where the tail formula is too
    cautious.
    """
    rng = np.random.default_rng(n)
    orders = rng.permuted(np.tile(np.arange(1.0, n + 1.0), (5000, 1)), axis=1)
    scores = 2.0 * np.cumsum(orders, axis=1)[:, :-1] - np.arange(1, n) * (n + 1.0)
    return np.sort(np.abs(scores).max(axis=1))
