"""Exposed communication and waiting from what each rank's DDP timed itself: the second witness.

Its communication ends for all ranks together. On the rank that begins it last nobody is waited for, so what its
computing does not hide is communication; what another rank has more is waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

from lm_profiler.analysis.ranks.rank_timeline import ReducerTimes
from lm_profiler.analysis.why.traced import Traced
from lm_profiler.record.quantities import counted
from lm_profiler.record.run import CollectiveFigures


@dataclass(frozen=True)
class BackwardCommunication:
    """Means over ``backwards``: seconds of communication that no computing hides, and what each rank waits there."""

    exposed_s: float
    waiting_s: Mapping[int, float]
    backwards: int


def backward_communication(ranks: Sequence[ReducerTimes]) -> BackwardCommunication | None:
    """Return the mean over the backwards that all ``ranks`` know of; None where there are none, or only one rank
    knows."""
    if len(ranks) < 2:
        return None
    common = sorted(set.intersection(*(set(each.exposed_s) for each in ranks)))
    if not common:
        return None
    least = {number: min(each.exposed_s[number] for each in ranks) for number in common}
    waiting = {each.rank: mean(each.exposed_s[number] - least[number] for number in common) for each in ranks}
    return BackwardCommunication(mean(least.values()), waiting, len(common))


class Exposed(NamedTuple):
    """Seconds a step by phase, and whose they are, in words; None where nobody says."""

    seconds: dict[str, float]
    source: str | None


def exposed_communication(reducers: Sequence[ReducerTimes], traced: Traced | None) -> Exposed:
    """Return the communication that no compute hides, by phase.

    Backward's is DDP's own, where DDP times it: without waiting. All else is what the trace of a device has, with
    waiting, for one rank's trace cannot tell the two apart.
    """
    seconds = _of_trace(traced)
    sources = [] if traced is None or not seconds else [_source_of(traced)]
    reduced = backward_communication(reducers)
    if reduced is not None:
        seconds["backward"] = reduced.exposed_s
        rank, waited_s = max(reduced.waiting_s.items(), key=lambda waits: waits[1])
        times = f"DDP's own timings of {counted(reduced.backwards, 'backward')}"
        told = f"{times}, by which rank {rank} waits there for {waited_s * 1e3:.3g} ms"
        sources = [told, *(f"the rest: {source}" for source in sources if len(seconds) > 1)]
    return Exposed(seconds, "; ".join(sources) or None)


def _of_trace(traced: Traced | None) -> dict[str, float]:
    """Return the seconds by phase, for a device alone: on the CPU the calls return at once, and what is waited for is
    in no operator."""
    if traced is None or not traced.on_device:
        return {}
    ns: Counter[str] = Counter()
    for piece, own in traced.of("communication"):
        ns[piece.phase] += round(own)
    return {phase: total * 1e-9 / traced.steps for phase, total in ns.items()}


def communication_figures(traced: Traced | None) -> dict[str, Any]:
    """Return the fields of ``Ranks`` that hold what the traced steps spent in collectives; none if nothing is known."""
    seen = None if traced is None else traced.communication
    if seen is None:
        return {}
    a_step = 1e-9 / seen.steps
    rows = [
        CollectiveFigures(name=name, calls=calls / seen.steps, seconds=ns * a_step, exposed_s=exposed_ns * a_step)
        for name, calls, ns, exposed_ns in seen.by_name
    ]
    return {
        "communication_s": seen.ns * a_step,
        "exposed_communication_s": seen.exposed_ns * a_step,
        "collectives": rows,
    }


def _source_of(traced: Traced) -> str:
    return f"rank 0's trace of {counted(traced.steps, 'step')}, waiting included"
