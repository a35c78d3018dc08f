"""Own work and waiting of each rank, by step and part; and how much shorter a step is if slow ranks are like others.

A collective that all ranks wait in releases them when the last has come. The work of a rank between two releases is its
own work. The rank with most own work determines the duration, so the run lasts as long as the sum of these maxima.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.rank_timeline import (
    BACKWARD,
    OUTSIDE,
    Instants,
    RankTimeline,
    Seconds,
    Track,
)
from lm_profiler.analysis.ranks.slowness import SlowCandidate

Flags = NDArray[np.bool_]

# a rank whose next mark or call precedes the last rank's arrival by more than this did not wait
_EARLY_LEAVER_NS = 200_000

# if ranks left early in more than this share of the calls of one name and part, not all ranks wait in such calls
_MOST_EARLY_CALLS = 0.05

# They stand in place of an instant that does not exist: one later than all others, and one earlier.
_NEVER = np.iinfo(np.int64).max
_NEVER_YET = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Calls:
    """Collectives in the order in which the last rank came. ``[C, R]`` is call x rank."""

    names: list[str]  # [C]
    came_ns: Instants  # [C, R]
    members: Flags  # [C, R], whether the rank takes part in the call; values of other ranks mean nothing
    # [C, R], how long the rank waited where that was measured, else -1
    measured_ns: Instants

    @property
    def released_ns(self) -> Instants:
        """[C]: when the last rank came."""
        members_came_ns = np.where(self.members, self.came_ns, _NEVER_YET)
        return np.asarray(members_came_ns.max(axis=1))

    def sorted_by_release(self, begin_ns: int, end_ns: int) -> Calls:
        """Return the calls that released their ranks between two instants, in the order of the release."""
        released_ns = self.released_ns
        # what comes later on every rank also has the later last arrival
        order = released_ns.argsort(kind="stable")
        is_in_time = (released_ns[order] >= begin_ns) & (released_ns[order] <= end_ns)
        order = order[is_in_time]
        names = [self.names[call] for call in order.tolist()]
        return Calls(
            names=names,
            came_ns=self.came_ns[order],
            members=self.members[order],
            measured_ns=self.measured_ns[order],
        )


@dataclass(eq=False)
class RanksWork:
    """Seconds of own work and waiting; ``saves_s`` returns how much shorter a step is if slow ranks are fixed.

    The own work is cut into cells where a step begins or ends, and where all ranks meet. ``[K, R]`` is cell x rank.
    """

    steps: Instants  # numbers of the steps that all ranks have
    # [rank, step, part]; the last part (``OUTSIDE``) is the work between the step before and this one: 0 of the first,
    # and where a step was left out
    own_s: Seconds
    waiting_s: Seconds  # [rank, step, part]; with the own work in the step's parts it makes up the step
    # [rank, step], the waiting beside the work of the part ``OUTSIDE``
    waiting_outside_s: Seconds
    # returns the own work in a part, or in all of them: [K, R]
    in_part: Callable[[int | None], Seconds]
    # [K], index of the step that the cell is in, or precedes if it lies between steps; else -1
    step_of_cell: NDArray[np.int64]
    # the first cell of each segment: within one, no rank waits for another; all meet at its end
    segment_begins: NDArray[np.int64]
    # [rank, step], how long the others waited for this rank on average
    caused_s: Seconds = field(init=False)
    _cells_s: Seconds = field(init=False)  # [K, R], own work in all parts
    _run_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._cells_s = self.in_part(None)
        self._run_s = self._duration_s(self._cells_s)
        self.caused_s = self._waits_caused_s()

    def _waits_caused_s(self) -> Seconds:
        """Return [rank, step]: the others wait for the rank that is last at the end of a segment."""
        # [segment, rank]; nobody waits at the end of the last segment
        segments_s = np.add.reduceat(self._cells_s, self.segment_begins, axis=0)[:-1]
        ranks = segments_s.shape[1]
        last_rank = segments_s.argmax(axis=1)
        others_wait_s = segments_s.max(axis=1) * ranks - segments_s.sum(axis=1)
        mean_wait_s = others_wait_s / (ranks - 1)

        last_cells = self.segment_begins[1:] - 1
        step_of_segment = self.step_of_cell[last_cells]
        is_in_step = step_of_segment >= 0
        places = (last_rank[is_in_step], step_of_segment[is_in_step])
        caused_s = np.zeros(self.own_s.shape[:2])
        np.add.at(caused_s, places, mean_wait_s[is_in_step])
        return caused_s

    @property
    def step_s(self) -> float:
        """The mean step of all ranks."""
        own_in_step_s = self.own_s[:, :, :OUTSIDE]
        return float((own_in_step_s + self.waiting_s).sum(axis=2).mean())

    def saves_s(self, slow: Iterable[SlowCandidate]) -> float:
        """Return seconds saved per step if all of these took as long as the ranks that are not slow.

        Its fastest step then takes as long as the others' fastest, and so on. So a rank keeps its own ups and downs:
        a rank that equals another step by step would never wait for it.
        """
        cells_s = self._cells_s.copy()
        slow_by_part = defaultdict[int, list[SlowCandidate]](list)
        for candidate in slow:
            slow_by_part[candidate.part].append(candidate)
        for part, slow_in_part in slow_by_part.items():
            slow_indices = {candidate.rank for candidate in slow_in_part}
            fast_indices = sorted(set(slow_in_part[0].fast_ranks) - slow_indices)
            fast_sorted_s = np.sort(self.own_s[fast_indices, :, part], axis=1)
            # of the fastest step, the second, …
            usual_s = np.median(fast_sorted_s, axis=0)
            for candidate in slow_in_part:
                saved_s = self._saved_in_cells_s(candidate.rank, part, usual_s)
                cells_s[:, candidate.rank] -= saved_s
        return self._saved_s(cells_s)

    def _saved_in_cells_s(self, rank: int, part: int, usual_s: Seconds) -> Seconds:
        """Return [K]: how much less each cell takes if the rank's steps, sorted by length, take ``usual_s``."""
        own_s = self.own_s[rank, :, part]
        place_by_length = own_s.argsort(kind="stable").argsort()
        less_s = own_s - usual_s[place_by_length]
        has_work = own_s > 0
        shares = np.divide(less_s, own_s, out=np.zeros_like(own_s), where=has_work)

        is_in_step = self.step_of_cell >= 0
        saved_s = self.in_part(part)[:, rank].copy()
        saved_s[is_in_step] *= shares[self.step_of_cell[is_in_step]]
        saved_s[~is_in_step] = 0.0
        return saved_s

    def saved_if_even_s(self, part: int) -> float:
        """Return seconds saved per step if all ranks took the median rank's time in ``part`` of each cell.

        With an even number of ranks it is the lower median: with two, the time of the faster rank.
        """
        spent_s = self.in_part(part)
        median_s = np.quantile(spent_s, 0.5, axis=1, method="lower")
        return self._saved_s(self._cells_s - spent_s + median_s[:, None])

    def _saved_s(self, cells_s: Seconds) -> float:
        return (self._run_s - self._duration_s(cells_s)) / len(self.steps)

    def _duration_s(self, cells_s: Seconds) -> float:
        """Return how long the ranks take for these cells: the rank with most work decides about each segment."""
        positive_s = np.maximum(cells_s, 0.0)
        segments_s = np.add.reduceat(positive_s, self.segment_begins, axis=0)
        return float(segments_s.max(axis=1).sum())


