"""Kinds of steps: a share of the steps takes another time, in random order (buckets of lengths, for example).

A few steps of one kind may follow each other by chance. That does not mean that the run became slower or faster from
there on (a change of level), nor that the slow steps repeat at an interval (a pattern).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import Series

_FEWEST = 3  # steps of a kind
_MOST_KINDS = 5  # more of them are no kinds, but noise with gaps
_GAP = math.log(1.1)  # in logarithms: kinds are 10 % apart at least
_GAP_IN_SPREADS = 3.0  # standard deviations within a kind
_ORDER = 0.02  # chance of as few changes between two kinds in random order, at which they count as ordered
# standard errors by which a kind may come earlier or later than the others
_POSITION = 2.6


@dataclass(frozen=True)
class RarerKind:
    """A kind that is rarer than the most frequent one."""

    members: NDArray[np.bool_]  # (n,) which steps are of it
    offset: float  # how far they lie above the most frequent kind, in logarithms


def find_kinds(values: Series) -> list[RarerKind]:
    """Return the kinds of ``values``, logarithms, beside the most frequent one; none if the values are of one kind."""
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
    """(count,) what the kinds add to each value."""
    total = np.zeros(count)
    for kind in kinds:
        total += kind.offset * kind.members
    return total


def _clusters(values: Series) -> list[NDArray[np.bool_]]:
    """Return the groups of alike values, as masks, the lowest first. One or two values are no group.

    The list is empty if groups are as wide as the gaps between them.
    """
    if not values.size:
        return []
    order = np.argsort(values)
    ends = np.flatnonzero(np.diff(values[order]) >= _GAP) + 1
    groups = [group for group in np.split(order, ends) if group.size >= _FEWEST]
    spread = max((float(values[group].std()) for group in groups), default=0.0)
    for lower, upper in pairwise(groups):
        gap = float(values[upper].min() - values[lower].max())
        if gap < _GAP_IN_SPREADS * spread:
            return []
    clusters = []
    for group in groups:
        members = np.zeros(values.size, bool)
        members[group] = True
        clusters.append(members)
    return clusters


def _has_order(members: NDArray[np.bool_]) -> bool:
    """Return whether ``members`` come together, or earlier or later than the others, more than chance explains."""
    count = members.size
    member_count = int(members.sum())
    other_count = count - member_count
    changes = int(np.count_nonzero(members[1:] != members[:-1]))
    if _chance_of_runs(member_count, other_count, changes + 1) <= _ORDER:
        return True
    # Wilcoxon's rank sum of the positions
    mean_position = float(np.flatnonzero(members).mean()) - (count - 1) / 2.0
    variance = (count + 1) * other_count / (12.0 * member_count)
    return abs(mean_position) > _POSITION * math.sqrt(variance)


def _chance_of_runs(count_a: int, count_b: int, runs: int) -> float:
    """Return the chance of ``runs`` runs or fewer of two kinds in random order (Wald & Wolfowitz 1940)."""
    ways = 0
    for number in range(2, runs + 1):
        # The kinds take turns, and either may begin: so many runs of one, so many of the other.
        longer_half = math.ceil(number / 2)
        half = number // 2
        ways += _ways_to_cut(count_a, longer_half) * _ways_to_cut(count_b, half)
        ways += _ways_to_cut(count_a, half) * _ways_to_cut(count_b, longer_half)
    return ways / math.comb(count_a + count_b, count_a)


def _ways_to_cut(count: int, runs: int) -> int:
    """Return in how many ways ``count`` steps in a row make ``runs`` runs, none of them empty."""
    return math.comb(count - 1, runs - 1)
