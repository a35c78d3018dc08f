"""Finds the ranks that are slower than the others, in which part and in which steps, and whether chance explains it.

The excess of a rank over the others, step by step, is modelled like step times: with levels, a pattern, odd steps and
noise. The noise is estimated from the residuals of this model, never from data that contain the difference itself.
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
    AR1_COEFFICIENTS,
    FEWEST_VALUES,
    ar1_means,
    student_quantile,
)
from lm_profiler.analysis.steps.step_model import StepModel, fit
from lm_profiler.record.steps import Counts

SIGNIFICANCE = 0.02  # the probability of calling any rank slower when all are equal

_LEAST_EXCESS = 0.01  # a smaller excess, as a share of the step, is ignored

# A gap divides slow ranks from fast ones if it is at least this share of the range from the fastest to the slowest.
_CLEAR_GAP_SHARE = 0.5

_MOST_TESTS = 8  # up to this many slow ranks of a part are tested each; of more, only the slowest and the least slow

# The slow stretch of a rank goes from its first to its last level that is at least this share of the highest one.
_SLOW_STRETCH_SHARE = 0.5

# Some parts are occasional: at most half of the steps are active. A step is active if the fast ranks spend more than
# half of their longest time in the part, and an idle one has at most a quarter of the shortest active one.
_ACTIVE_SHARE = 0.5
_MOST_ACTIVE_STEPS = 0.5
_IDLE_SHARE = 0.25

# A rank is judged by the active steps only if they have this share of its excess.
_LEAST_JUDGED_SHARE = 0.5

_LOWEST_SHARE = 0.05  # the smallest value passed to the model, as a share of the step


@dataclass(frozen=True)
class SlowCandidate:
    """A rank that took longer in a part than others did, perhaps by chance."""

    rank: int  # the index of the rank
    part: int  # the index of the part; ``OUTSIDE`` for the time between steps
    fast_ranks: tuple[int, ...]  # the indices of the ranks with which it is compared
    # the rank's time in the part beyond the mean of the fast ranks, in the mean step
    seconds: float
    half_interval_s: float  # half the 95 % interval of the excess
    is_certain: bool  # whether chance cannot explain it, considering that all ranks and parts were tested
    begin: int  # the first step in which it is slow, by index
    end: int  # the first step after those in which it is slow


def slow_ranks(own_s: Seconds, step_s: float) -> list[SlowCandidate]:
    """Return the ranks that are slower than others in some part, by at least 1 % of the step, the slowest first.

    Means over the steps are compared, not medians, so that an excess in every fifth step counts. Ranks are compared
    within each step, so that steps that are long on all ranks do not matter. Certainty is corrected for the number of
    tests (Bonferroni).

    Args:
        own_s: [rank, step, part] own work.
        step_s: the mean step.
    """
    ranks, steps, parts = own_s.shape
    if ranks < 2 or steps < FEWEST_VALUES:
        return []
    has_work = (own_s > 0.0).any(axis=(0, 1))  # [part]
    tests = ranks * int(np.count_nonzero(has_work))
    slower = []
    for part in range(parts):
        slower += _slow_in_part(own_s[:, :, part], part, step_s, tests)
    return sorted(slower, key=lambda candidate: -candidate.seconds)


def fast_ranks(means_s: Seconds) -> tuple[int, ...]:
    """Return the indices of the ranks below the largest gap, even if they are the minority; all if no gap is clear.

    ``means_s`` is [rank] the mean time in a part.
    """
    order = np.argsort(means_s, kind="stable")
    gaps_s = np.diff(means_s[order])
    widest = int(gaps_s.argmax())
    least_gap_s = _CLEAR_GAP_SHARE * np.ptp(means_s)
    if gaps_s[widest] > 0.0 and gaps_s[widest] >= least_gap_s:
        order = order[: widest + 1]
    return tuple(sorted(order.tolist()))


def _slow_in_part(
    own_s: Seconds, part: int, step_s: float, tests: int
) -> list[SlowCandidate]:
    """Return the ranks that are slow in one part.

    ``own_s`` is [rank, step] the own work in it, and ``tests`` the number of tests in all parts.
    """
    means_s = own_s.mean(axis=1)
    fast = fast_ranks(means_s)
    is_fast = np.isin(np.arange(means_s.size), fast)
    # Each rank is compared with the fast ranks; a fast rank with the other fast ranks. [rank] their number and sum:
    compared_counts = len(fast) - is_fast
    compared_sums_s = means_s[is_fast].sum() - is_fast * means_s
    excess_s = means_s - compared_sums_s / np.maximum(compared_counts, 1)
    slow = []  # the indices of slow ranks, the slowest first
    for rank in np.argsort(-excess_s).tolist():
        has_excess = excess_s[rank] >= _LEAST_EXCESS * step_s
        is_only_fast_rank = fast == (rank,)  # there is none to compare it with
        if has_excess and not is_only_fast_rank:
            slow.append(rank)

    # Each test fits a model, which takes time. Of many slow ranks only the two extremes are tested; the others get the
    # result of the least slow one.
    ranks_to_test = slow
    if len(slow) > _MOST_TESTS:
        ranks_to_test = [slow[0], slow[-1]]
    tested = {}  # the candidates, by rank
    for rank in ranks_to_test:
        tested[rank] = _test_rank(own_s, rank, part, fast, step_s, tests)
    candidates = []
    for rank in slow:
        if rank in tested:
            candidates.append(tested[rank])
            continue
        least_slow = tested[slow[-1]]
        rank_excess_s = float(excess_s[rank])
        candidates.append(replace(least_slow, rank=rank, seconds=rank_excess_s))
    return candidates


def _test_rank(
    own_s: Seconds,
    rank: int,
    part: int,
    fast: tuple[int, ...],
    step_s: float,
    tests: int,
) -> SlowCandidate:
    """Test whether ``rank`` is slower than the fast ranks in one part.

    Args:
        own_s: [rank, step] the own work in the part.
        rank: the index of the rank.
        part: the index of the part.
        fast: the indices of the fast ranks.
        step_s: the mean step.
        tests: the number of all tests, for Bonferroni's correction.
    """
    compared_ranks = [fast_rank for fast_rank in fast if fast_rank != rank]
    compared_s = own_s[compared_ranks].mean(axis=0)
    all_excess_s = own_s[rank] - compared_s
    judged_steps = _judged_steps(all_excess_s, compared_s)
    excess_s = all_excess_s[judged_steps]

    # The model needs positive times, so a mean step is added to the differences.
    series_s = np.maximum(step_s + excess_s, _LOWEST_SHARE * step_s)
    model = fit(series_s, warms_up=False)
    freedom = _degrees_of_freedom(model)
    relative_residuals = (series_s - model.expected) / step_s
    error_s = _error_of_mean(relative_residuals, model.odd, freedom) * step_s

    mean_s = float(excess_s.mean())
    half_interval_s = student_quantile(freedom, confidence=0.95) * error_s
    # two-sided, but only a longer time makes a rank slow
    corrected_confidence = 1.0 - 2.0 * SIGNIFICANCE / tests
    least_certain_s = student_quantile(freedom, corrected_confidence) * error_s
    begin, end = _slow_stretch(excess_s, model.edges)
    share_of_steps = judged_steps.size / compared_s.size
    return SlowCandidate(
        rank=rank,
        part=part,
        fast_ranks=fast,
        seconds=mean_s * share_of_steps,
        half_interval_s=half_interval_s * share_of_steps,
        is_certain=mean_s > least_certain_s,
        begin=int(judged_steps[begin]),
        end=int(judged_steps[end - 1]) + 1,
    )


def _judged_steps(excess_s: Seconds, fast_s: Seconds) -> Counts:
    """Return the indices of the steps by which a rank is judged: the active ones if they have most of its excess."""
    active = _active_steps(fast_s)
    if excess_s[active].sum() < _LEAST_JUDGED_SHARE * excess_s.sum():
        return np.arange(fast_s.size)
    return active


def _degrees_of_freedom(model: StepModel) -> int:
    """Return the number of usual steps minus the number of parameters fitted to them (levels and a pattern)."""
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
    # The number and the length of odd steps are random: their sum is a compound Poisson process, whose variance is
    # about the sum of the squares.
    odd_squares = float((residuals[is_odd] ** 2).sum())
    odd_error = math.sqrt(odd_squares) / residuals.size
    return math.hypot(noise_error, odd_error)


def _slow_stretch(excess_s: Seconds, edges: Sequence[int]) -> tuple[int, int]:
    """Return the start and the end of the stretch from the first to the last high level; levels lie between edges."""
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
    """Return the indices of the active steps of an occasional part, such as a validation or a checkpoint.

    All ranks have the same active steps, so only the differences between ranks within these steps are random. If the
    part is not an occasional one, return all steps. ``fast_s`` is [step] the mean time of the fast ranks in the part.
    """
    all_steps = np.arange(fast_s.size)
    active = np.flatnonzero(fast_s > _ACTIVE_SHARE * fast_s.max(initial=0.0))
    most_active = _MOST_ACTIVE_STEPS * fast_s.size
    has_few_active_steps = FEWEST_VALUES <= active.size <= most_active
    if not has_few_active_steps:
        return all_steps
    other_steps_s = np.delete(fast_s, active)
    most_idle_s = _IDLE_SHARE * fast_s[active].min()
    are_others_idle = other_steps_s.max(initial=0.0) < most_idle_s
    return active if are_others_idle else all_steps


def _standard_error(noise: Seconds, freedom: int) -> float:
    """Return the standard error of the mean of AR(1) noise, averaged over the coefficient by its likelihood."""
    if noise.size < FEWEST_VALUES:
        return math.inf
    # by coefficient
    fits = ar1_means(noise - noise.mean())
    # This prior favours weak autocorrelation: without it, ten steps would be too few for any result.
    likelihoods = np.exp(-0.5 * (fits.scores - fits.scores.min()))
    weights = likelihoods * (1.0 - AR1_COEFFICIENTS)
    mean_square = float(weights @ fits.standard_errors**2) / float(weights.sum())
    # ``ar1_means`` assumes that only the mean was fitted, but the model has more parameters
    return math.sqrt(mean_square * (noise.size - 1) / freedom)
