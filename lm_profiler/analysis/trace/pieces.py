"""The pieces of work in traced steps, from one walk over the trace; the time that they cover together, and the gaps.

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
from lm_profiler.analysis.trace.packed_trace import NONE, Inputs, PackedTrace, Range
from lm_profiler.analysis.trace.trace_file import trace_events
from lm_profiler.analysis.trace.walk import DriverCall, OperatorCalls, walk
from lm_profiler.record.kernels import Kind
from lm_profiler.record.parts import INPUT_PHASES, NO_PHASE

Times = NDArray[np.int64]


# What a device's time is used for. ``dispatch``, on the CPU alone: an operator that only calls others.
Use = Literal["products", "memory", "communication", "input", "dispatch"]

# of what runs at the same time, the piece of the lowest rank has the time
_RANKS: dict[Use, int] = {
    "products": 0,
    "memory": 1,
    "communication": 3,
    "input": 4,
    "dispatch": 5,
}
# what is known by name goes first, for a compiled region may hold it
_RANK_OF_UNKNOWN_MEMORY = 2

# operators that compute nothing: views, empty tensors, autograd's nodes, what surrounds compiled graphs
_CALLS_ONLY = re.compile(
    r"^(autograd|profiler|torch)::|^\w+Backward\d*$|^(detach|Optimizer\.)|^Torch|^AOTDispatcher|^Pregraph|^CompiledFunction|"
    r"^aten::(_?(unsafe_)?(view|reshape|split|chunk|unbind|expand|empty|new_empty|to|narrow|select|slice|squeeze|"
    r"unsqueeze|t|transpose|permute|detach|alias|flatten|unflatten|item|is_\w+|as_strided|resolve_(conj|neg)|result_type|"
    r"resize|set|lift_fresh|contiguous|movedim|diagonal|real|imag|numpy_T|unfold|size|stride|broadcast_to|swapaxes|"
    r"empty_like|empty_strided|new_empty_strided|expand_as|view_as|conj|view_as_(real|complex)|split_with_sizes)_?(_alias)?)$"
)


# An operator that calls others works itself, too, if it has so much time, and so much of it, apart from theirs.
_LEAST_OWN_NS = 100_000
_LEAST_OWN_SHARE = 0.5  # of the duration of the operator


class Piece(NamedTuple):
    """One kernel, or one call of an operator where the device is the CPU. None means unknown, or none."""

    start: int
    end: int
    launched_at: int  # when the host had launched it; on the CPU, when it started
    use: Use
    kind: Kind
    name: str
    operator: str | None
    module: str | None  # path and class of the module, as ``PackedTrace`` names it
    phase: str
    call_number: int  # the same for all kernels that one call of ``operator`` launched; negative if that is unknown
    inputs: Inputs | None
    own_ns: int = 0  # its length without that of the operators that it calls
    caller: str | None = None  # the operator that called it, or launched it
    is_overload: bool = False  # a call of an operator by itself, another overload, which is no further call
    # the process group of a collective, where the profiler writes it
    group: str | None = None
    collective: str | None = None  # the profiler's own name of a collective
    copied_bytes: int | None = None  # of a copy or a memset


@dataclass(frozen=True)
class TracedWork:
    """The work that the host launched between ``begin`` and ``end``: the whole traced steps."""

    packed: PackedTrace
    pieces: list[Piece]
    launches: list[DriverCall]  # all calls of the driver; none if the device is the CPU
    begin: int
    end: int

    @property
    def on_device(self) -> bool:
        return self.packed.has_device

    @cached_property
    def done(self) -> int:
        """When the last piece was over: the device may still run after ``end`` what the last step launched."""
        if not self.on_device:
            return self.end
        return max([self.end, *(piece.end for piece in self.pieces)])

    @cached_property
    def _phase_starts(self) -> list[int]:
        return [phase.start for phase in self.packed.phases]

    def split_by_phase(self, begin: int, end: int) -> Iterator[tuple[str, int]]:
        """Yield the phases of a stretch of time, with how much of it lies in each, and outside all of them."""
        outside_ns, phases = end - begin, self.packed.phases
        first = max(bisect_right(self._phase_starts, begin) - 1, 0)
        for index in range(first, len(phases)):
            # a slice would copy all later phases for each of many gaps
            start, stop, name = phases[index]
            if start >= end:
                break
            inside_ns = min(end, stop) - max(begin, start)
            if inside_ns > 0:
                outside_ns -= inside_ns
                yield name, inside_ns
        if outside_ns > 0:
            yield NO_PHASE, outside_ns


def traced_work(packed: PackedTrace) -> TracedWork:
    """Return what ran in the trace's steps: kernels where it has any, else operators of the CPU."""
    begin, end = packed.steps_window()
    calls, launches = walk(packed)
    if packed.has_device:
        return TracedWork(
            packed, list(_kernels(packed, launches, begin, end)), launches, begin, end
        )
    return TracedWork(
        packed,
        pieces=list(_operators(packed, calls, begin, end)),
        launches=[],
        begin=begin,
        end=end,
    )


