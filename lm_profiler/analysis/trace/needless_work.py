"""Finds work of traced steps that may be needless: repeated passes, and large results of broadcasts.

A pass is repeated if a module runs again on the same inputs, or if backward runs again through the same graph. A
broadcast of two small tensors, such as a column and a row, to a large one may be intended, or a shape may be wrong.

Times are integers of nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from operator import attrgetter
from typing import NamedTuple, TypeVar

import numpy as np

from lm_profiler.analysis.trace.packed_trace import (
    BACKWARD_LINK,
    FORWARD_LINK,
    PackedTrace,
    Range,
    outermost,
)
from lm_profiler.analysis.trace.pieces import Piece, TracedWork, phases_at
from lm_profiler.record.findings import NeedlessKind, NeedlessWork

_FORWARD = "forward"
_BACKWARD = "backward"

# The result of a broadcast is large if it has this many times the elements of its largest input, and this many.
_LEAST_GROWTH = 16
_LEAST_ELEMENTS = 1 << 16

_Shape = tuple[int, ...]


class _Occurrence(NamedTuple):
    """One occurrence of needless work: a pass, a node of the graph, or an operator."""

    kind: NeedlessKind
    phase: str
    what: str | None
    ns: float


class _Stretch(NamedTuple):
    """A stretch of the host's time in which work is repeated."""

    start: int
    end: int
    phase: str
    module: str | None


def needless_work(
    work: TracedWork, pieces: Sequence[tuple[Piece, float]]
) -> list[NeedlessWork]:
    """Return the work of the traced steps that may be needless, per mean step, by kind, phase and place.

    ``pieces`` are the pieces of ``work`` with their own nanoseconds. On a device, the time of a repeated pass is that
    of the kernels launched in it; on the CPU it is the host's time.
    """
    stretches = [
        stretch
        for stretch in _repeated_stretches(work.packed)
        if work.begin <= stretch.start <= work.end
    ]
    stretches_ns = _host_ns(stretches)
    if work.on_device:
        stretches_ns = _kernels_ns(stretches, pieces)

    occurrences: list[_Occurrence] = []
    for stretch, ns in zip(stretches, stretches_ns, strict=True):
        kind: NeedlessKind = "repeated_forward"
        if stretch.module is None:
            kind = "repeated_backward"
        occurrences.append(_Occurrence(kind, stretch.phase, stretch.module, ns))
    occurrences += _broadcasting_operators(pieces)
    return _mean_of_steps(occurrences, steps=len(work.packed.steps))


def _mean_of_steps(
    occurrences: Sequence[_Occurrence], steps: int
) -> list[NeedlessWork]:
    """Return the mean per step of the occurrences of each kind, phase and place."""
    times_ns: defaultdict[_Occurrence, list[float]] = defaultdict(list)
    for occurrence in occurrences:
        kind_and_place = occurrence._replace(ns=0.0)
        times_ns[kind_and_place].append(occurrence.ns)
    works = []
    for kind_and_place, all_ns in times_ns.items():
        work = NeedlessWork(
            kind=kind_and_place.kind,
            phase=kind_and_place.phase,
            what=kind_and_place.what,
            count=len(all_ns) / steps,
            seconds=sum(all_ns) * 1e-9 / steps,
        )
        works.append(work)
    return works


def _broadcasting_operators(
    pieces: Iterable[tuple[Piece, float]],
) -> Iterator[_Occurrence]:
    """Yield the operators that broadcast two small tensors to a large one, and operators on tensors of that shape."""
    # descriptions of broadcasts, by the shape of the result
    names: dict[_Shape, str] = {}
    # each operator with its own time, and the shapes of its inputs and of a broadcast result
    operators: list[tuple[Piece, float, list[_Shape]]] = []
    for piece, own_ns in pieces:
        if piece.use != "memory":
            continue
        shapes = _shapes_of(piece)
        result = _broadcast_shape(shapes)
        if result is not None:
            sides = " and ".join(_shape_text(shape) for shape in shapes)
            name = f"{piece.operator} of {sides} makes {_shape_text(result)}"
            names.setdefault(result, name)
            shapes.append(result)
        operators.append((piece, own_ns, shapes))
    for piece, own_ns, shapes in operators:
        large_shape = next((shape for shape in shapes if shape in names), None)
        if large_shape is not None:
            yield _Occurrence(
                kind="broadcast", phase=piece.phase, what=names[large_shape], ns=own_ns
            )


def _shapes_of(piece: Piece) -> list[_Shape]:
    """Return the shapes of the inputs that are tensors with at least one dimension."""
    if piece.inputs is None:
        return []
    shapes = []
    for dims in piece.inputs.dims:
        is_shape = isinstance(dims, list) and dims
        if is_shape and all(isinstance(size, int) for size in dims):
            shapes.append(tuple(dims))
    return shapes


