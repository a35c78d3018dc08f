"""Own work and waiting of each rank, by step and part; and how much shorter a step is if slow ranks are like others.

A collective that all ranks wait in releases them when the last has come. What a rank does between two releases is its
own work, and the rank with most of it decides how long that takes: the run lasts as long as the sum of these maxima.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.rank_timeline import BACKWARD, OUTSIDE, Instants, RankTimeline, Seconds, Track
from lm_profiler.analysis.ranks.slowness import Slow

Flags = NDArray[np.bool_]

# a rank whose next mark or call precedes the last rank's arrival by more than this was not held
_WENT_ON_NS = 200_000

# if ranks went on early in more than this share of the calls of one name and part, not all ranks wait in such calls
_MAY_GO_ON = 0.05


@dataclass(frozen=True)
class Calls:
    """Collectives in the order in which the last rank came. ``[C, R]`` is call x rank."""

    names: list[str]  # [C]
    came_ns: Instants  # [C, R]
    members: Flags  # [C, R], whether the rank takes part in the call; values of other ranks mean nothing
    measured_ns: Instants  # [C, R], how long the rank waited where that was measured, else -1

    @property
    def released_ns(self) -> Instants:
        """[C]: when the last rank came."""
        return np.asarray(np.where(self.members, self.came_ns, np.iinfo(np.int64).min).max(axis=1))


@dataclass(eq=False)
class RanksWork:
    """Seconds of own work and waiting; ``saves_s`` returns how much shorter a step is if slow ranks are mended.

    The own work is cut into cells where a step begins or ends, and where all ranks meet. ``[K, R]`` is cell x rank.
    """

    steps: Instants  # numbers of the steps that all ranks have
    # [rank, step, part]; the last part (``OUTSIDE``) is the work between the step before and this one: 0 of the first,
    # and where a step was left out
    own_s: Seconds
    waiting_s: Seconds  # [rank, step, part]; with the own work in the step's parts it makes up the step
    in_part: Callable[[int | None], Seconds]  # returns the own work in a part, or in all of them: [K, R]
    step: NDArray[np.int64]  # [K], index of the step that the cell is in, or precedes if it lies between steps; else -1
    first: NDArray[np.int64]  # where each segment begins: within one, no rank waits for another; all meet at its end
    caused_s: Seconds = field(init=False)  # [rank, step], how long the others waited for this rank on average
    _cells: Seconds = field(init=False)
    _whole_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._cells = self.in_part(None)
        self._whole_s = self._lasts_s(self._cells)
        self.caused_s = np.zeros(self.own_s.shape[:2])
        segments = np.add.reduceat(self._cells, self.first, axis=0)[:-1]  # nobody waits at the end of the last one
        ranks, step = segments.shape[1], self.step[self.first[1:] - 1]
        waits_s = (segments.max(axis=1) * ranks - segments.sum(axis=1)) / (ranks - 1)
        met = step >= 0
        np.add.at(self.caused_s, (segments.argmax(axis=1)[met], step[met]), waits_s[met])

    @property
    def step_s(self) -> float:
        """The mean step of all ranks."""
        return float((self.own_s[:, :, :OUTSIDE] + self.waiting_s).sum(axis=2).mean())

    def saves_s(self, slow: Iterable[Slow]) -> float:
        """Return seconds saved per step if all of these took as long as the ranks that are not slow.

        Its fastest step then takes as long as the others' fastest, and so on. So a rank keeps its own ups and downs:
        a rank that equals another step by step would never wait for it.
        """
        cells, in_part = self._cells.copy(), defaultdict[int, list[Slow]](list)
        for one in slow:
            in_part[one.part].append(one)
        inside = self.step >= 0
        for part, some in in_part.items():
            others = sorted(set(some[0].fast) - {one.rank for one in some})
            usual_s = np.median(np.sort(self.own_s[others, :, part], axis=1), axis=0)
            spent_s = self.in_part(part)
            for one in some:
                own_s = self.own_s[one.rank, :, part]
                less_s = own_s - usual_s[own_s.argsort(kind="stable").argsort()]
                share = np.divide(less_s, own_s, out=np.zeros_like(own_s), where=own_s > 0)
                cells[inside, one.rank] -= share[self.step[inside]] * spent_s[inside, one.rank]
        return self._saved_s(cells)

    def evened_s(self, part: int) -> float:
        """Return seconds saved per step if all ranks took the median rank's time in ``part`` of each cell.

        With an even number of ranks it is the lower median: with two, the time of the faster rank.
        """
        spent_s = self.in_part(part)
        return self._saved_s(self._cells - spent_s + np.quantile(spent_s, 0.5, axis=1, method="lower")[:, None])

    def _saved_s(self, cells: Seconds) -> float:
        return (self._whole_s - self._lasts_s(cells)) / len(self.steps)

    def _lasts_s(self, cells: Seconds) -> float:
        return float(np.add.reduceat(np.maximum(cells, 0.0), self.first, axis=0).max(axis=1).sum())


def work_of(timelines: Sequence[RankTimeline], steps: Instants, overlap: bool) -> RanksWork:
    """Return own work and waiting of at least two ranks in ``steps``, which all of them have.

    With ``overlap`` gradients are reduced during backward: then only the last call of a backward holds ranks.
    """
    tracks = [Track.of(timeline, steps) for timeline in timelines]
    calls = shared_calls(timelines, tracks)
    at = np.stack([track.at(calls.came_ns[:, rank]) for rank, track in enumerate(tracks)], axis=1)
    parts = np.stack([track.codes[at[:, rank]] for rank, track in enumerate(tracks)], axis=1)
    waits_ns, meets = _waits(calls, tracks, at, parts, overlap)
    points_ns, step, first = _points(tracks, steps, calls.came_ns[meets])
    own, waiting, cells = [], [], []
    for rank, track in enumerate(tracks):
        mine = calls.members[:, rank]
        came_ns, waited_ns, codes = calls.came_ns[mine, rank], waits_ns[mine, rank], parts[mine, rank]
        cells.append(partial(_own_s, track, points_ns[:, rank], came_ns, waited_ns, codes))
        of_step = np.clip(np.searchsorted(track.end_ns, came_ns, "left"), 0, len(steps) - 1)
        waited = np.bincount(of_step * (OUTSIDE + 1) + codes, waited_ns, len(steps) * (OUTSIDE + 1))
        waited = waited.reshape(-1, OUTSIDE + 1)
        own.append(np.maximum(track.spent_ns(steps) - waited, 0.0) * 1e-9)
        waiting.append(waited[:, :OUTSIDE] * 1e-9)

    @cache
    def in_part(part: int | None) -> Seconds:
        return np.stack([of(part) for of in cells], axis=1)

    return RanksWork(steps, np.stack(own), np.stack(waiting), in_part, step, first)


def _own_s(
    track: Track, ends_ns: Instants, came_ns: Instants, waited_ns: Instants, parts: NDArray[np.uint8], part: int | None
) -> Seconds:
    """Return one rank's own work in ``part``, or in all parts, in cells that end at ``ends_ns``, from its calls."""
    in_cell = np.searchsorted(ends_ns, came_ns, "right")
    mine = (in_cell < len(ends_ns)) & ((parts == part) if part is not None else True)
    waits_ns = np.bincount(in_cell[mine], waited_ns[mine], len(ends_ns))
    until_ns = ends_ns - ends_ns[0] if part is None else track.in_part_until_ns(part, ends_ns)
    return np.asarray(np.maximum(np.diff(until_ns, prepend=until_ns[0]) - waits_ns, 0.0) * 1e-9)


