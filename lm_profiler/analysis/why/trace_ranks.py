"""Compares the traces of several ranks, to find which rank waits for which at each collective.

The clocks of several machines cannot be compared, but durations can. A collective that needs the data of all ranks ends
on all of them at the same time. So the rank on which the call is shortest arrived last, and each other rank waited for
as long as its own call exceeds the shortest one. Broadcasts are left out, because their source does not wait; so are
calls between two ranks, and calls of an unknown kind.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lm_profiler.analysis.trace.any_trace import AnyTrace, part_notes
from lm_profiler.analysis.trace.kernel_sums import (
    collective_kind,
    collective_name,
    communication_of,
)
from lm_profiler.record.trace_answer import RankTime, RankWait, TraceRanks

_NEED_ALL_RANKS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class _CallKey(NamedTuple):
    """A collective call that is the same on all of its ranks."""

    group: str
    kind: str
    number: int  # its number among the calls of its group and kind


class _Wait(NamedTuple):
    """The key under which waits are added up."""

    collective: str
    rank: int
    last_rank: int


def compare_ranks(traces: Sequence[AnyTrace]) -> TraceRanks:
    """Return the waits of the ranks of ``traces``, which are two or more, per step."""
    ranks = rank_numbers(traces)
    steps = min(len(trace.work.packed.steps) for trace in traces)
    # by call, then by rank
    durations_ns: defaultdict[_CallKey, dict[int, int]] = defaultdict(dict)
    for rank, trace in zip(ranks, traces, strict=True):
        for key, duration_ns in _call_durations_ns(trace).items():
            durations_ns[key][rank] = duration_ns

    sums = _WaitSums()
    for key, ns_by_rank in durations_ns.items():
        if len(ns_by_rank) > 1:
            sums.add_call(key.kind, ns_by_rank)
    waits = sums.waits_per_step(steps)
    times = []
    for rank, trace in zip(ranks, traces, strict=True):
        rank_waits_s = sum(wait.waited_s for wait in waits if wait.rank == rank)
        caused_s = sums.caused_ns[rank] * 1e-9 / steps
        times.append(_rank_time(rank, trace, rank_waits_s, caused_s))
    return TraceRanks(
        steps=steps,
        ranks=times,
        waits=waits,
        matched=sums.added_calls,
        unmatched=len(durations_ns) - sums.added_calls,
        notes=_notes(traces, sums.added_calls),
    )


class _WaitSums:
    """How long ranks waited for each other, as sums over the calls of collectives."""

    def __init__(self) -> None:
        self.added_calls = 0
        # by rank: how long the others waited for it, on average over them
        self.caused_ns: defaultdict[int, float] = defaultdict(float)
        self._waited_ns: Counter[_Wait] = Counter()
        self._call_counts: Counter[_Wait] = Counter()

    def add_call(self, kind: str, ns_by_rank: Mapping[int, int]) -> None:
        """Add the waits in a call, by its duration on each rank.

        The rank that comes last does not wait, so that the call is shortest on it.
        """
        self.added_calls += 1
        last_rank = min(ns_by_rank, key=lambda rank: ns_by_rank[rank])
        waiting_ranks = [rank for rank in ns_by_rank if rank != last_rank]
        for rank in waiting_ranks:
            wait = _Wait(kind, rank, last_rank)
            wait_ns = ns_by_rank[rank] - ns_by_rank[last_rank]
            self._waited_ns[wait] += wait_ns
            self._call_counts[wait] += 1
            self.caused_ns[last_rank] += wait_ns / len(waiting_ranks)

    def waits_per_step(self, steps: int) -> list[RankWait]:
        """Return the waits of each rank for each other one in a mean step, the longest first."""
        waits = []
        for wait, waited_ns in self._waited_ns.most_common():
            waits.append(
                RankWait(
                    **wait._asdict(),
                    calls=self._call_counts[wait] / steps,
                    waited_s=waited_ns * 1e-9 / steps,
                )
            )
        return waits


def are_ranks(traces: Sequence[AnyTrace]) -> bool:
    """Return whether ``traces`` record different ranks of one run."""
    ranks = [trace.rank for trace in traces]
    world_sizes = {trace.world_size for trace in traces}
    return (
        None not in ranks
        and len(set(ranks)) == len(ranks)
        and len(world_sizes) == 1
        and None not in world_sizes
    )


def rank_numbers(traces: Sequence[AnyTrace]) -> list[int]:
    """Return the rank that each trace records, or if these do not all differ, its position in the call."""
    ranks = [trace.rank for trace in traces if trace.rank is not None]
    if len(set(ranks)) == len(traces):
        return ranks
    return list(range(len(traces)))


def _call_durations_ns(trace: AnyTrace) -> dict[_CallKey, int]:
    """Return the duration of each collective of the steps, in the order in which the host launched them.

    Calls of one kind in one group are numbered, so that the same call has the same key on each rank.
    """
    work = trace.work
    # when the host launched it, its group, its name and its duration
    calls: list[tuple[int, str, str, int]] = []
    if work.on_device:
        for piece in work.pieces:
            if piece.use == "communication":
                name = collective_name(piece)
                calls.append((piece.launched_at, piece.group or "", name, piece.own_ns))
    else:
        for call in work.packed.collectives:
            if work.begin <= call.start <= work.end:
                calls.append((call.start, "", call.name, call.end - call.start))

    durations_ns = {}
    counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    for _, group, name, duration_ns in sorted(calls):
        kind = collective_kind(name)
        if kind not in _NEED_ALL_RANKS:
            continue
        number = counts[group, kind]
        durations_ns[_CallKey(group, kind, number)] = duration_ns
        counts[group, kind] += 1
    return durations_ns


def _rank_time(
    rank: int, trace: AnyTrace, waited_s: float, caused_s: float
) -> RankTime:
    """Return a rank's times in a mean step: its length, its collectives, how long it waited, and others for it."""
    work = trace.work
    steps = len(work.packed.steps)
    communication = communication_of(work)
    communication_ns = 0 if communication is None else communication.ns
    exposed_ns = 0 if communication is None else communication.exposed_ns
    return RankTime(
        rank=rank,
        trace=str(trace.path),
        step_s=(work.done - work.begin) * 1e-9 / steps,
        communication_s=communication_ns * 1e-9 / steps,
        exposed_s=exposed_ns * 1e-9 / steps,
        waited_s=waited_s,
        caused_s=caused_s,
    )


def _notes(traces: Sequence[AnyTrace], matched: int) -> list[str]:
    """Return why the calls that were matched across ranks may not belong to each other."""
    notes = part_notes(traces)
    step_counts = {len(trace.work.packed.steps) for trace in traces}
    if len(step_counts) > 1:
        notes.append(
            "the traces have different numbers of steps, so the compared calls may not belong together"
        )
    step_names = {trace.work.packed.steps[0].name for trace in traces}
    if len(step_names) > 1:
        notes.append(
            f"the traces begin with different steps: {', '.join(sorted(step_names))}"
        )
    if not matched:
        notes.append("no collective appears in the traces of two or more ranks")
    return notes
