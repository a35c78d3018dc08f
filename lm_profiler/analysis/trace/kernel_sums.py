"""Sums over traced steps: time by phase, kind, kernel and module; and collectives, with what no compute hides."""

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

LARGEST_ROWS = 300  # rows that are kept: the file stays small, and what is left out adds up to next to nothing

_LONGEST_NAME = 240  # characters
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
    """Calls, and their nanoseconds."""

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
    """Return the table of a trace."""
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
    """Return the rows of all work of a trace, the longest first."""
    rows = []
    for key, row in _longest_first(_sums_by_row(work.pieces)):
        rows.append(KernelRow(**key._asdict(), count=row.calls, total_s=row.ns * 1e-9))
    return rows


def _sums_by_row(pieces: Iterable[Piece]) -> Mapping[_RowKey, _Sum]:
    """Return calls and nanoseconds of the pieces, by the key of their row in the table."""
    same_names = defaultdict[tuple[str, Kind, str, str | None, str | None], _Sum](_Sum)
    for piece in pieces:  # the names of thousands of calls are shortened once
        key = (piece.phase, piece.kind, piece.name, piece.caller, piece.module)
        same_names[key].add(_call_count(piece), piece.own_ns)
    rows = defaultdict[_RowKey, _Sum](_Sum)
    for (phase, kind, name, caller, module), names_sum in same_names.items():
        path, type_name = module_of(module)
        operator = None if caller is None else _shortened(caller)
        row_key = _RowKey(
            phase,
            kind,
            name=_shortened(name),
            operator=operator,
            module=path,
            module_type=type_name,
        )
        rows[row_key].add(names_sum.calls, names_sum.ns)
    return rows


def _call_count(piece: Piece) -> int:
    return 0 if piece.is_overload else 1


def _phase_kernels(work: TracedWork) -> dict[str, PhaseKernels]:
    """Return the kernels of each phase that had any work or idle time."""
    kinds_by_phase = defaultdict[str, defaultdict[Kind, _Sum]](
        lambda: defaultdict(_Sum)
    )
    for piece in work.pieces:
        kinds_by_phase[piece.phase][piece.kind].add(_call_count(piece), piece.own_ns)
    busy_ns, idle_ns = _busy_and_idle(work)
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


def _busy_and_idle(work: TracedWork) -> tuple[Counter[str], Counter[str]]:
    """Return nanoseconds by phase. A device's idle time counts to the phase of the work that ended it, the host's to
    the phase in which it passed."""
    pieces = work.pieces
    if not work.on_device:
        pieces = [piece for piece in pieces if piece.caller is None]
    starts, ends = _spans(pieces)
    busy_ns, idle_ns = Counter[str](), Counter[str]()
    equal_ranks = [0] * len(pieces)
    own_ns = own_times_ns(starts, ends, equal_ranks, work.begin, work.done).tolist()
    for piece, piece_ns in zip(pieces, own_ns, strict=True):
        busy_ns[piece.phase] += piece_ns

    gap_starts, gap_ends = gaps_between(starts, ends, work.begin, work.done)
    phase_of_start = {piece.start: piece.phase for piece in reversed(pieces)}
    for gap_start, gap_end in zip(gap_starts.tolist(), gap_ends.tolist(), strict=True):
        if work.on_device:
            phase = phase_of_start.get(gap_end, NO_PHASE)
            idle_ns[phase] += gap_end - gap_start
        else:
            for phase, phase_ns in work.split_by_phase(gap_start, gap_end):
                idle_ns[phase] += phase_ns
    return busy_ns, idle_ns


def _share_of_kinds(work: TracedWork, kinds: Iterable[str]) -> float | None:
    """Return the share of the window in which only ``kinds`` ran; None without a device."""
    if not work.on_device:
        return None
    others = [piece for piece in work.pieces if piece.kind not in kinds]
    only_kinds_ns = _busy_ns(work, work.pieces) - _busy_ns(work, others)
    return only_kinds_ns / (work.done - work.begin)


def _busy_ns(work: TracedWork, pieces: Sequence[Piece]) -> int:
    starts, ends = _spans(pieces)
    left, right = union_of_intervals(starts, ends, work.begin, work.done)
    return int((right - left).sum())


def _spans(pieces: Iterable[Piece | Range]) -> tuple[list[int], list[int]]:
    starts, ends = [], []
    for piece in pieces:
        starts.append(piece.start)
        ends.append(piece.end)
    return starts, ends


