"""The pictures of runs and how they are saved: bars of phases, and figures against a fact."""

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
from lm_profiler.report.pictures.drawing import (
    PART_COLOURS,
    SERIES_COLOURS,
    STYLE,
    add_legend,
    error_bar_text,
    error_bars,
    label_logarithmic,
    new_figure,
    thinned,
    wrapped,
)
from lm_profiler.report.pictures.figure_grids import bars, heat_map
from lm_profiler.report.pictures.groups import (
    Axis,
    Group,
    axis_of,
    axis_title,
    bar_groups,
    groups_by_line,
    line_groups,
)
from lm_profiler.report.pictures.over_time import overlap
from lm_profiler.report.tables.column import Column
from lm_profiler.report.tables.link_table import BUS, SIZE, LinkFigures
from lm_profiler.report.tables.run_groups import Estimate, estimate
from lm_profiler.report.tables.table import fact_text
from lm_profiler.report.tables.table_columns import (
    COLUMNS,
    columns_named,
    peak_memory,
)
from lm_profiler.usage_error import UsageError, expect

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = (
    "phases",
    "memory",
    "attention",
    "tokens",
    "mfu",
    "overlap",
    "line",
    "bars",
    "heat",
)
# the kinds of pictures that show any figure, the step's time if none is named
ANY_FIGURE = ("line", "bars", "heat")
# the kinds whose axis of figures may be logarithmic
LOGARITHMIC = ("line", "bars", "memory", "attention", "tokens", "mfu")
TIMELINE = "memory_timeline"  # the kind of picture that is drawn from timelines, which are files next to the records
SUFFIXES = (".png", ".svg", ".pdf", ".html")

# Without a date equal figures make equal files.
_NO_DATE = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
_PAGE = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>lm_profiler</title></head>{}</html>\n'


def check_picture(path: Path) -> None:
    """Raise UsageError or MissingExtra if no picture can be drawn into ``path``."""
    expect(
        path.suffix.lower() in SUFFIXES,
        "plot",
        f"a file ending in {', '.join(SUFFIXES)}",
        path.name,
    )
    require("matplotlib", "plot")


def save_figure(draw_figure: Callable[[], Figure], path: Path) -> None:
    """Write the figure that ``draw_figure`` returns to ``path``, in the format of its suffix."""
    check_picture(path)
    from matplotlib import rc_context

    suffix = path.suffix.lower()
    is_page = suffix == ".html"
    # a page embeds the picture, and needs no script
    drawn_suffix = ".svg" if is_page else suffix
    with rc_context(STYLE):
        buffer = io.BytesIO()
        draw_figure().savefig(
            buffer, format=drawn_suffix[1:], dpi=150, metadata=_NO_DATE[drawn_suffix]
        )
    content = buffer.getvalue()
    if is_page:
        svg = content[content.index(b"<svg") :].decode()
        content = _PAGE.format(f"<body>{svg}</body>").encode()
    write_whole(path, content)


def draw(
    kind: str,
    entries: Sequence[Entry],
    by: str | None = None,
    value: str | None = None,
    is_logarithmic: bool = False,
) -> Figure:
    """Draw a picture of ``entries`` against ``by``, the name of an option or a fact; by default one that varies.

    ``value`` names the figure of a kind in ``ANY_FIGURE``. ``is_logarithmic`` makes the axis of figures logarithmic.
    """
    if kind == "phases":
        return phases(bar_groups(entries, by))
    if kind == "overlap":
        return overlap(bar_groups(entries, by))
    if kind in ANY_FIGURE:
        [column] = columns_named([value or TIMES["step"].name], entries)
        if kind == "heat":
            return heat_map(bar_groups(entries, by), column)
        if kind == "bars":
            return bars(bar_groups(entries, by), column, is_logarithmic)
        if column.quantity is None:
            raise UsageError(
                f"value: expected a figure such as step_s, given {column.name!r}"
            )
    else:
        column = peak_memory(entries)
        if kind != "memory":
            column = COLUMNS[_FIGURE_OF_KIND[kind]]
    return _figure_against_fact(line_groups(entries, by), column, is_logarithmic)


