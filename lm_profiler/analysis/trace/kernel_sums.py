"""Where the time of traced steps went, by phase, kind, kernel and module. Pure: a trace's events in, a table out."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np

from lm_profiler.analysis.trace.intervals import NO_PHASE, Busy, by_phase, union_of
from lm_profiler.analysis.trace.kinds import MEMORY_BOUND
from lm_profiler.analysis.trace.pieces import Piece, TracedWork
from lm_profiler.analysis.trace.walk import MODULE_PREFIX
from lm_profiler.record.kernels import KernelRow, KernelTable, Kind, KindTime, PhaseKernels, Rest
from lm_profiler.record.quantities import PARTS

LARGEST_ROWS = 300  # rows that are kept: the file stays small, and what is left out adds up to next to nothing

_LONGEST_NAME = 240
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_MODULE = re.compile(rf"{MODULE_PREFIX}(?P<path>.*?)(?: \((?P<type>\w+)\))?$")


_Row = tuple[str, Kind, str, str | None, str | None]  # phase, kind, name, operator and module


_Key = TypeVar("_Key")
_Coarser = TypeVar("_Coarser")


class _Totals(Generic[_Key]):
    """Calls and nanoseconds by key."""

    def __init__(self) -> None:
        self._sums: dict[_Key, list[int]] = {}

    def add(self, key: _Key, calls: int, nanoseconds: int) -> None:
        sums = self._sums.get(key)
        if sums is None:
            self._sums[key] = [calls, nanoseconds]
        else:
            sums[0] += calls
            sums[1] += nanoseconds

    def by(self, coarser: Callable[[_Key], _Coarser]) -> _Totals[_Coarser]:
        """Return the totals by what ``coarser`` makes of each key."""
        merged = _Totals[_Coarser]()
        for key, (calls, nanoseconds) in self._sums.items():
            merged.add(coarser(key), calls, nanoseconds)
        return merged

    def longest_first(self) -> list[tuple[_Key, int, int]]:
        """Return key, calls and nanoseconds of each; equally long ones as they came."""
        rows = [(key, calls, nanoseconds) for key, (calls, nanoseconds) in self._sums.items()]
        return sorted(rows, key=lambda row: -row[2])


def kernel_table(work: TracedWork) -> KernelTable:
    """Return the table of a trace."""
    return (_of_device if work.on_device else _of_operators)(work)


def _of_device(work: TracedWork) -> KernelTable:
    begin, end = work.begin, work.end
    totals, all_, computing, local = _Totals[_Row](), Busy(begin), Busy(begin), Busy(begin)
    for piece in work.pieces:
        start, stop, phase, kind = piece.start, piece.end, piece.phase, piece.kind
        totals.add(_row(piece), 1, piece.own)
        end = max(end, stop)
        all_.add(start, stop, phase)
        if kind not in MEMORY_BOUND:
            computing.add(start, stop, phase)
        if kind != "communication":
            local.add(start, stop, phase)
    all_.add(end, end, NO_PHASE)
    waiting, talking = ((all_.busy.total() - other.busy.total()) / (end - begin) for other in (computing, local))
    return _table(work, totals, all_, memory_bound_share=waiting, communication_share=talking)


def _of_operators(work: TracedWork) -> KernelTable:
    begin, end = work.begin, work.end
    totals = _Totals[_Row]()
    for piece in work.pieces:
        totals.add(_row(piece), 0 if piece.again else 1, piece.own)
    outermost = [piece for piece in work.pieces if piece.caller is None]
    starts, ends = [piece.start for piece in outermost], [piece.end for piece in outermost]
    covered = by_phase(*union_of(starts, ends, begin, end), work.phases)
    idle = by_phase(np.array([begin]), np.array([end]), work.phases)
    idle.subtract(covered)
    return _table(work, totals, Busy(end, covered, idle), memory_bound_share=None, communication_share=None)


def _row(piece: Piece) -> _Row:
    return piece.phase, piece.kind, piece.name, piece.caller, piece.module


def _table(work: TracedWork, totals: _Totals[_Row], time: Busy, **shares: Any) -> KernelTable:
    rows, rest = _rows(totals)
    by_kind = totals.by(lambda row: row[:2]).longest_first()
    phases = {}
    for phase in PARTS:
        here = [(kind, calls, ns) for (part, kind), calls, ns in by_kind if part == phase]
        kinds = {kind: KindTime(count=calls, total_s=_seconds(ns)) for kind, calls, ns in here}
        busy_s, idle_s = _seconds(time.busy[phase]), _seconds(time.idle[phase])
        if kinds or idle_s:
            overlap_s = _seconds(max(sum(ns for *_, ns in here) - time.busy[phase], 0))
            phases[phase] = PhaseKernels(busy_s=busy_s, idle_s=idle_s, overlap_s=overlap_s, kinds=kinds)
    return KernelTable(
        source="kernels" if work.on_device else "operators",
        steps=len(work.steps),
        window_s=_seconds(time.busy.total() + time.idle.total()),
        phases=phases,
        rows=rows,
        rest=rest,
        **shares,
    )


def _rows(totals: _Totals[_Row]) -> tuple[list[KernelRow], Rest]:
    """Return the largest rows, equal layers merged, and what is left."""
    merged = totals.by(lambda row: (*row[:4], *module_of(row[4])))
    largest = [(*key, calls, _seconds(ns)) for key, calls, ns in merged.longest_first()]
    rows = [
        KernelRow(
            phase=phase,
            kind=kind,
            name=_cut(name) or "",
            operator=_cut(operator),
            module=path,
            module_type=type_,
            count=count,
            total_s=total_s,
        )
        for phase, kind, name, operator, path, type_, count, total_s in largest[:LARGEST_ROWS]
    ]
    left = largest[LARGEST_ROWS:]
    return rows, Rest(rows=len(left), count=sum(row[-2] for row in left), total_s=sum(row[-1] for row in left))


@lru_cache(maxsize=4096)
def module_of(name: str | None) -> tuple[str | None, str | None]:
    """Return path, with ``*`` for indices, and class of the module whose range is ``name``."""
    if name is None or (match := _MODULE.fullmatch(name)) is None:
        return None, None
    return _INDEX.sub("*", match["path"]), match["type"]


def _cut(name: str | None) -> str | None:
    return name if name is None or len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


def _seconds(nanoseconds: int) -> float:
    return nanoseconds * 1e-9
