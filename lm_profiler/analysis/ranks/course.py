"""What all ranks went through, in its order: the steps' ends, and the collectives, with who waited there for how long.

A collective that all wait in releases everyone when the last rank has come: what lies between two releases, up to a
rank's arrival, is its own work. Not all hold everyone:

- Of gradients that are reduced while backward goes on (DDP), only the last bucket of a backward is waited for.
- A broadcast is a tree (gloo/broadcast.cc): a rank has to wait for those above it, and for those right below.
- Where ranks went on before the last one had come, nobody is held: the call returns at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.rank_timeline import BACKWARD, Instants, RankTimeline, Track
from lm_profiler.analysis.ranks.shared_calls import BESIDE, in_order, shared_calls

# whom an event holds: everybody till the last has come; as a broadcast's tree says; nobody
MEETING, TREE, OPEN = range(3)

# a rank whose next mark or call comes so much before the last rank's arrival, and more than clocks may err, was not
# held
_WENT_ON_NS = 200_000

# the share of the calls of one kind in one phase before which ranks may have gone on; above it no rank waits in any
_MAY_GO_ON = 0.05


@dataclass(frozen=True)
class Course:
    """Events in an order that is every rank's own; ``[E, R]`` is event x rank, instants are on rank 0's clock."""

    steps: Instants  # numbers of the steps that all ranks have
    tracks: list[Track]  # of each rank
    kinds: NDArray[np.int8]  # [E]
    # [E], index of the step that ends with the event, or that it is in, or that comes next if none was left out before
    # it; else -1
    step: NDArray[np.int64]
    members: NDArray[np.bool_]  # [E, R], whose event it is
    arrivals_ns: Instants  # [E, R], when each came; meaningless of others than members
    waits_ns: Instants  # [E, R], how long each waited there
    parts: NDArray[np.uint8]  # [E, R], codes of the parts in which each came

    def before_ns(self) -> Instants:
        """[E, R]: when each rank went on from its event before this one; at its first event, when that came."""
        if self.members.all():
            left = self.arrivals_ns + self.waits_ns
            return np.concatenate([self.arrivals_ns[:1], left[:-1]])
        last, rows = np.zeros(len(self.tracks), dtype=np.int64), []
        seen = np.zeros(len(self.tracks), dtype=bool)
        for members, came, wait in zip(self.members, self.arrivals_ns, self.waits_ns, strict=True):
            rows.append(np.where(seen, last, came))
            last, seen = np.where(members, came + wait, last), seen | members
        return np.array(rows)


def course_of(timelines: Sequence[RankTimeline], steps: Instants, overlap: bool) -> Course:
    """Return the common course of ``timelines``.

    Args:
        timelines: of at least two ranks.
        steps: numbers of steps that each of them has.
        overlap: whether gradients are reduced while backward goes on.
    """
    tracks = [Track.of(timeline, steps) for timeline in timelines]
    events, step = _events(timelines, tracks, steps)
    came, members, measured = events.came_ns, events.members, events.measured_ns
    at = np.stack([track.at(came[:, r]) for r, track in enumerate(tracks)], axis=1)
    parts = np.stack([track.codes[at[:, r]] for r, track in enumerate(tracks)], axis=1)
    followed = _next_event(came, members, tracks)
    # Of what is timed on a stream nothing is known of who came before whom.
    followed[np.asarray((measured >= 0).any(axis=1))] = np.iinfo(np.int64).max
    wrong_ns = max(max(timeline.clock.uncertainty_ns) for timeline in timelines)
    kinds = _kinds(events, at, parts, overlap)
    _open_where_ranks_went_on(kinds, events, parts, followed, _WENT_ON_NS + 2 * wrong_ns)
    waits = np.minimum(_left(kinds, came, members), followed) - came
    waits = np.where(members, np.maximum(waits, 0), 0)
    waits = np.where(measured >= 0, _timed_waits(kinds, came, measured), waits)
    return Course(steps, tracks, kinds, step, members, came, waits, parts)


@dataclass(frozen=True)
class _Events:
    """Events in their order; ``labels`` are the calls' names, empty of a step's begin and end. The rest is as in
    ``Course``."""

    labels: list[str]
    came_ns: Instants
    members: NDArray[np.bool_]
    measured_ns: Instants

    @property
    def calls(self) -> list[int]:
        return [event for event, label in enumerate(self.labels) if label]


def _events(
    timelines: Sequence[RankTimeline], tracks: Sequence[Track], steps: Instants
) -> tuple[_Events, NDArray[np.int64]]:
    """Steps' ends and begins, and the calls between the first and the last; and of each the step."""
    end, begin = (np.stack([getattr(t, name) for t in tracks], axis=1) for name in ("end_ns", "begin_ns"))
    names, came, members, waited = shared_calls(timelines)
    released = _release(came, members)
    within = (released >= begin[0].min()) & (released <= end[-1].max())
    came = np.concatenate([end, begin, came[within]])
    own = 2 * len(end)
    members = np.concatenate([np.ones_like(came[:own], dtype=bool), members[within]])
    measured = np.concatenate([np.full_like(came[:own], -1), waited[within]])
    labels = [""] * own + [name for name, keep in zip(names, within, strict=True) if keep]
    order = in_order(came, members)
    events = _Events([labels[k] for k in order.tolist()], came[order], members[order], measured[order])
    return events, _steps(order, steps)


