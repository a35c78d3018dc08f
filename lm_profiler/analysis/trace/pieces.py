"""Extracts the pieces of work (kernels, or operators of the CPU) of traced steps, and divides the time among them.

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


# What time is used for. ``dispatch`` occurs only on the CPU: operators that only call others.
Use = Literal["products", "memory", "communication", "input", "dispatch"]

# If several pieces run at the same time, the time belongs to the piece with the lowest rank.
_RANKS: dict[Use, int] = {
    "products": 0,
    "memory": 1,
    "communication": 3,
    "input": 4,
    "dispatch": 5,
}
# Pieces of unknown kind, such as compiled regions, come after those of known kinds, which may be within them.
_RANK_OF_UNKNOWN_MEMORY = 2

# operators that compute nothing: views, empty tensors, autograd's nodes, what surrounds compiled graphs
_CALLS_ONLY = re.compile(
    r"^(autograd|profiler|torch)::|^\w+Backward\d*$|^(detach|Optimizer\.)|^Torch|^AOTDispatcher|^Pregraph|^CompiledFunction|"
    r"^aten::(_?(unsafe_)?(view|reshape|split|chunk|unbind|expand|empty|new_empty|to|narrow|select|slice|squeeze|"
    r"unsqueeze|t|transpose|permute|detach|alias|flatten|unflatten|item|is_\w+|as_strided|resolve_(conj|neg)|result_type|"
    r"resize|set|lift_fresh|contiguous|movedim|diagonal|real|imag|numpy_T|unfold|size|stride|broadcast_to|swapaxes|"
    r"empty_like|empty_strided|new_empty_strided|expand_as|view_as|conj|view_as_(real|complex)|split_with_sizes)_?(_alias)?)$"
)


# An operator that calls others also counts as working itself if its own time, without theirs, is at least this long and
# this share of its duration.
_LEAST_OWN_NS = 100_000
_LEAST_OWN_SHARE = 0.5


class Piece(NamedTuple):
    """One kernel, or if the device is the CPU, one call of an operator. None means unknown, or none."""

    start: int
    end: int
    # when the host had finished launching it; on the CPU, when it started
    launched_at: int
    use: Use
    kind: Kind
    name: str
    operator: str | None
    module: str | None  # path and class of the module, as ``PackedTrace`` names it
    phase: str
    # identifies the call of ``operator`` that launched it; negative if unknown
    call_number: int
    inputs: Inputs | None  # the inputs of ``operator``
    own_ns: int = 0  # its duration without that of the operators that it calls
    caller: str | None = None  # the operator that called it, or launched it
    is_overload: bool = False  # whether the operator called itself (another overload), which is not counted as a call
    # the process group of a collective, if the profiler recorded it
    group: str | None = None
    collective: str | None = None  # the profiler's own name of a collective
    copied_bytes: int | None = None  # the bytes that a copy or a memset moved


@dataclass(frozen=True)
class TracedWork:
    """The work that the host launched in the traced steps, which last from ``begin`` to ``end``."""

    packed: PackedTrace
    pieces: list[Piece]
    # all calls of the device's driver; empty if the device is the CPU
    launches: list[DriverCall]
    begin: int
    end: int

    @property
    def on_device(self) -> bool:
        return self.packed.has_device

    @cached_property
    def done(self) -> int:
        """When the last piece ended, which may be after ``end``: the device runs behind the host."""
        if not self.on_device:
            return self.end
        return max([self.end, *(piece.end for piece in self.pieces)])

    @cached_property
    def _phase_starts(self) -> list[int]:
        return [phase.start for phase in self.packed.phases]

    def split_by_phase(self, begin: int, end: int) -> Iterator[tuple[str, int]]:
        """Divide a stretch of time among the phases: yield each phase, and NO_PHASE, with its nanoseconds."""
        phases = self.packed.phases
        outside_ns = end - begin
        first = max(bisect_right(self._phase_starts, begin) - 1, 0)
        # not a slice, which would copy all later phases for each of many stretches
        for index in range(first, len(phases)):
            phase = phases[index]
            if phase.start >= end:
                break
            inside_ns = min(end, phase.end) - max(begin, phase.start)
            if inside_ns > 0:
                outside_ns -= inside_ns
                yield phase.name, inside_ns
        if outside_ns > 0:
            yield NO_PHASE, outside_ns


def traced_work(packed: PackedTrace) -> TracedWork:
    """Return the work of the trace's steps: its kernels, or if it has none, the operators of the CPU."""
    begin, end = packed.steps_window()
    calls, launches = walk(packed)
    if packed.has_device:
        pieces = list(_kernels_between(packed, launches, begin, end))
    else:
        pieces = list(_operators_between(packed, calls, begin, end))
        launches = []
    return TracedWork(packed, pieces, launches, begin, end)