def read_traced_work(path: Path) -> TracedWork | None:
    """Return what ran in the steps of the trace in ``path``; None if there is none, or none with a whole step."""
    if not path.exists():
        return None
    packed = PackedTrace(trace_events(path))
    if not packed.steps or not packed.phases:
        return None
    return traced_work(packed)


def _kernels(
    packed: PackedTrace, calls: Sequence[DriverCall], begin: int, end: int
) -> Iterator[Piece]:
    """Yield the kernels launched between ``begin`` and ``end``, by their start.

    ``calls`` launched them; a kernel and its launch have the same correlation. All kernels of a replayed CUDA graph
    have that of its one launch.
    """
    launch_by_correlation = {call.correlation: call for call in calls}
    kernels = list(packed.device_rows())
    launches = []
    for kernel in kernels:
        launch = launch_by_correlation.get(kernel.correlation)
        if launch is None:
            # the trace has no launch of it: assume that it was launched when it started
            launch = DriverCall(
                start=kernel.start,
                length=0,
                name=NONE,
                correlation=kernel.correlation,
                operator=NONE,
                module=NONE,
                number=NONE,
                inputs=NONE,
            )
        launches.append(launch)
    phases = phases_at(packed.phases, [launch.start for launch in launches])

    # NONE is -1, the number of the last name and of the last inputs, which are None.
    for kernel, launch, phase in zip(kernels, launches, phases, strict=True):
        is_launched_in_steps = begin <= launch.start <= end
        if not is_launched_in_steps:
            continue
        name = packed.names[kernel.name] or ""
        operator = packed.names[launch.operator]
        kernel_key = (kernel.start, kernel.correlation)
        kind = kernel_kind(name, operator)
        yield Piece(
            start=kernel.start,
            end=kernel.start + kernel.length,
            launched_at=launch.start + launch.length,
            use=_use_of(kind, phase),
            kind=kind,
            name=name,
            operator=operator,
            module=packed.names[launch.module],
            phase=phase,
            call_number=launch.number,
            inputs=packed.inputs[launch.inputs],
            own_ns=kernel.length,
            caller=operator,
            group=packed.groups.get(kernel_key),
            collective=packed.collective_names.get(kernel_key),
            copied_bytes=packed.copied_bytes.get(kernel_key),
        )


def _operators(
    packed: PackedTrace, calls: OperatorCalls, begin: int, end: int
) -> Iterator[Piece]:
    """Yield the operators that were called while the steps lasted, in the order in which they end."""
    is_wanted = (begin <= calls.start) & (calls.start <= end)
    calls = OperatorCalls(*(column[is_wanted] for column in calls))
    phases = phases_at(packed.phases, calls.start)
    # thousands: as Python's own numbers
    rows = zip(*(column.tolist() for column in calls), phases, strict=True)
    for (
        start,
        length,
        name_number,
        caller,
        module,
        number,
        inputs,
        own_ns,
        is_again,
        phase,
    ) in rows:
        name = packed.names[name_number] or ""
        calls_others = own_ns < length and not _works_itself(own_ns, length)
        kind, use = _work_of_operator(name, calls_others, phase)
        yield Piece(
            start=start,
            end=start + length,
            launched_at=start,
            use=use,
            kind=kind,
            name=name,
            operator=name,
            module=packed.names[module],
            phase=phase,
            call_number=number,
            inputs=packed.inputs[inputs],
            own_ns=own_ns,
            caller=packed.names[caller],
            is_overload=is_again,
        )


def _works_itself(own: int, length: int) -> bool:
    """Return whether an operator does most of its work itself, as ``linalg_eigh`` does, besides calling others."""
    return own >= _LEAST_OWN_NS and own >= _LEAST_OWN_SHARE * length


@lru_cache(maxsize=4096)
def _work_of_operator(name: str, calls_others: bool, phase: str) -> tuple[Kind, Use]:
    """Return what the operator ``name`` does in ``phase``, and what its time is used for."""
    kind = operator_kind(name)
    is_composite = name.startswith("aten::") and calls_others
    if kind == "other" and (is_composite or _CALLS_ONLY.match(name) is not None):
        return kind, "dispatch"
    return kind, _use_of(kind, phase)


