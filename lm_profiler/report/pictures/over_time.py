"""Pictures of the course of one step: memory by cause, and computation beside communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm_profiler.analysis.trace.kernel_sums import collective_calls, compute_spans
from lm_profiler.analysis.trace.packed_trace import PackedTrace
from lm_profiler.analysis.trace.pieces import (
    TracedWork,
    gaps_between,
    traced_work,
    union_of_intervals,
)
from lm_profiler.analysis.trace.trace_file import trace_events
from lm_profiler.record.entry import Entry
from lm_profiler.record.figure import byte_unit
from lm_profiler.record.memory_timeline import (
    CAUSE_TITLES,
    SOURCES,
    Allocation,
    MemoryTimeline,
)
from lm_profiler.record.quantities import PARTS, bytes_text
from lm_profiler.record.text import shortened
from lm_profiler.report.pictures.drawing import (
    CAUSE_COLOURS,
    PART_COLOURS,
    SERIES_COLOURS,
    add_legend,
    new_figure,
    wrapped,
)
from lm_profiler.report.pictures.groups import Group
from lm_profiler.report.run.plan_table import origin_text
from lm_profiler.usage_error import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# -- the memory of one step --------------------------------------------------------------------------------------------

_PANEL_WIDTH = 8.6  # inches of a picture with one panel
_FURTHER_WIDTH = 6.2  # inches of each further panel
_MOST_TIMELINES = 4
# The share of the axis that a character of a phase's name needs. A name with less room is rotated.
_CHARACTER_SHARE = 0.012


def titled_timelines(
    timelines: Sequence[MemoryTimeline], run_name: str = ""
) -> dict[str, MemoryTimeline]:
    """Return ``timelines`` by title: the run's name, if given, and the source of the timeline."""
    by_title = {}
    for timeline in timelines:
        title = SOURCES[timeline.source]
        if run_name:
            title = f"{run_name}: {title}"
        by_title[title] = timeline
    return by_title


def memory_timelines(timelines: Mapping[str, MemoryTimeline]) -> Figure:
    """Draw each of ``timelines`` in a panel below its name; panels are side by side and have one scale."""
    _check_count(len(timelines))
    most_bytes = max(timeline.peak for timeline in timelines.values())
    unit, unit_bytes = byte_unit(most_bytes)
    width = _PANEL_WIDTH + _FURTHER_WIDTH * (len(timelines) - 1)
    figure, panels = new_figure(
        width,
        6.4,
        nrows=2,
        ncols=len(timelines),
        squeeze=False,
        height_ratios=(3.4, 2.0),
    )
    drawn_causes: set[str] = set()
    for (name, timeline), axes, axes_below in zip(
        timelines.items(), *panels, strict=True
    ):
        drawn_causes.update(_draw_memory(axes, timeline, unit_bytes))
        axes.set_ylim(0, 1.12 * most_bytes / unit_bytes or 1.0)
        axes.set_title(wrapped(name, _FURTHER_WIDTH), fontsize=9.5, loc="left", pad=36)
        axes.set_xlabel("allocations and frees of one step, in order")
        _list_largest(axes_below, timeline)
    panels[0][0].set_ylabel(f"bytes in use ({unit})")
    entries = []
    for cause, colour in CAUSE_COLOURS.items():
        if cause in drawn_causes:
            entries.append((CAUSE_TITLES.get(cause, cause), colour))
    add_legend(figure, entries)
    return figure


def _check_count(count: int) -> None:
    """Raise UsageError unless the number of timelines can be drawn."""
    expected = f"plot: expected 1 to {_MOST_TIMELINES} memory timelines"
    if count == 0:
        raise UsageError(
            f"{expected}, given none; a run has one if it was started with --check_memory=true or --memory.history=true"
        )
    if count > _MOST_TIMELINES:
        raise UsageError(f"{expected}, given {count}; name fewer runs")