def read_traced_work(path: Path) -> TracedWork | None:
    """Return the work of the trace in ``path``; None if the file does not exist, or has no whole step."""
    if not path.exists():
        return None
    packed = PackedTrace(trace_events(path))
    if not packed.steps or not packed.phases:
        return None
    return traced_work(packed)


def _kernels_between(
    packed: PackedTrace, calls: Sequence[DriverCall], begin: int, end: int
) -> Iterator[Piece]:
    """Yield the kernels launched between ``begin`` and ``end``, ordered by start.

    A kernel has the correlation number of the driver call, among ``calls``, that launched it. All kernels of a replayed
    CUDA graph have that of its single launch.
    """
    launch_by_correlation = {call.correlation: call for call in calls}
    kernels = list(packed.device_rows())
    launches = []
    for kernel in kernels:
        launch = launch_by_correlation.get(kernel.correlation)
        if launch is None:
            # its launch is not in the trace: assume that it was launched when it started
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

    # (NONE is -1, the index of the last entry of ``names`` and of ``inputs``, which is None.)
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


def _operators_between(
    packed: PackedTrace, calls: OperatorCalls, begin: int, end: int
) -> Iterator[Piece]:
    """Yield the operators called between ``begin`` and ``end``, ordered by end."""
    is_in_steps = (begin <= calls.start) & (calls.start <= end)
    calls = OperatorCalls(*(column[is_in_steps] for column in calls))
    phases = phases_at(packed.phases, calls.start)
    # lists, because Python iterates faster over them than over arrays
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
        is_overload,
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
            is_overload=is_overload,
        )


def _works_itself(own: int, length: int) -> bool:
    """Return whether an operator that calls others, such as ``linalg_eigh``, does most of the work itself."""
    return own >= _LEAST_OWN_NS and own >= _LEAST_OWN_SHARE * length


@lru_cache(maxsize=4096)
def _work_of_operator(name: str, calls_others: bool, phase: str) -> tuple[Kind, Use]:
    """Return the kind of the operator ``name``, and what its time in ``phase`` is used for."""
    kind = operator_kind(name)
    is_composite = name.startswith("aten::") and calls_others
    if kind == "other" and (is_composite or _CALLS_ONLY.match(name) is not None):
        return kind, "dispatch"
    return kind, _use_of(kind, phase)


def _use_of(kind: Kind, phase: str) -> Use:
    """Return what the time of a kernel of this ``kind`` in ``phase`` is used for."""
    if phase in INPUT_PHASES or kind == "host_copies":
        return "input"
    if kind in ("matmul", "attention"):
        return "products"
    if kind == "communication":
        return "communication"
    return "memory"


def rank_of(piece: Piece) -> int:
    """Return the rank of a piece: of pieces that run at the same time, the one with the lowest rank gets the time."""
    if piece.use == "memory" and piece.kind in ("waiting", "other"):
        return _RANK_OF_UNKNOWN_MEMORY
    return _RANKS[piece.use]


def phases_at(phases: Sequence[Range], moments: Sequence[int] | Times) -> list[str]:
    """Return the name of the phase at each of the ``moments``; NO_PHASE if there is none.

    ``phases`` are ordered by start and do not overlap.
    """
    # index 0 stands for no phase
    names = [NO_PHASE]
    starts = [0]
    ends = [0]
    for phase in phases:
        names.append(phase.name)
        starts.append(phase.start)
        ends.append(phase.end)
    last_begun = np.searchsorted(np.array(starts), moments, side="right") - 1
    is_inside = np.asarray(moments) < np.array(ends)[last_begun]
    phase_at_moment = np.where(is_inside, last_begun, 0)
    return [names[index] for index in phase_at_moment.tolist()]


