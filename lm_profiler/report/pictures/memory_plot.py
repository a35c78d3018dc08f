"""The memory timeline: bytes over one step, stacked by cause, with the largest allocations alive at the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_profiler.record.memory_timeline import HELD, SOURCES, Allocation, MemoryTimeline
from lm_profiler.record.quantities import bytes_text
from lm_profiler.record.text import shortened
from lm_profiler.report.pictures.drawing import CAUSE_COLOURS, PART_COLOURS, legend, new_figure, wrapped
from lm_profiler.report.run.allocation_tables import made_by
from lm_profiler.usage_error import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _SECOND = 8.6, 6.2  # inches of a picture with one panel, and of each further one
_MOST_PANELS = 4
_NARROW = 0.012  # the share of the axis that a character of a phase's name takes; names with less room are turned
_UNITS = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def memory_timelines(timelines: Mapping[str, MemoryTimeline]) -> Figure:
    """Draw each of ``timelines`` in a panel under its name, side by side and to one scale."""
    if not 0 < len(timelines) <= _MOST_PANELS:
        raise UsageError(
            f"plot: expected 1 to {_MOST_PANELS} memory timelines, given {len(timelines) or 'none'}; "
            + ("name fewer runs" if timelines else "a run has one where --check_memory planned it, or of a snapshot")
        )
    count, most = len(timelines), max(of.peak for of in timelines.values())
    size, unit = next((each for each in _UNITS if most >= each[0] / 2), _UNITS[-1])
    figure, panels = new_figure(
        _WIDTH + _SECOND * (count - 1), 6.4, nrows=2, ncols=count, squeeze=False, height_ratios=(3.4, 2.0)
    )
    drawn: dict[str, None] = {}
    for (name, timeline), axes, below in zip(timelines.items(), *panels, strict=True):
        drawn |= dict.fromkeys(_draw(axes, timeline, size))
        axes.set_ylim(0, 1.12 * most / size or 1.0)
        axes.set_title(wrapped(name, _SECOND), fontsize=9.5, loc="left", pad=36)
        axes.set_xlabel("allocations and frees of one step, in their order")
        _list(below, timeline)
    panels[0][0].set_ylabel(f"bytes in use ({unit})")
    legend(figure, [(HELD.get(cause, cause), CAUSE_COLOURS[cause]) for cause in CAUSE_COLOURS if cause in drawn])
    return figure


def _draw(axes: Axes, timeline: MemoryTimeline, size: float) -> Sequence[str]:
    places, curves = timeline.curves()
    # The level holds until the next event: drawn as steps.
    heights = [[of / size for of in curve] for curve in curves.values()]
    colours = [CAUSE_COLOURS.get(cause, CAUSE_COLOURS["rest"]) for cause in curves]
    axes.stackplot(places, heights, colors=colours, step="post", lw=0)
    end = max(len(timeline.events), 1)
    for phase, begins, ends in timeline.shaded():
        axes.axvspan(begins, ends, color=PART_COLOURS.get(phase, PART_COLOURS["other"]), alpha=0.13, lw=0, zorder=0)
        axes.axvline(begins, color=PART_COLOURS.get(phase, PART_COLOURS["other"]), lw=0.6, ymax=1.0)
        turned = (ends - begins) / end < _NARROW * len(phase)
        axes.annotate(
            phase, ((begins + ends) / 2, 1.01), xycoords=("data", "axes fraction"), va="bottom", fontsize=7.5,
            ha="left" if turned else "center", rotation=35 if turned else 0, rotation_mode="anchor",
        )  # fmt: skip
    at, peak = timeline.peak_at, timeline.peak / size
    left = at > 0.6 * end
    axes.plot([at], [peak], "v", color="black", ms=6, clip_on=False)
    axes.annotate(
        f"peak {bytes_text(timeline.peak)}", (at, peak), xytext=(-7 if left else 7, 3), textcoords="offset points",
        ha="right" if left else "left", va="bottom", fontweight="bold",
    )  # fmt: skip
    axes.set_xlim(0, end)
    axes.grid(visible=False, axis="x")
    return [*curves]


def _list(axes: Axes, timeline: MemoryTimeline) -> None:
    axes.axis("off")
    rows = [["at the peak", "cause", "shape, dtype", "made by"], *map(_row, timeline.largest)]
    at = (0.0, 0.14, 0.31, 0.55)
    for number, row in enumerate(rows):
        for x, text in zip(at, row, strict=True):
            look: dict[str, Any] = {"fontweight": "bold"} if not number else {}
            axes.text(x, 1.0 - 0.092 * number, text, transform=axes.transAxes, fontsize=7, va="top", **look)


def _row(of: Allocation) -> list[str]:
    kind = "" if of.shape is None else f"{' × '.join(map(str, of.shape))}, {of.dtype}"
    return [bytes_text(of.bytes), HELD.get(of.cause, of.cause), kind, shortened(made_by(of), 58)]


def named(timelines: Sequence[MemoryTimeline], of: str = "") -> dict[str, MemoryTimeline]:
    """Return ``timelines`` by the title of their source, behind the run's name ``of`` if any."""
    return {f"{of}: {SOURCES[each.source]}" if of else SOURCES[each.source]: each for each in timelines}
