"""The calls that ranks share: which are DDP's own buckets, and all of them in one order that keeps each rank's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import chain, groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.rank_timeline import BACKWARD, Instants, RankTimeline

BESIDE = ", beside DDP's buckets"  # ends the name of a call amid backward that is none of them: all ranks wait in it


def told_apart(
    timeline: RankTimeline, sent_bytes: Mapping[tuple[str, int], int | None], buckets: Sequence[int]
) -> RankTimeline | None:
    """``timeline`` with the calls amid backward named that are none of DDP's; None where they cannot be told apart.

    Args:
        timeline: of one rank.
        sent_bytes: of each all-reduce, by its group and number.
        buckets: bytes of DDP's, in the order in which it reduces them.

    DDP reduces its buckets in one order, so they are found by their sizes. Where these differ (in another precision),
    they are the buckets if there are no more of them in any backward.
    """
    mark = np.searchsorted(timeline.host_ns, timeline.arrivals_ns, "right") - 1
    amid = np.flatnonzero((mark >= 0) & (timeline.codes[mark] == BACKWARD)).tolist()
    backwards = [list(calls) for _, calls in groupby(amid, key=lambda call: int(mark[call]))]
    sizes = [sent_bytes.get((each.group, each.number)) for each in timeline.collectives]
    of_ddp = [_buckets([sizes[call] for call in calls], buckets) for calls in backwards]
    if not any(sum(each) == len(buckets) for each in of_ddp):
        return timeline if all(len(each) <= len(buckets) for each in of_ddp) else None
    beside = {call for call, bucket in zip(amid, chain(*of_ddp), strict=True) if not bucket}
    named = [
        each._replace(name=each.name + BESIDE) if call in beside else each
        for call, each in enumerate(timeline.collectives)
    ]
    return replace(timeline, collectives=named)


def _buckets(sizes: Sequence[int | None], buckets: Sequence[int]) -> list[bool]:
    """Return, for each call of one backward, whether it is the next bucket."""
    of_ddp: list[bool] = []
    for size in sizes:
        reduced = sum(of_ddp)
        of_ddp.append(reduced < len(buckets) and size == buckets[reduced])
    return of_ddp


Calls = tuple[list[str], Instants, NDArray[np.bool_], Instants]


def shared_calls(timelines: Sequence[RankTimeline]) -> Calls:
    """Names; when each rank came, on rank 0's clock; whose call it is; how long each waited where that was measured (-1
    elsewhere): [call, rank]. A call that not all of its group's ranks know of is left out: who came last is unknown.
    """
    came = [timeline.clock.on_first(timeline.arrivals_ns) for timeline in timelines]
    waited = [np.full(len(t.collectives), -1) if t.waited_ns is None else t.waited_ns for t in timelines]
    calls = timelines[0].collectives
    if all(timeline.collectives == calls for timeline in timelines[1:]):
        shape = (len(calls), len(timelines))
        return [c.name for c in calls], np.stack(came, 1), np.ones(shape, dtype=bool), np.stack(waited, 1)
    return _of_groups(timelines, came, waited)


def _of_groups(timelines: Sequence[RankTimeline], came: list[Instants], waited: list[Instants]) -> Calls:
    names: dict[tuple[str, int], str] = {}
    ranks_of: dict[str, set[int]] = {}
    places: list[dict[tuple[str, int], int]] = []
    for rank, timeline in enumerate(timelines):
        places.append({(c.group, c.number): k for k, c in enumerate(timeline.collectives)})
        for call in timeline.collectives:
            names.setdefault((call.group, call.number), call.name)
            ranks_of.setdefault(call.group, set()).add(rank)
    known = [key for key in names if len(ranks_of[key[0]]) > 1 and all(key in places[r] for r in ranks_of[key[0]])]
    shape = (len(known), len(timelines))
    at, held, members = np.zeros(shape, dtype=np.int64), np.full(shape, -1), np.zeros(shape, dtype=bool)
    for rank, place in enumerate(places):
        mine = [k for k, key in enumerate(known) if rank in ranks_of[key[0]]]
        where = [place[known[k]] for k in mine]
        at[mine, rank], held[mine, rank], members[mine, rank] = came[rank][where], waited[rank][where], True
    return [names[key] for key in known], at, members, held


def in_order(came: Instants, members: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Indices of the events, so that each rank's come in the order in which it came to them."""
    last = np.where(members, came, np.iinfo(np.int64).min).max(axis=1, initial=np.iinfo(np.int64).min)
    if members.all():  # what comes later on every rank has the later last arrival, too
        return np.argsort(last, kind="stable")
    return _merged(came, members, last)


def _merged(came: Instants, members: NDArray[np.bool_], last: Instants) -> NDArray[np.int64]:
    """Each rank's own order, and of what may come next the earliest; by ``last`` alone where ranks contradict."""
    sorter = TopologicalSorter[int](dict.fromkeys(range(len(came)), ()))
    for rank in range(came.shape[1]):
        mine = np.flatnonzero(members[:, rank])
        for before, event in pairwise(mine[np.argsort(came[mine, rank], kind="stable")].tolist()):
            sorter.add(event, before)
    try:
        sorter.prepare()
    except CycleError:
        return np.argsort(last, kind="stable")
    ready: list[tuple[int, int]] = []
    order: list[int] = []
    while sorter.is_active():
        for event in sorter.get_ready():
            heappush(ready, (int(last[event]), event))
        order.append(heappop(ready)[1])
        sorter.done(order[-1])
    return np.array(order, dtype=np.int64)
