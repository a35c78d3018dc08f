"""Which ranks are slower than the others, in which part and in which steps, and whether chance explains it.

A rank's excess time over the others is a series with levels, a pattern, odd steps and noise, like step times. Its
noise is estimated from the model's residuals: never from data that still contain the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.rank_timeline import Seconds
from lm_profiler.analysis.steps.statistics import (
    FEWEST_VALUES,
    PHI,
    ar1_means,
    student_quantile,
)
from lm_profiler.analysis.steps.step_model import StepModel, fit
from lm_profiler.record.steps import Counts

SIGNIFICANCE = 0.02  # the probability of calling any rank slower when all are equal

_LEAST_EXCESS = 0.01  # the share of the step below which an excess is not looked at

# the gap that divides slow ranks from fast ones, as a share of the distance of the slowest from the fastest
_CLEAR = 0.5

_MOST_TESTS = 8  # up to this many ranks of a part are tested each; of more, only the slowest and the least slow

# levels from this share of the highest level on belong to the slow stretch
_SLOW_STRETCH_SHARE = 0.5

# a step is active if the fast ranks spend more than this share of their longest step in the part
_ACTIVE_SHARE = 0.5
# a part happens now and then if at most this share of the steps is active
_MOST_ACTIVE_STEPS = 0.5

# the share of a rank's excess that the steps must have by which it is judged
_LEAST_JUDGED_SHARE = 0.5

_LOWEST = 0.05  # the least value of the model, as a share of the step

# in a part that happens now and then, the other steps have less than this share of the shortest of these
_IDLE = 0.25


@dataclass(frozen=True)
class SlowCandidate:
    """A rank that took longer in a part than others did, perhaps by chance."""

    rank: int  # its index
    part: int  # code of the part; one more than those of a step for what lies between steps
    fast_ranks: tuple[int, ...]  # indices of the ranks that it is compared with
    seconds: float  # how much longer than their mean, in the mean step
    half_interval_s: float  # half the 95 % interval of that
    is_certain: bool  # whether chance cannot explain it, given that all ranks and parts were tested
    begin: int  # the stretch of steps in which it is slow, by index
    end: int


def slow_ranks(own_s: Seconds, step_s: float) -> list[SlowCandidate]:
    """Return those of [rank, step, part] that are slower by 1 % of the mean step ``step_s`` or more, the slowest first.

    Means over the steps are compared, not medians: an excess in every fifth step counts. Differences are taken within
    each step, so that steps that are long for all ranks do no harm. Bonferroni's correction covers all ranks and parts.
    """
    ranks, steps, parts = own_s.shape
    if ranks < 2 or steps < FEWEST_VALUES:
        return []
    parts_with_work = int(np.count_nonzero(own_s.mean(axis=1).max(axis=0) > 0.0))
    tests = ranks * parts_with_work
    slower = []
    for part in range(parts):
        slower += _in_part(own_s[:, :, part], part, step_s, tests)
    return sorted(slower, key=lambda slow: -slow.seconds)


def fast_ranks(means_s: Seconds) -> tuple[int, ...]:
    """Return those below the largest gap between ranks if it is a clear one, even if they are the fewer; else all."""
    order = np.argsort(means_s, kind="stable")
    gaps_s = np.diff(means_s[order])
    widest = int(gaps_s.argmax())
    least_gap_s = _CLEAR * np.ptp(means_s)
    if gaps_s[widest] > 0.0 and gaps_s[widest] >= least_gap_s:
        order = order[: widest + 1]
    return tuple(sorted(order.tolist()))


def _in_part(
    own_s: Seconds, part: int, step_s: float, tests: int
) -> list[SlowCandidate]:
    """Return the ranks that are slow in one part; ``own_s`` is [rank, step]."""
    means_s = own_s.mean(axis=1)
    fast = fast_ranks(means_s)
    is_fast = np.isin(np.arange(means_s.size), fast)
    # A rank is compared with the fast ranks, but not with itself.
    compared_counts = len(fast) - is_fast
    compared_sums_s = means_s[is_fast].sum() - is_fast * means_s
    excess_s = means_s - compared_sums_s / np.maximum(compared_counts, 1)
    slow = []
    for rank in np.argsort(-excess_s).tolist():
        is_only_fast_rank = fast == (rank,)
        if excess_s[rank] >= _LEAST_EXCESS * step_s and not is_only_fast_rank:
            slow.append(rank)

    # Each test fits a model: with many slow ranks, the two extremes stand for all.
    ranks_to_test = slow
    if len(slow) > _MOST_TESTS:
        ranks_to_test = [slow[0], slow[-1]]
    slow_by_rank = {}
    for rank in ranks_to_test:
        slow_by_rank[rank] = _test_rank(own_s, rank, part, fast, step_s, tests)
    slow_in_part = []
    for rank in slow:
        if rank in slow_by_rank:
            slow_in_part.append(slow_by_rank[rank])
            continue
        least_slow = slow_by_rank[slow[-1]]
        rank_excess_s = float(excess_s[rank])
        slow_in_part.append(replace(least_slow, rank=rank, seconds=rank_excess_s))
    return slow_in_part


def _test_rank(
    own_s: Seconds,
    rank: int,
    part: int,
    fast: tuple[int, ...],
    step_s: float,
    tests: int,
) -> SlowCandidate:
    """Return how much slower ``rank`` is than the fast ranks, with its interval, and whether that is certain."""
    compared_ranks = [fast_rank for fast_rank in fast if fast_rank != rank]
    compared_s = own_s[compared_ranks].mean(axis=0)
    all_excess_s = own_s[rank] - compared_s
    judged_steps = _judged_steps(all_excess_s, compared_s)
    excess_s = all_excess_s[judged_steps]

    # The model needs positive times: a mean step is added to the differences, which may be negative.
    series_s = np.maximum(step_s + excess_s, _LOWEST * step_s)
    model = fit(series_s, warms_up=False)
    freedom = _degrees_of_freedom(model)
    relative_residuals = (series_s - model.expected) / step_s
    error_s = _error_of_mean(relative_residuals, model.odd, freedom) * step_s

    mean_s = float(excess_s.mean())
    confidence = 1.0 - 2.0 * SIGNIFICANCE / tests
    begin, end = _slow_stretch(excess_s, model.edges)
    share_of_steps = judged_steps.size / compared_s.size
    return SlowCandidate(
        rank=rank,
        part=part,
        fast_ranks=fast,
        seconds=mean_s * share_of_steps,
        half_interval_s=student_quantile(freedom, 0.95) * error_s * share_of_steps,
        is_certain=mean_s > student_quantile(freedom, confidence) * error_s,
        begin=int(judged_steps[begin]),
        end=int(judged_steps[end - 1]) + 1,
    )


def _judged_steps(excess_s: Seconds, fast_s: Seconds) -> Counts:
    """Return the indices of the steps to judge a rank by: the active ones, or all if its excess is mostly in others."""
    active = _active_steps(fast_s)
    if excess_s[active].sum() < _LEAST_JUDGED_SHARE * excess_s.sum():
        return np.arange(fast_s.size)
    return active


def _degrees_of_freedom(model: StepModel) -> int:
    """Return how many more usual steps there are than values that were fitted to them: levels and a pattern."""
    pattern_length = 1
    if model.pattern is not None:
        pattern_length = model.pattern.period
    fitted = len(model.levels) + pattern_length - 1
    usual_steps = int(np.count_nonzero(~model.odd))
    return max(usual_steps - fitted, 1)


def _error_of_mean(
    residuals: Seconds, is_odd: NDArray[np.bool_], freedom: int
) -> float:
    """Return the standard error of the mean of a series, by the ``residuals`` of its model."""
    noise_error = _standard_error(residuals[~is_odd], freedom)
    # Odd steps are no noise, but it is chance how many of them come, and how long they are: their sum is a compound
    # Poisson process, whose variance is about the sum of the squares.
    odd_squares = float((residuals[is_odd] ** 2).sum())
    odd_error = math.sqrt(odd_squares) / residuals.size
    return math.hypot(noise_error, odd_error)


def _slow_stretch(excess_s: Seconds, edges: Sequence[int]) -> tuple[int, int]:
    """Return where the stretch begins and ends outside of which the levels are low; a level lies between two edges."""
    levels_s = []
    for begin, end in pairwise(edges):
        levels_s.append(float(excess_s[begin:end].mean()))
    least_s = _SLOW_STRETCH_SHARE * max(levels_s)
    high_levels = []
    for level, level_s in enumerate(levels_s):
        if level_s >= least_s:
            high_levels.append(level)
    return edges[high_levels[0]], edges[high_levels[-1] + 1]


def _active_steps(fast_s: Seconds) -> Counts:
    """Return the indices of the steps to judge by: those in which the fast ranks do what they do now and then.

    A validation or a checkpoint happens in few steps, in the same ones on all ranks. Which steps these are is no
    chance: only the differences within them are. Other parts are judged by all steps.
    """
    active = np.flatnonzero(fast_s > _ACTIVE_SHARE * fast_s.max(initial=0.0))
    rest_s = np.delete(fast_s, active)
    most_active = _MOST_ACTIVE_STEPS * fast_s.size
    happens_now_and_then = FEWEST_VALUES <= active.size <= most_active
    if happens_now_and_then and rest_s.max(initial=0.0) < _IDLE * fast_s[active].min():
        return active
    return np.arange(fast_s.size)


def _standard_error(noise: Seconds, freedom: int) -> float:
    """Return the standard error of the mean of AR(1) noise, averaged over the coefficient by its likelihood."""
    if noise.size < FEWEST_VALUES:
        return math.inf
    score, _, errors = ar1_means(noise - noise.mean())
    # ten steps could show nothing without this prior
    weights = np.exp(-0.5 * (score - score.min())) * (1.0 - PHI)
    mean_square = float(weights @ errors**2) / float(weights.sum())
    return math.sqrt(mean_square * (noise.size - 1) / freedom)
