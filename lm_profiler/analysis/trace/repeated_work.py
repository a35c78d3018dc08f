"""Finds work that traced steps do twice: a module's pass on inputs that it had before, a backward pass of one graph.

Times are integers of nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

import numpy as np

from lm_profiler.analysis.trace.packed_trace import (
    BACKWARD_LINK,
    FORWARD_LINK,
    PackedTrace,
    Range,
)
from lm_profiler.analysis.trace.pieces import Piece, TracedWork, phases_at

_FORWARD = "forward"
_BACKWARD = "backward"


class RepeatedWork(NamedTuple):
    """What all traced steps together did again."""

    phase: str
    module: (
        str | None
    )  # whose pass is repeated; None for a backward pass that runs twice
    times: int  # of passes, or of nodes of the graph
    ns: float


class _Stretch(NamedTuple):
    """A stretch of the host's time in which work is repeated."""

    start: int
    end: int
    phase: str
    module: str | None


def repeated_work(
    work: TracedWork, pieces: Sequence[tuple[Piece, float]]
) -> list[RepeatedWork]:
    """Return what the steps of ``work`` did again, by phase and module.

    ``pieces`` are those of ``work`` with their own nanoseconds. On a device, the work's time is that of the kernels
    that were launched meanwhile; on the CPU it is the host's.
    """
    stretches = _repeated_stretches(work.packed)
    stretches = [
        stretch for stretch in stretches if work.begin <= stretch.start <= work.end
    ]
    stretches_ns = _host_ns(stretches)
    if work.on_device:
        stretches_ns = _kernels_ns(stretches, pieces)

    sums: dict[tuple[str, str | None], RepeatedWork] = {}
    for stretch, ns in zip(stretches, stretches_ns, strict=True):
        key = (stretch.phase, stretch.module)
        before = sums.get(key, RepeatedWork(*key, times=0, ns=0.0))
        sums[key] = before._replace(times=before.times + 1, ns=before.ns + ns)
    return list(sums.values())


def _repeated_stretches(packed: PackedTrace) -> list[_Stretch]:
    """Return all stretches in which work is repeated, by their start; they do not overlap."""
    passes = _outermost(packed.repeated_passes)
    passes = _outside_backward(packed, passes)
    stretches = []
    for pass_ in passes:
        stretches.append(_Stretch(pass_.start, pass_.end, _FORWARD, pass_.name))
    stretches += _backward_of(packed, passes)
    starts = {stretch.start for stretch in stretches}
    for run in _second_runs(packed):
        if run.start not in starts:
            stretches.append(_Stretch(run.start, run.end, _BACKWARD, None))
    return sorted(stretches, key=attrgetter("start"))


def _outermost(ranges: Sequence[Range]) -> list[Range]:
    """Return those of ``ranges`` that no other one holds, by their start."""
    outermost: list[Range] = []
    reached = 0
    for candidate in sorted(ranges, key=lambda range_: (range_.start, -range_.end)):
        if candidate.start >= reached:
            outermost.append(candidate)
            reached = candidate.end
    return outermost


def _outside_backward(packed: PackedTrace, passes: Sequence[Range]) -> list[Range]:
    """Return the ``passes`` outside of backward, where activation checkpointing runs forward again on purpose."""
    starts = [pass_.start for pass_ in passes]
    phases = phases_at(packed.phases, starts)
    outside = []
    for pass_, phase in zip(passes, phases, strict=True):
        if phase != _BACKWARD:
            outside.append(pass_)
    return outside


def _backward_of(packed: PackedTrace, passes: Sequence[Range]) -> Iterator[_Stretch]:
    """Yield the runs of the nodes that were made in ``passes``: a repeated pass may have a backward pass, too."""
    module_of_link: dict[int, str] = {}
    for moment, link in packed.links(FORWARD_LINK).tolist():
        pass_ = _range_at(moment, passes)
        if pass_ is not None:
            module_of_link[link] = pass_.name
    for moment, link in packed.links(BACKWARD_LINK).tolist():
        run = _range_at(moment, packed.node_runs)
        if run is not None and link in module_of_link:
            yield _Stretch(run.start, run.end, _BACKWARD, module_of_link[link])


_Span = TypeVar("_Span", Range, _Stretch)


def _range_at(moment: int, ranges: Sequence[_Span]) -> _Span | None:
    """Return the one of ``ranges``, which come by their start and do not overlap, that holds ``moment``."""
    index = bisect_right(ranges, moment, key=attrgetter("start")) - 1
    if index < 0 or moment >= ranges[index].end:
        return None
    return ranges[index]


def _second_runs(packed: PackedTrace) -> Iterator[Range]:
    """Yield the runs of autograd's nodes that ran before.

    A node that made nodes itself when it ran first (``create_graph``) may have to run again for a higher derivative:
    that is no repetition.
    """
    moments_of_links = np.sort(packed.links(FORWARD_LINK)[:, 0])
    runs_by_node: defaultdict[str, list[Range]] = defaultdict(list)
    for run in packed.node_runs:
        runs_by_node[run.name].append(run)
    for first_run, *later_runs in runs_by_node.values():
        links_before_start = np.searchsorted(moments_of_links, first_run.start)
        links_before_end = np.searchsorted(moments_of_links, first_run.end)
        makes_nodes = links_before_end > links_before_start
        if not makes_nodes:
            yield from later_runs


def _host_ns(stretches: Sequence[_Stretch]) -> list[float]:
    """Return how long each of ``stretches`` is."""
    return [float(stretch.end - stretch.start) for stretch in stretches]


def _kernels_ns(
    stretches: Sequence[_Stretch], pieces: Iterable[tuple[Piece, float]]
) -> list[float]:
    """Return the time of the kernels that were launched in each of ``stretches``."""
    ns_by_start = {stretch.start: 0.0 for stretch in stretches}
    for piece, own_ns in pieces:
        stretch = _range_at(piece.asked, stretches)
        if stretch is not None:
            ns_by_start[stretch.start] += own_ns
    return list(ns_by_start.values())