def _steps(order: NDArray[np.int64], steps: Instants) -> NDArray[np.int64]:
    """Return the step of each event, by where the steps' own events stand among them."""
    step, now, count = np.full(len(order), -1, dtype=np.int64), -1, len(steps)
    follows = np.append(np.diff(steps) == 1, False)
    for event, index in enumerate(order.tolist()):
        if index < count:  # a step's end
            step[event], now = index, index + 1 if follows[index] else -1
            continue
        if index < 2 * count:  # its begin
            now = index - count
        step[event] = now
    return step


def _release(came: Instants, members: NDArray[np.bool_]) -> Instants:
    least = np.iinfo(np.int64).min
    return np.asarray(np.where(members, came, least).max(axis=1, initial=least))


def _next_event(came: Instants, members: NDArray[np.bool_], tracks: Sequence[Track]) -> Instants:
    """[E, R]: when each rank next made a mark or a call, which it can only if nothing holds it."""
    instants = np.full(came.shape, np.iinfo(np.int64).max)
    for rank, track in enumerate(tracks):
        mine = members[:, rank]
        events = np.sort(np.concatenate([track.marks_ns, came[mine, rank]]))
        following = np.searchsorted(events, came[mine, rank], "right")
        instants[mine, rank] = np.append(events, np.iinfo(np.int64).max)[following]
    return instants


def _kinds(events: _Events, at: NDArray[np.int64], parts: NDArray[np.uint8], overlap: bool) -> NDArray[np.int8]:
    """Return whom each event holds. With ``overlap``, ranks wait for the last bucket of a backward alone."""
    kinds = np.full(len(events.labels), OPEN, dtype=np.int8)
    first = events.members.argmax(axis=1)
    for e in events.calls:
        kinds[e] = TREE if ":broadcast" in events.labels[e] else MEETING
    places = {
        e: (int(first[e]), int(at[e, first[e]])) for e in events.calls if overlap and parts[e, first[e]] == BACKWARD
    }
    behind = [e for e in places if not events.labels[e].endswith(BESIDE)]
    for e, following in pairwise(behind):
        if places[e] == places[following]:
            kinds[e] = OPEN
    return kinds


def _open_where_ranks_went_on(
    kinds: NDArray[np.int8], events: _Events, parts: NDArray[np.uint8], followed: Instants, tolerance_ns: int
) -> None:
    """Mark calls as holding nobody where ranks went on before the last came; calls of one name in one part are
    alike."""
    release = _release(events.came_ns, events.members)
    free = np.asarray((events.members & (followed < release[:, None] - tolerance_ns)).any(axis=1))
    first = events.members.argmax(axis=1)
    alike: dict[tuple[str, int], list[int]] = {}
    for e in np.flatnonzero(kinds == MEETING).tolist():
        alike.setdefault((events.labels[e], int(parts[e, first[e]])), []).append(e)
    for same in alike.values():
        if free[same].mean() > _MAY_GO_ON:
            kinds[same] = OPEN


def _timed_waits(kinds: NDArray[np.int8], came: Instants, measured: Instants) -> Instants:
    """[E, R]: what of the time waited in the calls themselves nothing hid.

    Calls queue behind each other on a stream of their own. While one goes on that nobody waits for, the rank computes:
    what is left of its waiting when the call comes that is waited for counts there.
    """
    waits, until = np.zeros_like(came), np.full(came.shape[1], np.iinfo(np.int64).min)
    for event in np.flatnonzero((measured >= 0).any(axis=1)).tolist():
        until = np.where(measured[event] >= 0, np.maximum(until, came[event]) + measured[event], until)
        if kinds[event] != OPEN:
            waits[event] = np.where(measured[event] >= 0, until - came[event], 0)
            until[:] = np.iinfo(np.int64).min
    return waits


def _left(kinds: NDArray[np.int8], came: Instants, members: NDArray[np.bool_]) -> Instants:
    """[E, R]: when each rank was let go."""
    left = came.copy()
    meetings = kinds == MEETING
    left[meetings] = _release(came[meetings], members[meetings])[:, None]
    for e in np.flatnonzero(kinds == TREE).tolist():
        left[e, members[e]] = tree_exits(came[e, members[e]])
    return left


def tree_exits(came: NDArray[np.int64]) -> NDArray[np.int64]:
    """When each rank leaves a broadcast of gloo's from the first, to which they came at ``came``.

    It is a binomial tree: above rank v stands v without its highest bit. A rank hands on what it has, once the one
    below is there to take it (gloo/transport/tcp/pair.cc: it waits for the receiver to be ready).
    """
    has = came.copy()
    width = 1
    while width < came.size:
        below = np.arange(width, min(2 * width, came.size))
        has[below] = np.maximum(came[below], has[below - width])
        width *= 2
    left = has.copy()
    width = 1
    while width < came.size:
        below = np.arange(width, min(2 * width, came.size))
        left[below - width] = np.maximum(left[below - width], came[below])
        width *= 2
    return left
