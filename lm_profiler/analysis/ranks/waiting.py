"""Divides the time of each rank into own work and waiting, and computes how much fixing slow ranks would save.

A collective in which all ranks wait releases them when the last rank arrives. What a rank does between two releases is
its own work. The rank with the most own work determines when the next release is, so that the duration of the run is
the sum of these maxima.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

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
_CallKey = tuple[str, int]  # the group of a call, and its number in the group

# A rank did not wait for the last one if its next mark or call is more than this before the last one's arrival.
_EARLY_LEAVER_NS = 200_000

# If ranks left early in more than this share of the calls of one name and part, such calls do not make ranks wait.
_MOST_EARLY_CALLS = 0.05

# stand for a missing instant: one is later than all others, the other is earlier
_NEVER = np.iinfo(np.int64).max
_NEVER_YET = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Calls:
    """C collective calls of R ranks, in the order of the last arrival."""

    names: list[str]  # [C] the name of each collective
    came_ns: Instants  # [C, R] when each rank arrived
    members: Flags  # [C, R] whether the rank takes part in the call; other values of ranks that do not are meaningless
    # [C, R] how long the rank waited, if this was measured; otherwise -1
    measured_ns: Instants

    @property
    def released_ns(self) -> Instants:
        """[C] when the last rank arrived."""
        members_came_ns = np.where(self.members, self.came_ns, _NEVER_YET)
        return np.asarray(members_came_ns.max(axis=1))

    def sorted_by_release(self, begin_ns: int, end_ns: int) -> Calls:
        """Return the calls that released their ranks between two instants, in the order of the release.

        This order agrees with the order of the calls on each rank.
        """
        order = self.released_ns.argsort(kind="stable")
        sorted_ns = self.released_ns[order]
        is_in_time = (sorted_ns >= begin_ns) & (sorted_ns <= end_ns)
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
    """Own work and waiting of R ranks, and what fixing slow ranks would save.

    Time is cut into K slices: wherever a step begins or ends, and wherever all ranks meet, which is a call in which all
    wait for the last one. The slices between two meetings are a segment. Within a segment no rank waits for another.
    """

    steps: Instants  # numbers of the steps that all ranks have
    # [rank, step, part]; the last part (``OUTSIDE``) is the work between the previous step and this one. It is 0 for
    # the first step, and if the previous step is missing.
    own_s: Seconds
    # [rank, step, part] without ``OUTSIDE``; the sum of it and the own work in the same parts is the step time
    waiting_s: Seconds
    # [rank, step] the waiting in the part ``OUTSIDE``
    waiting_outside_s: Seconds
    # returns [K, R] the own work of each rank in a part (None: in all parts), by time slice
    own_in_slices_s: Callable[[int | None], Seconds]
    # [K] the index of the step that the slice is in, or before which it is; -1 if the steps around it are not
    # successive
    step_of_slice: NDArray[np.int64]
    # the index of the first slice of each segment
    segment_begins: NDArray[np.int64]
    # [rank, step] how long the other ranks waited for this one, on average over them
    caused_s: Seconds = field(init=False)
    _all_own_s: Seconds = field(init=False)  # [K, R] own work in all parts
    _run_s: float = field(init=False)  # the duration of all segments

    def __post_init__(self) -> None:
        self._all_own_s = self.own_in_slices_s(None)  # None: all parts
        self._run_s = self._duration_s(self._all_own_s)
        self.caused_s = self._waits_caused_s()

    def _waits_caused_s(self) -> Seconds:
        """Return [rank, step] how long the others waited on average because this rank was the last to end a segment."""
        # [segment, rank] own work
        segments_s = np.add.reduceat(self._all_own_s, self.segment_begins, axis=0)
        segments_s = segments_s[:-1]  # the last segment does not end with a meeting
        ranks = segments_s.shape[1]
        # [segment] the rank with the most work, and how long the others waited for it, as a sum and on average
        last_rank = segments_s.argmax(axis=1)
        all_waits_s = segments_s.max(axis=1) * ranks - segments_s.sum(axis=1)
        mean_wait_s = all_waits_s / (ranks - 1)

        # a segment counts for the step in which it ends
        last_slices = self.segment_begins[1:] - 1
        step_of_segment = self.step_of_slice[last_slices]
        is_in_step = step_of_segment >= 0
        rank_and_step = (last_rank[is_in_step], step_of_segment[is_in_step])
        caused_s = np.zeros(self.own_s.shape[:2])
        np.add.at(caused_s, rank_and_step, mean_wait_s[is_in_step])
        return caused_s

    @property
    def step_s(self) -> float:
        """The mean step of all ranks."""
        own_in_step_s = self.own_s[:, :, :OUTSIDE]
        return float((own_in_step_s + self.waiting_s).sum(axis=2).mean())

    def saved_if_fixed_s(self, slow: Iterable[SlowCandidate]) -> float:
        """Return the seconds saved per step if these ranks took as long, in their parts, as ranks that are not slow.

        The distribution of a rank's step times is replaced by that of the fast ranks: its fastest step gets the time of
        their fastest step, and so on. The order of its short and long steps stays, so that ranks still differ from each
        other in individual steps, and still wait.
        """
        slow_by_part = defaultdict[int, list[SlowCandidate]](list)
        for candidate in slow:
            slow_by_part[candidate.part].append(candidate)

        remaining_s = self._all_own_s.copy()  # [K, R]
        for part, slow_in_part in slow_by_part.items():
            slow_indices = {candidate.rank for candidate in slow_in_part}
            # all candidates of a part were compared with the same ranks
            fast_indices = sorted(set(slow_in_part[0].fast_ranks) - slow_indices)
            # [fast rank, step], each rank's steps from the shortest to the longest
            fast_sorted_s = np.sort(self.own_s[fast_indices, :, part], axis=1)
            # [step] the usual time of a rank's shortest step, of its second shortest, …
            usual_sorted_s = np.median(fast_sorted_s, axis=0)
            for candidate in slow_in_part:
                rank = candidate.rank
                remaining_s[:, rank] -= self._saved_in_slices_s(
                    rank, part, usual_sorted_s
                )
        return self._saved_s(remaining_s)

    def _saved_in_slices_s(
        self, rank: int, part: int, usual_sorted_s: Seconds
    ) -> Seconds:
        """Return [K] how much shorter each time slice becomes on a rank that takes the usual time in ``part``.

        ``usual_sorted_s`` is [step] the usual time of a rank's shortest step, of its second shortest, and so on.
        """
        own_s = self.own_s[rank, :, part]
        # [step] the position of each step among the steps sorted by length
        position_by_length = own_s.argsort(kind="stable").argsort()
        saved_by_step_s = own_s - usual_sorted_s[position_by_length]
        # [step] the share of the own work that is saved; 0 without any work
        saved_shares = np.divide(
            saved_by_step_s, own_s, out=np.zeros_like(own_s), where=own_s > 0
        )

        is_in_step = self.step_of_slice >= 0
        saved_s = self.own_in_slices_s(part)[:, rank].copy()
        saved_s[is_in_step] *= saved_shares[self.step_of_slice[is_in_step]]
        saved_s[~is_in_step] = 0.0
        return saved_s

    def saved_if_even_s(self, part: int) -> float:
        """Return the seconds saved per step if all ranks took as long as the median rank in ``part``.

        The median is of each time slice; a slice lies within a step, and no rank waits in it. With an even number of
        ranks it is the lower median: with two, the time of the faster rank.
        """
        # [time slice, rank]
        part_s = self.own_in_slices_s(part)
        median_s = np.quantile(part_s, 0.5, axis=1, method="lower")
        other_parts_s = self._all_own_s - part_s
        return self._saved_s(other_parts_s + median_s[:, None])

    def _saved_s(self, own_s: Seconds) -> float:
        """Return the seconds saved per step if the own work were ``own_s`` [time slice, rank]."""
        saved_in_run_s = self._run_s - self._duration_s(own_s)
        return saved_in_run_s / len(self.steps)

    def _duration_s(self, own_s: Seconds) -> float:
        """Return the duration of the run if the own work is ``own_s`` [time slice, rank].

        A segment takes as long as the rank with the most own work in it.
        """
        positive_s = np.maximum(own_s, 0.0)
        segments_s = np.add.reduceat(positive_s, self.segment_begins, axis=0)
        return float(segments_s.max(axis=1).sum())


@dataclass(frozen=True)
class _RankCalls:
    """The calls of one rank: when it arrived, how long it waited, and in which part of the step."""

    came_ns: Instants
    waited_ns: Instants
    parts: NDArray[np.uint8]


def work_of(
    timelines: Sequence[RankTimeline], steps: Instants, overlap: bool
) -> RanksWork:
    """Return the own work and the waiting of at least two ranks in ``steps``, which all of them have.

    With ``overlap``, gradients are reduced while backward continues, so that ranks wait only in its last call.
    """
    tracks = [Track.from_timeline(timeline, steps) for timeline in timelines]
    calls = shared_calls(timelines, tracks)
    # C calls, R ranks, K slices of time.
    # [C, R] the last mark before each call, and its part of the step
    marks, parts = _places_of_calls(calls, tracks)
    # [C, R] how long each rank waits in each call; [C] whether all ranks wait there for the last one
    waits_ns, all_ranks_wait = _waits_by_rank(calls, tracks, marks, parts, overlap)
    slices = _cut_into_slices(tracks, steps, calls.came_ns[all_ranks_wait])

    # each by rank
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

    # cached, because several slow ranks may be slow in the same part
    @cache
    def own_in_slices_s(part: int | None) -> Seconds:
        """Return [K, R] the own work of each rank in ``part``, by time slice; None: in all parts."""
        by_rank_s = []
        for rank, track in enumerate(tracks):
            ends_ns = slices.ends_ns[:, rank]
            by_rank_s.append(_own_work_s(track, ends_ns, calls_by_rank[rank], part))
        return np.stack(by_rank_s, axis=1)

    return RanksWork(
        steps=steps,
        own_s=np.stack(own_s),
        waiting_s=np.stack(waiting_s),
        waiting_outside_s=np.stack(waiting_outside_s),
        own_in_slices_s=own_in_slices_s,
        step_of_slice=slices.steps,
        segment_begins=slices.segment_begins,
    )


def _places_of_calls(
    calls: Calls, tracks: Sequence[Track]
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return [C, R] the index of the mark before each call, and [C, R] the part of the step that it begins."""
    marks_by_rank = []
    parts_by_rank = []
    for rank, track in enumerate(tracks):
        last_marks = track.last_mark(calls.came_ns[:, rank])
        marks_by_rank.append(last_marks)
        parts_by_rank.append(track.codes[last_marks])
    return np.stack(marks_by_rank, axis=1), np.stack(parts_by_rank, axis=1)