def union_of_intervals(
    starts: Sequence[int], ends: Sequence[int], begin: int, end: int
) -> tuple[Times, Times]:
    """Return the union of intervals, clipped to ``begin`` and ``end``, as disjoint intervals ordered by start.

    Returns:
        the starts, and the ends.
    """
    all_starts = np.asarray(starts, dtype=np.int64)
    all_ends = np.asarray(ends, dtype=np.int64)
    order = np.argsort(all_starts, kind="stable")
    start = np.clip(all_starts[order], begin, end)
    stop = np.clip(all_ends[order], begin, end)
    # the latest end of this interval and all before it: one that starts later begins a new part of the union
    latest_end = np.maximum.accumulate(stop)
    begins_part = np.ones(len(order), dtype=bool)
    begins_part[1:] = start[1:] > latest_end[:-1]
    # An interval ends a part if the next one begins a part. np.roll puts the first one, which begins a part, after the
    # last one.
    ends_part = np.roll(begins_part, -1)
    return start[begins_part], latest_end[ends_part]


def own_times_ns(
    starts: Sequence[int],
    ends: Sequence[int],
    ranks: Sequence[int],
    begin: int,
    end: int,
) -> Times:
    """Divide the time from ``begin`` to ``end`` among intervals, and return the nanoseconds of each.

    Time that several intervals cover belongs to the one with the lowest rank, and of equal ranks to the one that began
    first.
    """
    start = np.clip(np.asarray(starts, dtype=np.int64), begin, end)
    stop = np.clip(np.asarray(ends, dtype=np.int64), begin, end)
    rank = np.asarray(ranks)
    own = np.zeros(len(start), dtype=np.int64)
    order = np.argsort(start, kind="stable")
    # An interval owns what is covered neither by earlier intervals of its rank, nor by any interval of a lower rank.
    for level in np.unique(rank):
        same_rank = order[rank[order] == level]
        # what earlier intervals of this rank leave: from the latest of their ends on
        latest_end = np.maximum.accumulate(stop[same_rank])
        uncovered_from = start[same_rank].copy()
        np.maximum(uncovered_from[1:], latest_end[:-1], out=uncovered_from[1:])
        uncovered_until = np.maximum(stop[same_rank], uncovered_from)
        is_lower_rank = rank < level
        hidden_ns = covered_ns(
            start[is_lower_rank],
            stop[is_lower_rank],
            uncovered_from,
            uncovered_until,
            begin,
            end,
        )
        own[same_rank] = uncovered_until - uncovered_from - hidden_ns
    return own


def covered_ns(
    starts: Times, ends: Times, first: Times, last: Times, begin: int, end: int
) -> Times:
    """Return how many nanoseconds of each stretch are covered by intervals.

    Args:
        starts: when the intervals start.
        ends: when they end.
        first: when the stretches begin.
        last: when the stretches end.
        begin: the intervals are clipped to begin here.
        end: and to end here.
    """
    if len(starts) == 0:
        return np.zeros(len(first), dtype=np.int64)
    part_starts, part_ends = union_of_intervals(starts, ends, begin, end)  # type: ignore[arg-type]
    covered_before_part = np.concatenate(([0], np.cumsum(part_ends - part_starts)))

    def covered_until(moment: Times) -> Times:
        """Return how many nanoseconds before each moment are covered."""
        parts_begun = np.searchsorted(part_starts, moment, side="right")
        # the part that began last; before the first part it is -1, whose values are not used
        last_part = parts_begun - 1
        in_last_part = np.minimum(moment, part_ends[last_part]) - part_starts[last_part]
        covered = covered_before_part[last_part] + in_last_part
        return np.where(parts_begun > 0, covered, 0)

    return covered_until(last) - covered_until(first)


def gaps_between(
    starts: Sequence[int], ends: Sequence[int], begin: int, end: int
) -> tuple[Times, Times]:
    """Return the starts and the ends of the gaps between intervals, from ``begin`` to ``end``."""
    if len(starts) == 0:
        return np.array([begin]), np.array([end])
    part_starts, part_ends = union_of_intervals(starts, ends, begin, end)
    gap_starts = np.concatenate(([begin], part_ends))
    gap_ends = np.concatenate((part_starts, [end]))
    has_length = gap_ends > gap_starts
    return gap_starts[has_length], gap_ends[has_length]
