"""What one rank says of its measured steps: its marks, when it came to each collective, how far off its clock is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lm_profiler.record.columns import Codes, Counts

Instants = Counts


class Collective(NamedTuple):
    """One collective call. ``group`` and ``number`` (the group's sequence number) are the same on all of its ranks.

    ``name`` as torch's flight recorder has it: ``gloo:all_reduce``, ``nccl:broadcast``, …; it may end with
    ``buckets.BESIDE``.
    """

    group: str
    number: int
    name: str


@dataclass(frozen=True)
class ClockOffset:
    """How far a rank's clock is ahead of rank 0's: known at two instants of its own clock, linear between and beyond.

    Attributes:
        at_ns: the two instants, on this rank's clock; the same twice where it was compared once.
        ahead_ns: this rank's clock less rank 0's, at each.
        uncertainty_ns: by how much each may be off, at most.
    """

    at_ns: tuple[int, int] = (0, 0)
    ahead_ns: tuple[int, int] = (0, 0)
    uncertainty_ns: tuple[int, int] = (0, 0)

    @property
    def drift(self) -> float:
        """Seconds that this clock gains on rank 0's in a second."""
        apart = self.at_ns[1] - self.at_ns[0]
        return (self.ahead_ns[1] - self.ahead_ns[0]) / apart if apart else 0.0

    def on_first(self, instants: Instants) -> Instants:
        """The same instants on rank 0's clock."""
        ahead = self.ahead_ns[0] + np.rint((instants - self.at_ns[0]) * self.drift).astype(np.int64)
        return np.asarray(instants - ahead, dtype=np.int64)


@dataclass(frozen=True)
class RankTimeline:
    """The measured steps of one rank. Instants are of its own monotonic clock, in nanoseconds.

    Attributes:
        rank: in the whole group.
        host: name of its machine.
        steps: int64[n], numbers of the measured steps, in order.
        first: int64[n + 1], where each step's marks begin in ``codes`` and ``host_ns``; the last entry is their count.
        codes: uint8[m], the part that begins at each mark: an index of ``record.parts.PARTS``, or one more for what
            lies outside of the step; the last mark of a step ends it.
        host_ns: int64[m], when.
        arrivals_ns: int64[k], when it came to each collective, in the order in which it came.
        collectives: [k], which one.
        clock: how far this clock is ahead of rank 0's.
        waited_ns: int64[k], how long it waited at each for the others, where that is measured (on NCCL: the
            duration on its stream less the least of all ranks); -1 where it is not. None: clocks and arrivals say it.
    """

    rank: int
    host: str
    steps: Instants
    first: Instants
    codes: Codes
    host_ns: Instants
    arrivals_ns: Instants
    collectives: list[Collective]
    clock: ClockOffset
    waited_ns: Instants | None = None

    def __eq__(self, other: Any) -> bool:
        """Whether both say the same."""
        if not isinstance(other, RankTimeline):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)
