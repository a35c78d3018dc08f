"""Waiting from how long a collective takes on each rank's stream.

It runs on a rank's stream from when that rank comes until all have what they need: whoever comes last is in it for the
shortest time, and what another rank is in it for longer, that one waits. No clocks are compared for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lm_profiler.analysis.ranks.timeline import Collective, RankTimeline


def with_waits(timelines: Sequence[RankTimeline]) -> list[RankTimeline]:
    """``timelines`` with what was waited, where ``waited_ns`` has how long each collective took; -1: it is not known.

    Of a collective that not all of its ranks have timed nothing is known.
    """
    least: dict[tuple[str, int], int] = {}
    for timeline in timelines:
        for call, took_ns in _timed(timeline):
            key = (call.group, call.number)
            least[key] = min(least.get(key, took_ns), took_ns)
    return [timeline if timeline.waited_ns is None else _waiting(timeline, least) for timeline in timelines]


def _timed(timeline: RankTimeline) -> list[tuple[Collective, int]]:
    took_ns = [] if timeline.waited_ns is None else timeline.waited_ns.tolist()
    return list(zip(timeline.collectives, took_ns, strict=False))


def _waiting(timeline: RankTimeline, least: dict[tuple[str, int], int]) -> RankTimeline:
    waited = [
        took_ns - least[call.group, call.number] if min(took_ns, least[call.group, call.number]) >= 0 else -1
        for call, took_ns in _timed(timeline)
    ]
    return replace(timeline, waited_ns=np.array(waited, dtype=np.int64))
