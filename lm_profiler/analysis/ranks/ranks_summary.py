"""Computes the record's part on ranks from the data that the ranks have sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from lm_profiler.analysis.ranks.finding import ReportingRanks, delay_by_others, finding
from lm_profiler.analysis.ranks.rank_timeline import OUTSIDE, RankTimeline, Seconds
from lm_profiler.analysis.ranks.slow_rank_cause import CountersByRank
from lm_profiler.analysis.ranks.waiting import work_of
from lm_profiler.analysis.trace.kernel_sums import CollectiveTime
from lm_profiler.analysis.why.traced import Traced
from lm_profiler.record.parts import PARTS
from lm_profiler.record.quantities import count_text
from lm_profiler.record.run_record import (
    CollectiveFigures,
    Contention,
    Ranks,
    RankSpread,
    RankTimes,
    StepCounters,
)

# The record lists up to this many ranks. Of more, it lists rank 0, and 8 each of the busiest and of the idlest.
_MOST_RANKS = 64
_RANKS_PER_EXTREME = 8
# of the heat map, which shows the last steps, one per column
_MOST_COLUMNS = 256


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
    """Return the work and the waiting of each rank; None if fewer than two ranks report them for the same steps.

    Args:
        timelines: those of the ranks that have one.
        world: the number of ranks of the run.
        overlap: whether gradients are reduced during backward (DDP).
        steps: the steps for the figures; None for all measured steps. The finding always uses all measured steps.
        witness: how the waiting was measured, as text.
        traced: traced steps of rank 0, which show communication.
        contention: the use of the machine by other programs.
        counters: the counters of all ranks, which show how much of a delay other programs explain.
    """
    by_rank = sorted(timelines, key=lambda timeline: timeline.rank)
    # Arrivals on different clocks cannot be compared; measured waits need no common clock.
    comparable = [
        timeline for timeline in by_rank if _is_comparable(timeline, by_rank[0])
    ]
    if len(comparable) < 2:
        return None
    common_steps = reduce(np.intersect1d, (timeline.steps for timeline in comparable))
    is_judged = np.ones(len(common_steps), bool)
    if steps is not None:
        is_judged = np.isin(common_steps, list(steps))
    if not is_judged.any():
        return None
    work = work_of(comparable, common_steps, overlap)
    # [rank, step, part], without the time outside of steps
    own_s = work.own_s[:, is_judged, :OUTSIDE]
    waiting_s = work.waiting_s[:, is_judged]
    judged_steps = common_steps[is_judged]
    step_s = float((own_s + waiting_s).sum(axis=2).mean())
    numbers = [timeline.rank for timeline in comparable]
    group = ReportingRanks(
        numbers=numbers,
        hosts=[timeline.host for timeline in comparable],
        counters=CountersByRank(counters),
        delay_by_others=delay_by_others(contention, counters, numbers),
    )
    notes = []
    missing = world - len(comparable)
    if missing:
        notes.append(
            f"{missing} of {world} ranks did not report when they arrived at collectives, or used another clock: "
            "how long other ranks waited for them is unknown"
        )
    has_rank_0 = numbers[0] == 0
    waiting_of_rank_0_s = _by_part(waiting_s[0]) if has_rank_0 else None
    return Ranks(
        world=world,
        hosts=_ranks_by_host(comparable),
        steps=len(judged_steps),
        step_s=step_s,
        own=_spreads_over_ranks(own_s, numbers),
        waiting=_spreads_over_ranks(waiting_s, numbers),
        waiting_share=float(waiting_s.sum(axis=2).mean()) / step_s,
        by_rank=_times_of_ranks(group, own_s, waiting_s),
        columns=judged_steps[-_MOST_COLUMNS:].tolist(),
        finding=finding(work, group),
        witness=witness,
        notes=notes,
        **communication_figures(traced, waiting_of_rank_0_s),
    )


def _ranks_by_host(timelines: Sequence[RankTimeline]) -> dict[str, list[int]]:
    """Return the numbers of the ranks on each host."""
    ranks_of_host: dict[str, list[int]] = {}
    for timeline in timelines:
        ranks_of_host.setdefault(timeline.host, []).append(timeline.rank)
    return ranks_of_host


def _times_of_ranks(
    group: ReportingRanks, own_s: Seconds, waiting_s: Seconds
) -> list[RankTimes]:
    """Return the times of the ranks to show; ``own_s`` and ``waiting_s`` are [rank, step, part]."""
    times_of_ranks = []
    for index in _ranks_to_show(own_s):
        times = RankTimes(
            rank=group.numbers[index],
            host=group.hosts[index],
            own_s=_by_part(own_s[index]),
            waiting_s=_by_part(waiting_s[index]),
            own_by_column_s=own_s[index, -_MOST_COLUMNS:].sum(axis=1).tolist(),
        )
        times_of_ranks.append(times)
    return times_of_ranks


def _is_comparable(timeline: RankTimeline, reference: RankTimeline) -> bool:
    """Return whether the waiting of two ranks can be compared: it was measured, or both use the same clock."""
    return timeline.waited_ns is not None or timeline.clock == reference.clock


def _ranks_to_show(own_s: Seconds) -> list[int]:
    """Return the indices of the ranks that the record lists: all, or the first, the idlest and the busiest ones.

    ``own_s`` is [rank, step, part].
    """
    mean_own_s = own_s.sum(axis=2).mean(axis=1)
    by_own_work = np.argsort(mean_own_s, kind="stable").tolist()
    if len(by_own_work) <= _MOST_RANKS:
        return sorted(by_own_work)
    idlest = by_own_work[:_RANKS_PER_EXTREME]
    busiest = by_own_work[-_RANKS_PER_EXTREME:]
    return sorted({0, *idlest, *busiest})


def communication_figures(
    traced: Traced | None, waiting_s: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return the fields of ``Ranks`` on communication, from traced steps; empty if nothing is known.

    A trace does not distinguish communication from waiting. So ``waiting_s``, how long the traced rank waited in each
    phase, is subtracted if it is known. Exposed communication is reported only for a device: on the CPU, calls return
    at once, and the wait is not in an operator.
    """
    if traced is None:
        return {}
    fields: dict[str, Any] = {}
    communication = traced.communication
    if communication is not None:
        s_per_ns = 1e-9 / communication.steps
        fields["communication_s"] = communication.ns * s_per_ns
        fields["exposed_communication_s"] = communication.exposed_ns * s_per_ns
        fields["communication_share"] = communication.share
        fields["collectives"] = [
            _collective_figures(calls, communication.steps)
            for calls in communication.by_name
        ]
    exposed_s = _exposed_s(traced, waiting_s or {})
    if exposed_s:
        waiting_words = "including waiting"
        if waiting_s is not None:
            waiting_words = "without that rank's waiting"
        steps = count_text(traced.steps, "step")
        fields["exposed_s"] = exposed_s
        fields["exposed_source"] = f"rank 0's trace of {steps}, {waiting_words}"
    return fields