_FIGURE_OF_KIND = {"mfu": "mfu", "tokens": "tokens_per_s", "attention": "saved_bytes"}


# -- a bar for each group ----------------------------------------------------------------------------------------------

_BARS_WIDTH = 8.0
_NAME_WIDTH = 2.6  # the width of the names in inches; longer ones have a second line
_MOST_NAMES = 100  # with more bars, only every k-th one has its name printed
# fewer bars have a white line between their parts; it would hide thinner bars
_SPACED_BARS = 50


def phases(groups: Sequence[Group]) -> Figure:
    """Draw a bar for each group: the means of its parts, which add up to the mean step, and the step's interval."""
    count = len(groups)
    figure, axes = new_figure(_BARS_WIDTH, 1.4 + 0.36 * min(count, _MOST_NAMES))
    stacks = [group.part_seconds() for group in groups]
    steps = [estimate(group.entries, COLUMNS["step_s"]) for group in groups]
    drawn_parts, ends_ms = _draw_stacks(axes, stacks)
    scale = TIMES["step"].scale
    bars = error_bars(enumerate(steps), scale)
    if bars.values:
        axes.errorbar(
            bars.values,
            bars.places,
            xerr=(bars.below, bars.above),
            fmt="|",
            color="black",
            ms=9,
            capsize=3,
            lw=1.2,
        )

    named_rows = thinned(count, _MOST_NAMES)
    labels = []
    step_texts = []
    for row in named_rows:
        labels.append(
            wrapped(shortened(groups[row].label, most_characters=64), _NAME_WIDTH)
        )
        step_texts.append(_step_text(steps[row], groups[row].failure_text))
    axes.set_yticks(list(named_rows), labels)
    # The axis points down, so that the first bar is at the top; each bar is around a whole number.
    axes.set_ylim(count - 0.4, -0.6)
    highest_ms = [(step.high or step.value or 0.0) * scale for step in steps]
    axes.set_xlim(0, 1.03 * max([*ends_ms, *highest_ms]) or 1.0)
    _add_column_at_right(axes, named_rows, step_texts)
    axes.grid(visible=False, axis="y")

    lines = ["step time (ms)", "phases and step: means"]
    interval_text = error_bar_text(steps)
    if interval_text:
        lines.append(f"black: the mean step, {interval_text}")
    if named_rows.step > 1:
        lines.append(f"{count} bars; one in {named_rows.step} shows its name")
    axes.set_xlabel("\n".join(lines))
    if len(groups[0].columns) == 1:  # otherwise the names include their fact
        axes.set_ylabel(shortened(groups[0].columns[0].title))
    add_legend(figure, [(part, PART_COLOURS[part]) for part in drawn_parts])
    return figure


def _add_column_at_right(axes: Axes, rows: Sequence[int], texts: Sequence[str]) -> None:
    """Write a text for each of the ``rows`` of bars in a column at the right.

    Next to the bars, the longest text would squeeze all bars.
    """
    right_axis = axes.secondary_yaxis("right")
    right_axis.set_yticks(list(rows), texts)
    right_axis.tick_params(length=0)
    right_axis.spines["right"].set_visible(False)


def _draw_stacks(
    axes: Axes, stacks: Sequence[Mapping[str, float]]
) -> tuple[list[str], list[float]]:
    """Draw a bar for each stack of parts; return the parts that occur, and the end of each bar in ms."""
    scale = TIMES["step"].scale
    line_width = 0.4 if len(stacks) < _SPACED_BARS else 0.0
    ends_ms = [0.0] * len(stacks)
    drawn_parts = []
    for part in PARTS:
        rows = [row for row, stack in enumerate(stacks) if part in stack]
        if not rows:
            continue
        drawn_parts.append(part)
        starts = [ends_ms[row] for row in rows]
        widths = [stacks[row][part] * scale for row in rows]
        axes.barh(
            rows,
            widths,
            height=0.72,
            left=starts,
            color=PART_COLOURS[part],
            edgecolor="white",
            lw=line_width,
        )
        for row, width in zip(rows, widths, strict=True):
            ends_ms[row] += width
    return drawn_parts, ends_ms


