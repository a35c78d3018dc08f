"""Pictures of one step over its time: memory by cause, and computation during communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm_profiler.analysis.trace.kernel_sums import collective_calls, compute_spans
from lm_profiler.analysis.trace.packed_trace import PackedTrace
from lm_profiler.analysis.trace.pieces import TracedWork, gaps_between, traced_work, union_of
from lm_profiler.analysis.trace.trace_file import trace_events
from lm_profiler.record.entry import Entry
from lm_profiler.record.memory_timeline import HELD, SOURCES, MemoryTimeline
from lm_profiler.record.quantities import PARTS, bytes_text
from lm_profiler.record.text import shortened
from lm_profiler.report.pictures import drawing
from lm_profiler.report.pictures.drawing import PART_COLOURS, SERIES_COLOURS, Group, new_figure, wrapped
from lm_profiler.report.run.plan_table import made_by
from lm_profiler.usage_error import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# -- the memory of one step --------------------------------------------------------------------------------------------

_ONE_PANEL, _FURTHER = 8.6, 6.2  # inches of a picture with one panel, and of each further one
_MOST_TIMELINES = 4
_NARROW = 0.012  # the share of the axis for a character of a phase's name; names with less room are rotated
_UNITS = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def named(timelines: Sequence[MemoryTimeline], of: str = "") -> dict[str, MemoryTimeline]:
    """Return ``timelines`` by the title of their source, after the run's name ``of`` if any."""
    return {f"{of}: {SOURCES[each.source]}" if of else SOURCES[each.source]: each for each in timelines}


def memory_timelines(timelines: Mapping[str, MemoryTimeline]) -> Figure:
    """Draw each of ``timelines`` in a panel under its name, side by side and to one scale."""
    if not 0 < len(timelines) <= _MOST_TIMELINES:
        raise UsageError(
            f"plot: expected 1 to {_MOST_TIMELINES} memory timelines, given {len(timelines) or 'none'}; "
            + ("name fewer runs" if timelines else "a run has one where --check_memory planned it, or of a snapshot")
        )
    count, most = len(timelines), max(of.peak for of in timelines.values())
    size, unit = next((each for each in _UNITS if most >= each[0] / 2), _UNITS[-1])
    width = _ONE_PANEL + _FURTHER * (count - 1)
    figure, panels = new_figure(width, 6.4, nrows=2, ncols=count, squeeze=False, height_ratios=(3.4, 2.0))
    drawn: dict[str, None] = {}
    for (name, timeline), axes, below in zip(timelines.items(), *panels, strict=True):
        drawn |= dict.fromkeys(_draw_memory(axes, timeline, size))
        axes.set_ylim(0, 1.12 * most / size or 1.0)
        axes.set_title(wrapped(name, _FURTHER), fontsize=9.5, loc="left", pad=36)
        axes.set_xlabel("allocations and frees of one step, in their order")
        _list_largest(below, timeline)
    panels[0][0].set_ylabel(f"bytes in use ({unit})")
    drawing.legend(
        figure,
        [(HELD.get(cause, cause), drawing.CAUSE_COLOURS[cause]) for cause in drawing.CAUSE_COLOURS if cause in drawn],
    )
    return figure


def _draw_memory(axes: Axes, timeline: MemoryTimeline, size: float) -> Sequence[str]:
    """Draw the stack, the phases behind it and the mark at the peak; return the causes that have an area."""
    places, curves = timeline.curves()
    # The level holds until the next event: drawn as steps.
    heights = [[of / size for of in curve] for curve in curves.values()]
    colours = [drawing.CAUSE_COLOURS.get(cause, drawing.CAUSE_COLOURS["rest"]) for cause in curves]
    axes.stackplot(places, heights, colors=colours, step="post", lw=0)
    end = max(len(timeline.events), 1)
    for phase, begins, ends in timeline.shaded():
        colour = PART_COLOURS.get(phase, PART_COLOURS["other"])
        axes.axvspan(begins, ends, color=colour, alpha=0.13, lw=0, zorder=0)
        axes.axvline(begins, color=colour, lw=0.6, ymax=1.0)
        turned = (ends - begins) / end < _NARROW * len(phase)
        axes.annotate(
            phase, ((begins + ends) / 2, 1.01), xycoords=("data", "axes fraction"), va="bottom", fontsize=7.5,
            ha="left" if turned else "center", rotation=35 if turned else 0, rotation_mode="anchor",
        )  # fmt: skip
    at, peak = timeline.peak_at, timeline.peak / size
    side: dict[str, Any] = {"xytext": (-7, 3), "ha": "right"} if at > 0.6 * end else {"xytext": (7, 3), "ha": "left"}
    axes.plot([at], [peak], "v", color="black", ms=6, clip_on=False)
    said = f"peak {bytes_text(timeline.peak)}"
    axes.annotate(said, (at, peak), textcoords="offset points", va="bottom", fontweight="bold", **side)
    axes.set_xlim(0, end)
    axes.grid(visible=False, axis="x")
    return [*curves]