def _draw_memory(
    axes: Axes, timeline: MemoryTimeline, unit_bytes: float
) -> Iterable[str]:
    """Draw the stack of causes, the phases behind it and a mark at the peak; return the causes."""
    places, curves = timeline.curves()
    heights = []
    for curve in curves.values():
        heights.append([held_bytes / unit_bytes for held_bytes in curve])
    colours = [CAUSE_COLOURS.get(cause, CAUSE_COLOURS["rest"]) for cause in curves]
    # The level holds until the next event: drawn as steps.
    axes.stackplot(places, heights, colors=colours, step="post", lw=0)

    end = max(len(timeline.events), 1)
    for phase, phase_begin, phase_end in timeline.phase_spans():
        colour = PART_COLOURS.get(phase, PART_COLOURS["other"])
        axes.axvspan(phase_begin, phase_end, color=colour, alpha=0.13, lw=0, zorder=0)
        axes.axvline(phase_begin, color=colour, lw=0.6, ymax=1.0)
        middle = (phase_begin + phase_end) / 2
        is_narrow = (phase_end - phase_begin) / end < _CHARACTER_SHARE * len(phase)
        _write_phase(axes, phase, middle, is_narrow)

    peak = timeline.peak / unit_bytes
    axes.plot([timeline.peak_at], [peak], "v", color="black", ms=6, clip_on=False)
    # The text is on the side of the mark that has more room.
    offset, alignment = (7, 3), "left"
    if timeline.peak_at > 0.6 * end:
        offset, alignment = (-7, 3), "right"
    axes.annotate(
        f"peak {bytes_text(timeline.peak)}", (timeline.peak_at, peak), textcoords="offset points", va="bottom",
        fontweight="bold", xytext=offset, ha=alignment,
    )  # fmt: skip
    axes.set_xlim(0, end)
    axes.grid(visible=False, axis="x")
    return curves.keys()


def _write_phase(axes: Axes, phase: str, middle: float, is_narrow: bool) -> None:
    """Write a phase's name above the axes, rotated if the phase is too narrow for it."""
    rotation, alignment = 0, "center"
    if is_narrow:
        rotation, alignment = 35, "left"
    axes.annotate(
        phase, (middle, 1.01), xycoords=("data", "axes fraction"), va="bottom", fontsize=7.5,
        ha=alignment, rotation=rotation, rotation_mode="anchor",
    )  # fmt: skip


def _list_largest(axes: Axes, timeline: MemoryTimeline) -> None:
    """Write a table of the largest allocations at the peak."""
    axes.axis("off")
    _write_row(
        axes, 0, ["at the peak", "cause", "shape, dtype", "made by"], fontweight="bold"
    )
    for number, allocation in enumerate(timeline.largest, 1):
        cause = CAUSE_TITLES.get(allocation.cause, allocation.cause)
        maker = shortened(origin_text(allocation), most_characters=58)
        _write_row(
            axes,
            number,
            [bytes_text(allocation.bytes), cause, _shape_text(allocation), maker],
        )


def _write_row(
    axes: Axes, number: int, texts: Sequence[str], fontweight: str = "normal"
) -> None:
    """Write ``texts`` as row ``number`` of the table below a picture."""
    # in shares of the axes: the left edge of each column, and the upper edge of the row
    lefts = (0.0, 0.14, 0.31, 0.55)
    y = 1.0 - 0.092 * number
    for x, text in zip(lefts, texts, strict=True):
        axes.text(
            x,
            y,
            text,
            transform=axes.transAxes,
            fontsize=7,
            va="top",
            fontweight=fontweight,
        )


def _shape_text(allocation: Allocation) -> str:
    """Return shape and dtype of an allocation, such as ``8 × 512, torch.float32``; empty if they are unknown."""
    if allocation.shape is None:
        return ""
    sizes = " × ".join(str(size) for size in allocation.shape)
    return f"{sizes}, {allocation.dtype}"


# -- computation above communication -----------------------------------------------------------------------------------

_MOST_RANKS = 4
_HIDDEN_COLOUR = "#DDCC77"
_EXPOSED_COLOUR = SERIES_COLOURS[2]
_FINEST = 1000  # gaps in computation that are shorter than the step divided by this are not drawn
_WIDE_ENOUGH = 0.01  # a phase with this share of the computation is visible

Span = tuple[float, float]  # begin and length in ms


@dataclass(frozen=True)
class _Lanes:
    """The last traced step of a rank: computation by phase, and communication.

    ``hidden`` has the spans of all collectives; ``exposed`` has the parts without computation, which are drawn over it.
    """

    rank: int
    compute: dict[str, list[Span]]
    hidden: list[Span]
    exposed: list[Span]

    def visible_phases(self) -> set[str]:
        """Return the phases that are wide enough to be seen."""
        lengths = {}
        for phase, spans in self.compute.items():
            lengths[phase] = sum(length for _, length in spans)
        least_length = _WIDE_ENOUGH * sum(lengths.values())
        return {phase for phase, length in lengths.items() if length > least_length}


