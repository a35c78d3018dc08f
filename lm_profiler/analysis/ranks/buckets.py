"""Which calls amid backward are DDP's own buckets, which nobody waits for but the last, and which are the module's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby

import numpy as np

from lm_profiler.analysis.ranks.timeline import RankTimeline
from lm_profiler.analysis.ranks.track import BACKWARD

BESIDE = ", beside DDP's buckets"
"""Ends the name of a call amid backward that is none of them: all ranks wait in it."""


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
    """Of each call of one backward, whether it is the next bucket."""
    of_ddp: list[bool] = []
    for size in sizes:
        reduced = sum(of_ddp)
        of_ddp.append(reduced < len(buckets) and size == buckets[reduced])
    return of_ddp