def _step_text(step: Estimate, failure_text: str) -> str:
    """Return the time of a step and how its runs failed, on two lines if the text is long."""
    if step.value is None:
        return shortened(failure_text)
    ms = TIMES["step"].show(step.value, digits=1)
    if len(failure_text) <= 16:
        return f"{ms} {failure_text}".rstrip()
    return f"{ms}\n{shortened(failure_text)}"


# -- a figure against a fact -------------------------------------------------------------------------------------------

# the most lines in a legend or in the text below an axis; a last line has the number of further ones
_MOST_LINES = 12
_WIDTH = 7.2
_MOST_TICKS = 24
_TICK_CHARACTERS = 32  # longer names are shortened
_CHARACTERS_PER_INCH = 8  # names that need more room are rotated
_MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":", "-.")


def _figure_against_fact(
    groups: Sequence[Group], column: Column, is_logarithmic: bool
) -> Figure:
    """Draw the figure of ``column`` against the first fact, with a line for each combination of the other facts."""
    assert column.quantity is not None
    figures = [estimate(group.entries, column) for group in groups]
    values = [figure.value for figure in figures if figure.value is not None]
    if not values:
        raise UsageError(
            f"plot: expected successful runs whose {column.title} is known, given none; "
            "`report RUNS` prints how each run ended"
        )
    quantity = in_fitting_unit(column.quantity, values)
    trouble_lines = _trouble_lines(groups, figures)
    drawn, axes = new_figure(_WIDTH, 4.0 + 0.17 * len(trouble_lines))
    axis = axis_of(groups)
    lines = groups_by_line(groups)
    for index, (name, groups_of_line) in enumerate(lines.items()):
        points = []
        for group in groups_of_line:
            place = axis.places[group.values[0]]
            points.append((place, estimate(group.entries, column)))
        label = shortened(name) if index < _MOST_LINES else "_"
        _draw_line(
            axes,
            points,
            index,
            scale=quantity.scale,
            label=label,
            is_connected=axis.are_numbers,
        )
    _set_ticks(axes, axis)
    if is_logarithmic:
        axes.set_ylim(auto=True)
        axes.set_yscale("log")
        label_logarithmic(axes.yaxis)

    columns = groups[0].columns
    axes.set_xlabel("\n".join([wrapped(columns[0].title, _WIDTH), *trouble_lines]))
    label_lines = filter(None, (quantity.heading, error_bar_text(figures)))
    axes.set_ylabel("\n".join(label_lines))
    if len(lines) > 1:
        title = _legend_title(columns, len(lines))
        drawn.legend(loc="outside right upper", title=title)
    return drawn


def _legend_title(columns: Sequence[Column], line_count: int) -> str:
    """Return the title of a legend: the second fact if there are two, and how many lines the legend leaves out.

    The first of the ``columns`` is the horizontal axis; each combination of the others has a line.
    """
    title = ""
    if len(columns) == 2:
        title = shortened(axis_title(columns[1]), most_characters=24)
    if line_count > _MOST_LINES:
        title += f"\nand {line_count - _MOST_LINES} more"
    return title