def overlap(groups: Sequence[Group]) -> Figure:
    """Draw a panel for the first run of each group: computation and communication of its first ranks."""
    traced: list[tuple[Group, list[_Lanes]]] = []
    for group in groups:
        lanes = _lanes_of_run(group.entries[0])
        if lanes:
            traced.append((group, lanes))
    if not traced:
        raise UsageError(
            "plot: no run has traces of several ranks; `lm_profiler fit` with several devices records them"
        )
    height = 1.0 + sum(0.3 + 0.68 * len(lanes) for _, lanes in traced)
    figure, panels = new_figure(
        8.5, height, nrows=len(traced), sharex=True, squeeze=False
    )
    visible_phases: set[str] = set()
    for axes, (group, lanes) in zip(panels[:, 0], traced, strict=True):
        name = group.full_label or group.entries[0].folder.parent.name
        axes.set_title(shortened(name), fontsize=9, loc="left")
        _draw_lanes(axes, lanes)
        visible_phases.update(*(lane.visible_phases() for lane in lanes))
    panels[-1, 0].set_xlabel(
        "ms of the last traced step; waiting for other ranks counts as communication"
    )
    entries = [(part, PART_COLOURS[part]) for part in PARTS if part in visible_phases]
    entries += [("communication, exposed", _EXPOSED_COLOUR), ("hidden", _HIDDEN_COLOUR)]
    add_legend(figure, entries)
    return figure


def _draw_lanes(axes: Any, lanes: Sequence[_Lanes]) -> None:
    """Draw two rows for each rank: its computation, and below it its communication."""
    names: list[str] = []
    for lane in lanes:
        compute_row = len(names)
        names += [f"rank {lane.rank}: compute", f"rank {lane.rank}: communication"]
        for phase, spans in lane.compute.items():
            axes.broken_barh(
                spans, (compute_row - 0.4, 0.8), color=PART_COLOURS[phase], lw=0
            )
        axes.broken_barh(
            lane.hidden, (compute_row + 0.6, 0.8), color=_HIDDEN_COLOUR, lw=0
        )
        axes.broken_barh(
            lane.exposed, (compute_row + 0.6, 0.8), color=_EXPOSED_COLOUR, lw=0
        )
    axes.set_yticks(range(len(names)), names)
    # The axis points down, so that the first rank is at the top.
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _lanes_of_run(entry: Entry) -> list[_Lanes]:
    """Return the lanes of the run's first ranks.

    Ranks whose trace is missing or damaged, or has no collectives, are left out.
    """
    ranks = None if entry.record is None else entry.record.ranks
    if ranks is None:
        return []
    works: dict[int, TracedWork] = {}
    for rank in range(_MOST_RANKS):
        with suppress(OSError, ValueError):
            trace = entry.folder / "trace" / f"rank{rank}.pt.trace.json.gz"
            works[rank] = traced_work(PackedTrace(trace_events(trace)))
    works = {rank: work for rank, work in works.items() if collective_calls(work)}
    if ranks.host_count != 1:
        # Clocks of several machines cannot be compared: each rank begins at 0.
        return [
            _lanes_of_rank(rank, work, zero_ns=_step_begin_ns(work))
            for rank, work in works.items()
        ]
    earliest_ns = min((_step_begin_ns(work) for work in works.values()), default=0)
    return [
        _lanes_of_rank(rank, work, zero_ns=earliest_ns) for rank, work in works.items()
    ]


def _step_begin_ns(work: TracedWork) -> int:
    return work.packed.steps[-1].start


def _lanes_of_rank(rank: int, work: TracedWork, zero_ns: int) -> _Lanes:
    """Return the lanes of the last step of ``work``, as times since ``zero_ns``."""
    begin, end, _ = work.packed.steps[-1]
    starts, ends = compute_spans(work)
    # A gap below the width of a line cannot be drawn. Ends are moved past such gaps, so that the union of the spans
    # joins those around a gap.
    shortest_gap = (end - begin) // _FINEST
    ends_past_gaps = [stop + shortest_gap for stop in ends]
    compute: dict[str, list[Span]] = {}
    for phase in work.packed.phases:
        is_in_step = begin <= phase.start < end
        if not is_in_step:
            continue
        busy_starts, busy_ends = union_of_intervals(
            starts, ends_past_gaps, phase.start, phase.end
        )
        spans = _spans(busy_starts, busy_ends, zero_ns)
        compute.setdefault(phase.name, []).extend(spans)

    calls = collective_calls(work)
    call_starts, call_ends = union_of_intervals(
        [call.start for call in calls], [call.end for call in calls], begin, end
    )
    exposed: list[Span] = []
    for start, stop in zip(call_starts.tolist(), call_ends.tolist(), strict=True):
        if stop > start:
            gap_starts, gap_ends = gaps_between(starts, ends, start, stop)
            exposed += _spans(gap_starts, gap_ends, zero_ns)
    return _Lanes(
        rank, compute, hidden=_spans(call_starts, call_ends, zero_ns), exposed=exposed
    )


def _spans(starts: Iterable[int], ends: Iterable[int], zero_ns: int) -> list[Span]:
    """Return the spans that have a length, in ms since ``zero_ns``."""
    spans = []
    for start, end in zip(starts, ends, strict=True):
        if end > start:
            spans.append(((start - zero_ns) * 1e-6, (end - start) * 1e-6))
    return spans
