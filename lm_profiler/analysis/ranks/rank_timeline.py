"""What one rank says of its measured steps: its marks, when it came to each collective, how far off its clock is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.parts import PARTS
from lm_profiler.record.steps import Codes, Counts

Instants = Counts
Seconds = NDArray[np.float64]


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
    """How far a rank's clock is ahead of rank 0's: known at two of its own instants, linear between and beyond."""

    at_ns: tuple[int, int] = (0, 0)  # the two instants, on this rank's clock; the same twice where it was compared once
    ahead_ns: tuple[int, int] = (0, 0)  # this rank's clock less rank 0's, at each
    uncertainty_ns: tuple[int, int] = (0, 0)  # by how much each may be off, at most

    @property
    def drift(self) -> float:
        """Seconds that this clock gains on rank 0's in a second."""
        apart = self.at_ns[1] - self.at_ns[0]
        return (self.ahead_ns[1] - self.ahead_ns[0]) / apart if apart else 0.0

    def on_first(self, instants: Instants) -> Instants:
        """Return the same instants on rank 0's clock."""
        ahead = self.ahead_ns[0] + np.rint((instants - self.at_ns[0]) * self.drift).astype(np.int64)
        return np.asarray(instants - ahead, dtype=np.int64)


@dataclass(frozen=True)
class RankTimeline:
    """The measured steps of one rank. Instants are of its own monotonic clock, in nanoseconds."""

    rank: int  # in the whole group
    host: str  # name of its machine
    steps: Instants  # int64[n], numbers of the measured steps, in order
    # int64[n + 1], where each step's marks begin in ``codes`` and ``host_ns``; the last entry is their count
    first: Instants
    # uint8[m], the part that begins at each mark: an index of ``record.parts.PARTS``, or one more for what lies outside
    # of the step; the last mark of a step ends it
    codes: Codes
    host_ns: Instants  # int64[m], when
    arrivals_ns: Instants  # int64[k], when it came to each collective, in the order in which it came
    collectives: list[Collective]  # [k], which one
    clock: ClockOffset  # how far this clock is ahead of rank 0's
    # int64[k], how long it waited at each for the others, where that is measured (on NCCL: the duration on its stream
    # less the least of all ranks); -1 where it is not. None: clocks and arrivals say it.
    waited_ns: Instants | None = None

    def __eq__(self, other: Any) -> bool:
        """Return whether both say the same."""
        if not isinstance(other, RankTimeline):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)


OUTSIDE = len(PARTS)  # the code of what lies in no step

BACKWARD = PARTS.index("backward")


@dataclass(frozen=True)
class Track:
    """Marks of the steps that all ranks have, on rank 0's clock. Codes of what is outside of them are ``OUTSIDE``.

    ``step`` is the index of the step that each mark lies in; ``first`` where each begins, and the count of marks.
    """

    marks_ns: Instants
    codes: NDArray[np.uint8]
    step: NDArray[np.int64]
    first: NDArray[np.int64]

    @staticmethod
    def of(timeline: RankTimeline, steps: Instants) -> Track:
        """Return the track of ``steps``, which ``timeline`` has."""
        counts = np.diff(timeline.first)
        kept = np.isin(timeline.steps, steps)
        of_step = np.repeat(kept, counts)
        codes = timeline.codes.copy()
        codes[timeline.first[1:] - 1] = OUTSIDE  # a step's last mark ends it
        first = np.concatenate([[0], np.cumsum(counts[kept])])
        marks_ns = timeline.clock.on_first(timeline.host_ns[of_step])
        return Track(marks_ns, codes[of_step], np.repeat(np.arange(len(steps)), counts[kept]), first)

    @property
    def begin_ns(self) -> Instants:
        """When each step began."""
        return self.marks_ns[self.first[:-1]]

    @property
    def end_ns(self) -> Instants:
        """When each step ended."""
        return self.marks_ns[self.first[1:] - 1]

    def at(self, instants: Instants) -> NDArray[np.int64]:
        """The last mark at or before each instant; the first mark for what is earlier."""
        return np.maximum(np.searchsorted(self.marks_ns, instants, "right") - 1, 0)

    def spent_ns(self) -> NDArray[np.float64]:
        """[step, part]: how long each took."""
        cells = self.step[:-1] * (OUTSIDE + 1) + self.codes[:-1]
        spent = np.bincount(cells, np.diff(self.marks_ns), len(self.begin_ns) * (OUTSIDE + 1))
        return np.asarray(spent.reshape(-1, OUTSIDE + 1)[:, :OUTSIDE], dtype=np.float64)

    def in_part_until_ns(self, code: int, instants: Instants) -> NDArray[np.float64]:
        """Return how long the rank was in a part up to each instant, from its first mark on."""
        lasted = np.diff(self.marks_ns) * (self.codes[:-1] == code)
        # Relative to the first mark: instants since boot have no room for nanoseconds in a float.
        zero = self.marks_ns[0]
        until = np.concatenate([[0.0], np.cumsum(lasted)])
        return np.asarray(np.interp(instants - zero, self.marks_ns - zero, until))


@dataclass(frozen=True)
class ReducerTimes:
    """Seconds of each backward's communication that no computing of ``rank`` hid, by the backward's number."""

    rank: int
    exposed_s: Mapping[int, float]
