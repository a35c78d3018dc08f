"""Sums over traced steps: time by phase, kind, kernel and module; and collectives, with what no compute hides."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from lm_profiler.analysis.trace.kinds import MEMORY_BOUND
from lm_profiler.analysis.trace.pieces import (
    NO_PHASE,
    Piece,
    Times,
    TracedWork,
    covered,
    gaps_between,
    phases_at,
    shared_out,
    union_of,
)
from lm_profiler.analysis.trace.walk import MODULE_PREFIX, Range
from lm_profiler.record.kernels import KernelRow, KernelTable, KindTime, PhaseKernels, Rest
from lm_profiler.record.quantities import PARTS

LARGEST_ROWS = 300  # rows that are kept: the file stays small, and what is left out adds up to next to nothing

_COLUMNS = ("phase", "kind", "name", "operator", "module", "module_type")
_LONGEST_NAME = 240
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_MODULE = re.compile(rf"{MODULE_PREFIX}(?P<path>.*?)(?: \((?P<type>\w+)\))?$")
_COLLECTIVES = {
    kind: re.compile(kind.replace("_", "_?"), re.IGNORECASE)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
}


def kernel_table(work: TracedWork) -> KernelTable:
    """Return the table of a trace."""
    alike, rows, kinds = (defaultdict[tuple[Any, ...], list[int]](lambda: [0, 0]) for _ in range(3))  # calls and ns
    for piece in work.pieces:  # the names of thousands of calls are made once
        sums = alike[piece.phase, piece.kind, piece.name, piece.caller, piece.module]
        sums[0] += not piece.again
        sums[1] += piece.own
    for (phase, kind, name, caller, module), (calls, ns) in alike.items():
        row = (phase, kind, _cut(name), caller and _cut(caller), *module_of(module))
        for sums in (rows[row], kinds[phase, kind]):
            sums[0] += calls
            sums[1] += ns
    end = work.done
    busy, idle = _busy_and_idle(work, end)
    phases = {}
    for phase in PARTS:
        here = {kind: sums for (part, kind), sums in _longest_first(kinds) if part == phase}
        if here or idle[phase]:
            phases[phase] = PhaseKernels(
                busy_s=busy[phase] * 1e-9,
                idle_s=idle[phase] * 1e-9,
                overlap_s=max(sum(ns for _, ns in here.values()) - busy[phase], 0) * 1e-9,
                kinds={kind: KindTime(count=calls, total_s=ns * 1e-9) for kind, (calls, ns) in here.items()},
            )
    largest = _longest_first(rows)
    left = [sums for _, sums in largest[LARGEST_ROWS:]]
    return KernelTable(
        source="kernels" if work.on_device else "operators",
        steps=len(work.packed.steps),
        window_s=(end - work.begin) * 1e-9,
        phases=phases,
        rows=[
            KernelRow(**dict(zip(_COLUMNS, key, strict=True)), count=calls, total_s=ns * 1e-9)
            for key, (calls, ns) in largest[:LARGEST_ROWS]
        ],
        rest=Rest(rows=len(left), count=sum(calls for calls, _ in left), total_s=sum(ns for _, ns in left) * 1e-9),
        memory_bound_share=_share(work, end, MEMORY_BOUND),
        communication_share=_share(work, end, {"communication"}),
    )


def _busy_and_idle(work: TracedWork, end: int) -> tuple[Counter[str], Counter[str]]:
    """Return nanoseconds by phase. A device's idle time is of the work that ended it, the host's of when it was."""
    pieces = work.pieces if work.on_device else [piece for piece in work.pieces if piece.caller is None]
    starts, ends = _spans(pieces)
    busy, idle = Counter[str](), Counter[str]()
    for piece, own in zip(pieces, shared_out(starts, ends, [0] * len(pieces), work.begin, end).tolist(), strict=True):
        busy[piece.phase] += own
    ended_by = {piece.start: piece.phase for piece in reversed(pieces)} if work.on_device else {}
    for first, last in zip(*(side.tolist() for side in gaps_between(starts, ends, work.begin, end)), strict=True):
        if work.on_device:
            idle[ended_by.get(last, NO_PHASE)] += last - first
        else:
            for phase, ns in work.by_phase(first, last):
                idle[phase] += ns
    return busy, idle


def _share(work: TracedWork, end: int, kinds: Iterable[str]) -> float | None:
    """Return the share of the window in which only ``kinds`` ran; None without a device."""
    if not work.on_device:
        return None
    busy_ns = []
    for some in (work.pieces, [piece for piece in work.pieces if piece.kind not in kinds]):
        left, right = union_of(*_spans(some), work.begin, end)
        busy_ns.append(int((right - left).sum()))
    return (busy_ns[0] - busy_ns[1]) / (end - work.begin)


def _spans(pieces: Iterable[Piece | Range]) -> tuple[list[int], list[int]]:
    some = list(pieces)
    return [piece.start for piece in some], [piece.end for piece in some]


def _longest_first(sums: dict[tuple[Any, ...], list[int]]) -> list[tuple[tuple[Any, ...], list[int]]]:
    return sorted(sums.items(), key=lambda item: -item[1][1])


@lru_cache(maxsize=4096)
def module_of(name: str | None) -> tuple[str | None, str | None]:
    """Return path, with ``*`` for indices, and class of the module whose range is ``name``."""
    if name is None or (match := _MODULE.fullmatch(name)) is None:
        return None, None
    return _INDEX.sub("*", match["path"]), match["type"]


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


class CollectiveTime(NamedTuple):
    """Collectives of one name: calls and nanoseconds of all steps together; ``exposed_ns`` is what nothing hides."""

    name: str
    calls: int
    ns: int
    exposed_ns: int


@dataclass(frozen=True)
class Communication:
    """What a rank's traced ``steps`` spent in collectives, waiting included: in all (some overlap), and by name."""

    steps: int
    ns: int
    exposed_ns: int
    share: float  # of those steps
    by_name: Sequence[CollectiveTime]


