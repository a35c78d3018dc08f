"""What the time of traced steps went to: every nanosecond of their window is one piece's, or a gap's."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple, get_args

from lm_profiler.analysis.steps.statistics import student
from lm_profiler.analysis.trace.kernel_sums import Communication, communication_of
from lm_profiler.analysis.trace.pieces import (
    INPUT_PHASES,
    NO_PHASE,
    Piece,
    TracedWork,
    Use,
    gaps_between,
    phase_finder,
    rank_of,
    shared_out,
)

# calls that make the host wait for the device; a copy from or to pageable memory is one, whatever its name says
_WAITS = re.compile(r"Synchronize|^(cuda|hip)Memcpy")

_LONG_NS = 10_000  # a call of the driver that lasts longer is worth a name: launching takes 5 microseconds

_MOST = 0.5  # the share of a gap that a call must fill to be its cause

PYTHON = "Python"
QUEUED = "between kernels that were queued"


class Gap(NamedTuple):
    """A time in which the device had nothing to do."""

    ns: int
    phase: str
    what: str  # the call that made the host wait, what it was about to launch, or the operator that it was in


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
    """Yield what the ``idle`` stretches of time are due to; on the CPU also ``pieces`` that only call others."""
    if not work.on_device:
        for piece, own in pieces:
            if piece.use == "dispatch":
                yield Gap(own, piece.phase, piece.name)
        for begin, end in idle:
            for phase, ns in work.by_phase(begin, end):
                yield Gap(ns, phase, PYTHON)
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
    """Split a gap before a kernel of ``phase``: what passed while the host saw to the batch, and the rest."""
    inside = sum(ns for at, ns in work.by_phase(begin, end) if at in INPUT_PHASES)
    if inside:
        yield Gap(inside, phase if phase in INPUT_PHASES else "data", what)
    if outside := end - begin - inside:
        yield Gap(outside, NO_PHASE if phase in INPUT_PHASES else phase, what)


def _calls(work: TracedWork) -> list[_DriverCall]:
    """Return calls of the driver that made the host wait, or that took long, by when they end."""
    calls = []
    for event in work.launches:
        name, operator = work.names[event.name] or "", work.names[event.operator]
        waits = _WAITS.search(name) is not None
        if waits or event.length > _LONG_NS:
            what = name if operator is None else f"{name} in {operator}"
            calls.append(_DriverCall(event.start, event.start + event.length, what, waits))
    return sorted(calls, key=attrgetter("end"))


def _in_call(calls: Sequence[_DriverCall], begin: int, end: int) -> str | None:
    """Return the call that the host was in while the device had nothing to do, or for whose end it had waited."""
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


Weighed = tuple[Piece, float]  # a piece, and how many nanoseconds of it count


@dataclass(frozen=True)
class Traced:
    """Pieces and gaps, which add up to the length of ``steps`` steps together."""

    pieces: list[Weighed]
    gaps: list[Gap]
    steps: int
    on_device: bool
    # half the 95 % interval of the mean step's time in products or memory, a share of it; None of one step
    scatter: float | None = None
    communication: Communication | None = None

    def of(self, use: Use) -> Sequence[Weighed]:
        return self._by_use[use]

    def seconds(self, use: Use) -> float:
        """Return the seconds of one step that went to ``use``."""
        return self._seconds[use]

    @cached_property
    def _by_use(self) -> Mapping[Use, list[Weighed]]:
        by_use: dict[Use, list[Weighed]] = {use: [] for use in get_args(Use)}
        for weighed in self.pieces:
            by_use[weighed[0].use].append(weighed)
        return by_use

    @cached_property
    def _seconds(self) -> Mapping[Use, float]:
        return {use: sum(own for _, own in some) * 1e-9 / self.steps for use, some in self._by_use.items()}


def traced_of(work: TracedWork) -> Traced:
    """Break the traced steps down into pieces and gaps."""
    begin, end, pieces = work.begin, work.end, work.pieces
    if work.on_device:
        # The device may still work off what the last step launched.
        end = max([end, *(piece.end for piece in pieces)])
    starts, ends = [piece.start for piece in pieces], [piece.end for piece in pieces]
    own = shared_out(starts, ends, [rank_of(piece) for piece in pieces], begin, end).tolist()
    # What runs wholly beside something of a lower rank has no time of its own.
    weighed = [(piece, ns) for piece, ns in zip(pieces, own, strict=True) if ns]
    idle = gaps_between(starts, ends, begin, end)
    return Traced(
        pieces=[(piece, ns) for piece, ns in weighed if piece.use != "dispatch"],
        gaps=list(gaps_of(work, weighed, list(zip(*(side.tolist() for side in idle), strict=True)))),
        steps=len(work.steps),
        on_device=work.on_device,
        scatter=_scatter(weighed, [of.start for of in work.steps]),
        communication=communication_of(work),
    )


def _scatter(weighed: Sequence[Weighed], begins: Sequence[int]) -> float | None:
    """Return the scatter, from the variance of a step's time over its mean, pooled over products and memory."""
    sums = {use: [0.0] * len(begins) for use in ("products", "memory")}
    for piece, own in weighed:
        of_use = sums.get(piece.use)
        if of_use is not None:
            of_use[max(bisect_right(begins, piece.start) - 1, 0)] += own
    rates = [[own / (sum(of) / len(of)) - 1.0 for own in of] for of in sums.values() if any(of)]
    freedom = (len(begins) - 1) * len(rates)
    if freedom < 1:
        return None
    variance = sum(off * off for of in rates for off in of) / freedom
    return student(freedom, 0.95) * math.sqrt(variance / len(begins))


# nanoseconds of the whole call of an operator, from its name and inputs alone; None is unknown
Floor = Callable[[Piece], float | None]


def floored(pieces: Iterable[Weighed], floor: Floor) -> list[tuple[Piece, float, float | None]]:
    """Return each piece, its own time and its share of its call's floor, which is never more than its own time.

    The floor of an operator's call is shared by all kernels that it launched, as their times are.
    """
    calls: defaultdict[int, list[Weighed]] = defaultdict(list)
    for number, weighed in enumerate(pieces):
        call = weighed[0].call
        calls[call if call >= 0 else -1 - number].append(weighed)  # an unknown call is one of its own
    shared: list[tuple[Piece, float, float | None]] = []
    known: dict[tuple[str | None, int], float | None] = {}  # equal inputs of a trace are one object
    for together in calls.values():
        first = together[0][0]
        key = first.operator, id(first.inputs)
        if key not in known:
            known[key] = floor(first)
        least = known[key]
        share = None if least is None else min(least / sum(own for _, own in together), 1.0)
        shared += [(piece, own, None if share is None else share * own) for piece, own in together]
    return shared