def shared_calls(timelines: Sequence[RankTimeline], tracks: Sequence[Track]) -> Calls:
    """Return the calls between the beginning of the first step and the end of the last.

    A call that some rank of its group lacks is left out: who came last is unknown.
    """
    arrivals = [timeline.arrivals_ns for timeline in timelines]
    waited = [np.full(len(t.collectives), -1) if t.waited_ns is None else t.waited_ns for t in timelines]
    calls, ranks = timelines[0].collectives, len(timelines)
    if all(timeline.collectives == calls for timeline in timelines[1:]):
        names, members = [call.name for call in calls], np.ones((len(calls), ranks), dtype=bool)
        came, measured = np.stack(arrivals, axis=1), np.stack(waited, axis=1)
    else:
        at = [{(call.group, call.number): k for k, call in enumerate(t.collectives)} for t in timelines]
        ranks_of: defaultdict[str, set[int]] = defaultdict(set)
        for rank, timeline in enumerate(timelines):
            for group in {call.group for call in timeline.collectives}:
                ranks_of[group].add(rank)
        named = {(call.group, call.number): call.name for timeline in timelines for call in timeline.collectives}
        known = [key for key in named if len(ranks_of[key[0]]) > 1 and all(key in at[r] for r in ranks_of[key[0]])]
        names, members = [named[key] for key in known], np.zeros((len(known), ranks), dtype=bool)
        came, measured = np.zeros(members.shape, dtype=np.int64), np.full(members.shape, -1)
        for rank, place in enumerate(at):
            mine = np.flatnonzero([rank in ranks_of[group] for group, _ in known])
            where = [place[known[k]] for k in mine.tolist()]
            members[mine, rank] = True
            came[mine, rank], measured[mine, rank] = arrivals[rank][where], waited[rank][where]
    released = Calls([], came, members, measured).released_ns
    order = released.argsort(kind="stable")  # a call that comes later on every rank also has the later last arrival
    begin, end = min(track.begin_ns[0] for track in tracks), max(track.end_ns[-1] for track in tracks)
    order = order[(released[order] >= begin) & (released[order] <= end)]
    return Calls([names[k] for k in order.tolist()], came[order], members[order], measured[order])


