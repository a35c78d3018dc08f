"""Finds kinds of steps: clusters of step times that occur in random order, for example by buckets of lengths.

A few steps of one kind may follow each other by chance. This is neither a change of level, after which the run stays
slower or faster, nor a pattern, in which slow steps repeat at an interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import Series

_FEWEST_STEPS_PER_KIND = 3  # steps per kind
_MOST_KINDS = 5  # with more clusters, they are noise with gaps and not kinds
_LEAST_LOG_GAP = math.log(1.1)  # kinds are at least 10 % apart
# and at least this many of the largest standard deviation within a kind
_LEAST_GAP_IN_STDS = 3.0
# A kind counts as ordered if so few changes between it and the others have less than this probability, ...
_LEAST_CHANCE = 0.02
# ... or if its mean position in the run differs by this many standard errors from that of the others.
_MOST_STANDARD_ERRORS = 2.6


@dataclass(frozen=True)
class RarerKind:
    """A kind that is rarer than the most frequent one."""

    members: NDArray[np.bool_]  # (n,) which steps are of this kind
    offset: float  # the logarithm of their time, relative to the most frequent kind


def find_kinds(values: Series) -> list[RarerKind]:
    """Return the kinds of ``values`` (logarithms) except the most frequent one; none if all are of one kind."""
    clusters = _clusters(values)
    if not 2 <= len(clusters) <= _MOST_KINDS:
        return []
    usual = max(clusters, key=np.count_nonzero)
    kinds = []
    for cluster in clusters:
        if cluster is usual or _has_order(cluster):
            continue
        offset = np.median(values[cluster]) - np.median(values[usual])
        kinds.append(RarerKind(cluster, float(offset)))
    return kinds


def offsets_of(kinds: list[RarerKind], count: int) -> Series:
    """Return (count,) the offset of each value from the most frequent kind."""
    total = np.zeros(count)
    for kind in kinds:
        total += kind.offset * kind.members
    return total


def _clusters(values: Series) -> list[NDArray[np.bool_]]:
    """Return the clusters of values as (n,) masks, the lowest first; clusters of one or two values are left out.

    None are returned if a gap between clusters is not much wider than the clusters are.
    """
    if not values.size:
        return []
    order = np.argsort(values)
    # The sorted values are divided at each wide gap. A group holds the indices of its values.
    ends = np.flatnonzero(np.diff(values[order]) >= _LEAST_LOG_GAP) + 1
    groups = [
        group for group in np.split(order, ends) if group.size >= _FEWEST_STEPS_PER_KIND
    ]
    widest_std = max((float(values[group].std()) for group in groups), default=0.0)
    for lower, upper in pairwise(groups):
        gap = float(values[upper].min() - values[lower].max())
        if gap < _LEAST_GAP_IN_STDS * widest_std:
            return []
    clusters = []
    for group in groups:
        is_member = np.zeros(values.size, bool)
        is_member[group] = True
        clusters.append(is_member)
    return clusters


def _has_order(members: NDArray[np.bool_]) -> bool:
    """Return whether ``members`` occur together, or earlier or later than the others, more than by chance.

    ``members`` is the (n,) mask of the steps of one kind.
    """
    count = members.size
    member_count = int(members.sum())
    other_count = count - member_count
    changes = int(np.count_nonzero(members[1:] != members[:-1]))
    runs = changes + 1
    if _chance_of_runs(member_count, other_count, runs) <= _LEAST_CHANCE:
        return True
    # Wilcoxon's rank sum, as the mean position of the members relative to the middle
    middle = (count - 1) / 2.0
    mean_position = float(np.flatnonzero(members).mean()) - middle
    variance = (count + 1) * other_count / (12.0 * member_count)
    return abs(mean_position) > _MOST_STANDARD_ERRORS * math.sqrt(variance)


def _chance_of_runs(count_a: int, count_b: int, runs: int) -> float:
    """Return the probability that steps of two kinds in random order form at most ``runs`` runs.

    A run is a sequence of steps of one kind between steps of the other kind (Wald & Wolfowitz 1940). ``count_a`` and
    ``count_b`` are the numbers of steps of each kind, at least one.
    """
    orders_with_few_runs = 0
    for run_count in range(2, runs + 1):
        # Runs of the kinds alternate. If their number is odd, the kind that begins has one more.
        first_runs = math.ceil(run_count / 2)
        second_runs = run_count // 2
        orders_a_first = _division_count(count_a, first_runs) * _division_count(
            count_b, second_runs
        )
        orders_b_first = _division_count(count_b, first_runs) * _division_count(
            count_a, second_runs
        )
        orders_with_few_runs += orders_a_first + orders_b_first
    orders = math.comb(count_a + count_b, count_a)
    return orders_with_few_runs / orders


def _division_count(count: int, runs: int) -> int:
    """Return the number of ways to divide ``count`` steps in a row into ``runs`` runs that are not empty."""
    return math.comb(count - 1, runs - 1)
