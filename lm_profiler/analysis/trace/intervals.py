"""Intervals of a trace: what they cover together, and in which phase. Times are integers of nanoseconds."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from lm_profiler.analysis.trace.walk import Range

NO_PHASE = "other"
"""What lies in no phase."""

_START = attrgetter("start")


@dataclass
class Busy:
    """The union of intervals that come by their start, within a window; ``busy`` and ``idle`` are by phase."""

    reached: int
    busy: Counter[str] = field(default_factory=Counter)
    idle: Counter[str] = field(default_factory=Counter)

    def add(self, start: int, end: int, phase: str) -> None:
        """Time before ``start`` that nothing covered was idle, and is ``phase``'s."""
        if start > self.reached:
            self.idle[phase] += start - self.reached
            self.reached = start
        if end > self.reached:
            self.busy[phase] += end - self.reached
            self.reached = end


def phase_at(phases: Sequence[Range], moment: int) -> str:
    """Whose host code runs at ``moment``."""
    last = bisect_right(phases, moment, key=_START) - 1
    return phases[last].name if last >= 0 and moment < phases[last].end else NO_PHASE


def union_of(starts: Sequence[int], ends: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """What any interval covers between ``begin`` and ``end``, without overlaps, by time."""
    order = np.argsort(np.asarray(starts, dtype=np.int64), kind="stable")
    start, stop = (np.clip(np.asarray(side, dtype=np.int64)[order], begin, end) for side in (starts, ends))
    reached = np.maximum.accumulate(stop)
    first = np.ones(len(order), dtype=bool)
    first[1:] = start[1:] > reached[:-1]
    return zip(map(int, start[first]), map(int, reached[np.roll(first, -1)]), strict=True)


def by_phase(union: Iterable[tuple[int, int]], phases: list[Range]) -> Counter[str]:
    """How much of ``union`` lies in each phase, and outside all of them."""
    covered: Counter[str] = Counter()
    first = 0
    for start, stop in union:
        outside = stop - start
        while first < len(phases) and phases[first].end <= start:
            first += 1
        for phase in phases[first : bisect_right(phases, stop, key=_START)]:
            shared = max(min(stop, phase.end) - max(start, phase.start), 0)
            covered[phase.name] += shared
            outside -= shared
        covered[NO_PHASE] += outside
    return covered