def _draw_line(
    axes: Axes,
    points: Sequence[tuple[float, Estimate]],
    index: int,
    *,
    scale: float,
    label: str,
    is_connected: bool,
) -> None:
    """Draw the ``index``-th line; colour, marker and dashes follow from the index. A cross marks a missing figure."""
    colour = SERIES_COLOURS[index % len(SERIES_COLOURS)]
    style = _MARKERS[index % len(_MARKERS)]
    if is_connected:
        style += _DASHES[index // len(SERIES_COLOURS) % len(_DASHES)]
    bars = error_bars(points, scale)
    axes.errorbar(
        bars.places,
        bars.values,
        yerr=(bars.below, bars.above),
        color=colour,
        capsize=3,
        fmt=style,
        markerfacecolor="none",  # so that all markers are visible if lines coincide
        label=label,
    )
    missing = [place for place, figure in points if figure.value is None]
    if missing:
        axes.plot(missing, [0.0] * len(missing), "x", color=colour, clip_on=False)


def _trouble_lines(groups: Sequence[Group], figures: Sequence[Estimate]) -> list[str]:
    """Return a line for each group in which runs failed or the figure is unknown, with the reason."""
    lines = []
    for group, figure in zip(groups, figures, strict=True):
        failure_text = group.failure_text
        if not failure_text and figure.value is None:
            failure_text = "unknown"
        if failure_text:
            lines.append(f"{shortened(group.label)}: {failure_text}")
    if len(lines) <= _MOST_LINES:
        return lines
    return [*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES} more"]


def _set_ticks(axes: Axes, axis: Axis) -> None:
    """Label the horizontal axis with at most ``_MOST_TICKS`` values; numbers far apart get a logarithmic axis."""
    smallest = min(axis.places.values())
    largest = max(axis.places.values())
    # From a factor of 4 on the axis is logarithmic, so that doubling values have equal distances.
    if axis.are_numbers and 0 < 4 * smallest <= largest:
        axes.set_xscale("log", base=2)
    values = list(axis.places)
    shown_values = [values[index] for index in thinned(len(values), _MOST_TICKS)]
    names = []
    for value in shown_values:
        names.append(shortened(fact_text(value) or "unknown", _TICK_CHARACTERS))
    characters = sum(len(name) for name in names)
    is_crowded = not axis.are_numbers and characters > _WIDTH * _CHARACTERS_PER_INCH
    rotation: dict[str, Any] = {}
    if is_crowded:
        rotation = {"rotation": 30, "ha": "right"}
    axes.set_xticks([axis.places[value] for value in shown_values], names, **rotation)
    axes.minorticks_off()
    axes.margins(x=0.1)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


# -- collectives -------------------------------------------------------------------------------------------------------


def bandwidths(rows: Sequence[LinkFigures]) -> Figure:
    """Draw bus bandwidth against size: a line for each collective, with dashes by the number of processes."""
    timed_rows = [row for row in rows if row.bus_bandwidth]
    if not timed_rows:
        raise UsageError(
            "plot: expected a collective that could be timed, given none; the table gives the reason"
        )

    figure, axes = new_figure(_WIDTH, 4.0)
    links = list(dict.fromkeys((row.backend, row.ranks) for row in timed_rows))
    operations = list(dict.fromkeys(row.op for row in timed_rows))
    for link_index, (backend, ranks) in enumerate(links):
        rows_of_link = [
            row for row in timed_rows if (row.backend, row.ranks) == (backend, ranks)
        ]
        for index, operation in enumerate(operations):
            line = [row for row in rows_of_link if row.op == operation]
            label = operation
            if len(links) > 1:
                label += f", {ranks} x {backend}"
            axes.plot(
                [row.size_bytes * SIZE.scale for row in line],
                [(row.bus_bandwidth or 0.0) * BUS.scale for row in line],
                color=SERIES_COLOURS[index % len(SERIES_COLOURS)],
                marker=_MARKERS[index % len(_MARKERS)],
                linestyle=_DASHES[link_index % len(_DASHES)],
                label=label,
            )
    sizes = {row.size_bytes * SIZE.scale for row in timed_rows}
    _use_logarithmic_axes(axes, sizes=sorted(sizes))
    axes.set_xlabel(SIZE.heading)
    axes.set_ylabel("bus bandwidth (GB/s)")
    title = ""
    if len(links) == 1:
        backend, ranks = links[0]
        title = f"{ranks} x {backend}"
    figure.legend(loc="outside right upper", title=title)
    return figure


def _use_logarithmic_axes(axes: Axes, sizes: Sequence[float]) -> None:
    """Make both axes logarithmic, with a tick at each of ``sizes`` and plain numbers as labels."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:.4g}" for size in sizes])
    axes.xaxis.minorticks_off()
    label_logarithmic(axes.yaxis)
