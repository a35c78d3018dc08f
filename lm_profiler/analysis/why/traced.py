"""Divides the time of traced steps into pieces of work and gaps: each nanosecond belongs to exactly one of them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import Literal, NamedTuple, get_args

from lm_profiler.analysis.trace.kernel_sums import Communication, communication_of
from lm_profiler.analysis.trace.needless_work import needless_work
from lm_profiler.analysis.trace.pieces import (
    Piece,
    TracedWork,
    Use,
    gaps_between,
    own_times_ns,
    phases_at,
    rank_of,
)
from lm_profiler.analysis.trace.walk import DriverCall
from lm_profiler.record.parts import INPUT_PHASES, NO_PHASE
from lm_profiler.record.run_record import NeedlessWork

# calls of the driver that make the host wait for the device; copies from or to pageable memory do too
_WAITS = re.compile(r"Synchronize|^(cuda|hip)Memcpy")

_LAUNCHES = re.compile(r"Launch|EnqueueKernel|AppendLaunch")

_LEAST_CAUSE_NS = 10_000  # only longer calls of the driver can be the cause of a gap: a launch takes 5 microseconds

_LEAST_SHARE = 0.5  # a call is the cause of a gap if it fills at least this share of it

PYTHON = "Python"
QUEUED = "between kernels that were queued"


# what the host did while the device was idle
GapCause = Literal[
    "queued",  # it had already launched the next kernel
    "launching",  # it was about to launch the next kernel
    "waiting",  # it waited for the device
    "driver",  # it was in another call of the driver
    "input",  # it handled a batch
    "end",  # it launched nothing more
    "python",  # there is no device
]


class Gap(NamedTuple):
    """A time in which the device was idle."""

    ns: int
    phase: str
    what: str  # the call in which the host was, the kernel that it launched next, or an operator that only calls others
    # when the host had launched the kernel that ended the gap; on the CPU, when the gap began
    launched_at: int = 0
    cause: GapCause = "python"


def gaps_of(
    work: TracedWork,
    pieces: Sequence[tuple[Piece, int]],
    idle: Sequence[tuple[int, int]],
) -> Iterator[Gap]:
    """Yield the gaps: the ``idle`` spans (begin and end of each).

    On the CPU, ``pieces`` in which an operator only calls other operators are gaps, too.
    """
    if work.on_device:
        yield from _gaps_on_device(work, pieces, idle)
        return
    for piece, own_ns in pieces:
        if piece.use == "dispatch":
            yield Gap(own_ns, piece.phase, what=piece.name, launched_at=piece.start)
    for begin, end in idle:
        for phase, phase_ns in work.split_by_phase(begin, end):
            yield Gap(phase_ns, phase, what=PYTHON, launched_at=begin)


def _gaps_on_device(
    work: TracedWork,
    pieces: Sequence[tuple[Piece, int]],
    idle: Sequence[tuple[int, int]],
) -> Iterator[Gap]:
    """Yield each idle span with its cause: the host was ahead, waited for the device, or was launching."""
    names = work.packed.names
    # the numbers of the names of calls in which the host waits
    waiting_calls = {
        number for number, name in enumerate(names) if _WAITS.search(name or "")
    }
    long_calls = []
    for call in work.launches:
        if call.length > _LEAST_CAUSE_NS or call.name in waiting_calls:
            long_calls.append(call)
    long_calls.sort(key=_end)
    by_start = sorted((piece for piece, _ in pieces), key=attrgetter("start"))

    for begin, end in idle:
        gap = _gap_before_next_piece(work, by_start, begin, end)
        if gap.launched_at <= begin:
            # the host was ahead, so it is not the cause
            yield gap._replace(what=QUEUED, cause="queued")
            continue
        blocking = _call_in_gap(long_calls, waiting_calls, begin, end)
        if blocking is not None:
            cause = _cause_of(names[blocking.call.name] or "")
            gap = gap._replace(what=blocking.words(names), cause=cause)
        input_ns = 0
        for name, phase_ns in work.split_by_phase(begin, end):
            if name in INPUT_PHASES:
                input_ns += phase_ns
        yield from _without_input(gap, input_ns)


def _gap_before_next_piece(
    work: TracedWork, by_start: Sequence[Piece], begin: int, end: int
) -> Gap:
    """Return the idle span from ``begin`` to ``end``, as if launching the piece that ends it were the cause.

    ``by_start`` are all pieces, sorted by their start. If none of them follows, the loop is the cause.
    """
    ns = end - begin
    following = bisect_left(by_start, end, key=attrgetter("start"))
    if following == len(by_start):
        phase = phases_at(work.packed.phases, [end - 1])[0]
        return Gap(ns, phase, what="the loop", launched_at=end, cause="end")
    next_piece = by_start[following]
    what = f"launching {next_piece.operator or next_piece.name}"
    return Gap(ns, next_piece.phase, what, next_piece.launched_at, cause="launching")


def _without_input(gap: Gap, input_ns: int) -> Iterator[Gap]:
    """Yield the ``input_ns`` of a gap in which the host handled the batch, and the rest of it, as two gaps.

    ``gap.phase`` goes to the part that it fits. The other part gets ``data`` if it is input, or no phase if it is not.
    """
    other_ns = gap.ns - input_ns
    input_phase, other_phase = "data", gap.phase
    if gap.phase in INPUT_PHASES:
        input_phase, other_phase = gap.phase, NO_PHASE
    if input_ns:
        yield gap._replace(ns=input_ns, phase=input_phase, cause="input")
    if other_ns:
        yield gap._replace(ns=other_ns, phase=other_phase)


def _cause_of(call_name: str) -> GapCause:
    """Return what the host does in a call of the driver."""
    if _WAITS.search(call_name):
        return "waiting"
    if _LAUNCHES.search(call_name):
        return "launching"
    return "driver"


def _end(call: DriverCall) -> int:
    """Return when ``call`` ended; a sort key."""
    return call.start + call.length


class _BlockingCall(NamedTuple):
    """A call of the host that explains idle time of the device.

    ``relation`` is "in" if the device was idle during the call, and "after" if it was idle once the call had ended.
    """

    relation: str
    call: DriverCall

    def words(self, names: Sequence[str | None]) -> str:
        """Return, for example, "after cudaStreamSynchronize in aten::item"; ``names`` are those of ``PackedTrace``."""
        words = f"{self.relation} {names[self.call.name]}"
        operator = names[self.call.operator]
        if operator is None:
            return words
        return f"{words} in {operator}"


def _call_in_gap(
    calls: Sequence[DriverCall], waiting_calls: Container[int], begin: int, end: int
) -> _BlockingCall | None:
    """Return the call that the host was in while the device was idle, or whose end it had waited for.

    ``calls`` are sorted by their end.
    """
    for call in calls[bisect_left(calls, begin, key=_end) :]:
        time_in_gap_ns = min(_end(call), end) - max(call.start, begin)
        if time_in_gap_ns > _LEAST_SHARE * (end - begin):
            return _BlockingCall("in", call)
        if call.name in waiting_calls and call.start < begin and _end(call) <= end:
            return _BlockingCall("after", call)
        if _end(call) > end:  # all further calls end after the gap, too
            return None
    return None


# a piece, and its own nanoseconds: those in which no piece of lower rank runs
Weighed = tuple[Piece, float]
# returns nanoseconds of the whole call of an operator; None means unknown
Floor = Callable[[Piece], float | None]


@dataclass(frozen=True)
class Traced:
    """Pieces and gaps, which add up to the length of ``steps`` steps together."""

    pieces: list[Weighed]
    gaps: list[Gap]
    steps: int
    on_device: bool
    communication: Communication | None = None
    begins: tuple[int, ...] = ()  # when each of the steps began
    # work that a mean step may have done needlessly
    needless: tuple[NeedlessWork, ...] = ()
    is_part: bool = False  # whether it is one of several steps

    def only_step(self, step: int) -> Traced:
        """Return what the host launched in one of the steps, numbered from 0, as if no other had been traced."""
        # The first step has all that was launched before the second one began, and the last all that came later.
        boundaries = (-inf, *self.begins[1:], inf)
        begin, end = boundaries[step], boundaries[step + 1]
        pieces = []
        for piece, own_ns in self.pieces:
            if begin <= piece.launched_at < end:
                pieces.append((piece, own_ns))
        gaps = [gap for gap in self.gaps if begin <= gap.launched_at < end]
        return replace(self, pieces=pieces, gaps=gaps, steps=1, begins=(), is_part=True)

    @cached_property
    def by_use(self) -> Mapping[Use, list[Weighed]]:
        """The pieces by their use."""
        by_use: dict[Use, list[Weighed]] = {use: [] for use in get_args(Use)}
        for piece, own_ns in self.pieces:
            by_use[piece.use].append((piece, own_ns))
        return by_use

    @cached_property
    def seconds(self) -> Mapping[Use, float]:
        """The seconds of one step that went to each use."""
        seconds: dict[Use, float] = {}
        for use, weighed in self.by_use.items():
            use_ns = sum(own_ns for _, own_ns in weighed)
            seconds[use] = use_ns * 1e-9 / self.steps
        return seconds


def broken_down(work: TracedWork) -> Traced:
    """Break the traced steps down into pieces, each with its own nanoseconds, and gaps; together they are the steps."""
    begin, end, pieces = work.begin, work.done, work.pieces
    starts = [piece.start for piece in pieces]
    ends = [piece.end for piece in pieces]
    ranks = [rank_of(piece) for piece in pieces]
    own_times = own_times_ns(starts, ends, ranks, begin, end).tolist()
    weighed = []
    for piece, own_ns in zip(pieces, own_times, strict=True):
        if own_ns:
            # a piece that runs entirely beside one of a lower rank has no own time
            weighed.append((piece, own_ns))

    step_begins = tuple(step.start for step in work.packed.steps)
    # On the CPU a gap ends with its step: an empty interval at the begin of each step cuts a gap there.
    boundaries = () if work.on_device else step_begins
    idle_starts, idle_ends = gaps_between(
        [*starts, *boundaries], [*ends, *boundaries], begin, end
    )
    idle = list(zip(idle_starts.tolist(), idle_ends.tolist(), strict=True))
    return Traced(
        pieces=[
            (piece, own_ns) for piece, own_ns in weighed if piece.use != "dispatch"
        ],
        gaps=list(gaps_of(work, weighed, idle)),
        steps=len(work.packed.steps),
        on_device=work.on_device,
        communication=communication_of(work),
        begins=step_begins,
        needless=tuple(needless_work(work, weighed)),
    )


def with_floors(
    pieces: Iterable[Weighed], floor: Floor
) -> list[tuple[Piece, float, float | None]]:
    """Return each piece with its own time, and with its floor: the least time that it could take (None: unknown).

    ``floor`` returns the floor of a whole operator call, which must depend only on the operator and its inputs. It is
    divided among the kernels of the call in proportion to their times. No floor exceeds the piece's own time.
    """
    calls = []  # the number of the call, the piece, and its own time
    first_pieces: dict[int, Piece] = {}
    call_ns: defaultdict[int, float] = defaultdict(float)
    for index, (piece, own_ns) in enumerate(pieces):
        # a piece of an unknown call gets a call number of its own
        call = piece.call_number if piece.call_number >= 0 else -1 - index
        calls.append((call, piece, own_ns))
        first_pieces.setdefault(call, piece)
        call_ns[call] += own_ns

    # by the operator and the id of its inputs: equal inputs are the same object
    floors_ns: dict[tuple[str | None, int], float | None] = {}
    floor_shares: dict[int, float | None] = {}
    for call, piece in first_pieces.items():
        key = (piece.operator, id(piece.inputs))
        if key not in floors_ns:
            floors_ns[key] = floor(piece)
        floor_ns = floors_ns[key]
        floor_shares[call] = None
        if floor_ns is not None:
            floor_shares[call] = min(floor_ns / call_ns[call], 1.0)

    pieces_with_floors: list[tuple[Piece, float, float | None]] = []
    for call, piece, own_ns in calls:
        share = floor_shares[call]
        floor_of_piece_ns = None
        if share is not None:
            floor_of_piece_ns = share * own_ns
        pieces_with_floors.append((piece, own_ns, floor_of_piece_ns))
    return pieces_with_floors
