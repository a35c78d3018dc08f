"""The pictures of runs, each saved in any format: a bar of phases for each group, and figures against a fact."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_profiler.record.calls import require
from lm_profiler.record.entry import Entry
from lm_profiler.record.figure import in_fitting_unit
from lm_profiler.record.files import write_whole
from lm_profiler.record.quantities import PARTS, TIMES
from lm_profiler.record.text import shortened
from lm_profiler.report.pictures import drawing
from lm_profiler.report.pictures.drawing import PART_COLOURS, SERIES_COLOURS, Group, grouped, new_figure, wrapped
from lm_profiler.report.pictures.over_time import overlap
from lm_profiler.report.tables.link_table import BUS, SIZE, LinkFigures
from lm_profiler.report.tables.rows import Estimate, estimated
from lm_profiler.report.tables.table import fact_text
from lm_profiler.report.tables.table_columns import COLUMNS, Column, peak_memory
from lm_profiler.usage_error import UsageError, expect

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("phases", "memory", "attention", "tokens", "mfu", "overlap")
TIMELINE = "memory_timeline"  # the kind of picture that shows one step of each run, from files next to its record
SUFFIXES = (".png", ".svg", ".pdf", ".html")

# Without a date equal figures make equal files.
_NO_DATE = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
_PAGE = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>lm_profiler</title></head>{}</html>\n'


def check_picture(path: Path) -> None:
    """Raise UsageError or MissingExtra where no picture can be drawn into ``path``."""
    expect(path.suffix.lower() in SUFFIXES, "plot", f"a file ending in {', '.join(SUFFIXES)}", path.name)
    require("matplotlib", "plot")


def save_figure(draw_it: Callable[[], Figure], path: Path) -> None:
    """Write the figure that ``draw_it`` returns to ``path``, in the format that its suffix says."""
    check_picture(path)
    suffix = path.suffix.lower()
    from matplotlib import rc_context

    drawn_as = ".svg" if suffix == ".html" else suffix  # a page embeds the picture, and needs no script
    with rc_context(drawing.STYLE):
        content = io.BytesIO()
        draw_it().savefig(content, format=drawn_as[1:], dpi=150, metadata=_NO_DATE[drawn_as])
    picture = content.getvalue()
    if suffix == ".html":
        picture = _PAGE.format(f"<body>{picture[picture.index(b'<svg') :].decode()}</body>").encode()
    write_whole(path, picture)


def draw(kind: str, entries: Sequence[Entry], by: str | None = None) -> Figure:
    """Draw ``entries`` against ``by``, an option or a fact (None: one that varies)."""
    if kind in ("phases", "overlap"):
        return (phases if kind == "phases" else overlap)(grouped(entries, by))
    figures = {"mfu": COLUMNS["mfu"], "tokens": COLUMNS["tokens_per_s"], "attention": COLUMNS["saved_bytes"]}
    return _figure_against(grouped(entries, by, numbers=True), figures.get(kind) or peak_memory(entries))


_BARS_WIDTH = 8.0
_NAMES_ROOM = 2.6  # the width of the names in inches; longer ones have a second line
_MOST_NAMED = 100  # the most bars that have a name each; of more bars every k-th has one


def phases(groups: Sequence[Group]) -> Figure:
    """Draw a bar for each group, from the top: the means of its parts, which add up to its step, with its interval."""
    count, scale = len(groups), TIMES["step"].scale
    figure, axes = new_figure(_BARS_WIDTH, 1.4 + 0.36 * min(count, _MOST_NAMED))
    stacks = [drawing.stack(group) for group in groups]
    present = [part for part in PARTS if any(part in parts for parts in stacks)]
    left = [0.0] * count
    for part in present:
        rows = [row for row in range(count) if part in stacks[row]]
        widths, starts = [stacks[row][part] * scale for row in rows], [left[row] for row in rows]
        axes.barh(rows, widths, 0.72, starts, color=PART_COLOURS[part], edgecolor="white", lw=0.4 * (count < 50))
        for row, width in zip(rows, widths, strict=True):
            left[row] += width
    steps = [estimated(group.entries, COLUMNS["step_s"]) for group in groups]
    at, values, *around = drawing.known_points(enumerate(steps), scale)
    if values:
        axes.errorbar(values, at, xerr=around, fmt="|", color="black", ms=9, capsize=3, lw=1.2)
    named = drawing.thinned(count, _MOST_NAMED)
    axes.set_yticks(list(named), [wrapped(shortened(groups[row].label, 64), _NAMES_ROOM) for row in named])
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_xlim(0, 1.03 * max([*left, *((of.high or of.value or 0.0) * scale for of in steps)]) or 1.0)
    beside = axes.secondary_yaxis("right")  # a column: next to the bars the longest text would squeeze them all
    beside.set_yticks(list(named), [_said(steps[row], drawing.trouble(groups[row].entries)) for row in named])
    beside.tick_params(length=0)
    beside.spines["right"].set_visible(False)
    axes.grid(visible=False, axis="y")
    bars = drawing.error_bars(steps)
    lines = ["time of a step (ms)", "phases and step: means", *[f"black: the mean step, {bars}"] * bool(bars)]
    axes.set_xlabel("\n".join(lines + [f"{count} bars, one in {named.step} with its name"] * (named.step > 1)))
    if len(groups[0].columns) == 1:  # otherwise the names include their fact
        axes.set_ylabel(shortened(groups[0].columns[0].title))
    drawing.legend(figure, [(part, PART_COLOURS[part]) for part in present])
    return figure


def _said(step: Estimate, ended: str) -> str:
    if step.value is None:
        return shortened(ended)
    ms = TIMES["step"].show(step.value, digits=1)
    return f"{ms} {ended}".rstrip() if len(ended) <= 16 else f"{ms}\n{shortened(ended)}"


_MOST_WORDS = 12  # the most lines in a legend, and below an axis; of more, only the number is shown
_WIDTH, _MOST_TICKS = 7.2, 24
_MARKERS, _DASHES = "osD^vPX", ("-", "--", ":", "-.")
_SAME = 1e-3  # lines whose points differ by less than this share of the largest value would hide each other


def _figure_against(groups: Sequence[Group], column: Column) -> Figure:
    """Draw the figure of ``column`` against the first fact, with a line for each combination of the other facts."""
    assert column.quantity is not None
    figures = [estimated(group.entries, column) for group in groups]
    values = [figure.value for figure in figures if figure.value is not None]
    if not values:
        raise UsageError(
            f"plot: expected runs that ended well and know their {column.title}, given none; "
            "`report RUNS` shows how each ended"
        )
    quantity = in_fitting_unit(column.quantity, values)
    absent = _absent(groups, figures)
    drawn, axes = new_figure(_WIDTH, 4.0 + 0.17 * len(absent))
    ticks, are_numbers = drawing.places(groups)
    lines = _distinct_lines(drawing.lines(groups), column, _SAME * max(values))
    for index, (name, groups_of_line) in enumerate(lines.items()):
        points = [(ticks[group.values[0]], estimated(group.entries, column)) for group in groups_of_line]
        colour = SERIES_COLOURS[index % len(SERIES_COLOURS)]
        style = _MARKERS[index % len(_MARKERS)]
        if are_numbers:
            style += _DASHES[index // len(SERIES_COLOURS) % len(_DASHES)]
        label = name if index < _MOST_WORDS else "_"
        x, y, *around = drawing.known_points(points, quantity.scale)
        axes.errorbar(x, y, yerr=around, color=colour, capsize=3, fmt=style, label=label)
        missing = [place for place, figure in points if figure.value is None]
        if missing:  # a cross on the axis
            axes.plot(missing, [0.0] * len(missing), "x", color=colour, clip_on=False)
    _ticks(axes, ticks, are_numbers)
    columns = groups[0].columns
    axes.set_xlabel("\n".join((wrapped(columns[0].title, _WIDTH), *absent)))
    axes.set_ylabel("\n".join(filter(None, (quantity.heading, drawing.error_bars(figures)))))
    if len(lines) > 1 or len(drawing.lines(groups)) > 1:
        title = shortened(columns[1].title, 24) if len(columns) == 2 else ""
        if len(lines) > _MOST_WORDS:
            title += f"\nand {len(lines) - _MOST_WORDS} more"
        drawn.legend(loc="outside right upper", title=title)
    return drawn


def _distinct_lines(lines: Mapping[str, list[Group]], column: Column, same: float) -> dict[str, list[Group]]:
    """Return the lines to draw by their labels. Lines whose values differ by less than ``same`` are one.

    Otherwise the last one drawn would hide the others. Its label names all of them, each on a line of its own.
    """
    values_of: dict[str, dict[Any, float | None]] = {}
    for name, groups in lines.items():
        values_of[name] = {group.values[0]: estimated(group.entries, column).value for group in groups}
    alike: dict[str, list[str]] = {}
    for name, values in values_of.items():
        twin = next((other for other in alike if _are_same(values, values_of[other], same)), name)
        alike.setdefault(twin, []).append(shortened(name))
    return {" =\n".join(names): lines[name] for name, names in alike.items()}


def _are_same(values: Mapping[Any, float | None], others: Mapping[Any, float | None], same: float) -> bool:
    if values.keys() != others.keys():
        return False
    for place, value in values.items():
        other = others[place]
        if value is None or other is None:
            if value is not other:
                return False
        elif abs(value - other) >= same:
            return False
    return True


def _absent(groups: Sequence[Group], figures: Sequence[Estimate]) -> list[str]:
    """Return a line on how each group ended that lacks a point, or has one for only some of its repeats."""
    told = []
    for group, figure in zip(groups, figures, strict=True):
        if word := drawing.trouble(group.entries) or ("unknown" if figure.value is None else ""):
            told.append(f"{shortened(group.label)}: {word}")
    return told[:_MOST_WORDS] + [f"and {len(told) - _MOST_WORDS} more"] * (len(told) > _MOST_WORDS)


def _ticks(axes: Axes, ticks: Mapping[Any, float], numbers: bool) -> None:
    # From a factor of 4 on the axis is logarithmic, so that doubling values have equal distances.
    if numbers and 0 < 4 * min(ticks.values()) <= max(ticks.values()):
        axes.set_xscale("log", base=2)
    shown = [list(ticks.items())[at] for at in drawing.thinned(len(ticks), _MOST_TICKS)]
    names = [shortened(fact_text(value) or "unknown", 32) for value, _ in shown]
    crowded = not numbers and sum(map(len, names)) > _WIDTH * 8
    turned: dict[str, Any] = {"rotation": 30, "ha": "right"} if crowded else {}
    axes.set_xticks([place for _, place in shown], names, **turned)
    axes.minorticks_off()
    axes.margins(x=0.1)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def bandwidths(rows: Sequence[LinkFigures]) -> Figure:
    """Draw bus bandwidth against size, a line for each collective, with a dash pattern for each number of processes."""
    known = [row for row in rows if row.bus_bandwidth]
    if not known:
        raise UsageError("plot: expected a collective that could be timed, given none; the table says why")
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    drawn, axes = new_figure(_WIDTH, 4.0)
    groups = list(dict.fromkeys((row.backend, row.ranks) for row in known))
    ops = list(dict.fromkeys(row.op for row in known))
    for backend, ranks in groups:
        for at, op in enumerate(ops):
            line = [row for row in known if (row.backend, row.ranks, row.op) == (backend, ranks, op)]
            axes.plot(
                [row.size_bytes * SIZE.scale for row in line],
                [(row.bus_bandwidth or 0.0) * BUS.scale for row in line],
                color=SERIES_COLOURS[at % len(SERIES_COLOURS)],
                marker=_MARKERS[at % len(_MARKERS)],
                linestyle=_DASHES[groups.index((backend, ranks)) % len(_DASHES)],
                label=f"{op}, {ranks} x {backend}" if len(groups) > 1 else op,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = sorted({row.size_bytes * SIZE.scale for row in known})
    axes.set_xticks(sizes, [f"{size:.4g}" for size in sizes])
    axes.xaxis.minorticks_off()
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(StrMethodFormatter("{x:g}"))
    axes.set_xlabel(SIZE.heading)
    axes.set_ylabel("bus bandwidth (GB/s)")
    drawn.legend(loc="outside right upper", title="" if len(groups) > 1 else f"{groups[0][1]} x {groups[0][0]}")
    return drawn