@dataclass(frozen=True)
class _RankCalls:
    """The calls of one rank: when it came, how long it waited, and in which part of the step."""

    came_ns: Instants
    waited_ns: Instants
    parts: NDArray[np.uint8]


def work_of(
    timelines: Sequence[RankTimeline], steps: Instants, overlap: bool
) -> RanksWork:
    """Return own work and waiting of at least two ranks in ``steps``, which all of them have.

    With ``overlap`` gradients are reduced during backward: ranks then wait only in the last call of a backward.
    """
    tracks = [Track.from_timeline(timeline, steps) for timeline in timelines]
    calls = shared_calls(timelines, tracks)
    marks_by_rank = []
    parts_by_rank = []
    for rank, track in enumerate(tracks):
        last_marks = track.last_mark(calls.came_ns[:, rank])
        marks_by_rank.append(last_marks)
        parts_by_rank.append(track.codes[last_marks])
    marks = np.stack(marks_by_rank, axis=1)
    parts = np.stack(parts_by_rank, axis=1)
    waits_ns, all_ranks_wait = _waits(calls, tracks, marks, parts, overlap)
    ends_ns, step_of_cell, segment_begins = _cut_into_cells(
        tracks, steps, calls.came_ns[all_ranks_wait]
    )

    own_s = []
    waiting_s = []
    waiting_outside_s = []
    calls_by_rank = []
    for rank, track in enumerate(tracks):
        is_member = calls.members[:, rank]
        rank_calls = _RankCalls(
            calls.came_ns[is_member, rank],
            waits_ns[is_member, rank],
            parts[is_member, rank],
        )
        waited_ns = _waited_by_step(rank_calls, track, len(steps))
        calls_by_rank.append(rank_calls)
        own_s.append(np.maximum(track.spent_ns(steps) - waited_ns, 0.0) * 1e-9)
        waiting_s.append(waited_ns[:, :OUTSIDE] * 1e-9)
        waiting_outside_s.append(waited_ns[:, OUTSIDE] * 1e-9)

    @cache
    def in_part(part: int | None) -> Seconds:
        cells_s = []
        for rank, track in enumerate(tracks):
            cells_s.append(_own_s(track, ends_ns[:, rank], calls_by_rank[rank], part))
        return np.stack(cells_s, axis=1)

    return RanksWork(
        steps=steps,
        own_s=np.stack(own_s),
        waiting_s=np.stack(waiting_s),
        waiting_outside_s=np.stack(waiting_outside_s),
        in_part=in_part,
        step_of_cell=step_of_cell,
        segment_begins=segment_begins,
    )


