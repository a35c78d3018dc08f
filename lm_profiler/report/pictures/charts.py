"""What the page's charts show, as plain JSON; shown units, four figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_profiler.record.collection import Entry
from lm_profiler.record.quantities import PARTS, TIMES
from lm_profiler.record.run import RecordError
from lm_profiler.report.pictures.colours import PALE, PART_COLOURS, SERIES_COLOURS
from lm_profiler.report.pictures.page_table import run_names
from lm_profiler.report.pictures.series import series
from lm_profiler.report.tables.columns import COLUMNS, Column
from lm_profiler.report.tables.groups import (
    Group,
    Groups,
    doubling,
    grouped,
    label,
    lines,
    peak_memory,
    places,
    shortened,
    stack,
)
from lm_profiler.report.tables.merged import figure as estimated
from lm_profiler.report.tables.table import title_with_unit

Point = tuple[float, float | None, float | None]
"""A figure and its interval."""


def charts(entries: Sequence[Entry]) -> dict[str, Any]:
    """Data of each chart by its name; a chart that would be empty is None."""
    return {
        "parts": [{"name": part, "colour": PART_COLOURS[part]} for part in PARTS],
        "series": SERIES_COLOURS,
        "pale": PALE,
        "phases": _phases(grouped(entries)) if entries else None,
        "runs": _runs(entries),
        "memory": _against(grouped(entries, numbers=True), peak_memory(entries)) if entries else None,
        "tokens": _against(grouped(entries, numbers=True), COLUMNS["tokens_per_s"]) if entries else None,
        "mfu": _against(grouped(entries, numbers=True), COLUMNS["mfu"]) if entries else None,
    }


def _phases(groups: Groups) -> dict[str, Any]:
    return {
        "title": shortened(groups.title),
        "groups": [
            {
                "label": shortened(group.label),
                "trouble": group.trouble,
                "step": _point(group, COLUMNS["step_s"]),
                "parts": {part: _short(seconds * TIMES[part].scale) for part, seconds in stack(group).items()},
            }
            for group in groups.groups
        ],
    }


def _runs(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The steps of each run that has any."""
    found = []
    for entry, name in zip(entries, run_names(entries), strict=True):
        try:
            run = series(entry)
        except RecordError:  # a cell that was refused has none
            continue
        if run.steps:
            ms = [_short(seconds * TIMES["step"].scale) for seconds in run.seconds]
            repeat = f" (repeat {entry.cell.repeat})" if entry.cell is not None and entry.cell.repeat else ""
            found.append({"name": name + repeat, "steps": run.steps, "ms": ms, "warmup": run.warmup, "cut": run.cut})
    return found


def _against(groups: Groups, figure: Column) -> dict[str, Any] | None:
    """Lines of ``figure``; None where no group knows it. ``at`` says at which tick each point stands."""
    assert figure.quantity is not None
    if all(_point(group, figure) is None for group in groups.groups):
        return None
    ticks, numbers = places(groups)
    order = list(ticks)
    return {
        "title": groups.columns[0].title,
        "unit": title_with_unit(figure.title, figure.quantity.shown_unit),
        "ticks": {
            "places": list(ticks.values()),
            "labels": [shortened(label([value])) for value in order],
            "numbers": numbers,
            "log": numbers and doubling(ticks.values()),
        },
        "lines": [
            {
                "label": shortened(name),
                "at": [order.index(group.values[0]) for group in line],
                "points": [_point(group, figure) for group in line],
                "absent": [group.absence(figure) for group in line],
            }
            for name, line in lines(groups).items()
        ],
    }


def _point(group: Group, figure: Column) -> Point | None:
    assert figure.quantity is not None
    found = estimated(group.entries, figure)
    if found.value is None:
        return None
    value, low, high = (
        None if x is None else _short(x * figure.quantity.scale) for x in (found.value, found.low, found.high)
    )
    assert value is not None
    return value, low, high


def _short(value: float) -> float:
    return float(f"{value:.5g}")