def _waited_by_step(calls: _RankCalls, track: Track, steps: int) -> Seconds:
    """Return [step, part] how long a rank waited."""
    # a call between two steps belongs to the later one
    step_of_call = np.searchsorted(track.end_ns, calls.came_ns, "left")
    step_of_call = np.clip(step_of_call, 0, steps - 1)
    parts = OUTSIDE + 1
    # one number for a step and a part, so that bincount sums over both
    step_and_part = step_of_call * parts + calls.parts
    waited_ns = np.bincount(step_and_part, calls.waited_ns, steps * parts)
    return np.asarray(waited_ns.reshape(steps, parts), dtype=np.float64)


def _own_work_s(
    track: Track, ends_ns: Instants, calls: _RankCalls, part: int | None
) -> Seconds:
    """Return [K] one rank's own work in ``part`` (None: in all parts), in the time slices that end at ``ends_ns``."""
    slice_of_call = np.searchsorted(ends_ns, calls.came_ns, "right")
    is_counted = slice_of_call < len(ends_ns)
    # [K] the time in the part until the end of each slice
    if part is None:
        until_ns = ends_ns - ends_ns[0]
    else:
        is_counted &= calls.parts == part
        until_ns = track.in_part_until_ns(part, ends_ns)
    # [K] the time in the part within each slice (0 in the first), and how much of it was waiting
    spent_ns = np.diff(until_ns, prepend=until_ns[0])
    waits_ns = np.bincount(
        slice_of_call[is_counted], calls.waited_ns[is_counted], len(ends_ns)
    )
    own_ns = np.maximum(spent_ns - waits_ns, 0.0)
    return np.asarray(own_ns * 1e-9)