def _waited_by_step(calls: _RankCalls, track: Track, steps: int) -> Seconds:
    """Return how long a rank waited in each [step, part]."""
    next_ends = np.searchsorted(track.end_ns, calls.came_ns, "left")
    step_of_call = np.clip(next_ends, 0, steps - 1)
    parts = OUTSIDE + 1
    places = step_of_call * parts + calls.parts
    waited_ns = np.bincount(places, calls.waited_ns, steps * parts)
    return np.asarray(waited_ns.reshape(steps, parts), dtype=np.float64)


def _own_s(
    track: Track, ends_ns: Instants, calls: _RankCalls, part: int | None
) -> Seconds:
    """Return one rank's own work in ``part``, or in all parts, in cells that end at ``ends_ns``."""
    cell_of_call = np.searchsorted(ends_ns, calls.came_ns, "right")
    is_counted = cell_of_call < len(ends_ns)
    if part is None:
        until_ns = ends_ns - ends_ns[0]
    else:
        is_counted &= calls.parts == part
        until_ns = track.in_part_until_ns(part, ends_ns)
    waits_ns = np.bincount(
        cell_of_call[is_counted], calls.waited_ns[is_counted], len(ends_ns)
    )
    spent_ns = np.diff(until_ns, prepend=until_ns[0])
    own_ns = np.maximum(spent_ns - waits_ns, 0.0)
    return np.asarray(own_ns * 1e-9)


def shared_calls(timelines: Sequence[RankTimeline], tracks: Sequence[Track]) -> Calls:
    """Return the calls between the beginning of the first step and the end of the last.

    A call that some rank of its group lacks is left out: who came last is unknown.
    """
    first_calls = timelines[0].collectives
    are_equal = all(timeline.collectives == first_calls for timeline in timelines[1:])
    calls = _equal_calls(timelines) if are_equal else _matched_calls(timelines)
    begin_ns = min(track.begin_ns[0] for track in tracks)
    end_ns = max(track.end_ns[-1] for track in tracks)
    return calls.sorted_by_release(begin_ns, end_ns)


def _measured_waits(timeline: RankTimeline) -> Instants:
    """Return how long the rank waited in each of its calls; -1 if that was not measured."""
    if timeline.waited_ns is None:
        return np.full(len(timeline.collectives), -1)
    return timeline.waited_ns


def _equal_calls(timelines: Sequence[RankTimeline]) -> Calls:
    """Return the calls of ranks that all made the same ones, in the same order."""
    names = [call.name for call in timelines[0].collectives]
    came_ns = np.stack([timeline.arrivals_ns for timeline in timelines], axis=1)
    measured_ns = np.stack(
        [_measured_waits(timeline) for timeline in timelines], axis=1
    )
    return Calls(names, came_ns, np.ones(came_ns.shape, dtype=bool), measured_ns)


