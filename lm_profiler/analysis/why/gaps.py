"""Gaps: when the device had nothing to do, and what the host did meanwhile."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from lm_profiler.analysis.trace.intervals import NO_PHASE, phase_at
from lm_profiler.analysis.trace.walk import LaunchCall, Packed, walk
from lm_profiler.analysis.why.pieces import Piece

_WAITS = re.compile(r"Synchronize|^(cuda|hip)Memcpy(?!.*Async)|^(cuda|hip)MemcpyAsync")
"""Calls after which the device may stand idle because the host waited for it: also a copy to pageable memory."""

PYTHON = "Python"


class Gap(NamedTuple):
    """``what``: the call that made the host wait, what it was about to launch, or the operator that it was in."""

    ns: int
    phase: str
    what: str


class _Wait(NamedTuple):
    start: int
    end: int
    what: str


def gaps_of(packed: Packed, pieces: Sequence[tuple[Piece, int]], idle: Sequence[tuple[int, int]]) -> Iterator[Gap]:
    """What the ``idle`` stretches of time are due to; on the CPU also ``pieces`` that only call others."""
    if not packed.has_device:
        for piece, own in pieces:
            if piece.use == "dispatch":
                yield Gap(own, piece.phase, piece.name)
        for begin, end in idle:
            yield from _python(packed, begin, end)
        return
    waits = _waits(packed)
    following = sorted((piece for piece, _ in pieces), key=attrgetter("start"))
    starts = [piece.start for piece in following]
    for begin, end in idle:
        at = bisect_left(starts, end)
        next_ = following[at] if at < len(following) else None
        phase = phase_at(packed.phases, end - 1) if next_ is None else next_.phase
        yield Gap(end - begin, phase, _waited(waits, begin, end) or _towards(next_))


def _python(packed: Packed, begin: int, end: int) -> Iterator[Gap]:
    """A stretch in which no operator ran, cut where phases begin and end."""
    left = end - begin
    at = max(bisect_right(packed.phases, begin, key=attrgetter("start")) - 1, 0)
    for phase in packed.phases[at:]:
        if phase.start >= end:
            break
        inside = min(end, phase.end) - max(begin, phase.start)
        if inside > 0:
            left -= inside
            yield Gap(inside, phase.name, PYTHON)
    if left > 0:
        yield Gap(left, NO_PHASE, PYTHON)


def _waits(packed: Packed) -> list[_Wait]:
    """Calls in which the host waited for the device, by when they end."""
    waits = []
    for event in walk(packed):
        if isinstance(event, LaunchCall) and _WAITS.search(name := packed.names[event.name] or ""):
            operator = packed.names[event.operator]
            what = name if operator is None else f"{name} in {operator}"
            waits.append(_Wait(event.start, event.start + event.length, what))
    return sorted(waits, key=attrgetter("end"))


def _waited(waits: Sequence[_Wait], begin: int, end: int) -> str | None:
    """The call that had begun before the device ran out of work and ended while it had none."""
    at = bisect_left(waits, begin, key=attrgetter("end"))
    for wait in waits[at:]:
        if wait.end > end:
            return None
        if wait.start < begin:
            return f"after {wait.what}"
    return None


def _towards(piece: Piece | None) -> str:
    return "the loop" if piece is None else f"launching {piece.operator or piece.name}"