def shared_calls(timelines: Sequence[RankTimeline], tracks: Sequence[Track]) -> Calls:
    """Return the calls of all ranks between the beginning of the first step and the end of the last.

    A call that is missing on some rank of its group is left out, because the last arrival is unknown.
    """
    first_calls = timelines[0].collectives
    if all(timeline.collectives == first_calls for timeline in timelines[1:]):
        calls = _equal_calls(timelines)
    else:
        calls = _matched_calls(timelines)
    begin_ns = min(track.begin_ns[0] for track in tracks)
    end_ns = max(track.end_ns[-1] for track in tracks)
    return calls.sorted_by_release(begin_ns, end_ns)


def _measured_waits(timeline: RankTimeline) -> Instants:
    """Return how long the rank waited in each of its calls; -1 if this was not measured."""
    if timeline.waited_ns is None:
        return np.full(len(timeline.collectives), -1)
    return timeline.waited_ns


def _equal_calls(timelines: Sequence[RankTimeline]) -> Calls:
    """Return the calls if all ranks made the same ones, in the same order."""
    names = [call.name for call in timelines[0].collectives]
    # [C, R] each
    came_ns = np.stack([timeline.arrivals_ns for timeline in timelines], axis=1)
    measured_ns = np.stack(
        [_measured_waits(timeline) for timeline in timelines], axis=1
    )
    all_members = np.ones(came_ns.shape, dtype=bool)
    return Calls(names, came_ns, all_members, measured_ns)


