"""What ran in traced steps, piece by piece, from one walk over the trace; and what pieces cover together, and leave.

Times are integers of nanoseconds.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.trace.kinds import kernel_kind, operator_kind
from lm_profiler.analysis.trace.walk import DriverCall, Inputs, OperatorCalls, Packed, Range, trace_events, walk
from lm_profiler.record.kernels import Kind
from lm_profiler.record.parts import INPUT_PHASES

Times = NDArray[np.int64]

NO_PHASE = "other"  # the phase of what lies in none

# What a device's time is used for. ``dispatch``, on the CPU alone: an operator that only calls others.
Use = Literal["products", "memory", "communication", "input", "dispatch"]

_RANKS: dict[Use, int] = {"products": 0, "memory": 1, "communication": 3, "input": 4, "dispatch": 5}
_UNKNOWN = 2  # of memory's: what is known by name goes first, for a compiled region may hold it

# operators that compute nothing: views, empty tensors, autograd's nodes, what surrounds compiled graphs
_CALLS_ONLY = re.compile(
    r"^(autograd|profiler|torch)::|^\w+Backward\d*$|^(detach|Optimizer\.)|^Torch|^AOTDispatcher|^Pregraph|^CompiledFunction|"
    r"^aten::(_?(unsafe_)?(view|reshape|split|chunk|unbind|expand|empty|new_empty|to|narrow|select|slice|squeeze|"
    r"unsqueeze|t|transpose|permute|detach|alias|flatten|unflatten|item|is_\w+|as_strided|resolve_(conj|neg)|result_type|"
    r"resize|set|lift_fresh|contiguous|movedim|diagonal|real|imag|numpy_T|unfold|size|stride|broadcast_to|swapaxes|"
    r"empty_like|empty_strided|new_empty_strided|expand_as|view_as|conj|view_as_(real|complex)|split_with_sizes)_?(_alias)?)$"
)


class Piece(NamedTuple):
    """One kernel, or one call of an operator where the device is the CPU. None is unknown, or none."""

    start: int
    end: int
    asked: int  # when the host had asked for it
    use: Use
    kind: Kind
    name: str
    operator: str | None
    module: str | None
    phase: str
    call: int  # tells the calls of ``operator`` apart: one may launch several kernels
    inputs: Inputs | None
    own: int = 0  # its length without that of the operators that it calls
    caller: str | None = None  # the operator that called it, or launched it
    again: bool = False  # a call of an operator by itself, another overload, which is no further call


@dataclass(frozen=True)
class TracedWork:
    """The work that was wanted between ``begin`` and ``end``, the window of the whole ``steps``."""

    packed: Packed
    pieces: list[Piece]
    launches: list[DriverCall]  # all calls of the driver; none where the device is the CPU
    begin: int
    end: int

    @property
    def on_device(self) -> bool:
        return self.packed.has_device

    @cached_property
    def done(self) -> int:
        """When the last of it was over: the device may still work off what the last step launched."""
        return max([self.end, *(piece.end for piece in self.pieces)]) if self.on_device else self.end

    @cached_property
    def _phase_starts(self) -> list[int]:
        return [phase.start for phase in self.packed.phases]

    def by_phase(self, begin: int, end: int) -> Iterator[tuple[str, int]]:
        """Yield the phases of a stretch of time, with how much of it lies in each, and outside all of them."""
        left, phases = end - begin, self.packed.phases
        first = max(bisect_right(self._phase_starts, begin) - 1, 0)
        for at in range(first, len(phases)):  # a slice would copy all later phases for each of many gaps
            start, stop, name = phases[at]
            if start >= end:
                break
            inside = min(end, stop) - max(begin, start)
            if inside > 0:
                left -= inside
                yield name, inside
        if left > 0:
            yield NO_PHASE, left


def traced_work(packed: Packed) -> TracedWork:
    """Return what ran in the trace's steps: kernels where it has any, else operators of the CPU."""
    begin, end = packed.window()
    calls, launches = walk(packed)
    pieces = _kernels(packed, launches, begin, end) if packed.has_device else _operators(packed, calls, begin, end)
    return TracedWork(packed, list(pieces), launches if packed.has_device else [], begin, end)


def _kernels(packed: Packed, calls: Sequence[DriverCall], begin: int, end: int) -> Iterator[Piece]:
    """Yield what was launched while the steps lasted, by its start; a replayed CUDA graph has one launch."""
    launches = {call.correlation: call for call in calls}
    # Without its launch there is only the work itself to tell when it was wanted.
    work = list(packed.device())
    asked_by = [launches.get(of[3]) or DriverCall(of[0], 0, -1, of[3], -1, -1, -1, -1) for of in work]
    phases = phases_at(packed.phases, [launch.start for launch in asked_by])
    for (start, length, name, _), launch, phase in zip(work, asked_by, phases, strict=True):
        if not begin <= launch.start <= end:
            continue
        called, operator = packed.names[name] or "", packed.names[launch.operator]
        kind = kernel_kind(called, operator)
        module, inputs = packed.names[launch.module], packed.inputs[launch.inputs]
        use, asked = _use(kind, phase), launch.start + launch.length
        inside = (phase, launch.number, inputs, length, operator)
        yield Piece(start, start + length, asked, use, kind, called, operator, module, *inside)


