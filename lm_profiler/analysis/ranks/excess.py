"""Is a rank slower than the others, or was it chance?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.work import Seconds
from lm_profiler.analysis.steps.statistics import mean_interval

SIGNIFICANCE = 0.02
"""Of calling any rank slower when all are equal."""

_MOST_TESTED = 16


@dataclass(frozen=True)
class Excess:
    """By how much a rank (or a host) takes longer in a part than the median of the others, seconds a step.

    ``error_s`` is its standard error over the steps; ``certain`` that chance does not explain it, though the largest of
    all ranks' and parts' was looked for.
    """

    group: int
    part: int
    seconds: float
    error_s: float
    certain: bool


def excesses(own_s: Seconds) -> list[Excess]:
    """Those of [group, step, part] that are above 0, the largest first; at most the 16 largest.

    Means over the steps are compared, not medians: what happens every fifth step counts. The test is Student's, of the
    differences within each step (so that steps that are long for all do no harm) from the mean of the other groups,
    with Bonferroni's correction for all groups and parts.
    """
    groups, steps, parts = own_s.shape
    if groups < 2 or steps < 2:
        return []
    means = own_s.mean(axis=1)
    above = means - _median_of_others(means)
    limit = _limit(means, steps)
    largest = []
    for cell in np.argsort(above, axis=None)[::-1][:_MOST_TESTED].tolist():
        group, part = divmod(cell, parts)
        seconds = float(above[group, part])
        if seconds <= 0.0:
            break
        others = (own_s[:, :, part].sum(axis=0) - own_s[group, :, part]) / (groups - 1)
        apart = own_s[group, :, part] - others
        error_s = standard_error(apart)
        certain = float(apart.mean()) > limit * error_s and seconds > limit * error_s
        largest.append(Excess(group, part, seconds, error_s, certain))
    return largest


def excess_of(own_s: Seconds, ranks: Sequence[int], part: int, tested: Sequence[int]) -> Excess | None:
    """Of ``ranks`` together, by how much their mean is above the median of the others; certain where each of the
    ``tested`` is. None where no others are left."""
    own = own_s[:, :, part]
    mine, others = own[list(ranks)], np.delete(own, list(ranks), axis=0)
    if not len(mine) or not len(others):
        return None
    limit = _limit(own_s.mean(axis=1), own.shape[1])
    beside = others.mean(axis=0)
    each = [own[rank] - beside for rank in tested]
    certain = all(float(apart.mean()) > limit * standard_error(apart) for apart in each)
    seconds = float(mine.mean() - np.median(others.mean(axis=1)))
    return Excess(ranks[0], part, seconds, standard_error(mine.mean(axis=0) - beside), certain)


def _limit(means: Seconds, steps: int) -> float:
    """Standard errors that chance exceeds in ``SIGNIFICANCE`` of all cases, of all groups' and parts' ``means``."""
    busy = int(np.count_nonzero(means.max(axis=0) > 0.0))
    return student(SIGNIFICANCE / max(len(means) * busy, 1), steps - 1)


def standard_error(values: NDArray[np.float64]) -> float:
    """Of their mean, with what their autocorrelation adds."""
    known = mean_interval(values)
    return math.inf if known is None else (known.high - known.low) / 3.92


def _median_of_others(means: Seconds) -> Seconds:
    """[group, part]: the median over all other groups."""
    groups = len(means)
    ordered = np.sort(means, axis=0)
    place = np.argsort(np.argsort(means, axis=0, kind="stable"), axis=0, kind="stable")
    low, high = (groups - 2) // 2, (groups - 1) // 2  # of the others' order
    pick = [np.take_along_axis(ordered, np.where(place <= k, k + 1, k), axis=0) for k in (low, high)]
    return np.asarray((pick[0] + pick[1]) / 2.0)


def student(tail: float, freedom: int) -> float:
    """What Student's t exceeds with probability ``tail`` (below 1/2).

    Hill, Algorithm 396, Communications of the ACM 13 (1970) 619, to some 1e-4 of it: scipy, which has it to the last
    digit, is not there in every installation.
    """
    p, n = 2.0 * tail, float(freedom)
    if freedom == 1:
        return 1.0 / math.tan(p * math.pi / 2.0)
    if freedom == 2:
        return math.sqrt(2.0 / (p * (2.0 - p)) - 2.0)
    a = 1.0 / (n - 0.5)
    b = 48.0 / a**2
    c = ((20700.0 * a / b - 98.0) * a - 16.0) * a + 96.36
    d = ((94.5 / (b + c) - 3.0) / b + 1.0) * math.sqrt(a * math.pi / 2.0) * n
    y = (d * p) ** (2.0 / n)
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(p / 2.0)
        y = x * x
        c += 0.3 * (n - 4.5) * (x + 0.6) if n < 5 else 0.0
        c = (((0.05 * d * x - 5.0) * x - 7.0) * x - 2.0) * x + b + c
        y = (((((0.4 * y + 6.3) * y + 36.0) * y + 94.5) / c - y - 3.0) / b + 1.0) * x
        y = math.expm1(a * y * y)
    else:
        y = ((1.0 / (((n + 6.0) / (n * y) - 0.089 * d - 0.822) * (n + 2.0) * 3.0) + 0.5 / (n + 4.0)) * y - 1.0) * (
            n + 1.0
        ) / (n + 2.0) + 1.0 / y
    return math.sqrt(n * y)