def _matched_calls(timelines: Sequence[RankTimeline]) -> Calls:
    """Return the calls that all ranks of their group made, matched by group and number."""
    # the name of each call, and for each rank the index of the call
    names: dict[_CallKey, str] = {}
    indices_by_rank: list[dict[_CallKey, int]] = []
    for timeline in timelines:
        indices: dict[_CallKey, int] = {}
        for index, call in enumerate(timeline.collectives):
            key = (call.group, call.number)
            indices[key] = index
            names[key] = call.name
        indices_by_rank.append(indices)
    complete_keys = _keys_of_complete_calls(list(names), indices_by_rank)

    # a row for each complete call, and a column for each rank
    shape = (len(complete_keys), len(timelines))
    members = np.zeros(shape, dtype=bool)
    came_ns = np.zeros(shape, dtype=np.int64)
    measured_ns = np.full(shape, -1)
    for rank, timeline in enumerate(timelines):
        rows = []
        indices_of_rows = []
        for row, key in enumerate(complete_keys):
            if key in indices_by_rank[rank]:
                rows.append(row)
                indices_of_rows.append(indices_by_rank[rank][key])
        members[rows, rank] = True
        came_ns[rows, rank] = timeline.arrivals_ns[indices_of_rows]
        measured_ns[rows, rank] = _measured_waits(timeline)[indices_of_rows]
    return Calls([names[key] for key in complete_keys], came_ns, members, measured_ns)


def _keys_of_complete_calls(
    keys: Sequence[_CallKey], keys_by_rank: Sequence[Collection[_CallKey]]
) -> list[_CallKey]:
    """Return those of ``keys`` whose calls were made by all ranks of their group, which are at least two.

    ``keys_by_rank`` are the keys of the calls that each rank made.
    """
    ranks_of_group: defaultdict[str, set[int]] = defaultdict(set)
    for rank, keys_of_rank in enumerate(keys_by_rank):
        for group, _ in keys_of_rank:
            ranks_of_group[group].add(rank)
    complete_keys = []
    for key in keys:
        group, _ = key
        ranks = ranks_of_group[group]
        has_all_ranks = all(key in keys_by_rank[rank] for rank in ranks)
        if len(ranks) > 1 and has_all_ranks:
            complete_keys.append(key)
    return complete_keys


