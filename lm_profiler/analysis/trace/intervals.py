"""Intervals of a trace: what they cover together, and in which phase. Times are integers of nanoseconds."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.trace.walk import Range

Times = NDArray[np.int64]

NO_PHASE = "other"  # the phase of what lies in none


@dataclass
class Busy:
    """The union of intervals that come by their start, within a window; ``busy`` and ``idle`` are by phase."""

    reached: int
    busy: Counter[str] = field(default_factory=Counter)
    idle: Counter[str] = field(default_factory=Counter)

    def add(self, start: int, end: int, phase: str) -> None:
        """Add an interval of ``phase``; time before ``start`` that nothing covered was idle."""
        if start > self.reached:
            self.idle[phase] += start - self.reached
            self.reached = start
        if end > self.reached:
            self.busy[phase] += end - self.reached
            self.reached = end


def phase_finder(phases: Sequence[Range]) -> Callable[[int], str]:
    """Return a function that tells whose host code runs at a moment; ``phases`` come by their start."""
    starts, ends, names = ([getattr(phase, field) for phase in phases] for field in ("start", "end", "name"))

    def phase_at(moment: int) -> str:
        last = bisect_right(starts, moment) - 1
        return names[last] if last >= 0 and moment < ends[last] else NO_PHASE

    return phase_at


def union_of(starts: Sequence[int], ends: Sequence[int], begin: int, end: int) -> tuple[Times, Times]:
    """Return what any interval covers between ``begin`` and ``end``, without overlaps, by time: where it begins and
    ends."""
    order = np.argsort(np.asarray(starts, dtype=np.int64), kind="stable")
    start, stop = (np.clip(np.asarray(side, dtype=np.int64)[order], begin, end) for side in (starts, ends))
    reached = np.maximum.accumulate(stop)
    first = np.ones(len(order), dtype=bool)
    first[1:] = start[1:] > reached[:-1]
    return start[first], reached[np.roll(first, -1)]


def by_phase(starts: Times, ends: Times, phases: Sequence[Range]) -> Counter[str]:
    """Return how much of what lasts from ``starts`` to ``ends`` lies in each phase, and outside all of them."""
    covered: Counter[str] = Counter()
    for phase in phases:
        start, end = (np.clip(side, phase.start, phase.end) for side in (starts, ends))
        covered[phase.name] += int((end - start).sum())
    covered[NO_PHASE] += int((ends - starts).sum()) - covered.total()
    return covered


def shared_out(starts: Sequence[int], ends: Sequence[int], ranks: Sequence[int], begin: int, end: int) -> Times:
    """Return how much of the time from ``begin`` to ``end`` is each interval's own, in nanoseconds.

    What several cover is the one's of the lowest rank; among equals, the one's that began first.
    """
    start, stop = (np.clip(np.asarray(side, dtype=np.int64), begin, end) for side in (starts, ends))
    rank = np.asarray(ranks)
    own = np.zeros(len(start), dtype=np.int64)
    order = np.argsort(start, kind="stable")
    # By rank, the lowest first: each has what neither a lower rank nor an earlier interval of its own covers.
    for level in np.unique(rank):
        mine = order[rank[order] == level]
        reached = np.maximum.accumulate(stop[mine])
        first = start[mine].copy()
        np.maximum(first[1:], reached[:-1], out=first[1:])
        last = np.maximum(stop[mine], first)
        higher = rank < level
        own[mine] = last - first - covered(start[higher], stop[higher], first, last, begin, end)
    return own


def covered(starts: Times, ends: Times, first: Times, last: Times, begin: int, end: int) -> Times:
    """Return how much of each stretch from ``first`` to ``last`` any of the intervals covers."""
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
    """Return where nothing runs between ``begin`` and ``end``: from when to when."""
    if not len(starts):
        return np.array([begin]), np.array([end])
    left, right = union_of(starts, ends, begin, end)
    first, last = np.concatenate(([begin], right)), np.concatenate((left, [end]))
    some = last > first
    return first[some], last[some]
