"""Finds why a rank is slower than the others: the counter that explains its excess time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lm_profiler.record.run_record import StepCounters

_EXPLAINED = 0.5  # the share of the excess time that a cause must explain

# activities of a rank itself: other programs can only make them take longer, but not cause them
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
        """Return the mean of a counter of seconds over the steps of ``rank``; None if no step has it."""
        values_s = []
        for reading in self._by_rank.get(rank, []):
            value_s = getattr(reading, field_name)
            if value_s is not None:
                values_s.append(value_s)
        if not values_s:
            return None
        return fmean(values_s)

    def excess_s(self, rank: int, fast_ranks: Sequence[int], field_name: str) -> float:
        """Return by how much the mean of a counter of ``rank`` exceeds that of the ``fast_ranks``; 0 if unknown."""
        own_s = self.mean_s(rank, field_name)
        means_s = []
        for fast_rank in fast_ranks:
            mean_s = self.mean_s(fast_rank, field_name)
            if fast_rank != rank and mean_s is not None:
                means_s.append(mean_s)
        if own_s is None or not means_s:
            return 0.0
        return max(own_s - fmean(means_s), 0.0)

    def cause_of(
        self, rank: int, fast_ranks: Sequence[int], excess_s: float
    ) -> RankCause | None:
        """Return the cause of the ``excess_s`` of ``rank`` over ``fast_ranks``; None if none explains half of it."""
        longest_s = 0.0
        words = ""
        for field_name, cause_words in _CAUSES.items():
            explained_s = self.excess_s(rank, fast_ranks, field_name)
            if explained_s > longest_s:
                longest_s = explained_s
                words = cause_words
        if not words or longest_s < _EXPLAINED * excess_s:
            return None
        return RankCause(words, min(longest_s, excess_s))
