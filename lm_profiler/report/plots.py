"""Pictures of runs for documents: PNG, SVG or PDF."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lm_profiler.record.files import write_whole
from lm_profiler.record.quantities import PARTS, TIMES
from lm_profiler.record.run import RecordError
from lm_profiler.report.collection import Entry
from lm_profiler.report.colours import PART_COLOURS, SERIES_COLOURS
from lm_profiler.report.columns import COLUMNS, Column
from lm_profiler.report.groups import (
    Group,
    Groups,
    doubling,
    grouped,
    label,
    lines,
    mfu,
    peak_memory,
    places,
    shortened,
)
from lm_profiler.report.merged import Figure as Estimate
from lm_profiler.report.merged import figure as estimated
from lm_profiler.report.series import Series, series
from lm_profiler.report.table import title_with_unit

if TYPE_CHECKING:  # it takes half a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("phases", "steps", "memory", "mfu")
SUFFIXES = (".png", ".svg", ".pdf")

_STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "font.family": "sans-serif",
    "text.parse_math": False,  # a dollar in a run's name is a dollar
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "lm_profiler",  # equal figures make equal files
}
_NO_DATE = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
_MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":")


def save_plot(kind: str, entries: Sequence[Entry], path: Path, by: str | None = None) -> None:
    """Draw ``entries`` against ``by`` into ``path``, whose suffix says the format.

    ``phases``: the median step, cut into its parts; ``steps``: the time of every step, warm-up shaded; ``memory`` and
    ``mfu``. Bars of error are 95 % intervals. A run that has no figure stands there with the word for what became of
    it. ``by`` is an option or a fact; where it is None, one that varies.

    Raises:
        ValueError: an unknown kind, suffix or ``by``, or nothing to draw.
        OSError: ``path`` cannot be written.
    """
    if kind not in KINDS:
        raise ValueError(f"plot: expected one of {', '.join(KINDS)}, given {kind!r}")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"plot: expected a file ending in {', '.join(SUFFIXES)}, given {path.name!r}")
    if not entries:
        raise ValueError("plot: expected at least one run, given none; name a folder that holds one")
    from matplotlib import rc_context

    with rc_context(_STYLE):
        drawn = draw(kind, entries, by)
        content = io.BytesIO()
        drawn.savefig(content, format=suffix[1:], dpi=150, metadata=_NO_DATE[suffix])
    write_whole(path, content.getvalue())


def draw(kind: str, entries: Sequence[Entry], by: str | None = None) -> Figure:
    """The figure that ``save_plot`` saves.

    Raises:
        ValueError: ``by`` is no option and no fact, or no run has the figure.
    """
    if kind == "phases":
        return _phases(grouped(entries, by))
    if kind == "steps":
        return _steps(grouped(entries, by))
    if kind == "mfu":
        return _figure_against(grouped(entries, by, numbers=True), mfu())
    return _figure_against(grouped(entries, by, numbers=True), peak_memory(entries))


def _new(width: float, height: float, **grid: Any) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**grid)


# -- phases ------------------------------------------------------------------------------------------------------


def _phases(groups: Groups) -> Figure:
    """A bar a group, read from above: its parts' medians, and over them the median step with its interval."""
    figure, axes = _new(8.0, 1.4 + 0.36 * len(groups.groups))
    scale = TIMES["step"].scale
    present = set()
    for row, group in enumerate(groups.groups):
        left = 0.0
        for part in PARTS:
            time = estimated(group.entries, COLUMNS[TIMES[part].name]).value
            if time is not None:
                present.add(part)
                axes.barh(row, time * scale, 0.72, left, color=PART_COLOURS[part], edgecolor="white", lw=0.4)
                left += time * scale
        end, text = _total(axes, estimated(group.entries, COLUMNS["step_s"]), row)
        axes.annotate(f"{text} {group.trouble}", (end, row), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(groups.groups)), [shortened(group.label) for group in groups.groups])
    axes.set_ylim(len(groups.groups) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.margins(x=0.15)
    axes.grid(visible=False, axis="y")
    bars = _error_bars(groups, COLUMNS["step_s"])
    axes.set_xlabel("median time of a step, by phase (ms)" + (f"\nblack: the whole step, {bars}" if bars else ""))
    axes.set_ylabel(shortened(groups.title))
    _legend(figure, [(part, PART_COLOURS[part]) for part in PARTS if part in present])
    return figure


def _total(axes: Axes, step: Estimate, row: int) -> tuple[float, str]:
    """Draw the step's median and interval; how far to the right that reaches, and what to write there."""
    if step.value is None:
        return 0.0, ""
    scale, (below, above) = TIMES["step"].scale, _errors(step)
    errors = [[below * scale], [above * scale]]
    axes.errorbar(step.value * scale, row, xerr=errors, fmt="|", color="black", ms=9, capsize=3, lw=1.2)
    return (step.value + above) * scale, TIMES["step"].show(step.value, digits=1)


def _error_bars(groups: Groups, figure: Column) -> str:
    """What the bars of error are; empty where there are none."""
    counts = [found.n for group in groups.groups if (found := estimated(group.entries, figure)).low is not None]
    parts = ["with 95 % interval"] * (1 in counts) + ["of repeats, the extremes"] * (max(counts, default=1) > 1)
    return "; ".join(parts)


def _errors(figure: Estimate) -> tuple[float, float]:
    """How far the interval reaches below and above; 0 where there is none."""
    if figure.value is None or figure.low is None or figure.high is None:
        return 0.0, 0.0
    return figure.value - figure.low, figure.high - figure.value


def _legend(figure: Figure, colours: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    if colours:
        patches = [Patch(color=colour, label=label) for label, colour in colours]
        figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), handlelength=1.0)