def _waits_by_rank(
    calls: Calls,
    tracks: Sequence[Track],
    marks: NDArray[np.int64],
    parts: NDArray[np.uint8],
    overlap: bool,
) -> tuple[Instants, Flags]:
    """Compute the waiting of each rank in each call.

    Args:
        calls: the calls.
        tracks: the marks of each rank.
        marks: [C, R] the index of the mark before the call.
        parts: [C, R] the part of the step in which the call is.
        overlap: whether gradients are reduced while backward continues.

    Returns:
        [C, R] how long each rank waited, and [C] whether all ranks of the run wait for the last one in the call.
    """
    is_timed = (calls.measured_ns >= 0).any(axis=1)
    next_event_ns = _next_events(calls.came_ns, calls.members, tracks)
    # For calls timed on a device's stream, events of the host do not show whether a rank left early.
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
    """Return [C] whether some rank of the call did something else before the last rank arrived."""
    last_came_ns = calls.released_ns[:, None]
    leaves_early = next_event_ns < last_came_ns - _EARLY_LEAVER_NS
    return np.asarray((calls.members & leaves_early).any(axis=1))


def _waits_by_arrival(
    calls: Calls, next_event_ns: Instants, is_waited_for: Flags
) -> Instants:
    """Return [C, R] the time from a rank's arrival until the last arrival, or until its own next event."""
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
    """Return [C] whether the ranks of each call wait in it for the last one.

    They do not if ranks often leave such calls before the last one arrives (``has_early_rank``, [C]). The arguments
    ``marks`` and ``parts``, [C, R], and ``overlap`` are as in ``work_of``.
    """
    count = len(calls.names)
    if count == 0:
        return np.ones(0, dtype=bool)
    # [C] mark and part of each call, as its first rank has them
    all_calls = np.arange(count)
    first_member = calls.members.argmax(axis=1)
    mark = marks[all_calls, first_member]
    part = parts[all_calls, first_member]
    is_waited_for = np.ones(count, dtype=bool)
    if overlap:
        # only the last call of each backward pass is waited for
        is_waited_for = ~_has_later_call_in_backward(first_member, mark, part)

    calls_by_name_and_part = defaultdict[tuple[str, int], list[int]](list)
    for index in np.flatnonzero(is_waited_for).tolist():
        calls_by_name_and_part[calls.names[index], int(part[index])].append(index)
    for (name, _), similar_calls in calls_by_name_and_part.items():
        early_share = has_early_rank[similar_calls].mean()
        if early_share > _MOST_EARLY_CALLS:
            # Such calls do not make ranks wait for the last one, except that in a broadcast, ranks wait for the data.
            is_broadcast = ":broadcast" in name
            is_waited_for[similar_calls] = is_broadcast
    return is_waited_for


def _has_later_call_in_backward(
    first_member: NDArray[np.intp], mark: NDArray[np.int64], part: NDArray[np.uint8]
) -> Flags:
    """Return [C] whether the next call in backward is in the same backward pass: both then come after the same mark.

    ``mark`` and ``part`` are [C] those of the rank ``first_member``.
    """
    backward_calls = np.flatnonzero(part == BACKWARD)
    call, next_call = backward_calls[:-1], backward_calls[1:]
    is_same_rank = first_member[call] == first_member[next_call]
    is_same_backward = is_same_rank & (mark[call] == mark[next_call])
    has_later_call = np.zeros(len(part), dtype=bool)
    has_later_call[call[is_same_backward]] = True
    return has_later_call


def _next_events(
    came_ns: Instants, members: Flags, tracks: Sequence[Track]
) -> Instants:
    """Return [C, R] when each rank made its next mark or call after this call; until then it may have waited."""
    next_event_ns = np.full(came_ns.shape, _NEVER)
    for rank, track in enumerate(tracks):
        is_member = members[:, rank]
        calls_ns = came_ns[is_member, rank]
        events_ns = np.sort(np.concatenate([track.marks_ns, calls_ns]))
        next_event = np.searchsorted(events_ns, calls_ns, "right")
        # the last event has none after it
        events_with_end_ns = np.append(events_ns, _NEVER)
        next_event_ns[is_member, rank] = events_with_end_ns[next_event]
    return next_event_ns


