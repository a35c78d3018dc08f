"""Gaps: when the device had nothing to do, and what the host did meanwhile."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from lm_profiler.analysis.trace.intervals import NO_PHASE, phase_finder
from lm_profiler.analysis.trace.pieces import INPUT_PHASES, Piece, TracedWork

_WAITS = re.compile(r"Synchronize|^(cuda|hip)Memcpy")
"""Calls that make the host wait for the device; a copy from or to pageable memory is one, whatever its name says."""

_LONG_NS = 10_000
"""A call of the driver that lasts longer is worth a name: launching takes 5 microseconds."""

_MOST = 0.5
"""Of a gap that a call must fill to be its cause."""

PYTHON = "Python"
QUEUED = "between kernels that were queued"


class Gap(NamedTuple):
    """``what``: the call that made the host wait, what it was about to launch, or the operator that it was in."""

    ns: int
    phase: str
    what: str


class _DriverCall(NamedTuple):
    start: int
    end: int
    what: str
    waits: bool


def gaps_of(
    work: TracedWork,
    pieces: Sequence[tuple[Piece, int]],
    idle: Sequence[tuple[int, int]],
) -> Iterator[Gap]:
    """What the ``idle`` stretches of time are due to; on the CPU also ``pieces`` that only call others."""
    if not work.on_device:
        for piece, own in pieces:
            if piece.use == "dispatch":
                yield Gap(own, piece.phase, piece.name)
        for begin, end in idle:
            yield from _python(work, begin, end)
        return
    calls, phase_at = _calls(work), phase_finder(work.phases)
    following = sorted((piece for piece, _ in pieces), key=attrgetter("start"))
    starts = [piece.start for piece in following]
    for begin, end in idle:
        at = bisect_left(starts, end)
        next_ = following[at] if at < len(following) else None
        phase = phase_at(end - 1) if next_ is None else next_.phase
        if next_ is not None and next_.asked <= begin:
            yield Gap(end - begin, phase, QUEUED)  # the host was ahead: what it did meanwhile is not the reason
        else:
            yield from _by_input(work, begin, end, phase, _in_call(calls, begin, end) or _towards(next_))


def _by_input(work: TracedWork, begin: int, end: int, phase: str, what: str) -> Iterator[Gap]:
    """What of a gap before a kernel of ``phase`` passed while the host saw to the batch, and what did not."""
    inside = sum(part.ns for part in _python(work, begin, end) if part.phase in INPUT_PHASES)
    if inside:
        yield Gap(inside, phase if phase in INPUT_PHASES else "data", what)
    if outside := end - begin - inside:
        yield Gap(outside, NO_PHASE if phase in INPUT_PHASES else phase, what)


def _python(work: TracedWork, begin: int, end: int) -> Iterator[Gap]:
    """A stretch in which no operator ran, cut where phases begin and end."""
    left = end - begin
    at = max(bisect_right(work.phases, begin, key=attrgetter("start")) - 1, 0)
    for phase in work.phases[at:]:
        if phase.start >= end:
            break
        inside = min(end, phase.end) - max(begin, phase.start)
        if inside > 0:
            left -= inside
            yield Gap(inside, phase.name, PYTHON)
    if left > 0:
        yield Gap(left, NO_PHASE, PYTHON)


def _calls(work: TracedWork) -> list[_DriverCall]:
    """Calls of the driver that made the host wait, or that took long, by when they end."""
    calls = []
    for event in work.launches:
        name, operator = work.names[event.name] or "", work.names[event.operator]
        if event.length > _LONG_NS or _WAITS.search(name):
            what = name if operator is None else f"{name} in {operator}"
            calls.append(_DriverCall(event.start, event.start + event.length, what, _WAITS.search(name) is not None))
    return sorted(calls, key=attrgetter("end"))


def _in_call(calls: Sequence[_DriverCall], begin: int, end: int) -> str | None:
    """The call that the host was in while the device had nothing to do, or for whose end it had waited."""
    for call in calls[bisect_left(calls, begin, key=attrgetter("end")) :]:
        if min(call.end, end) - max(call.start, begin) > _MOST * (end - begin):
            return f"in {call.what}"
        if call.waits and call.start < begin and call.end <= end:
            return f"after {call.what}"
        if call.end > end:
            return None
    return None


def _towards(piece: Piece | None) -> str:
    return "the loop" if piece is None else f"launching {piece.operator or piece.name}"
