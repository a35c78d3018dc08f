"""Sums over traced steps: the time by phase, kind, kernel and module; and the time of collectives."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from lm_profiler.analysis.trace.kinds import MEMORY_BOUND
from lm_profiler.analysis.trace.packed_trace import Range
from lm_profiler.analysis.trace.pieces import (
    Piece,
    Times,
    TracedWork,
    covered_ns,
    gaps_between,
    own_times_ns,
    phases_at,
    union_of_intervals,
)
from lm_profiler.record.kernels import (
    KernelRow,
    KernelTable,
    Kind,
    KindTime,
    PhaseKernels,
    Rest,
)
from lm_profiler.record.parts import NO_PHASE, PARTS

LARGEST_ROWS = 300  # rows that the file has; all others together take hardly any time

_LONGEST_NAME = 240  # characters of a name that are kept
_LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_PATH_AND_TYPE = re.compile(r"(?P<path>.*?)(?: \((?P<type>\w+)\))?", re.DOTALL)
_COLLECTIVES = {
    kind: re.compile(kind.replace("_", "_?"), re.IGNORECASE)
    for kind in (
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "all_to_all",
    )
}


@dataclass
class _Sum:
    """The number of calls, and their time in nanoseconds."""

    calls: int = 0
    ns: int = 0

    def add(self, calls: int, ns: int) -> None:
        self.calls += calls
        self.ns += ns


class _RowKey(NamedTuple):
    """The key of a row of the table: the fields of ``KernelRow`` with the same names."""

    phase: str
    kind: Kind
    name: str
    operator: str | None
    module: str | None
    module_type: str | None


_Key = TypeVar("_Key")


def kernel_table(work: TracedWork) -> KernelTable:
    """Return the table of the kernels (or operators) of a trace."""
    rows = kernel_rows(work)
    smallest = rows[LARGEST_ROWS:]
    rest = Rest(
        rows=len(smallest),
        count=sum(row.count for row in smallest),
        total_s=sum(row.total_s for row in smallest),
    )
    return KernelTable(
        source="kernels" if work.on_device else "operators",
        steps=len(work.packed.steps),
        window_s=(work.done - work.begin) * 1e-9,
        phases=_phase_kernels(work),
        rows=rows[:LARGEST_ROWS],
        rest=rest,
        memory_bound_share=_share_of_kinds(work, MEMORY_BOUND),
        communication_share=_share_of_kinds(work, {"communication"}),
    )


def kernel_rows(work: TracedWork) -> list[KernelRow]:
    """Return all rows of the table of a trace, the longest first."""
    rows = []
    for key, row in _longest_first(_sums_by_row(work.pieces)):
        rows.append(KernelRow(**key._asdict(), count=row.calls, total_s=row.ns * 1e-9))
    return rows


def _sums_by_row(pieces: Iterable[Piece]) -> Mapping[_RowKey, _Sum]:
    """Return the calls and nanoseconds of the pieces, by the key of their row in the table."""
    # First by the full names, so that names are shortened once and not for each of thousands of calls.
    sums = defaultdict[tuple[str, Kind, str, str | None, str | None], _Sum](_Sum)
    for piece in pieces:
        key = (piece.phase, piece.kind, piece.name, piece.caller, piece.module)
        sums[key].add(_call_count(piece), piece.own_ns)
    rows = defaultdict[_RowKey, _Sum](_Sum)
    for (phase, kind, name, caller, module), names_sum in sums.items():
        path, type_name = module_of(module)
        operator = None if caller is None else _shortened_name(caller)
        row_key = _RowKey(
            phase,
            kind,
            name=_shortened_name(name),
            operator=operator,
            module=path,
            module_type=type_name,
        )
        rows[row_key].add(names_sum.calls, names_sum.ns)
    return rows


def _call_count(piece: Piece) -> int:
    """Return 1, or 0 for an operator that a call of the same operator calls, so that each call counts once."""
    return 0 if piece.is_overload else 1


def _phase_kernels(work: TracedWork) -> dict[str, PhaseKernels]:
    """Return the sums of each phase that had any work or idle time."""
    kinds_by_phase = defaultdict[str, defaultdict[Kind, _Sum]](
        lambda: defaultdict(_Sum)
    )
    for piece in work.pieces:
        kinds_by_phase[piece.phase][piece.kind].add(_call_count(piece), piece.own_ns)
    pieces = work.pieces
    if not work.on_device:
        # operators that others call are within these
        pieces = [piece for piece in pieces if piece.caller is None]
    busy_ns = _busy_ns_by_phase(work, pieces)
    idle_ns = _idle_ns_by_phase(work, pieces)
    phases = {}
    for phase in PARTS:
        kinds = _longest_first(kinds_by_phase[phase])
        if not kinds and not idle_ns[phase]:
            continue
        all_kinds_ns = sum(kind_sum.ns for _, kind_sum in kinds)
        phases[phase] = PhaseKernels(
            busy_s=busy_ns[phase] * 1e-9,
            idle_s=idle_ns[phase] * 1e-9,
            overlap_s=max(all_kinds_ns - busy_ns[phase], 0) * 1e-9,
            kinds={
                kind: KindTime(count=kind_sum.calls, total_s=kind_sum.ns * 1e-9)
                for kind, kind_sum in kinds
            },
        )
    return phases


def _busy_ns_by_phase(work: TracedWork, pieces: Sequence[Piece]) -> Counter[str]:
    """Return for how long ``pieces`` ran, by phase.

    Time in which several ran belongs to the one that began first.
    """
    starts, ends = _starts_and_ends(pieces)
    equal_ranks = [0] * len(pieces)
    own_ns = own_times_ns(starts, ends, equal_ranks, work.begin, work.done).tolist()
    busy_ns = Counter[str]()
    for piece, piece_ns in zip(pieces, own_ns, strict=True):
        busy_ns[piece.phase] += piece_ns
    return busy_ns


def _idle_ns_by_phase(work: TracedWork, pieces: Sequence[Piece]) -> Counter[str]:
    """Return for how long none of ``pieces`` ran, by phase.

    Idle time of a device belongs to the phase of the work that ends it. On the CPU, it belongs to the phase in which it
    occurs.
    """
    starts, ends = _starts_and_ends(pieces)
    gap_starts, gap_ends = gaps_between(starts, ends, work.begin, work.done)
    # reversed, so that of pieces with one start the first counts
    phase_by_start = {piece.start: piece.phase for piece in reversed(pieces)}
    idle_ns = Counter[str]()
    for gap_start, gap_end in zip(gap_starts.tolist(), gap_ends.tolist(), strict=True):
        if work.on_device:
            phase = phase_by_start.get(gap_end, NO_PHASE)
            idle_ns[phase] += gap_end - gap_start
            continue
        for phase, phase_ns in work.split_by_phase(gap_start, gap_end):
            idle_ns[phase] += phase_ns
    return idle_ns


def _share_of_kinds(work: TracedWork, kinds: Iterable[str]) -> float | None:
    """Return the share of the time of the traced steps in which only ``kinds`` ran; None without a device."""
    if not work.on_device:
        return None
    other_pieces = [piece for piece in work.pieces if piece.kind not in kinds]
    # the time in which anything ran, without that in which other kinds ran
    only_kinds_ns = _busy_ns(work, work.pieces) - _busy_ns(work, other_pieces)
    return only_kinds_ns / (work.done - work.begin)


def _busy_ns(work: TracedWork, pieces: Sequence[Piece]) -> int:
    """Return for how long any of ``pieces`` ran."""
    starts, ends = _starts_and_ends(pieces)
    union_starts, union_ends = union_of_intervals(starts, ends, work.begin, work.done)
    return int((union_ends - union_starts).sum())


def _starts_and_ends(pieces: Iterable[Piece | Range]) -> tuple[list[int], list[int]]:
    """Return the starts and the ends of ``pieces``."""
    starts, ends = [], []
    for piece in pieces:
        starts.append(piece.start)
        ends.append(piece.end)
    return starts, ends


def _longest_first(sums: Mapping[_Key, _Sum]) -> list[tuple[_Key, _Sum]]:
    return sorted(sums.items(), key=lambda item: item[1].ns, reverse=True)


@lru_cache(maxsize=4096)
def module_of(name: str | None) -> tuple[str | None, str | None]:
    """Return the path (with ``*`` for indices of layers) and the class of a module named as in ``PackedTrace``."""
    if name is None:
        return None, None
    match = _PATH_AND_TYPE.fullmatch(name)
    if match is None:
        return name, None
    return _LAYER_INDEX.sub("*", match["path"]), match["type"]


def _shortened_name(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    return name[: _LONGEST_NAME - 1] + "…"


class CollectiveTime(NamedTuple):
    """The collectives of one name, over all steps."""

    name: str
    calls: int
    ns: int
    exposed_ns: int  # the time during which nothing was computed


@dataclass(frozen=True)
class Communication:
    """The time of collectives in the traced steps of one rank, including waiting for other ranks."""

    steps: int  # number of traced steps
    ns: int  # the time during which at least one collective ran
    exposed_ns: int  # the part of it during which nothing was computed
    share: float  # the collectives' share of the time of the steps
    by_name: Sequence[CollectiveTime]


def communication_of(work: TracedWork) -> Communication | None:
    """Return the communication of ``work``; None if there is none."""
    calls = collective_calls(work)
    if not calls:
        return None
    call_starts, call_ends = _starts_and_ends(calls)
    # (calls,) each
    starts, ends = np.array(call_starts), np.array(call_ends)
    durations_ns = ends - starts
    exposed_ns = _exposed_ns(work, starts, ends)
    names = np.array([call.name for call in calls])
    by_name = []
    for name in dict.fromkeys(names.tolist()):
        has_name = names == name
        time_of_name = CollectiveTime(
            name,
            calls=int(has_name.sum()),
            ns=int(durations_ns[has_name].sum()),
            exposed_ns=int(exposed_ns[has_name].sum()),
        )
        by_name.append(time_of_name)

    union_starts, union_ends = union_of_intervals(
        call_starts, call_ends, work.begin, work.end
    )
    union_ns = int((union_ends - union_starts).sum())
    return Communication(
        steps=len(work.packed.steps),
        ns=union_ns,
        exposed_ns=int(_exposed_ns(work, union_starts, union_ends).sum()),
        share=union_ns / (work.end - work.begin),
        by_name=by_name,
    )


def collective_calls(work: TracedWork) -> list[Range]:
    """Return the collectives of ``work``, ordered by start, with names such as ``all_gather of blocks.0``."""
    calls = []
    moments = []  # when the host called each collective
    if work.on_device:
        for piece in work.pieces:
            if piece.use == "communication":
                name = collective_name(piece)
                calls.append(Range(piece.start, piece.end, name))
                moments.append(piece.launched_at)
    else:
        for call in work.packed.collectives:
            if work.begin <= call.start <= work.end:
                calls.append(call)
                moments.append(call.start)

    gathered_modules = phases_at(sorted(work.packed.gathers), moments)
    named_calls = []
    for call, gathered_module in zip(calls, gathered_modules, strict=True):
        name = collective_kind(call.name)
        if name == "all_gather" and gathered_module != NO_PHASE:
            name = f"all_gather of {gathered_module}"
        named_calls.append(call._replace(name=name))
    return sorted(named_calls)


def collective_name(piece: Piece) -> str:
    """Return the kind of collective of a kernel, by the kernel's name, or else by the profiler's name of the call."""
    kind = collective_kind(piece.name)
    is_unknown = kind == piece.name  # such as ``ncclDevKernel_Generic`` of ROCm
    if is_unknown and piece.collective is not None:
        return collective_kind(piece.collective)
    return kind


def collective_kind(name: str) -> str:
    """Return the kind of collective that ``name`` contains, such as ``all_reduce``; ``name`` itself if none."""
    for kind, pattern in _COLLECTIVES.items():
        if pattern.search(name):
            return kind
    return name


def compute_spans(work: TracedWork) -> tuple[list[int], list[int]]:
    """Return the starts and the ends of all pieces that compute or copy."""
    return _starts_and_ends(
        piece for piece in work.pieces if piece.use not in ("communication", "dispatch")
    )


def _exposed_ns(work: TracedWork, starts: Times, ends: Times) -> Times:
    """Return the time in which nothing computes, for each stretch from ``starts`` to ``ends``."""
    compute_starts, compute_ends = compute_spans(work)
    hidden_ns = covered_ns(
        np.array(compute_starts, dtype=np.int64),
        np.array(compute_ends, dtype=np.int64),
        starts,
        ends,
        work.begin,
        work.end,
    )
    return ends - starts - hidden_ns