def _timed_waits(
    is_waited_for: Flags, came_ns: Instants, measured_ns: Instants
) -> Instants:
    """Return [C, R] how long each rank waited in each of C calls that were timed on a stream.

    The calls run one after another on a stream of their own. During a call that is not waited for, the rank computes;
    if the call has not ended by the next call that is waited for, the rest of its time counts there. Negative values of
    ``measured_ns`` mean that a call was not measured.
    """
    waits_ns = np.zeros_like(came_ns)
    # [R] when the stream of calls is done with all calls since the last one that was waited for
    queue_end_ns = np.full(came_ns.shape[1], _NEVER_YET)
    for call, call_measured_ns in enumerate(measured_ns):
        is_measured = call_measured_ns >= 0  # [R]
        begin_ns = np.maximum(queue_end_ns, came_ns[call])
        end_ns = begin_ns + call_measured_ns
        queue_end_ns = np.where(is_measured, end_ns, queue_end_ns)
        if is_waited_for[call]:
            until_end_ns = queue_end_ns - came_ns[call]
            waits_ns[call] = np.where(is_measured, until_end_ns, 0)
            queue_end_ns[:] = _NEVER_YET
    return waits_ns


class _Slices(NamedTuple):
    """The K slices into which the time of R ranks is cut. A segment lies between two meetings of all ranks."""

    ends_ns: Instants  # [K, R] when each slice ends on each rank
    steps: NDArray[np.int64]  # [K] the index of the slice's step, or -1
    segment_begins: NDArray[np.int64]  # the index of the first slice of each segment


def _cut_into_slices(
    tracks: Sequence[Track], steps: Instants, met_ns: Instants
) -> _Slices:
    """Cut the time of R ranks into K slices: at the beginning and the end of each step, and where all ranks meet.

    Args:
        tracks: the marks of each rank.
        steps: the numbers of the steps.
        met_ns: [meeting, R] when each rank arrived at the calls in which all ranks wait for the last one.
    """
    begin_ns = np.stack([track.begin_ns for track in tracks], axis=1)
    end_ns = np.stack([track.end_ns for track in tracks], axis=1)
    # the points at which slices end: first the ends of the steps, then their beginnings, then the meetings
    points_ns = np.concatenate([end_ns, begin_ns, met_ns])
    # in the order in which the last rank reaches them
    order = points_ns.max(axis=1).argsort(kind="stable")
    first_meeting = len(end_ns) + len(begin_ns)
    is_meeting = order >= first_meeting
    # a segment begins with the slice after a meeting
    segment_begins = np.append(0, np.flatnonzero(is_meeting[:-1]) + 1)
    return _Slices(
        ends_ns=points_ns[order],
        steps=_steps_of_slices(order, steps),
        segment_begins=segment_begins,
    )


def _steps_of_slices(points: NDArray[np.intp], steps: Instants) -> NDArray[np.int64]:
    """Return [K] the index of the step of each slice; -1 between steps that are not successive.

    ``points`` has the point at which each slice ends. With n ``steps``, point i is the end of step i, point n + i is
    its beginning, and points from 2 n on are the collectives for which all ranks wait.
    """
    count = len(steps)
    is_next_measured = np.append(np.diff(steps) == 1, False)
    step_of_slice = np.full(len(points), -1, dtype=np.int64)
    # the step of the next slice; after the end of a step, that is the following step
    current_step = -1
    for index, point in enumerate(points.tolist()):
        is_end = point < count
        is_begin = count <= point < 2 * count
        if is_end:
            step_of_slice[index] = point
            current_step = point + 1 if is_next_measured[point] else -1
            continue
        step_of_slice[index] = current_step
        if is_begin:
            current_step = point - count
    return step_of_slice
