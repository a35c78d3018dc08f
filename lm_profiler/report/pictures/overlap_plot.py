"""The picture of overlap: one traced step of each rank, what computes above what communicates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm_profiler.analysis.trace.kernel_sums import collective_calls, compute_spans
from lm_profiler.analysis.trace.pieces import TracedWork, gaps_between, traced_work, union_of
from lm_profiler.analysis.trace.walk import Packed, trace_events
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.text import shortened
from lm_profiler.report.pictures.drawing import PART_COLOURS, SERIES_COLOURS, legend, new_figure
from lm_profiler.report.pictures.groups import Group
from lm_profiler.usage_error import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_RANKS = 4
_HIDDEN, _EXPOSED = "#DDCC77", SERIES_COLOURS[2]
_FINEST = 1000  # parts of a step: a gap in what computes that is shorter is not drawn

Span = tuple[float, float]  # begin and length in ms


@dataclass(frozen=True)
class _Lanes:
    """A rank's last traced step: what computes by phase, and collectives; ``exposed`` lies over ``hidden``."""

    rank: int
    compute: dict[str, list[Span]]
    hidden: list[Span]
    exposed: list[Span]


def overlap(groups: Sequence[Group]) -> Figure:
    """Draw a panel for each group's first run: of each of its first ranks, compute and communication."""
    known = [(group, lanes) for group in groups if (lanes := _lanes_of(group.entries[0]))]
    if not known:
        raise UsageError("plot: expected runs of several ranks with traces, given none; `fit` makes one")
    height = 1.0 + sum(0.3 + 0.68 * len(lanes) for _, lanes in known)
    figure, panels = new_figure(8.5, height, nrows=len(known), sharex=True, squeeze=False)
    for axes, (group, lanes) in zip(panels[:, 0], known, strict=True):
        axes.set_title(shortened(group.told or group.entries[0].folder.parent.name), fontsize=9, loc="left")
        _draw(axes, lanes)
    panels[-1, 0].set_xlabel("ms of the last traced step; waiting for other ranks counts as communication")
    drawn = [part for part in PARTS if any(_shows(of, part) for _, lanes in known for of in lanes)]
    looks = [("communication, exposed", _EXPOSED), ("hidden", _HIDDEN)]
    legend(figure, [*((part, PART_COLOURS[part]) for part in drawn), *looks])
    return figure


def _draw(axes: Any, lanes: Sequence[_Lanes]) -> None:
    for at, of in enumerate(lanes):
        for part, spans in of.compute.items():
            axes.broken_barh(spans, (2 * at - 0.4, 0.8), color=PART_COLOURS[part], lw=0)
        for spans, colour in ((of.hidden, _HIDDEN), (of.exposed, _EXPOSED)):
            axes.broken_barh(spans, (2 * at + 0.6, 0.8), color=colour, lw=0)
    names = [f"rank {of.rank}: {what}" for of in lanes for what in ("compute", "communication")]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _shows(of: _Lanes, part: str) -> bool:
    spent = {name: sum(length for _, length in spans) for name, spans in of.compute.items()}
    return spent.get(part, 0.0) > 0.01 * sum(spent.values())


def _lanes_of(entry: Entry) -> list[_Lanes]:
    works: dict[int, TracedWork] = {}
    for rank in range(_MOST_RANKS):
        with suppress(OSError, ValueError):
            works[rank] = traced_work(Packed(trace_events(entry.folder / "trace" / f"rank{rank}.pt.trace.json.gz")))
    works = {rank: work for rank, work in works.items() if collective_calls(work)}
    ranks = None if entry.record is None else entry.record.ranks
    if ranks is None:
        return []
    begins = [work.packed.steps[-1].start for work in works.values()]
    # Clocks of several machines have nothing in common: there each rank begins at 0.
    first = min(begins, default=0) if ranks.host_count == 1 else None
    return [_lanes(rank, work, first) for rank, work in works.items()]


def _lanes(rank: int, work: TracedWork, first_ns: int | None) -> _Lanes:
    begin, end, _ = work.packed.steps[-1]
    zero, shortest = begin if first_ns is None else first_ns, (end - begin) // _FINEST
    starts, ends = compute_spans(work)
    calls = collective_calls(work)

    def spans(begins: Any, stops: Any) -> list[Span]:
        each = zip(begins, stops, strict=True)
        return [((start - zero) * 1e-6, (stop - start) * 1e-6) for start, stop in each if stop > start]

    compute: dict[str, list[Span]] = {}
    for phase in work.packed.phases:
        if begin <= phase.start < end:
            busy = union_of(starts, [stop + shortest for stop in ends], phase.start, phase.end)
            compute.setdefault(phase.name, []).extend(spans(*busy))
    left, right = union_of([of.start for of in calls], [of.end for of in calls], begin, end)
    stretches = zip(left.tolist(), right.tolist(), strict=True)
    exposed = [gaps_between(starts, ends, start, stop) for start, stop in stretches if stop > start]
    return _Lanes(rank, compute, spans(left, right), [span for gaps in exposed for span in spans(*gaps)])
