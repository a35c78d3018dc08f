"""Own work and waiting of each rank, by step and part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.course import MEETING, OPEN, Course, tree_exits
from lm_profiler.analysis.ranks.timeline import Instants
from lm_profiler.analysis.ranks.track import OUTSIDE

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class RanksWork:
    """Seconds: ``own_s`` and ``waiting_s`` are [rank, step, part] and add up to the step.

    ``between_s`` is [rank, step]: own work between the step before and this one; 0 of the first, and where a step was
    left out. ``caused_s`` is [rank, step]: how long the other ranks, in the mean, waited for it; also where it had made
    another rank late, which they waited for.
    """

    own_s: Seconds
    waiting_s: Seconds
    between_s: Seconds
    caused_s: Seconds

    def of_steps(self, kept: NDArray[np.bool_]) -> RanksWork:
        """Of these steps alone."""
        return RanksWork(self.own_s[:, kept], self.waiting_s[:, kept], self.between_s[:, kept], self.caused_s[:, kept])

    @property
    def judged_s(self) -> Seconds:
        """[rank, step, part]: own work, with what lies between steps as a part more (``OUTSIDE``)."""
        return np.concatenate([self.own_s, self.between_s[:, :, None]], axis=2)

    @property
    def step_s(self) -> float:
        """The mean step of all ranks."""
        return float((self.own_s + self.waiting_s).sum(axis=2).mean())


def work_of(course: Course) -> RanksWork:
    """What of ``course`` is own work: of each part's time, what was not waited."""
    ranks = len(course.tracks)
    waiting = np.stack([_waited_ns(course, rank) for rank in range(ranks)])
    spent = np.stack([track.spent_ns() for track in course.tracks])
    own = np.maximum(spent - waiting, 0.0)
    between = np.stack([_between_ns(course, rank) for rank in range(ranks)])
    return RanksWork(own * 1e-9, waiting * 1e-9, between * 1e-9, _caused_ns(course) * 1e-9)


def _waited_ns(course: Course, rank: int) -> Seconds:
    """[step, part]."""
    inside = (course.step >= 0) & (course.parts[:, rank] < OUTSIDE)
    cells = course.step[inside] * OUTSIDE + course.parts[inside, rank]
    waited = np.bincount(cells, course.waits_ns[inside, rank], len(course.steps) * OUTSIDE)
    return np.asarray(waited.reshape(-1, OUTSIDE), dtype=np.float64)


def _between_ns(course: Course, rank: int) -> Seconds:
    """[step]."""
    track, outside = course.tracks[rank], (course.step >= 0) & (course.parts[:, rank] == OUTSIDE)
    waited = np.bincount(course.step[outside], course.waits_ns[outside, rank], len(course.steps))
    lasted = np.where(np.diff(course.steps) == 1, track.begin_ns[1:] - track.end_ns[:-1], 0)
    return np.asarray(np.maximum(np.append(0, lasted) - waited, 0.0), dtype=np.float64)


def _caused_ns(course: Course) -> Seconds:
    """[rank, step]. Whoever comes last was perhaps held before, longer than who waits: that is its holder's doing."""
    ranks = len(course.tracks)
    caused = np.zeros((ranks, len(course.steps)))
    held, holder = np.zeros(ranks), np.arange(ranks)  # since all met, how long each was, and by whom most of it
    for event in np.flatnonzero(course.kinds != OPEN).tolist():
        members = np.flatnonzero(course.members[event])
        waits = course.waits_ns[event, members].astype(np.float64)
        awaited = members[_awaited(int(course.kinds[event]), course.arrivals_ns[event, members], waits)]
        longer = np.maximum(held[awaited] - held[members], 0.0)
        earlier = np.where(holder[awaited] == members, 0.0, np.minimum(waits, longer))
        if course.step[event] >= 0:
            blame = np.bincount(holder[awaited], earlier, ranks) + np.bincount(awaited, waits - earlier, ranks)
            caused[:, course.step[event]] += blame / (ranks - 1)
        if course.kinds[event] == MEETING and len(members) == ranks:
            held[:] = 0.0
            continue
        most = np.where(earlier > waits / 2.0, holder[awaited], awaited)
        holder[members] = np.where(waits > held[members], most, holder[members])
        held[members] += waits
    return caused


def _awaited(kind: int, came: Instants, waits: Seconds) -> NDArray[np.int64]:
    """For whom each waits: everyone leaves when some rank comes, which is the one that does not wait."""
    if kind == MEETING:
        return np.full(came.size, waits.argmin())
    order = came.argsort(kind="stable")
    return np.asarray(order[np.searchsorted(came[order], tree_exits(came), "left")])
