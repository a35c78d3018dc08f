"""The record's part on ranks, from what all of them say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from lm_profiler.analysis.ranks.finding import HeardRanks, contended, finding
from lm_profiler.analysis.ranks.rank_timeline import OUTSIDE, RankTimeline, Seconds
from lm_profiler.analysis.ranks.slow_rank_cause import CountersByRank
from lm_profiler.analysis.ranks.waiting import work_of
from lm_profiler.analysis.why.traced import Traced
from lm_profiler.record.parts import PARTS
from lm_profiler.record.quantities import counted
from lm_profiler.record.run_record import (
    CollectiveFigures,
    Contention,
    Ranks,
    RankSpread,
    RankTimes,
    StepCounters,
)

# the record has up to this many ranks; of more, rank 0 and this many of the busiest and the idlest
_SHOWN, _EXTREMES = 64, 8
_COLUMNS = 256  # the last steps, which the heat map shows


def ranks_of(
    timelines: Sequence[RankTimeline],
    world: int,
    overlap: bool,
    steps: Iterable[int] | None = None,
    witness: str = "arrivals at collectives",
    traced: Traced | None = None,
    contention: Contention | None = None,
    counters: Sequence[StepCounters] = (),
) -> Ranks | None:
    """Return who worked and who waited; None where fewer than two ranks report it, or they have no step in common.

    Args:
        timelines: of the ranks that have one.
        world: how many ranks there are.
        overlap: whether gradients are reduced during backward (DDP).
        steps: the steps that the figures use; None: all measured steps, which the finding uses.
        witness: the source of the waiting.
        traced: steps of rank 0, which show communication.
        contention: what else used the machine.
        counters: of each rank's measured steps: they show how much of a delay contention explains.
    """
    timelines = sorted(timelines, key=lambda timeline: timeline.rank)
    # Arrivals on different clocks cannot be compared; measured waits need no common clock.
    timelines = [of for of in timelines if of.waited_ns is not None or of.clock == timelines[0].clock]
    if len(timelines) < 2:
        return None
    common = reduce(np.intersect1d, (timeline.steps for timeline in timelines))
    kept = np.ones(len(common), bool) if steps is None else np.isin(common, list(steps))
    if not kept.any():
        return None
    work = work_of(timelines, common, overlap)
    own_s, waiting_s, common = work.own_s[:, kept, :OUTSIDE], work.waiting_s[:, kept], common[kept]
    step_s = float((own_s + waiting_s).sum(axis=2).mean())
    named, hosts = [timeline.rank for timeline in timelines], [timeline.host for timeline in timelines]
    group = HeardRanks(named, hosts, CountersByRank(counters), contended(contention, counters, named))
    concluded = finding(work, group)
    missing = world - len(timelines)
    unseen = f"{missing} of {world} ranks did not report their arrivals, or used another clock"
    by_host: dict[str, list[int]] = {}
    for timeline in timelines:
        by_host.setdefault(timeline.host, []).append(timeline.rank)
    busy = np.argsort(own_s.sum(axis=2).mean(axis=1), kind="stable").tolist()
    return Ranks(
        world=world,
        hosts=by_host,
        steps=len(common),
        step_s=step_s,
        own=_spreads(own_s, named),
        waiting=_spreads(waiting_s, named),
        waiting_share=float(waiting_s.sum(axis=2).mean()) / step_s,
        by_rank=[
            RankTimes(
                rank=named[r],
                host=hosts[r],
                own_s=_by_part(own_s[r]),
                waiting_s=_by_part(waiting_s[r]),
                own_by_column_s=own_s[r, -_COLUMNS:].sum(axis=1).tolist(),
            )
            for r in sorted(busy if len(busy) <= _SHOWN else {0, *busy[:_EXTREMES], *busy[-_EXTREMES:]})
        ],
        columns=common[-_COLUMNS:].tolist(),
        finding=concluded,
        witness=witness,
        notes=[f"{unseen}: nobody is seen to wait for them"] if missing else [],
        **communication_figures(traced, _by_part(waiting_s[0]) if named[0] == 0 else None),
    )


def communication_figures(traced: Traced | None, waiting_s: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the fields of ``Ranks`` on communication, from traced steps; none where nothing is known.

    A trace shows one rank, which may wait for ``waiting_s`` in each phase: it cannot tell communication from
    waiting. Exposed communication is reported only for a device: on the CPU the calls return at once, and the wait
    is in no operator.
    """
    if traced is None:
        return {}
    fields: dict[str, Any] = {}
    if (seen := traced.communication) is not None:
        a_step = 1e-9 / seen.steps
        fields["communication_s"], fields["exposed_communication_s"] = seen.ns * a_step, seen.exposed_ns * a_step
        fields["communication_share"] = seen.share
        fields["collectives"] = [
            CollectiveFigures(name=name, calls=calls / seen.steps, seconds=ns * a_step, exposed_s=exposed_ns * a_step)
            for name, calls, ns, exposed_ns in seen.by_name
        ]
    exposed_ns: Counter[str] = Counter()
    for piece, own in traced.by_use["communication"] if traced.on_device else ():
        exposed_ns[piece.phase] += round(own)
    if exposed_ns:
        waits = waiting_s or {}
        exposed = {phase: ns * 1e-9 / traced.steps - waits.get(phase, 0.0) for phase, ns in exposed_ns.items()}
        told = "waiting included" if waiting_s is None else "less what that rank waits"
        fields["exposed_s"] = {phase: max(seconds, 0.0) for phase, seconds in exposed.items()}
        fields["exposed_source"] = f"rank 0's trace of {counted(traced.steps, 'step')}, {told}"
    return fields


def _by_part(seconds: Seconds) -> dict[str, float]:
    """Return the mean of each part that any time was spent in."""
    return {part: float(s) for part, s in zip(PARTS, seconds.mean(axis=0), strict=True) if s > 0.0}


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
