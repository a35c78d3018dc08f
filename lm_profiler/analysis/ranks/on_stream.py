"""Collectives on a device's stream: when it comes to them, and what each rank waits there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.rank_timeline import Collective, Instants, RankTimeline


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


def comes_ns(
    called_ns: Instants, took_ns: Instants, host_ns: Instants, stream_ns: Instants, behind: NDArray[np.bool_]
) -> Instants:
    """Return the instant of each call on the stream.

    A part of a step is on the stream the rank's own work and the calls that it stands in. In its own work a call comes
    as far on as in the host's time of that part.

    Args:
        called_ns: when the host made each call, in order.
        took_ns: how long each takes on its stream; 0 where that is not known.
        host_ns: the marks between parts, as the host made them.
        stream_ns: the same marks, as the stream came to them.
        behind: of each mark, whether the calls of the part that it begins are made while the rank goes on with its
            own work, which ends with the last of them (DDP's backward).
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
    """The stream stands in each call."""
    before = np.cumsum(took_ns) - took_ns
    return np.asarray(share * max(lasts - took_ns.sum(), 0) + before)


def _behind(share: NDArray[np.float64], took_ns: Instants, lasts: float) -> NDArray[np.float64]:
    """Calls queue behind each other on a stream of their own, and the part ends with the last one.

    From whichever the queue never ran dry, that one came so long before the part's end as it and all behind it take.
    """
    share = np.maximum(share / share[-1], 1e-6) if share[-1] > 0 else np.ones_like(share)
    left = np.cumsum(took_ns[::-1])[::-1]
    own = max(float(((lasts - left) / share).min()), 0.0)
    return np.asarray(share * own)
