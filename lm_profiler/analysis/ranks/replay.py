"""Own work and waiting of each rank, by step and part; and what would be, had a rank taken what the others take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.course import MEETING, OPEN, Course, tree_exits
from lm_profiler.analysis.ranks.rank_timeline import OUTSIDE, Instants, Seconds
from lm_profiler.analysis.ranks.slowness import Slow


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
        """Return the work of the ``kept`` steps alone."""
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
    """Return the own work in ``course``: the time of each part that was not waited."""
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
            held[:] = 0.0  # all leave together: nobody is late by what was before
            continue
        most = np.where(earlier > waits / 2.0, holder[awaited], awaited)
        holder[members] = np.where(waits > held[members], most, holder[members])
        held[members] += waits
    return caused


def _awaited(kind: int, came: Instants, waits: Seconds) -> NDArray[np.int64]:
    """Return for whom each waits: everyone leaves when some rank comes, which is the one that does not wait."""
    if kind == MEETING:
        return np.full(came.size, waits.argmin())
    order = came.argsort(kind="stable")
    return np.asarray(order[np.searchsorted(came[order], tree_exits(came), "left")])


Cuts = Mapping[int, Seconds]  # for each rank that does less, nanoseconds less before each event

_ASKED = 256  # the most other ranks that are asked what a segment usually takes


@dataclass(eq=False)
class Replay:
    """Replays ``course``; ``work`` is what was found in it."""

    course: Course
    work: RanksWork
    _parts: dict[int, Seconds] = field(default_factory=dict)
    _usuals: dict[tuple[int, tuple[int, ...]], tuple[Seconds, Seconds]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._own_s = self.work.judged_s
        self._before = self.course.before_ns()
        self._segments = np.where(self.course.members, self.course.arrivals_ns - self._before, 0).astype(np.float64)
        began = self._before[self.course.members.argmax(axis=0), np.arange(len(self.course.tracks))]
        self._began = (began - began.min()).astype(np.float64)
        self._whole_ns = self._ends_ns({})

    @property
    def whole_s(self) -> float:
        """Seconds a step, as it was."""
        return self._whole_ns * 1e-9 / len(self.course.steps)

    def saves_s(self, slow: Iterable[Slow]) -> float:
        """Seconds a step that the run would be shorter, had all of these taken what those take that are not slow."""
        slow = list(slow)
        mended = {(one.part, one.rank) for one in slow}
        cuts: dict[int, Seconds] = {}
        for one in slow:
            others = tuple(rank for rank in one.fast if (one.part, rank) not in mended)
            cuts[one.rank] = cuts.get(one.rank, 0.0) + self._cut(one.rank, one.part, *self._usual(one.part, others))
        return (self._whole_ns - self._ends_ns(cuts)) * 1e-9 / len(self.course.steps)

    def evened_s(self, part: int) -> float:
        """Seconds a step that the run would be shorter, had all ranks taken the median's time before each event.

        Of an even number of ranks it is the lower one's: of two, that of the rank that was not slow.
        """
        in_part = self._in_part(part)
        usual = np.quantile(in_part, 0.5, axis=1, method="lower")
        cuts = {rank: in_part[:, rank] - usual for rank in range(in_part.shape[1])}
        return (self._whole_ns - self._ends_ns(cuts)) * 1e-9 / len(self.course.steps)

    def _usual(self, part: int, others: tuple[int, ...]) -> tuple[Seconds, Seconds]:
        """Return what ``others`` take in ``part``: the median of their steps, the shortest of each first; and before
        each
        event, in nanoseconds."""
        if (part, others) not in self._usuals:
            of_steps = np.median(np.sort(self._own_s[list(others), :, part], axis=1), axis=0)
            asked = list(others[:: max(len(others) // _ASKED, 1)])
            self._usuals[part, others] = of_steps, np.median(self._in_part(part)[:, asked], axis=1)
        return self._usuals[part, others]

    def _cut(self, rank: int, part: int, of_steps: Seconds, of_events: Seconds) -> Seconds:
        """Return how much less there is before each event: the whole of it taken off where the rank takes longer than
        others do.

        As the others its fastest step takes what their fastest do, and so on. So it keeps its own ups and downs: a rank
        that equals another step by step would never wait for it.
        """
        own_s = self._own_s[rank, :, part]
        less = (own_s - of_steps[np.argsort(np.argsort(own_s, kind="stable"), kind="stable")]) * 1e9
        spent = self._in_part(part)
        beyond = np.maximum(spent[:, rank] - of_events, 0.0)
        step = self.course.step
        inside = step >= 0
        cut = np.zeros(len(step))
        # First where it takes longer than the others do; what that does not cover comes off all of its work alike.
        for weight in (beyond, spent[:, rank]):
            total = np.bincount(step[inside], weight[inside], len(less))
            left = less - np.bincount(step[inside], cut[inside], len(less))
            share = np.divide(left, total, out=np.zeros_like(left), where=total > 0)
            if weight is beyond:
                share = np.clip(share, 0.0, 1.0)  # no more than what is beyond; the rest everywhere
            cut[inside] += share[step[inside]] * weight[inside]
        return cut

    def _in_part(self, part: int) -> Seconds:
        """[E, R]: nanoseconds of own work in ``part`` before each event."""
        if part not in self._parts:
            course, columns = self.course, []
            for rank, track in enumerate(course.tracks):
                until = track.in_part_until_ns(part, course.arrivals_ns[:, rank])
                columns.append(until - track.in_part_until_ns(part, self._before[:, rank]))
            self._parts[part] = np.where(course.members, np.stack(columns, axis=1), 0.0)
        return self._parts[part]

    def _ends_ns(self, cuts: Cuts) -> float:
        """Return when the last rank is done, if each does so much less."""
        course, segments = self.course, self._segments
        if cuts:
            segments = segments.copy()
            for rank, cut in cuts.items():
                segments[:, rank] = np.maximum(segments[:, rank] - cut, 0.0)
        now, everyone = self._began.copy(), np.asarray(course.members.all(axis=1))
        for event, kind in enumerate(course.kinds.tolist()):
            now += segments[event]
            if kind == OPEN:
                continue
            here = slice(None) if everyone[event] else course.members[event]
            now[here] = now[here].max() if kind == MEETING else tree_exits(now[here])
        return float(now.max())