def communication_of(work: TracedWork) -> Communication | None:
    """Return the communication of ``work``; None where there is none."""
    calls = collective_calls(work)
    if not calls:
        return None
    starts, ends = (np.array(side) for side in _spans(calls))
    left, right = union_of(starts, ends, work.begin, work.end)  # type: ignore[arg-type]
    names, exposed_ns = np.array([call.name for call in calls]), _exposed_ns(work, starts, ends)
    by_name = [
        CollectiveTime(name, int(of.sum()), int((ends - starts)[of].sum()), int(exposed_ns[of].sum()))
        for name in dict.fromkeys(names.tolist())
        for of in [names == name]
    ]
    ns, exposed = int((right - left).sum()), int(_exposed_ns(work, left, right).sum())
    return Communication(len(work.packed.steps), ns, exposed, ns / (work.end - work.begin), by_name)


def collective_calls(work: TracedWork) -> list[Range]:
    """Return the collectives of ``work`` by their start, with names like ``all_reduce``, ``all_gather of blocks.0``."""
    if work.on_device:
        asked = [(of.asked, Range(of.start, of.end, of.name)) for of in work.pieces if of.use == "communication"]
    else:
        asked = [(of.start, of) for of in work.packed.collectives if work.begin <= of.start <= work.end]
    named, gathers = [], phases_at(sorted(work.packed.gathers), [at for at, _ in asked])
    for (_, call), gather in zip(asked, gathers, strict=True):
        kind = next((kind for kind, form in _COLLECTIVES.items() if form.search(call.name)), call.name)
        of = gather if kind == "all_gather" else NO_PHASE
        named.append(call._replace(name=kind if of == NO_PHASE else f"{kind} of {of}"))
    return sorted(named)


def compute_spans(work: TracedWork) -> tuple[list[int], list[int]]:
    """Return the starts and ends of what computes, or copies, on the device; on the CPU without what only calls."""
    return _spans(piece for piece in work.pieces if piece.use not in ("communication", "dispatch"))


def _exposed_ns(work: TracedWork, starts: Times, ends: Times) -> Times:
    """Return how much of each stretch no compute hides."""
    left, right = (np.array(side, dtype=np.int64) for side in compute_spans(work))
    return ends - starts - covered(left, right, starts, ends, work.begin, work.end)