def _broadcast_shape(shapes: Sequence[_Shape]) -> _Shape | None:
    """Return the shape to which two ``shapes`` are broadcast if it is far larger than they are; otherwise None."""
    if len(shapes) != 2 or shapes[0] == shapes[1]:
        return None
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        return None
    largest_input = max(prod(side) for side in shapes)
    elements = prod(shape)
    is_large = elements >= max(_LEAST_ELEMENTS, _LEAST_GROWTH * largest_input)
    return shape if is_large else None


def _shape_text(shape: _Shape) -> str:
    return " × ".join(str(size) for size in shape)


def _repeated_stretches(packed: PackedTrace) -> list[_Stretch]:
    """Return all stretches in which work is repeated, ordered by start; they do not overlap."""
    passes = outermost(packed.repeated_passes)
    passes = _passes_outside_backward(packed, passes)
    stretches = []
    for pass_ in passes:
        stretches.append(
            _Stretch(pass_.start, pass_.end, phase=_FORWARD, module=pass_.name)
        )
    stretches += _backward_passes_of(packed, passes)
    starts = {stretch.start for stretch in stretches}
    for run in _second_runs(packed):
        if run.start not in starts:
            stretches.append(_Stretch(run.start, run.end, phase=_BACKWARD, module=None))
    return sorted(stretches, key=attrgetter("start"))


def _passes_outside_backward(
    packed: PackedTrace, passes: Sequence[Range]
) -> list[Range]:
    """Return the ``passes`` that are not in backward, in which activation checkpointing repeats forward on purpose."""
    starts = [pass_.start for pass_ in passes]
    phases = phases_at(packed.phases, starts)
    kept_passes = []
    for pass_, phase in zip(passes, phases, strict=True):
        if phase != _BACKWARD:
            kept_passes.append(pass_)
    return kept_passes


def _backward_passes_of(
    packed: PackedTrace, passes: Sequence[Range]
) -> Iterator[_Stretch]:
    """Yield the backward passes of repeated ``passes``: the runs of autograd's nodes that were created in them."""
    module_of_link: dict[int, str] = {}
    for moment, link in packed.links(FORWARD_LINK).tolist():
        pass_ = _range_at(moment, passes)
        if pass_ is not None:
            module_of_link[link] = pass_.name
    for moment, link in packed.links(BACKWARD_LINK).tolist():
        run = _range_at(moment, packed.node_runs)
        if run is not None and link in module_of_link:
            yield _Stretch(
                run.start, run.end, phase=_BACKWARD, module=module_of_link[link]
            )


_Span = TypeVar("_Span", Range, _Stretch)


def _range_at(moment: int, ranges: Sequence[_Span]) -> _Span | None:
    """Return the range that contains ``moment``; None if there is none. ``ranges`` are ordered and do not overlap."""
    index = bisect_right(ranges, moment, key=attrgetter("start")) - 1
    if index < 0 or moment >= ranges[index].end:
        return None
    return ranges[index]


def _second_runs(packed: PackedTrace) -> Iterator[Range]:
    """Yield the second and later runs of each node of autograd's graph.

    Left out are nodes whose first run created nodes itself (``create_graph``): these may have to run again for a higher
    derivative.
    """
    # when nodes were created
    moments_of_links = np.sort(packed.links(FORWARD_LINK)[:, 0])
    runs_by_node: defaultdict[str, list[Range]] = defaultdict(list)
    for run in packed.node_runs:
        runs_by_node[run.name].append(run)
    for first_run, *later_runs in runs_by_node.values():
        links_before_start = np.searchsorted(moments_of_links, first_run.start)
        links_before_end = np.searchsorted(moments_of_links, first_run.end)
        creates_nodes = links_before_end > links_before_start
        if not creates_nodes:
            yield from later_runs


def _host_ns(stretches: Sequence[_Stretch]) -> list[float]:
    """Return the duration of each of ``stretches`` on the host."""
    return [float(stretch.end - stretch.start) for stretch in stretches]


def _kernels_ns(
    stretches: Sequence[_Stretch], pieces: Iterable[tuple[Piece, float]]
) -> list[float]:
    """Return the time of the kernels that were launched in each of ``stretches``."""
    # Stretches do not overlap, so that the start identifies one.
    ns_by_start = {stretch.start: 0.0 for stretch in stretches}
    for piece, own_ns in pieces:
        stretch = _range_at(piece.launched_at, stretches)
        if stretch is not None:
            ns_by_start[stretch.start] += own_ns
    return list(ns_by_start.values())
