"""Where the time of traced steps went: every nanosecond of their window belongs to one piece or one gap."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import NamedTuple, get_args

from lm_profiler.analysis.trace.kernel_sums import Communication, communication_of
from lm_profiler.analysis.trace.pieces import (
    NO_PHASE,
    Piece,
    TracedWork,
    Use,
    gaps_between,
    phases_at,
    rank_of,
    shared_out,
)
from lm_profiler.analysis.trace.walk import DriverCall
from lm_profiler.record.parts import INPUT_PHASES

# calls that make the host wait for the device; a copy from or to pageable memory waits, whatever its name
_WAITS = re.compile(r"Synchronize|^(cuda|hip)Memcpy")

_LONG_NS = 10_000  # a call of the driver that lasts longer is worth a name: launching takes 5 microseconds

_MOST = 0.5  # the share of a gap that a call must fill to be its cause

PYTHON = "Python"
QUEUED = "between kernels that were queued"


class Gap(NamedTuple):
    """A time in which the device was idle."""

    ns: int
    phase: str
    what: str  # the call that made the host wait, the kernel that it launched next, or the operator that it was in
    at: int = 0  # when the host asked for what ended it


def gaps_of(work: TracedWork, pieces: Sequence[tuple[Piece, int]], idle: Sequence[tuple[int, int]]) -> Iterator[Gap]:
    """Yield the ``idle`` spans with their causes; on the CPU also ``pieces`` that only call others."""
    if not work.on_device:
        for piece, own in pieces:
            if piece.use == "dispatch":
                yield Gap(own, piece.phase, piece.name, piece.start)
        for begin, end in idle:
            for phase, ns in work.by_phase(begin, end):
                yield Gap(ns, phase, PYTHON, begin)
        return
    names = work.packed.names
    waits = {number for number, name in enumerate(names) if _WAITS.search(name or "")}
    calls = sorted((call for call in work.launches if call.length > _LONG_NS or call.name in waits), key=_end)
    following = sorted((piece for piece, _ in pieces), key=attrgetter("start"))
    for begin, end in idle:
        at = bisect_left(following, end, key=attrgetter("start"))
        next_ = following[at] if at < len(following) else None
        asked = end if next_ is None else next_.asked
        phase = phases_at(work.packed.phases, [end - 1])[0] if next_ is None else next_.phase
        if asked <= begin:
            yield Gap(end - begin, phase, QUEUED, asked)  # the host was ahead, so it is not the cause
            continue
        towards = "the loop" if next_ is None else f"launching {next_.operator or next_.name}"
        what = towards
        if held_by := _in_call(calls, waits, begin, end):
            operator = names[held_by[1].operator]
            what = f"{held_by[0]} {names[held_by[1].name]}" + (f" in {operator}" if operator is not None else "")
        # Split into the time in which the host handled the batch, and the rest.
        inside = sum(ns for at, ns in work.by_phase(begin, end) if at in INPUT_PHASES)
        at_input = phase in INPUT_PHASES
        if inside:
            yield Gap(inside, phase if at_input else "data", what, asked)
        if outside := end - begin - inside:
            yield Gap(outside, NO_PHASE if at_input else phase, what, asked)


def _end(call: DriverCall) -> int:
    return call.start + call.length


def _in_call(calls: Sequence[DriverCall], waits: Container[int], begin: int, end: int) -> tuple[str, DriverCall] | None:
    """Return the call that the host was in while the device was idle, or whose end it had waited for."""
    for call in calls[bisect_left(calls, begin, key=_end) :]:
        if min(_end(call), end) - max(call.start, begin) > _MOST * (end - begin):
            return "in", call
        if call.name in waits and call.start < begin and _end(call) <= end:
            return "after", call
        if _end(call) > end:
            return None
    return None


Weighed = tuple[Piece, float]  # a piece, and how many nanoseconds of it count
Floor = Callable[[Piece], float | None]  # returns nanoseconds of the whole call of an operator; None is unknown


@dataclass(frozen=True)
class Traced:
    """Pieces and gaps, which add up to the length of ``steps`` steps together."""

    pieces: list[Weighed]
    gaps: list[Gap]
    steps: int
    on_device: bool
    communication: Communication | None = None
    begins: tuple[int, ...] = ()  # when each of the steps began
    is_part: bool = False  # whether it is one of several steps

    def alone(self, step: int) -> Traced:
        """Return what was asked for in one of the steps, from 0 on, as if no other had been traced."""
        begin, end = (-inf, *self.begins[1:], inf)[step : step + 2]
        pieces = [weighed for weighed in self.pieces if begin <= weighed[0].asked < end]
        gaps = [gap for gap in self.gaps if begin <= gap.at < end]
        return replace(self, pieces=pieces, gaps=gaps, steps=1, begins=(), is_part=True)

    @cached_property
    def by_use(self) -> Mapping[Use, list[Weighed]]:
        by_use: dict[Use, list[Weighed]] = {use: [] for use in get_args(Use)}
        for weighed in self.pieces:
            by_use[weighed[0].use].append(weighed)
        return by_use

    @cached_property
    def seconds(self) -> Mapping[Use, float]:
        """The seconds of one step that went to each use."""
        return {use: sum(own for _, own in some) * 1e-9 / self.steps for use, some in self.by_use.items()}


def traced_of(work: TracedWork) -> Traced:
    """Break the traced steps down into pieces and gaps."""
    begin, end, pieces = work.begin, work.done, work.pieces
    starts, ends = [piece.start for piece in pieces], [piece.end for piece in pieces]
    own = shared_out(starts, ends, [rank_of(piece) for piece in pieces], begin, end).tolist()
    # A piece that runs entirely beside one of a lower rank has no own time.
    weighed = [(piece, ns) for piece, ns in zip(pieces, own, strict=True) if ns]
    begins = tuple(of.start for of in work.packed.steps)
    cuts = () if work.on_device else begins  # on the CPU a gap ends with its step
    idle = gaps_between([*starts, *cuts], [*ends, *cuts], begin, end)
    return Traced(
        pieces=[(piece, ns) for piece, ns in weighed if piece.use != "dispatch"],
        gaps=list(gaps_of(work, weighed, list(zip(*(side.tolist() for side in idle), strict=True)))),
        steps=len(work.packed.steps),
        on_device=work.on_device,
        communication=communication_of(work),
        begins=begins,
    )


def floored(pieces: Iterable[Weighed], floor: Floor) -> list[tuple[Piece, float, float | None]]:
    """Return each piece, its own time and its share of its call's floor, which is never more than its own time.

    ``floor`` asks for its name and inputs alone. All kernels that the call launched share it, as their times are.
    """
    # Each unknown call is separate.
    called = [(of.call if of.call >= 0 else -1 - at, of, own) for at, (of, own) in enumerate(pieces)]
    firsts, spent = dict[int, Piece](), defaultdict[int, float](float)
    for call, piece, own in called:
        firsts.setdefault(call, piece)
        spent[call] += own
    known: dict[tuple[str | None, int], float | None] = {}  # equal inputs of a trace are one object
    shares: dict[int, float | None] = {}
    for call, first in firsts.items():
        key = first.operator, id(first.inputs)
        if key not in known:
            known[key] = floor(first)
        least = known[key]
        shares[call] = None if least is None else min(least / spent[call], 1.0)
    return [(of, own, None if (share := shares[call]) is None else share * own) for call, of, own in called]
