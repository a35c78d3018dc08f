"""Which ranks are slower than the others, in which part and in which steps, and whether chance explains it.

A rank's excess time over the others is a series with levels, a pattern, odd steps and noise, like step times. Its
noise is estimated from the model's residuals: never from data that still contain the difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from lm_profiler.analysis.ranks.rank_timeline import Seconds
from lm_profiler.analysis.steps.statistics import FEWEST_VALUES, PHI, ar1_means, student
from lm_profiler.analysis.steps.step_model import fit

SIGNIFICANCE = 0.02  # the probability of calling any rank slower when all are equal

_LEAST = 0.01  # the share of the step below which an excess is not looked at

# the gap that divides slow ranks from fast ones, as a share of the distance of the slowest from the fastest
_CLEAR = 0.5

_TESTED = 8  # up to this many ranks of a part are tested each; of more, only the slowest and the least slow

_HALF = 0.5  # levels above this share of the highest level belong to the slow stretch

_LOWEST = 0.05  # the least value of the model, as a share of the step


@dataclass(frozen=True)
class Slow:
    """A rank that takes longer in a part than others do."""

    rank: int  # its index
    part: int  # code of the part; one more than those of a step for what lies between steps
    fast: tuple[int, ...]  # indices of the ranks that it is compared with
    seconds: float  # how much longer than their mean, in the mean step
    half_s: float  # half the 95 % interval of that
    certain: bool  # whether chance cannot explain it, given that all ranks and parts were tested
    first: int  # the stretch of steps in which it is slow, by index
    end: int


def slow_ranks(own_s: Seconds, step_s: float) -> list[Slow]:
    """Return those of [rank, step, part] that are slower by 1 % of the mean step ``step_s`` or more, the slowest first.

    Means over the steps are compared, not medians: an excess in every fifth step counts. Differences are taken within
    each step, so that steps that are long for all ranks do no harm. Bonferroni's correction covers all ranks and parts.
    """
    ranks, steps, parts = own_s.shape
    if ranks < 2 or steps < FEWEST_VALUES:
        return []
    busy = int(np.count_nonzero(own_s.mean(axis=1).max(axis=0) > 0.0))
    slower = [slow for part in range(parts) for slow in _in_part(own_s[:, :, part], part, step_s, ranks * busy)]
    return sorted(slower, key=lambda slow: -slow.seconds)


def fast_ranks(means_s: Seconds) -> tuple[int, ...]:
    """Return those below the largest gap between ranks if it is a clear one, even if they are the fewer; else all."""
    order = np.argsort(means_s, kind="stable")
    gaps = np.diff(means_s[order])
    at = int(gaps.argmax())
    clear = gaps[at] > 0.0 and gaps[at] >= _CLEAR * np.ptp(means_s)
    return tuple(sorted((order[: at + 1] if clear else order).tolist()))


def _in_part(own_s: Seconds, part: int, step_s: float, tests: int) -> list[Slow]:
    means = own_s.mean(axis=1)
    fast = fast_ranks(means)
    held = np.isin(np.arange(means.size), fast)
    # No rank is compared with itself.
    above = means - (means[held].sum() - held * means) / np.maximum(len(fast) - held, 1)
    slow = [rank for rank in np.argsort(-above).tolist() if above[rank] >= _LEAST * step_s and fast != (rank,)]
    # Each test fits a model: with many slow ranks, the two extremes stand for all.
    tested = slow if len(slow) <= _TESTED else [slow[0], slow[-1]]
    known = {rank: _tested(own_s, rank, part, fast, step_s, tests) for rank in tested}
    return [
        known[rank] if rank in known else replace(known[slow[-1]], rank=rank, seconds=float(above[rank]))
        for rank in slow
    ]


def _tested(own_s: Seconds, rank: int, part: int, fast: tuple[int, ...], step_s: float, tests: int) -> Slow:
    apart = own_s[rank] - own_s[[other for other in fast if other != rank]].mean(axis=0)
    seconds = float(apart.mean())
    # The model is of positive times: a mean step is added to the differences, which may be negative.
    x = np.maximum(step_s + apart, _LOWEST * step_s)
    model = fit(x, warms_up=False)
    rest, even = (x - model.expected) / step_s, ~model.odd
    fitted = len(model.levels) + (0 if model.pattern is None else model.pattern.every - 1)
    freedom = max(int(even.sum()) - fitted, 1)
    odd = math.sqrt(float((rest[~even] ** 2).sum())) / apart.size  # as uncertain as a compound Poisson process
    error_s = math.hypot(_standard_error(rest[even], freedom), odd) * step_s
    certain = seconds > student(freedom, 1.0 - 2.0 * SIGNIFICANCE / tests) * error_s
    levels = [float(apart[a:b].mean()) for a, b in pairwise(model.edges)]
    stretches = zip(pairwise(model.edges), levels, strict=True)
    high = [stretch for stretch, level in stretches if level >= _HALF * max(levels)]
    return Slow(rank, part, fast, seconds, student(freedom, 0.95) * error_s, certain, high[0][0], high[-1][1])


def _standard_error(noise: Seconds, freedom: int) -> float:
    """Return the standard error of the mean of AR(1) noise, averaged over the coefficient by its likelihood."""
    if noise.size < FEWEST_VALUES:
        return math.inf
    score, _, errors = ar1_means(noise - noise.mean())
    weights = np.exp(-0.5 * (score - score.min())) * (1.0 - PHI)  # ten steps could show nothing without this prior
    return math.sqrt(float(weights @ errors**2) / float(weights.sum()) * (noise.size - 1) / freedom)