def _operators(packed: Packed, calls: OperatorCalls, begin: int, end: int) -> Iterator[Piece]:
    wanted = (begin <= calls.start) & (calls.start <= end)
    calls = OperatorCalls(*(column[wanted] for column in calls))
    start, stop, numbers = (column.tolist() for column in (calls.start, calls.start + calls.length, calls.number))
    names, callers, modules = ([packed.names[one] for one in column.tolist()] for column in calls[2:5])
    called, phases = [name or "" for name in names], phases_at(packed.phases, calls.start)
    works = [*map(_work_of, called, (calls.own < calls.length).tolist(), phases)]
    kinds, uses = ([work[at] for work in works] for at in (0, 1))
    inputs = [packed.inputs[one] for one in calls.inputs.tolist()]
    own, again = calls.own.tolist(), calls.again.tolist()
    columns = (start, stop, start, uses, kinds, called, called, modules, phases, numbers, inputs, own, callers, again)
    return map(Piece._make, zip(*columns, strict=True))


@lru_cache(maxsize=4096)
def _work_of(name: str, calls_others: bool, phase: str) -> tuple[Kind, Use]:
    """Return what the operator ``name`` does in ``phase``, and what its time is used for."""
    kind = operator_kind(name)
    composite = name.startswith("aten::") and calls_others
    only_calls = kind == "other" and (composite or _CALLS_ONLY.match(name) is not None)
    return kind, "dispatch" if only_calls else _use(kind, phase)


def _use(kind: Kind, phase: str) -> Use:
    if phase in INPUT_PHASES or kind == "host_copies":
        return "input"
    if kind in ("matmul", "attention"):
        return "products"
    return "communication" if kind == "communication" else "memory"


def rank_of(piece: Piece) -> int:
    """Return the rank: of things that run at the same time, the one of the lowest rank has the time."""
    return _UNKNOWN if piece.use == "memory" and piece.kind == "other" else _RANKS[piece.use]


def work_of(path: Path) -> TracedWork | None:
    """Return what ran in the steps of the trace in ``path``; None where there is none, or none with a whole step."""
    packed = Packed(trace_events(path)) if path.exists() else None
    return traced_work(packed) if packed is not None and packed.steps and packed.phases else None


def phases_at(phases: Sequence[Range], moments: Sequence[int] | Times) -> list[str]:
    """Return whose host code runs at each of the ``moments``; ``phases`` come by their start."""
    starts, ends = np.array([(0, 0), *(phase[:2] for phase in phases)]).T
    names, last = [NO_PHASE, *(phase.name for phase in phases)], np.searchsorted(starts, moments, side="right") - 1
    return [names[at] for at in np.where(np.asarray(moments) < ends[last], last, 0).tolist()]


def union_of(starts: Sequence[int], ends: Sequence[int], begin: int, end: int) -> tuple[Times, Times]:
    """Return what any interval covers between ``begin`` and ``end``, without overlaps: where it begins and ends."""
    order = np.argsort(np.asarray(starts, dtype=np.int64), kind="stable")
    start, stop = (np.clip(np.asarray(side, dtype=np.int64)[order], begin, end) for side in (starts, ends))
    reached = np.maximum.accumulate(stop)
    first = np.ones(len(order), dtype=bool)
    first[1:] = start[1:] > reached[:-1]
    return start[first], reached[np.roll(first, -1)]


def shared_out(starts: Sequence[int], ends: Sequence[int], ranks: Sequence[int], begin: int, end: int) -> Times:
    """Return how much of the time from ``begin`` to ``end`` is each interval's own, in nanoseconds.

    What several cover is the one's of the lowest rank; among equals, the one's that began first.
    """
    start, stop = (np.clip(np.asarray(side, dtype=np.int64), begin, end) for side in (starts, ends))
    rank = np.asarray(ranks)
    own = np.zeros(len(start), dtype=np.int64)
    order = np.argsort(start, kind="stable")
    # By rank, the lowest first: each has what neither a lower rank nor an earlier interval of its own covers.
    for level in np.unique(rank):
        mine = order[rank[order] == level]
        reached = np.maximum.accumulate(stop[mine])
        first = start[mine].copy()
        np.maximum(first[1:], reached[:-1], out=first[1:])
        last = np.maximum(stop[mine], first)
        higher = rank < level
        own[mine] = last - first - covered(start[higher], stop[higher], first, last, begin, end)
    return own


def covered(starts: Times, ends: Times, first: Times, last: Times, begin: int, end: int) -> Times:
    """Return how much of each stretch from ``first`` to ``last`` any of the intervals covers."""
    if not len(starts):
        return np.zeros(len(first), dtype=np.int64)
    left, right = union_of(starts, ends, begin, end)  # type: ignore[arg-type]
    before = np.concatenate(([0], np.cumsum(right - left)))

    def until(moment: Times) -> Times:
        at = np.searchsorted(left, moment, side="right")
        inside = np.minimum(moment, right[at - 1]) - left[at - 1]
        return np.where(at > 0, before[at - 1] + inside, 0)

    return until(last) - until(first)


def gaps_between(starts: Sequence[int], ends: Sequence[int], begin: int, end: int) -> tuple[Times, Times]:
    """Return where nothing runs between ``begin`` and ``end``: from when to when."""
    if not len(starts):
        return np.array([begin]), np.array([end])
    left, right = union_of(starts, ends, begin, end)
    first, last = np.concatenate(([begin], right)), np.concatenate((left, [end]))
    some = last > first
    return first[some], last[some]
