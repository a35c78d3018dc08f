"""The collectives of traced steps: how long each kind takes, and how much of that no compute of the rank hides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lm_profiler.analysis.trace.intervals import NO_PHASE, Times, covered, phase_finder, union_of
from lm_profiler.analysis.trace.pieces import TracedWork
from lm_profiler.analysis.trace.walk import Range

_KINDS = {
    kind: re.compile(kind.replace("_", "_?"), re.IGNORECASE)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
}


class CollectiveTime(NamedTuple):
    """Collectives of one name: calls and nanoseconds of all steps together; ``exposed_ns`` is what nothing hides."""

    name: str
    calls: int
    ns: int
    exposed_ns: int


@dataclass(frozen=True)
class Communication:
    """What a rank's traced ``steps`` spent in collectives: in all together (some overlap), and by name.

    Waiting for other ranks is part of it, for a trace is of one rank.
    """

    steps: int
    ns: int
    exposed_ns: int
    by_name: Sequence[CollectiveTime]


def communication_of(work: TracedWork) -> Communication | None:
    """Return the communication of ``work``; None where there is none."""
    calls = collective_calls(work)
    if not calls:
        return None
    starts, ends = ([getattr(call, side) for call in calls] for side in ("start", "end"))
    left, right = union_of(starts, ends, work.begin, work.end)
    each_ns = _exposed_ns(work, np.array(starts), np.array(ends)).tolist()
    by_name: dict[str, CollectiveTime] = {}
    for call, exposed_ns in zip(calls, each_ns, strict=True):
        _, count, ns, known_ns = by_name.get(call.name, CollectiveTime(call.name, 0, 0, 0))
        by_name[call.name] = CollectiveTime(call.name, count + 1, ns + call.end - call.start, known_ns + exposed_ns)
    exposed_ns = int(_exposed_ns(work, left, right).sum())
    return Communication(len(work.steps), int((right - left).sum()), exposed_ns, list(by_name.values()))


def collective_calls(work: TracedWork) -> list[Range]:
    """Return the collectives of ``work`` by their start, with names like ``all_reduce``, ``all_gather of blocks.0``."""
    if work.on_device:
        asked = [(of.asked, Range(of.start, of.end, of.name)) for of in work.pieces if of.use == "communication"]
    else:
        asked = [(of.start, of) for of in work.collectives if work.begin <= of.start <= work.end]
    gathers_at = phase_finder(sorted(work.gathers))
    named = []
    for at, call in asked:
        kind = next((kind for kind, form in _KINDS.items() if form.search(call.name)), call.name)
        of = gathers_at(at) if kind == "all_gather" else NO_PHASE
        named.append(call._replace(name=kind if of == NO_PHASE else f"{kind} of {of}"))
    return sorted(named)


def compute_spans(work: TracedWork) -> tuple[list[int], list[int]]:
    """Return the starts and ends of what computes, or copies, on the device; on the CPU without what only calls."""
    busy = [piece for piece in work.pieces if piece.use not in ("communication", "dispatch")]
    return [piece.start for piece in busy], [piece.end for piece in busy]


def _exposed_ns(work: TracedWork, starts: Times, ends: Times) -> Times:
    """Return how much of each stretch no compute hides."""
    left, right = (np.array(side, dtype=np.int64) for side in compute_spans(work))
    return ends - starts - covered(left, right, starts, ends, work.begin, work.end)