def _matched_calls(timelines: Sequence[RankTimeline]) -> Calls:
    """Return the calls that every rank of their group made, matched by group and number."""
    ranks_of_group: defaultdict[str, set[int]] = defaultdict(set)
    indices_by_rank: list[dict[tuple[str, int], int]] = []
    names: dict[tuple[str, int], str] = {}
    for rank, timeline in enumerate(timelines):
        indices = {}
        for index, call in enumerate(timeline.collectives):
            key = (call.group, call.number)
            indices[key] = index
            names[key] = call.name
            ranks_of_group[call.group].add(rank)
        indices_by_rank.append(indices)

    complete_keys = []
    for key in names:
        ranks = ranks_of_group[key[0]]
        has_all_ranks = all(key in indices_by_rank[rank] for rank in ranks)
        if len(ranks) > 1 and has_all_ranks:
            complete_keys.append(key)

    shape = (len(complete_keys), len(timelines))
    members = np.zeros(shape, dtype=bool)
    came_ns = np.zeros(shape, dtype=np.int64)
    measured_ns = np.full(shape, -1)
    for rank, timeline in enumerate(timelines):
        rows = []
        indices_of_rows = []
        for row, key in enumerate(complete_keys):
            if rank in ranks_of_group[key[0]]:
                rows.append(row)
                indices_of_rows.append(indices_by_rank[rank][key])
        members[rows, rank] = True
        came_ns[rows, rank] = timeline.arrivals_ns[indices_of_rows]
        measured_ns[rows, rank] = _measured_waits(timeline)[indices_of_rows]
    return Calls([names[key] for key in complete_keys], came_ns, members, measured_ns)


def _waits(
    calls: Calls,
    tracks: Sequence[Track],
    marks: NDArray[np.int64],
    parts: NDArray[np.uint8],
    overlap: bool,
) -> tuple[Instants, Flags]:
    """Return how long each rank waited in each call, and in which calls all of them wait for the last one.

    ``marks`` and ``parts`` have, for each call on each rank, the mark before it and the part that it is in.
    """
    is_timed = (calls.measured_ns >= 0).any(axis=1)
    next_event_ns = _next_events(calls.came_ns, calls.members, tracks)
    # the order of arrival is unknown for calls timed on a stream
    next_event_ns[is_timed] = _NEVER
    has_early_rank = _calls_with_early_rank(calls, next_event_ns)
    is_waited_for = _calls_waited_for(calls, has_early_rank, marks, parts, overlap)

    waits_ns = _waits_by_arrival(calls, next_event_ns, is_waited_for)
    waits_ns[is_timed] = _timed_waits(
        is_waited_for[is_timed], calls.came_ns[is_timed], calls.measured_ns[is_timed]
    )
    all_ranks_wait = is_waited_for & calls.members.all(axis=1)
    return waits_ns, all_ranks_wait


def _calls_with_early_rank(calls: Calls, next_event_ns: Instants) -> Flags:
    """Return [C]: whether some rank of the call did something else before the last one came."""
    last_came_ns = calls.released_ns[:, None]
    leaves_early = next_event_ns < last_came_ns - _EARLY_LEAVER_NS
    return np.asarray((calls.members & leaves_early).any(axis=1))


def _waits_by_arrival(
    calls: Calls, next_event_ns: Instants, is_waited_for: Flags
) -> Instants:
    """Return [C, R]: the time from a rank's arrival until the last one came, or until its own next event."""
    last_came_ns = calls.released_ns[:, None]
    until_ns = np.minimum(last_came_ns, next_event_ns)
    waits_ns = np.maximum(until_ns - calls.came_ns, 0)
    is_waiting_rank = calls.members & is_waited_for[:, None]
    return np.where(is_waiting_rank, waits_ns, 0)


