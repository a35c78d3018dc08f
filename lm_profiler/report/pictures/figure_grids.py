"""Pictures of any figure: a heat map of two facts, and bars with error bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_profiler.record.figure import Figure as Quantity
from lm_profiler.record.figure import in_fitting_unit
from lm_profiler.record.text import shortened
from lm_profiler.report.pictures.drawing import (
    PALE,
    SERIES_COLOURS,
    error_bar_text,
    error_bars,
    label_logarithmic,
    new_figure,
    wrapped,
)
from lm_profiler.report.pictures.groups import Group, axis_title
from lm_profiler.report.tables.column import Column
from lm_profiler.report.tables.run_groups import estimate
from lm_profiler.report.tables.table import fact_text
from lm_profiler.usage_error import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_CELLS = 40  # rows or columns of a heat map
_MOST_BARS = 100
_COLOUR_MAP = "viridis"
_WIDTH = 7.2


def heat_map(groups: Sequence[Group], column: Column) -> Figure:
    """Draw a heat map of a figure over two facts: rows are values of the first fact, columns of the second.

    A cell without a figure shows how its runs ended.
    """
    facts = groups[0].columns
    if len(facts) != 2:
        names = ", ".join(fact.name for fact in facts)
        raise UsageError(
            "plot: expected runs that differ in exactly two options or properties for a heat map, "
            f"given {names}; see --where"
        )
    quantity = _fitting_quantity(groups, column)
    row_values = list(dict.fromkeys(group.values[0] for group in groups))
    column_values = list(dict.fromkeys(group.values[1] for group in groups))
    if max(len(row_values), len(column_values)) > _MOST_CELLS:
        raise UsageError(
            f"plot: expected at most {_MOST_CELLS} values of each option or property for a heat map; see --where"
        )

    figure, axes = new_figure(
        2.4 + 0.8 * len(column_values), 1.6 + 0.5 * len(row_values)
    )
    heights: list[list[float]] = [
        [float("nan")] * len(column_values) for _ in row_values
    ]
    texts: dict[tuple[int, int], str] = {}
    for group in groups:
        row = row_values.index(group.values[0])
        place = column_values.index(group.values[1])
        value = estimate(group.entries, column).value
        if value is None:
            texts[row, place] = group.failure_text or "unknown"
            continue
        heights[row][place] = value * quantity.scale
        texts[row, place] = quantity.rounded(value)
    image = axes.imshow(heights, cmap=_COLOUR_MAP, aspect="auto")
    for (row, place), text in texts.items():
        axes.text(
            place,
            row,
            text,
            ha="center",
            va="center",
            color=_text_colour(image, heights[row][place]),
        )
    _name_cells(axes, row_values, column_values)
    axes.set_ylabel(shortened(axis_title(facts[0])))
    axes.set_xlabel(wrapped(axis_title(facts[1]), _WIDTH))
    figure.colorbar(image, label=quantity.heading)
    return figure


def _fitting_quantity(groups: Sequence[Group], column: Column) -> Quantity:
    """Return the quantity of ``column`` in a unit that fits the values of all groups."""
    if column.quantity is None:
        raise UsageError(
            f"value: expected a figure such as step_s, given {column.name!r}"
        )
    values = [estimate(group.entries, column).value for group in groups]
    known_values = [value for value in values if value is not None]
    if not known_values:
        raise UsageError(
            f"plot: expected successful runs whose {column.title} is known, given none"
        )
    return in_fitting_unit(column.quantity, known_values)


def _text_colour(image: Any, height: float) -> str:
    """Return black on light cells and white on dark ones."""
    if math.isnan(height):  # a cell without a figure
        return PALE
    red, green, blue, _ = image.cmap(image.norm(height))
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue  # ITU-R BT.601
    is_light = luminance > 0.5
    return "black" if is_light else "white"


def _name_cells(
    axes: Axes, row_values: Sequence[Any], column_values: Sequence[Any]
) -> None:
    """Name the rows and columns of the heat map after their values."""
    axes.set_yticks(range(len(row_values)), [_fact_name(value) for value in row_values])
    axes.set_xticks(
        range(len(column_values)), [_fact_name(value) for value in column_values]
    )
    axes.grid(visible=False)


def _fact_name(value: Any) -> str:
    return shortened(fact_text(value) or "unknown", most_characters=24)


def bars(groups: Sequence[Group], column: Column, is_logarithmic: bool) -> Figure:
    """Draw a bar with an error bar for each group, the first at the top."""
    quantity = _fitting_quantity(groups, column)
    if len(groups) > _MOST_BARS:
        raise UsageError(
            f"plot: expected at most {_MOST_BARS} bars, given {len(groups)}; see --where"
        )
    figure, axes = new_figure(_WIDTH, 1.2 + 0.36 * len(groups))
    figures = [estimate(group.entries, column) for group in groups]
    drawn = error_bars(enumerate(figures), quantity.scale)
    axes.barh(drawn.places, drawn.values, height=0.72, color=SERIES_COLOURS[0])
    axes.errorbar(
        drawn.values,
        drawn.places,
        xerr=(drawn.below, drawn.above),
        fmt="none",
        ecolor="black",
        capsize=3,
        lw=1.2,
    )
    labels = []
    for group, figure_of_group in zip(groups, figures, strict=True):
        label = f"{group.label}: {group.failure_text or 'unknown'}"
        if figure_of_group.value is not None:
            label = shortened(group.label, most_characters=48)
        labels.append(label)
    axes.set_yticks(range(len(groups)), labels)
    # The axis points down, so that the first bar is at the top; each bar is around a whole number.
    axes.set_ylim(len(groups) - 0.4, -0.6)
    if is_logarithmic:
        axes.set_xscale("log")
        label_logarithmic(axes.xaxis)
    interval_text = error_bar_text(figures)
    lines = [quantity.heading]
    if interval_text:
        lines.append(f"black: {interval_text}")
    axes.set_xlabel("\n".join(lines))
    if len(groups[0].columns) == 1:  # otherwise the names include their fact
        axes.set_ylabel(shortened(groups[0].columns[0].title))
    axes.grid(visible=False, axis="y")
    return figure