def _longest_first(sums: Mapping[_Key, _Sum]) -> list[tuple[_Key, _Sum]]:
    return sorted(sums.items(), key=lambda item: item[1].ns, reverse=True)


@lru_cache(maxsize=4096)
def module_of(name: str | None) -> tuple[str | None, str | None]:
    """Return path, with ``*`` for indices, and class of the module that ``PackedTrace`` names ``name``."""
    if name is None:
        return None, None
    match = _PATH_AND_TYPE.fullmatch(name)
    if match is None:
        return name, None
    return _LAYER_INDEX.sub("*", match["path"]), match["type"]


def _shortened(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    return name[: _LONGEST_NAME - 1] + "…"


class CollectiveTime(NamedTuple):
    """Collectives of one name: calls and nanoseconds of all steps together; ``exposed_ns`` is what nothing hides."""

    name: str
    calls: int
    ns: int
    exposed_ns: int


@dataclass(frozen=True)
class Communication:
    """The time of collectives in a rank's traced ``steps``, waiting included: in total (some overlap), and by name."""

    steps: int
    ns: int
    exposed_ns: int
    share: float  # of those steps
    by_name: Sequence[CollectiveTime]


def communication_of(work: TracedWork) -> Communication | None:
    """Return the communication of ``work``; None if there is none."""
    calls = collective_calls(work)
    if not calls:
        return None
    call_starts, call_ends = _spans(calls)
    starts, ends = np.array(call_starts), np.array(call_ends)
    exposed_ns = _exposed_ns(work, starts, ends)
    names = np.array([call.name for call in calls])
    by_name = []
    for name in dict.fromkeys(names.tolist()):
        has_name = names == name
        total_ns = int((ends - starts)[has_name].sum())
        by_name.append(
            CollectiveTime(
                name,
                calls=int(has_name.sum()),
                ns=total_ns,
                exposed_ns=int(exposed_ns[has_name].sum()),
            )
        )

    left, right = union_of_intervals(call_starts, call_ends, work.begin, work.end)
    union_ns = int((right - left).sum())
    return Communication(
        steps=len(work.packed.steps),
        ns=union_ns,
        exposed_ns=int(_exposed_ns(work, left, right).sum()),
        share=union_ns / (work.end - work.begin),
        by_name=by_name,
    )


def collective_calls(work: TracedWork) -> list[Range]:
    """Return the collectives of ``work`` by their start, with names like ``all_reduce``, ``all_gather of blocks.0``."""
    calls, moments = [], []
    if work.on_device:
        for piece in work.pieces:
            if piece.use == "communication":
                name = collective_name(piece)
                calls.append(Range(piece.start, piece.end, name))
                moments.append(piece.launched_at)
    else:
        calls = [
            call
            for call in work.packed.collectives
            if work.begin <= call.start <= work.end
        ]
        moments = [call.start for call in calls]

    gathered_modules = phases_at(sorted(work.packed.gathers), moments)
    named_calls = []
    for call, gathered_module in zip(calls, gathered_modules, strict=True):
        name = collective_kind(call.name)
        if name == "all_gather" and gathered_module != NO_PHASE:
            name = f"all_gather of {gathered_module}"
        named_calls.append(call._replace(name=name))
    return sorted(named_calls)


def collective_name(piece: Piece) -> str:
    """Return the kind of collective of a kernel by its name, or else by what the profiler writes beside it."""
    kind = collective_kind(piece.name)
    says_nothing = kind == piece.name  # ``ncclDevKernel_Generic`` of ROCm
    if says_nothing and piece.collective is not None:
        return collective_kind(piece.collective)
    return kind


def collective_kind(name: str) -> str:
    """Return the kind of collective in ``name``, such as ``all_reduce``; ``name`` itself if it has none."""
    for kind, pattern in _COLLECTIVES.items():
        if pattern.search(name):
            return kind
    return name


def compute_spans(work: TracedWork) -> tuple[list[int], list[int]]:
    """Return the starts and ends of what computes, or copies, on the device; on the CPU without what only calls."""
    return _spans(
        piece for piece in work.pieces if piece.use not in ("communication", "dispatch")
    )


def _exposed_ns(work: TracedWork, starts: Times, ends: Times) -> Times:
    """Return how much of each stretch no compute hides."""
    compute_starts, compute_ends = compute_spans(work)
    left, right = (
        np.array(compute_starts, dtype=np.int64),
        np.array(compute_ends, dtype=np.int64),
    )
    return ends - starts - covered_ns(left, right, starts, ends, work.begin, work.end)