def _calls_waited_for(
    calls: Calls,
    has_early_rank: Flags,
    marks: NDArray[np.int64],
    parts: NDArray[np.uint8],
    overlap: bool,
) -> Flags:
    """Return [C]: whether the ranks of the call wait in it for the last one."""
    count = len(calls.names)
    if count == 0:
        return np.ones(0, dtype=bool)
    all_calls = np.arange(count)
    first_member = calls.members.argmax(axis=1)
    mark = marks[all_calls, first_member]
    part = parts[all_calls, first_member]
    is_waited_for = np.ones(count, dtype=bool)
    if overlap:
        # Gradients are reduced while backward goes on: ranks wait in the last of its calls.
        backward_calls = np.flatnonzero(part == BACKWARD)
        call, next_call = backward_calls[:-1], backward_calls[1:]
        is_same_rank = first_member[call] == first_member[next_call]
        is_same_backward = is_same_rank & (mark[call] == mark[next_call])
        is_waited_for[call[is_same_backward]] = False

    calls_by_name_and_part = defaultdict[tuple[str, int], list[int]](list)
    for index in np.flatnonzero(is_waited_for).tolist():
        calls_by_name_and_part[calls.names[index], int(part[index])].append(index)
    for (name, _), alike_calls in calls_by_name_and_part.items():
        if has_early_rank[alike_calls].mean() > _MOST_EARLY_CALLS:
            # In a broadcast the sender waits, and ranks that have not received yet.
            is_waited_for[alike_calls] = ":broadcast" in name
    return is_waited_for


def _next_events(
    came_ns: Instants, members: Flags, tracks: Sequence[Track]
) -> Instants:
    """Return [C, R]: when each rank next made a mark or a call, which a waiting rank cannot do."""
    next_event_ns = np.full(came_ns.shape, _NEVER)
    for rank, track in enumerate(tracks):
        is_member = members[:, rank]
        calls_ns = came_ns[is_member, rank]
        events_ns = np.sort(np.concatenate([track.marks_ns, calls_ns]))
        next_event = np.searchsorted(events_ns, calls_ns, "right")
        next_event_ns[is_member, rank] = np.append(events_ns, _NEVER)[next_event]
    return next_event_ns


def _timed_waits(
    is_waited_for: Flags, came_ns: Instants, measured_ns: Instants
) -> Instants:
    """Return [C, R]: the part of the waiting time in the calls themselves that no computation hid.

    Calls queue behind each other on their own stream. The rank computes during a call that nobody waits for:
    the rest of its waiting counts at the next call that is waited for.
    """
    waits_ns = np.zeros_like(came_ns)
    queue_end_ns = np.full(came_ns.shape[1], _NEVER_YET)
    for call, is_measured in enumerate(measured_ns >= 0):
        begin_ns = np.maximum(queue_end_ns, came_ns[call])
        end_ns = begin_ns + measured_ns[call]
        queue_end_ns = np.where(is_measured, end_ns, queue_end_ns)
        if is_waited_for[call]:
            waits_ns[call] = np.where(is_measured, queue_end_ns - came_ns[call], 0)
            queue_end_ns[:] = _NEVER_YET
    return waits_ns


def _cut_into_cells(
    tracks: Sequence[Track], steps: Instants, met_ns: Instants
) -> tuple[Instants, NDArray[np.int64], NDArray[np.int64]]:
    """Cut the time of R ranks into K cells: at each step's end and begin, and where all ranks meet.

    ``met_ns`` is when each rank came to the calls in which all wait for the last one. A segment is what lies between
    two of these. Returns where cells end ([K, R]), the index of each cell's step, -1 for none ([K]), and the first cell
    of each segment.
    """
    begin_ns = np.stack([track.begin_ns for track in tracks], axis=1)
    end_ns = np.stack([track.end_ns for track in tracks], axis=1)
    points_ns = np.concatenate([end_ns, begin_ns, met_ns])
    order = points_ns.max(axis=1).argsort(kind="stable")
    is_meeting = order >= len(end_ns) + len(begin_ns)
    # a segment begins with the cell after a meeting
    segment_begins = np.append(0, np.flatnonzero(is_meeting[:-1]) + 1)
    return points_ns[order], _steps_of_cells(order, steps), segment_begins


def _steps_of_cells(points: NDArray[np.intp], steps: Instants) -> NDArray[np.int64]:
    """Return the index of the step of each cell, which ends at the point of the same place; -1 where no step runs.

    With n ``steps``, point i is the end of step i, n + i is its begin, and from 2 n on points are meetings.
    """
    count = len(steps)
    is_next_measured = np.append(np.diff(steps) == 1, False)
    step_of_cell = np.full(len(points), -1, dtype=np.int64)
    current_step = -1
    for cell, point in enumerate(points.tolist()):
        is_end = point < count
        is_begin = count <= point < 2 * count
        if is_end:
            step_of_cell[cell] = point
            current_step = point + 1 if is_next_measured[point] else -1
            continue
        step_of_cell[cell] = current_step
        if is_begin:
            current_step = point - count
    return step_of_cell