def _list_largest(axes: Axes, timeline: MemoryTimeline) -> None:
    axes.axis("off")
    rows = [["at the peak", "cause", "shape, dtype", "made by"]]
    for of in timeline.largest:
        kind = "" if of.shape is None else f"{' × '.join(map(str, of.shape))}, {of.dtype}"
        rows.append([bytes_text(of.bytes), HELD.get(of.cause, of.cause), kind, shortened(made_by(of), 58)])
    for number, row in enumerate(rows):
        look: dict[str, Any] = {"fontsize": 7, "va": "top"} | ({} if number else {"fontweight": "bold"})
        for x, text in zip((0.0, 0.14, 0.31, 0.55), row, strict=True):
            axes.text(x, 1.0 - 0.092 * number, text, transform=axes.transAxes, **look)


# -- computation above communication -----------------------------------------------------------------------------------

_MOST_RANKS = 4
_HIDDEN, _EXPOSED = "#DDCC77", SERIES_COLOURS[2]
_FINEST = 1000  # parts of a step: shorter gaps in computation are not drawn

Span = tuple[float, float]  # begin and length in ms


@dataclass(frozen=True)
class _Lanes:
    """A rank's last traced step: computation by phase, and collectives; ``exposed`` lies over ``hidden``."""

    rank: int
    compute: dict[str, list[Span]]
    hidden: list[Span]
    exposed: list[Span]


def overlap(groups: Sequence[Group]) -> Figure:
    """Draw a panel for each group's first run: compute and communication of each of its first ranks."""
    known = [(group, lanes) for group in groups if (lanes := _lanes_of(group.entries[0]))]
    if not known:
        raise UsageError("plot: expected runs of several ranks with traces, given none; `fit` makes one")
    height = 1.0 + sum(0.3 + 0.68 * len(lanes) for _, lanes in known)
    figure, panels = new_figure(8.5, height, nrows=len(known), sharex=True, squeeze=False)
    for axes, (group, lanes) in zip(panels[:, 0], known, strict=True):
        axes.set_title(shortened(group.told or group.entries[0].folder.parent.name), fontsize=9, loc="left")
        _draw_lanes(axes, lanes)
    panels[-1, 0].set_xlabel("ms of the last traced step; waiting for other ranks counts as communication")
    drawn = [part for part in PARTS if any(_shows(of, part) for _, lanes in known for of in lanes)]
    looks = [("communication, exposed", _EXPOSED), ("hidden", _HIDDEN)]
    drawing.legend(figure, [*((part, PART_COLOURS[part]) for part in drawn), *looks])
    return figure


def _draw_lanes(axes: Any, lanes: Sequence[_Lanes]) -> None:
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
    """Return whether the phase is wide enough to be seen: a hundredth of the computation."""
    spent = {name: sum(length for _, length in spans) for name, spans in of.compute.items()}
    return spent.get(part, 0.0) > 0.01 * sum(spent.values())


def _lanes_of(entry: Entry) -> list[_Lanes]:
    """Return the lanes of the run's first ranks; none where a trace is missing, damaged or without collectives."""
    works: dict[int, TracedWork] = {}
    for rank in range(_MOST_RANKS):
        with suppress(OSError, ValueError):
            trace = entry.folder / "trace" / f"rank{rank}.pt.trace.json.gz"
            works[rank] = traced_work(PackedTrace(trace_events(trace)))
    works = {rank: work for rank, work in works.items() if collective_calls(work)}
    ranks = None if entry.record is None else entry.record.ranks
    if ranks is None:
        return []
    begins = [work.packed.steps[-1].start for work in works.values()]
    # Clocks of several machines cannot be compared: each rank then begins at 0.
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