# -- steps -------------------------------------------------------------------------------------------------------


def _steps(groups: Groups) -> Figure:
    """A panel a run, each with its own scale of time."""
    runs = [(group.label, entry) for group in groups.groups for entry in group.entries]
    columns = min(3, len(runs))
    rows = -(-len(runs) // columns)
    figure, grid = _new(8.0, 0.8 + 1.9 * rows, nrows=rows, ncols=columns, sharex=True, squeeze=False)
    for axes, (name, entry) in zip(grid.flat, runs, strict=False):
        repeat = entry.cell.repeat if entry.cell is not None else 0
        axes.set_title(shortened(name, 32) + (f" (repeat {repeat})" if repeat else ""), fontsize=9, loc="left")
        _steps_of(axes, entry)
    for axes in grid.flat[len(runs) :]:
        axes.remove()
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("time of the step (ms)", fontsize=9)
    cut = any(e.record is not None and e.record.steadiness is not None and e.record.steadiness.cut for _, e in runs)
    _legend(figure, [("warm-up", _WARMUP), *([("also left out: not steady yet", _CUT)] * cut)])
    return figure


_WARMUP, _CUT = "#D0D0D0", "#E8E8E8"
_TALLEST = 3.0
"""A first step that compiled is a hundred times the others: beyond this many medians it is a number, not a point."""


def _steps_of(axes: Axes, entry: Entry) -> None:
    try:
        found: Series | None = series(entry)
    except RecordError:
        found = None
    if found is not None and found.steps:
        first, ms = found.steps[0] - 0.5, [s * TIMES["step"].scale for s in found.seconds]
        axes.axvspan(first, first + found.warmup, color=_WARMUP, lw=0)
        axes.axvspan(first + found.warmup, first + found.warmup + found.cut, color=_CUT, lw=0)
        axes.plot(found.steps, ms, "o-", color="black", ms=2.5, lw=0.8)
        top = min(1.1 * max(ms), _TALLEST * median(ms))
        axes.set_ylim(0, top)
        if max(ms) > top:
            axes.annotate(f"up to {max(ms):,.0f} ms", (0.03, 0.97), xycoords="axes fraction", va="top", fontsize=7)
    if entry.status != "ok" or found is None or not found.steps:
        word = "no steps" if entry.status == "ok" else Group((), (entry,)).trouble
        axes.annotate(word, (0.5, 0.5), xycoords="axes fraction", ha="center", va="center")
    if found is None or not found.steps:
        axes.set_yticks([])


# -- one figure --------------------------------------------------------------------------------------------------


def _figure_against(groups: Groups, figure: Column) -> Figure:
    """``figure`` against the first column, a line for each combination of the others."""
    assert figure.quantity is not None
    shown = title_with_unit(figure.title, figure.quantity.shown_unit)
    if all(estimated(group.entries, figure).value is None for group in groups.groups):
        raise ValueError(f"plot: expected runs that know their {figure.title}, given none; `report RUNS` says why")
    absent = _absent(groups, figure)
    drawn, axes = _new(7.2, 4.0 + 0.17 * len(absent))
    ticks, numbers = places(groups)
    found = lines(groups)
    for at, (rest, line) in enumerate(found.items()):
        style = _MARKERS[at % len(_MARKERS)] + (_DASHES[at // len(SERIES_COLOURS) % len(_DASHES)] if numbers else "")
        points = [(ticks[group.values[0]], estimated(group.entries, figure)) for group in line]
        colour, name = SERIES_COLOURS[at % len(SERIES_COLOURS)], shortened(label(rest))
        _line(axes, points, figure.quantity.scale, colour, style, name)
    _ticks(axes, ticks, numbers)
    axes.set_xlabel("\n".join((groups.columns[0].title, *absent)))
    axes.set_ylabel("\n".join(filter(None, (shown, _error_bars(groups, figure)))))
    if len(found) > 1:
        drawn.legend(
            loc="outside right upper", title=shortened(", ".join(column.title for column in groups.columns[1:]))
        )
    return drawn


def _line(
    axes: Axes, points: Sequence[tuple[float, Estimate]], scale: float, colour: str, style: str, name: str
) -> None:
    """A point for each figure; on the axis, a cross where there is none."""
    known = [(x, figure.value * scale, *_errors(figure)) for x, figure in points if figure.value is not None]
    x, y, below, above = zip(*known, strict=True) if known else ((), (), (), ())
    errors = [[error * scale for error in side] for side in (below, above)]
    axes.errorbar(x, y, yerr=errors, fmt=style, color=colour, label=name, capsize=3)
    missing = [x for x, figure in points if figure.value is None]
    axes.plot(missing, [0.0] * len(missing), "x", color=colour, clip_on=False)


def _absent(groups: Groups, figure: Column) -> list[str]:
    """A line for each group that has no point, or of which only some repeats speak: what became of it."""
    words = [(group.label, group.absence(figure)) for group in groups.groups]
    return [f"{shortened(name)}: {word}" for name, word in words if word]


def _ticks(axes: Axes, ticks: Mapping[Any, float], numbers: bool) -> None:
    """A tick at each value that was run; doubling values stand at equal distances."""
    if numbers and doubling(ticks.values()):
        axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks.values()), [shortened(label([value])) for value in ticks])
    axes.minorticks_off()
    axes.margins(x=0.1)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