def _waits(
    calls: Calls, tracks: Sequence[Track], at: NDArray[np.int64], parts: NDArray[np.uint8], overlap: bool
) -> tuple[Instants, Flags]:
    """Return how long each rank waited in each call, and in which calls all of them wait for the last one."""
    came, members, released = calls.came_ns, calls.members, calls.released_ns[:, None]
    timed = (calls.measured_ns >= 0).any(axis=1)
    followed = _next_event(came, members, tracks)
    followed[timed] = np.iinfo(np.int64).max  # the order of arrival is unknown for calls timed on a stream
    everyone = np.arange(len(came))
    first = members.argmax(axis=1) if len(came) else everyone
    place, part = at[everyone, first], parts[everyone, first]
    holds = np.ones(len(came), dtype=bool)
    if overlap:
        behind = np.flatnonzero(part == BACKWARD).tolist()
        for _, of_one in groupby(behind, key=lambda call: (int(first[call]), int(place[call]))):
            holds[list(of_one)[:-1]] = False
    went_on = np.asarray((members & (followed < released - _WENT_ON_NS)).any(axis=1))
    alike = defaultdict[tuple[str, int], list[int]](list)
    for call in np.flatnonzero(holds).tolist():
        alike[calls.names[call], int(part[call])].append(call)
    for (name, _), same in alike.items():
        if went_on[same].mean() > _MAY_GO_ON:
            holds[same] = ":broadcast" in name  # a broadcast holds the sender, and ranks that have not received yet
    waits = np.where(members & holds[:, None], np.maximum(np.minimum(released, followed) - came, 0), 0)
    waits[timed] = _timed_waits(holds[timed], came[timed], calls.measured_ns[timed])
    return waits, holds & members.all(axis=1)


def _next_event(came: Instants, members: Flags, tracks: Sequence[Track]) -> Instants:
    """Return [C, R]: when each rank next made a mark or a call, which a held rank cannot do."""
    instants = np.full(came.shape, np.iinfo(np.int64).max)
    for rank, track in enumerate(tracks):
        mine = members[:, rank]
        events = np.sort(np.concatenate([track.marks_ns, came[mine, rank]]))
        following = np.searchsorted(events, came[mine, rank], "right")
        instants[mine, rank] = np.append(events, np.iinfo(np.int64).max)[following]
    return instants


def _timed_waits(holds: Flags, came: Instants, measured: Instants) -> Instants:
    """Return [C, R]: the part of the waiting time in the calls themselves that no computation hid.

    Calls queue behind each other on their own stream. The rank computes during a call that nobody waits for:
    the rest of its waiting counts at the next call that is waited for.
    """
    waits, until = np.zeros_like(came), np.full(came.shape[1], np.iinfo(np.int64).min)
    for call, known in enumerate(measured >= 0):
        until = np.where(known, np.maximum(until, came[call]) + measured[call], until)
        if holds[call]:
            waits[call] = np.where(known, until - came[call], 0)
            until[:] = np.iinfo(np.int64).min
    return waits


def _points(
    tracks: Sequence[Track], steps: Instants, met_ns: Instants
) -> tuple[Instants, NDArray[np.int64], NDArray[np.int64]]:
    """Return where cells end ([K, R]), the step of each cell, and where segments begin."""
    begin, end = (np.stack([getattr(t, name) for t in tracks], axis=1) for name in ("begin_ns", "end_ns"))
    count, follows = len(steps), np.append(np.diff(steps) == 1, False)
    points = np.concatenate([end, begin, met_ns])
    order = points.max(axis=1).argsort(kind="stable")
    step, now = np.full(len(order), -1, dtype=np.int64), -1
    for cell, point in enumerate(order.tolist()):
        if point < count:  # a step's end
            step[cell], now = point, point + 1 if follows[point] else -1
            continue
        step[cell] = now
        if point < 2 * count:  # its begin
            now = point - count
    return points[order], step, np.append(0, np.flatnonzero(order[:-1] >= 2 * count) + 1)
