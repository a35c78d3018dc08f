"""What one rank reports about its measured steps: its marks, and when it arrived at each collective.

For collectives on a device's stream, the functions at the end return when the stream arrives, and how long it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.parts import PARTS
from lm_profiler.record.steps import Codes, Counts

Instants = Counts
Seconds = NDArray[np.float64]


class Collective(NamedTuple):
    """One collective call. ``group`` and ``number`` (the group's sequence number) are the same on all of its ranks.

    ``name`` is as torch's flight recorder has it: ``gloo:all_reduce``, ``nccl:broadcast``, …
    """

    group: str
    number: int
    name: str


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
    host_ns: Instants  # int64[m], the instant of each mark
    arrivals_ns: Instants  # int64[k], arrival at each collective, in the order of arrival
    collectives: list[Collective]  # [k], the collective of each arrival
    clock: str  # name of the clock, the same for all ranks that share it
    # int64[k], how long it waited for the others at each, if measured (on NCCL: the duration on its stream
    # minus the least of all ranks), else -1. None: the arrivals show it.
    waited_ns: Instants | None = None


OUTSIDE = len(PARTS)  # the code of time outside of steps

BACKWARD = PARTS.index("backward")


@dataclass(frozen=True)
class Track:
    """Marks of the steps that all ranks have. Marks outside of these have the code ``OUTSIDE``.

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
        return Track(timeline.host_ns[of_step], codes[of_step], np.repeat(np.arange(len(steps)), counts[kept]), first)

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

    def spent_ns(self, steps: Instants) -> Seconds:
        """Return how long each [step, part] took; the last part is the time between the previous step and this one."""
        cells = self.step[:-1] * (OUTSIDE + 1) + self.codes[:-1]
        spent = np.bincount(cells, np.diff(self.marks_ns), len(steps) * (OUTSIDE + 1)).reshape(-1, OUTSIDE + 1)
        between = np.where(np.diff(steps) == 1, self.begin_ns[1:] - self.end_ns[:-1], 0)
        spent[:, OUTSIDE] = np.append(0, between)
        return np.asarray(spent)

    def in_part_until_ns(self, code: int, instants: Instants) -> NDArray[np.float64]:
        """Return how long the rank was in a part up to each instant, from its first mark on."""
        lasted = np.diff(self.marks_ns) * (self.codes[:-1] == code)
        # Relative to the first mark: instants since boot have no room for nanoseconds in a float.
        zero = self.marks_ns[0]
        until = np.concatenate([[0.0], np.cumsum(lasted)])
        return np.asarray(np.interp(instants - zero, self.marks_ns - zero, until))


def with_waits(timelines: Sequence[RankTimeline]) -> list[RankTimeline]:
    """Return ``timelines`` with waits in ``waited_ns`` in place of the collectives' durations; -1 is unknown.

    The waits in a collective are unknown unless all of its ranks timed it.
    """
    least: dict[tuple[str, int], int] = {}
    took = [list[int]() if t.waited_ns is None else t.waited_ns.tolist() for t in timelines]
    for timeline, took_ns in zip(timelines, took, strict=True):
        for call, ns in zip(timeline.collectives, took_ns, strict=False):
            least[call[:2]] = min(least.get(call[:2], ns), ns)

    def waits(timeline: RankTimeline, took_ns: list[int]) -> RankTimeline:
        least_ns = [least[call[:2]] for call in timeline.collectives]
        waited = [ns - known if known >= 0 else -1 for ns, known in zip(took_ns, least_ns, strict=True)]
        return replace(timeline, waited_ns=np.array(waited, dtype=np.int64))

    return [t if t.waited_ns is None else waits(t, ns) for t, ns in zip(timelines, took, strict=True)]


def comes_ns(
    called_ns: Instants, took_ns: Instants, host_ns: Instants, stream_ns: Instants, behind: NDArray[np.bool_]
) -> Instants:
    """Return the instant of each call on the stream.

    On the stream, a part of a step is the rank's own work and the calls that it waits in. A call comes as far into
    that own work as it lies in the host's time of the part.

    Args:
        called_ns: when the host made each call, in order.
        took_ns: how long each takes on its stream; 0 where that is not known.
        host_ns: the marks between parts, as the host made them.
        stream_ns: the same marks, as the stream came to them.
        behind: for each mark, whether the rank's own work continues beside the calls of that part (DDP's backward).
    """
    comes = np.interp(called_ns, host_ns, stream_ns)
    part = np.searchsorted(host_ns, called_ns, "right") - 1
    for mark in np.unique(part[(part >= 0) & (part < len(host_ns) - 1)]).tolist():
        calls = np.flatnonzero(part == mark)
        share = (called_ns[calls] - host_ns[mark]) / max(host_ns[mark + 1] - host_ns[mark], 1)
        lasts = float(stream_ns[mark + 1] - stream_ns[mark])
        since = _behind(share, took_ns[calls], lasts) if behind[mark] else _in_turn(share, took_ns[calls], lasts)
        comes[calls] = stream_ns[mark] + np.clip(since, 0, lasts)
    return np.asarray(np.rint(comes), dtype=np.int64)


def _in_turn(share: NDArray[np.float64], took_ns: Instants, lasts: float) -> NDArray[np.float64]:
    """Return the instants of calls that each stop the stream."""
    before = np.cumsum(took_ns) - took_ns
    return np.asarray(share * max(lasts - took_ns.sum(), 0) + before)


def _behind(share: NDArray[np.float64], took_ns: Instants, lasts: float) -> NDArray[np.float64]:
    """Return the instants of calls that queue behind each other on their own stream; the part ends with the last one.

    If the queue never runs empty from one call on, that call came before the part's end by its and all later durations.
    """
    share = np.maximum(share / share[-1], 1e-6) if share[-1] > 0 else np.ones_like(share)
    left = np.cumsum(took_ns[::-1])[::-1]
    own = max(float(((lasts - left) / share).min()), 0.0)
    return np.asarray(share * own)
