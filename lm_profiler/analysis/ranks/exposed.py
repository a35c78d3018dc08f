"""What of a step's communication no compute hides, by phase: from DDP's own timings, and from a device's trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lm_profiler.analysis.ranks.reducer import ReducerTimes, backward_communication
from lm_profiler.analysis.why.traced import Traced
from lm_profiler.record.quantities import counted


class Exposed(NamedTuple):
    """Seconds a step by phase, and whose they are, in words; None where nobody says."""

    seconds: dict[str, float]
    source: str | None


def exposed_communication(reducers: Sequence[ReducerTimes], traced: Traced | None) -> Exposed:
    """Of backward what DDP times, where it does: the waiting is not in it. Of all else what the trace of a device has:
    its waiting is, for one rank's trace cannot tell the two apart."""
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
    """Of a device alone: on the CPU the calls return at once, and what is waited for is in no operator."""
    if traced is None or not traced.on_device:
        return {}
    ns: Counter[str] = Counter()
    for piece, own in traced.of("communication"):
        ns[piece.phase] += round(own)
    return {phase: total * 1e-9 / traced.steps for phase, total in ns.items()}


def _source_of(traced: Traced) -> str:
    return f"rank 0's trace of {counted(traced.steps, 'step')}, waiting included"
