"""The record's part on ranks, from what all of them say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.course import course_of
from lm_profiler.analysis.ranks.finding import HeardRanks, contended, finding
from lm_profiler.analysis.ranks.rank_timeline import Instants, RankTimeline, Seconds
from lm_profiler.analysis.ranks.replay import RanksWork, Replay, work_of
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run import ClockAlignment, Contention, Ranks, RankSpread, RankTimes, StepCounters

_SHOWN, _EXTREMES = 64, 8
_COLUMNS = 256


def ranks_of(
    timelines: Sequence[RankTimeline],
    world: int,
    overlap: bool,
    steps: Iterable[int] | None = None,
    witness: str = "arrivals at collectives",
    clocks: ClockAlignment | None = None,
    exposed_s: Mapping[str, float] | None = None,
    exposed_source: str | None = None,
    contention: Contention | None = None,
    counters: Sequence[StepCounters] = (),
) -> Ranks | None:
    """Return who worked and who waited; None where fewer than two ranks say so, or they have no step in common.

    Args:
        timelines: of the ranks that know.
        world: how many ranks there are.
        overlap: whether gradients are reduced while backward goes on (DDP).
        steps: numbers of the steps that the figures are of; None: all that were measured, of which the finding is.
        witness: what the waiting is known from.
        clocks: how they were brought together; None: as the timelines say.
        exposed_s: seconds a step of communication that no compute hides, by phase, where it is known.
        exposed_source: from where.
        contention: what else used the machine.
        counters: of the measured steps of each rank: they tell what of a lateness that explains.
    """
    timelines = sorted(timelines, key=lambda timeline: timeline.rank)
    common = _common_steps(timelines)
    kept = np.ones(len(common), bool) if steps is None else np.isin(common, list(steps))
    if len(timelines) < 2 or not kept.any():
        return None
    course = course_of(timelines, common, overlap)
    whole = work_of(course)
    work, common = whole.of_steps(kept), common[kept]
    clocks = clocks or alignment(timelines)
    shown, columns = _shown(work), _columns(len(common))
    named, hosts = [timeline.rank for timeline in timelines], [timeline.host for timeline in timelines]
    group = HeardRanks(named, hosts, clocks.uncertainty_s or 0.0, contended(contention, counters, named))
    concluded = finding(Replay(course, whole), group)
    missing = world - len(timelines)
    unseen = f"{missing} of {world} ranks did not say when they came: nobody is seen to wait for them"
    return Ranks(
        world=world,
        hosts=_by_host(named, hosts),
        steps=len(common),
        step_s=work.step_s,
        own=_spreads(work.own_s, named),
        waiting=_spreads(work.waiting_s, named),
        waiting_share=float(work.waiting_s.sum(axis=2).mean()) / work.step_s,
        by_rank=[_times(work, r, named[r], hosts[r], columns) for r in shown],
        columns=[int(common[first]) for first in columns],
        finding=concluded,
        exposed_s=dict(exposed_s or {}),
        exposed_source=exposed_source,
        witness=witness,
        clocks=clocks,
        notes=[unseen] if missing else [],
    )


def _by_host(ranks: Iterable[int], hosts: Iterable[str]) -> dict[str, list[int]]:
    by_host: dict[str, list[int]] = {}
    for rank, host in zip(ranks, hosts, strict=True):
        by_host.setdefault(host, []).append(rank)
    return by_host


def alignment(timelines: Sequence[RankTimeline]) -> ClockAlignment:
    """Return how the clocks of ``timelines`` were brought together."""
    offsets = [timeline.clock for timeline in timelines if timeline.clock.at_ns != (0, 0)]
    if not offsets:
        return ClockAlignment(method="one clock: all ranks are of one machine", uncertainty_s=0.0)
    drift = max(abs(offset.drift) for offset in offsets)
    uncertain_ns = sorted(max(offset.uncertainty_ns) for offset in offsets)
    # Rank 0's own clock is certain; two others may be off in opposite directions.
    return ClockAlignment(
        method="compared with rank 0's over the store, before and after the measured steps",
        uncertainty_s=sum(uncertain_ns[-2:]) * 1e-9,
        drift=drift,
    )


def _common_steps(timelines: Sequence[RankTimeline]) -> Instants:
    common = timelines[0].steps if timelines else np.array([], dtype=np.int64)
    for timeline in timelines[1:]:
        if not np.array_equal(common, timeline.steps):
            common = np.intersect1d(common, timeline.steps)
    return common


def _spreads(seconds: Seconds, named: Sequence[int]) -> dict[str, RankSpread]:
    """Return the spread over the ranks of each part that any rank spent time in."""
    means = seconds.mean(axis=1)
    return {
        part: RankSpread(
            least_s=float(column.min()),
            median_s=float(np.median(column)),
            largest_s=float(column.max()),
            slowest=named[int(column.argmax())],
        )
        for part, column in zip(PARTS, means.T, strict=True)
        if column.max() > 0.0
    }


def _shown(work: RanksWork) -> list[int]:
    """Indices of the ranks that the record has: all, or the first, the busiest and the idlest."""
    busy = np.argsort(work.own_s.sum(axis=2).mean(axis=1), kind="stable").tolist()
    return sorted(busy) if len(busy) <= _SHOWN else sorted({0, *busy[:_EXTREMES], *busy[-_EXTREMES:]})


def _columns(steps: int) -> NDArray[np.int64]:
    """Return where each column begins."""
    return np.unique(np.linspace(0, steps, min(steps, _COLUMNS), endpoint=False).astype(np.int64))


def _times(work: RanksWork, index: int, rank: int, host: str, columns: NDArray[np.int64]) -> RankTimes:
    own, waiting = work.own_s[index], work.waiting_s[index]
    sizes = np.diff(np.append(columns, len(own)))
    return RankTimes(
        rank=rank,
        host=host,
        own_s={part: float(s) for part, s in zip(PARTS, own.mean(axis=0), strict=True) if s > 0.0},
        waiting_s={part: float(s) for part, s in zip(PARTS, waiting.mean(axis=0), strict=True) if s > 0.0},
        own_by_column_s=(np.add.reduceat(own.sum(axis=1), columns) / sizes).tolist(),
    )
