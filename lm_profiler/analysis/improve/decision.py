"""Is B faster than A, after as many pairs of fresh processes as it takes? An interval that holds at any of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lm_profiler.analysis.compare.ratio import RatioInterval
from lm_profiler.analysis.steps.statistics import finite

PROCESSES = 0.05
"""By how much (std of the logarithm) processes of one program may differ."""

_EFFECT = 0.1
"""Std of the changes (logarithms) for which the interval is narrowest; it holds for all."""


def anytime_interval(a: Sequence[float], b: Sequence[float], error: float) -> RatioInterval | None:
    """Ratio of geometric means, B over A, of pairs of processes; it holds after all pairs with probability 1 - error.

    Of a normal mixture (Robbins 1970, Annals of Mathematical Statistics 41:1397), for processes that differ by
    ``PROCESSES`` or less. None without a pair.
    """
    x, y = finite(a), finite(b)
    n = min(x.size, y.size)
    if not n:
        return None
    mean = float((np.log(y[:n]) - np.log(x[:n])).mean())
    variance = 2.0 * PROCESSES**2
    r = n * _EFFECT**2 / variance
    half = math.sqrt(2.0 * (1.0 + r) / r * (math.log(1.0 / error) + 0.5 * math.log1p(r)) * variance / n)
    return RatioInterval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), 1.0 - error)
