"""Time that several things shared, given to one of them each: the parts add up to what any of them covers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lm_profiler.analysis.trace.intervals import Times, union_of


def shared_out(starts: Sequence[int], ends: Sequence[int], ranks: Sequence[int], begin: int, end: int) -> Times:
    """How much of the time from ``begin`` to ``end`` is each interval's own, in nanoseconds.

    What several cover is the one's of the lowest rank; among equals, the one's that began first.
    """
    start, stop = (np.clip(np.asarray(side, dtype=np.int64), begin, end) for side in (starts, ends))
    rank = np.asarray(ranks)
    own = np.zeros(len(start), dtype=np.int64)
    order = np.argsort(start, kind="stable")
    for level in np.unique(rank):
        mine = order[rank[order] == level]
        reached = np.maximum.accumulate(stop[mine])
        first = start[mine].copy()
        np.maximum(first[1:], reached[:-1], out=first[1:])
        last = np.maximum(stop[mine], first)
        higher = rank < level
        own[mine] = last - first - _covered(start[higher], stop[higher], first, last, begin, end)
    return own


def _covered(starts: Times, ends: Times, first: Times, last: Times, begin: int, end: int) -> Times:
    """How much of each stretch from ``first`` to ``last`` any of the intervals covers."""
    if not len(starts):
        return np.zeros(len(first), dtype=np.int64)
    left, right = union_of(starts, ends, begin, end)  # type: ignore[arg-type]
    before = np.concatenate(([0], np.cumsum(right - left)))

    def until(moment: Times) -> Times:
        """Covered time before ``moment``."""
        at = np.searchsorted(left, moment, side="right")
        inside = np.minimum(moment, right[at - 1]) - left[at - 1]
        return np.where(at > 0, before[at - 1] + inside, 0)

    return until(last) - until(first)


def gaps_between(starts: Sequence[int], ends: Sequence[int], begin: int, end: int) -> tuple[Times, Times]:
    """Where nothing runs between ``begin`` and ``end``: from when to when."""
    if not len(starts):
        return np.array([begin]), np.array([end])
    left, right = union_of(starts, ends, begin, end)
    first, last = np.concatenate(([begin], right)), np.concatenate((left, [end]))
    some = last > first
    return first[some], last[some]