def _exposed_s(traced: Traced, waiting_s: Mapping[str, float]) -> dict[str, float]:
    """Return the exposed communication of a mean step by phase, minus the waiting; empty without a device."""
    if not traced.on_device:
        return {}
    exposed_ns: Counter[str] = Counter()
    for piece, own_ns in traced.by_use["communication"]:
        exposed_ns[piece.phase] += round(own_ns)
    exposed_s = {}
    for phase, phase_ns in exposed_ns.items():
        phase_s = phase_ns * 1e-9 / traced.steps
        exposed_s[phase] = max(phase_s - waiting_s.get(phase, 0.0), 0.0)
    return exposed_s


def _collective_figures(calls: CollectiveTime, steps: int) -> CollectiveFigures:
    """Return the record's row of the collectives of one name, in a mean step."""
    return CollectiveFigures(
        name=calls.name,
        calls=calls.calls / steps,
        seconds=calls.ns * 1e-9 / steps,
        exposed_s=calls.exposed_ns * 1e-9 / steps,
    )


def _by_part(seconds: Seconds) -> dict[str, float]:
    """Return the mean seconds of each part with any time, from [step, part]."""
    means_s = {}
    for part, mean_s in zip(PARTS, seconds.mean(axis=0).tolist(), strict=True):
        if mean_s > 0.0:
            means_s[part] = mean_s
    return means_s


def _spreads_over_ranks(
    seconds: Seconds, numbers: Sequence[int]
) -> dict[str, RankSpread]:
    """Return the spread over ranks of the mean of each part with any time, from [rank, step, part]."""
    spreads = {}
    for part, rank_means_s in zip(PARTS, seconds.mean(axis=1).T, strict=True):
        if rank_means_s.max() <= 0.0:
            continue
        spreads[part] = RankSpread(
            least_s=float(rank_means_s.min()),
            median_s=float(np.median(rank_means_s)),
            largest_s=float(rank_means_s.max()),
            slowest=numbers[int(rank_means_s.argmax())],
        )
    return spreads