def _use_of(kind: Kind, phase: str) -> Use:
    """Return what a device's time in a kernel of this ``kind`` is used for."""
    if phase in INPUT_PHASES or kind == "host_copies":
        return "input"
    if kind in ("matmul", "attention"):
        return "products"
    if kind == "communication":
        return "communication"
    return "memory"


def rank_of(piece: Piece) -> int:
    """Return the rank: of things that run at the same time, the one of the lowest rank has the time."""
    if piece.use == "memory" and piece.kind in ("waiting", "other"):
        return _RANK_OF_UNKNOWN_MEMORY
    return _RANKS[piece.use]


def phases_at(phases: Sequence[Range], moments: Sequence[int] | Times) -> list[str]:
    """Return the name of the phase in which each of the ``moments`` is, NO_PHASE for none.

    ``phases`` come by their start and do not overlap.
    """
    names = [NO_PHASE, *(phase.name for phase in phases)]
    starts = np.array([0, *(phase.start for phase in phases)])
    ends = np.array([0, *(phase.end for phase in phases)])
    latest = np.searchsorted(starts, moments, side="right") - 1
    is_inside = np.asarray(moments) < ends[latest]
    return [names[number] for number in np.where(is_inside, latest, 0).tolist()]


def union_of_intervals(
    starts: Sequence[int], ends: Sequence[int], begin: int, end: int
) -> tuple[Times, Times]:
    """Return the union of the intervals between ``begin`` and ``end``: where each of its parts begins and ends.

    The parts come by their start, and do not overlap.
    """
    order = np.argsort(np.asarray(starts, dtype=np.int64), kind="stable")
    start = np.clip(np.asarray(starts, dtype=np.int64)[order], begin, end)
    stop = np.clip(np.asarray(ends, dtype=np.int64)[order], begin, end)
    reached = np.maximum.accumulate(stop)
    is_begin = np.ones(len(order), dtype=bool)
    is_begin[1:] = start[1:] > reached[:-1]
    return start[is_begin], reached[np.roll(is_begin, -1)]


def own_times_ns(
    starts: Sequence[int],
    ends: Sequence[int],
    ranks: Sequence[int],
    begin: int,
    end: int,
) -> Times:
    """Return how much of the time from ``begin`` to ``end`` is each interval's own, in nanoseconds.

    Time that several cover belongs to the one of the lowest rank; among equals, to the one that began first.
    """
    start = np.clip(np.asarray(starts, dtype=np.int64), begin, end)
    stop = np.clip(np.asarray(ends, dtype=np.int64), begin, end)
    rank = np.asarray(ranks)
    own = np.zeros(len(start), dtype=np.int64)
    order = np.argsort(start, kind="stable")
    # By rank, the lowest first: each has what neither a lower rank nor an earlier interval of its own covers.
    for level in np.unique(rank):
        same_rank = order[rank[order] == level]
        reached = np.maximum.accumulate(stop[same_rank])
        first = start[same_rank].copy()
        np.maximum(first[1:], reached[:-1], out=first[1:])
        last = np.maximum(stop[same_rank], first)
        is_lower_rank = rank < level
        hidden_ns = covered_ns(
            start[is_lower_rank], stop[is_lower_rank], first, last, begin, end
        )
        own[same_rank] = last - first - hidden_ns
    return own


def covered_ns(
    starts: Times, ends: Times, first: Times, last: Times, begin: int, end: int
) -> Times:
    """Return how many nanoseconds of each stretch any of the intervals covers.

    The intervals have ``starts`` and ``ends``; the stretches go from ``first`` to ``last``.
    """
    if len(starts) == 0:
        return np.zeros(len(first), dtype=np.int64)
    left, right = union_of_intervals(starts, ends, begin, end)  # type: ignore[arg-type]
    covered_before = np.concatenate(([0], np.cumsum(right - left)))

    def covered_until(moment: Times) -> Times:
        intervals_begun = np.searchsorted(left, moment, side="right")
        latest = intervals_begun - 1
        in_latest = np.minimum(moment, right[latest]) - left[latest]
        return np.where(intervals_begun > 0, covered_before[latest] + in_latest, 0)

    return covered_until(last) - covered_until(first)


def gaps_between(
    starts: Sequence[int], ends: Sequence[int], begin: int, end: int
) -> tuple[Times, Times]:
    """Return where nothing runs between ``begin`` and ``end``: from when to when."""
    if len(starts) == 0:
        return np.array([begin]), np.array([end])
    left, right = union_of_intervals(starts, ends, begin, end)
    first = np.concatenate(([begin], right))
    last = np.concatenate((left, [end]))
    has_length = last > first
    return first[has_length], last[has_length]
