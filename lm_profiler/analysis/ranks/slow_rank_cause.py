"""Finds why a rank is slower than the others: the counter that explains its excess time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lm_profiler.record.run_record import StepCounters

_EXPLAINED = 0.5  # the share of the excess time that a cause must explain

# what a rank does that other programs cannot cause: they can only make it take longer
_CAUSES = {
    "gc_s": "collecting garbage",
    "compile_s": "compiling",
    "checkpoint_s": "saving checkpoints",
}


@dataclass(frozen=True)
class RankCause:
    """The cause of a rank's excess time, and the seconds of the mean step that it explains."""

    words: str
    seconds: float


class CountersByRank:
    """The counters of each rank's measured steps."""

    def __init__(self, counters: Sequence[StepCounters]) -> None:
        by_rank = defaultdict[int, list[StepCounters]](list)
        for reading in counters:
            if reading.step is not None:
                by_rank[reading.rank].append(reading)
        self._by_rank: Mapping[int, list[StepCounters]] = by_rank

    def mean_s(self, rank: int, field_name: str) -> float | None:
        """Return the mean of a counter over the steps of ``rank``; None if no step has it."""
        readings = [
            getattr(reading, field_name) for reading in self._by_rank.get(rank, [])
        ]
        seconds = [reading for reading in readings if reading is not None]
        if not seconds:
            return None
        return fmean(seconds)

    def excess_s(self, rank: int, others: Sequence[int], field_name: str) -> float:
        """Return by how much a counter of ``rank`` exceeds the mean of the ``others``; 0 if it is unknown."""
        own_s = self.mean_s(rank, field_name)
        others_s = [self.mean_s(other, field_name) for other in others if other != rank]
        seconds = [other_s for other_s in others_s if other_s is not None]
        if own_s is None or not seconds:
            return 0.0
        return max(own_s - fmean(seconds), 0.0)

    def cause_of(
        self, rank: int, others: Sequence[int], excess_s: float
    ) -> RankCause | None:
        """Return what explains at least half of the ``excess_s`` of ``rank`` over the ``others``."""
        explained_s = {
            field_name: self.excess_s(rank, others, field_name)
            for field_name in _CAUSES
        }
        longest = max(explained_s, key=lambda field_name: explained_s[field_name])
        if explained_s[longest] <= 0.0 or explained_s[longest] < _EXPLAINED * excess_s:
            return None
        return RankCause(_CAUSES[longest], min(explained_s[longest], excess_s))
