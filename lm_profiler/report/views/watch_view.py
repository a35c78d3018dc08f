"""The Watch view: the step time over a whole training, where the time went, and the events."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import reduce
from itertools import chain
from pathlib import Path

import numpy as np

from lm_profiler.record.entry import Entry
from lm_profiler.record.watch_files import (
    Sketch,
    WatchEvent,
    WatchWindow,
    read_events,
    read_last_steps,
    read_status,
    read_windows,
)
from lm_profiler.report.pictures.drawing import PALE, PART_COLOURS, SERIES_COLOURS
from lm_profiler.report.run.watch_tables import event_text, is_watched, watch_tables
from lm_profiler.report.tables.table import Table
from lm_profiler.report.views.blocks import (
    Json,
    bar,
    bars,
    card,
    chart,
    escaped,
    fold,
    line,
    piece,
    table,
)
from lm_profiler.report.views.view import Limits, View, left_no_run

_EVENTS = 200  # the most events that are listed and marked
# The axis ends at this multiple of this quantile of the medians.
_AXIS_FACTOR = 3.0
_AXIS_QUANTILE = 0.98
_ROWS_PER_POINT = 10  # the fewest steps that a point of the curves represents
# the title of the first column of a table of ``watch_tables`` → the title of its fold
_FOLDS = {"ms": "Phases", "rank": "Ranks"}


def blocks(entry: Entry, limits: Limits) -> list[Json]:
    """Return the page of a watched run: its step time over the run, the ledger, events, and folded tables."""
    folder = entry.folder
    # The first table has no rows, only lines about the state of the run.
    state, *tables = watch_tables(folder, _EVENTS)
    headline, *lines = state.above
    curves = _curve_points(folder, limits.watch_points)
    events = read_events(folder)[-_EVENTS:]
    steps = card(
        "Step time over the run",
        line(f"{headline[0].upper()}{headline[1:]}", "headline"),
        *map(line, lines),
        _chart(curves, events, read_status(folder).world_size),
    )
    # The title of its first column identifies a table.
    table_by_column = {}
    for printed in tables:
        if printed.headings:
            table_by_column[printed.headings[0].title] = printed
    view_blocks = [steps]
    if "where the time went" in table_by_column:
        view_blocks.append(_ledger_bars(table_by_column["where the time went"]))
    if "when" in table_by_column:
        view_blocks.append(card("Events", *table(table_by_column["when"])))
    for column, title in _FOLDS.items():
        if column in table_by_column:
            view_blocks.append(fold(title, *table(table_by_column[column])))
    return view_blocks


def missing(entry: Entry) -> str | None:
    """Return why there is no watched run to show; None if there is one."""
    if is_watched(entry.folder):
        return None
    if entry.record is None:
        return left_no_run(entry)
    return "This run was not watched: `fit --watch=true` keeps measuring until training ends."


WATCH = View("watch", "Watch", blocks, missing, is_live=True)


def _ledger_bars(ledger: Table) -> Json:
    """Return a bar for each row of the ledger; the last row is the wall time, the sum of the others."""
    *terms, total = ledger.rows
    wall_s = _seconds(total[1].text)
    rows = []
    for term, seconds, share in terms:
        length = 0.0
        if wall_s:
            length = _seconds(seconds.text) / wall_s
        phase = term.text.removeprefix("step: ")
        colour = PART_COLOURS.get(phase, PALE)
        pieces = [piece(0.0, length, colour, share.text)]
        rows.append(bar(term.text, pieces, [seconds.text, share.text]))
    total_texts = [cell.text for cell in total[1:]]
    rows.append(bar(total[0].text, [], total_texts, is_total=True))
    return card("Where the time went", bars(["", "", "s", "share"], rows))


def _seconds(text: str) -> float:
    return float(text.replace(",", ""))


def _curve_points(folder: Path, most_points: int) -> list[tuple[int, Sketch]]:
    """Return the points of the curves: the first step of each point, and the distribution of its step times.

    The points are computed from the rows of individual steps as long as the file has all of them, else from windows.
    """
    rows = read_last_steps(folder)
    status = read_status(folder)
    windows = read_windows(folder)
    if status.window is not None:
        windows = [*windows, status.window]
    if not len(rows):
        return _merged_windows(windows, most_points)
    has_dropped_rows = len(windows) > 0 and rows["step"][0] > windows[0].first_step
    if has_dropped_rows:
        return _merged_windows(windows, most_points)
    points = min(most_points, math.ceil(len(rows) / _ROWS_PER_POINT))
    curve = []
    for part in np.array_split(rows, points):
        step_s = part["seconds"][:, -1].astype(float)
        curve.append((int(part["step"][0]), Sketch.from_seconds(step_s)))
    return curve


def _merged_windows(
    windows: Sequence[WatchWindow], most_points: int
) -> list[tuple[int, Sketch]]:
    """Return at most ``most_points`` points: the first step of each, and the merged step times of its windows."""
    windows_per_point = math.ceil(len(windows) / most_points) or 1
    timed = [window for window in windows if "step" in window.seconds]
    points = []
    for start in range(0, len(timed), windows_per_point):
        group = timed[start : start + windows_per_point]
        sketch = reduce(Sketch.merge, (window.seconds["step"] for window in group))
        points.append((group[0].first_step, sketch))
    return points


def _chart(
    points: Sequence[tuple[int, Sketch]], events: Sequence[WatchEvent], world_size: int
) -> Json:
    """Return the chart of step times over a run, with marks at events; a long stall may lie beyond the axis."""
    steps = [step for step, _ in points]
    curves = {
        "median": [sketch.quantile(0.5) for _, sketch in points],
        "mean": [sketch.mean for _, sketch in points],
        "99 % are below": [sketch.quantile(0.99) for _, sketch in points],
    }
    data: list[Json] = []
    for index, (name, seconds) in enumerate(curves.items()):
        look = {
            "color": SERIES_COLOURS[index],
            "width": 1 if index else 2,
            "dash": "dot" if index > 1 else "solid",
            "shape": "hv",
        }
        curve = {
            "type": "scatter",
            "mode": "lines" if len(steps) > 1 else "markers",
            "name": name,
            "x": steps,
            "y": [_rounded_ms(value_s) for value_s in seconds],
            "line": look,
            "hovertemplate": f"{name}: %{{y:.3f}} ms<extra></extra>",
        }
        data.append(curve)
    values_ms = chain.from_iterable(curve["y"] for curve in data)
    longest_ms = max((value for value in values_ms if value is not None), default=0.0)
    end_ms = _axis_end_ms(data[0]["y"])
    data += _event_marks(events, steps, data[0]["y"], world_size)
    y_axis: Json = {"title": {"text": "step time (ms)"}, "rangemode": "tozero"}
    if 0.0 < end_ms < longest_ms:
        y_axis["range"] = [0, end_ms]
        title = f"step time (ms); the longest, {longest_ms:,.0f}, is beyond the axis"
        y_axis["title"] = {"text": title}
    layout = {"showlegend": True, "xaxis": {"title": {"text": "step"}}, "yaxis": y_axis}
    return chart(data, layout)


def _rounded_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 6)


def _axis_end_ms(medians_ms: Sequence[float | None]) -> float:
    """Return the end of the axis: well above nearly all medians, so that a single stall does not flatten the curves."""
    known_ms = [value for value in medians_ms if value is not None]
    if not known_ms:
        return 0.0
    return _AXIS_FACTOR * float(np.quantile(known_ms, _AXIS_QUANTILE))


def _event_marks(
    events: Sequence[WatchEvent],
    steps: Sequence[int],
    medians_ms: Sequence[float | None],
    world_size: int,
) -> list[Json]:
    """Return a mark on the curve of the median for each event; each kind of event is a series of the chart."""
    marks = []
    for index, kind in enumerate(dict.fromkeys(event.kind for event in events)):
        kind_events = [event for event in events if event.kind == kind]
        places = [event.since_step or event.step for event in kind_events]
        colour = SERIES_COLOURS[(index + 3) % len(SERIES_COLOURS)]
        marks.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": kind,
                "x": places,
                "y": [_height(place, steps, medians_ms) for place in places],
                "text": [
                    escaped(event_text(event, world_size)) for event in kind_events
                ],
                "marker": {
                    "color": colour,
                    "size": 11,
                    "symbol": "triangle-down",
                    "line": {"width": 1, "color": PALE},
                },
                "hovertemplate": "step %{x:,}: %{text}<extra></extra>",
            }
        )
    return marks


def _height(
    place: int, steps: Sequence[int], medians_ms: Sequence[float | None]
) -> float | None:
    """Return the height of the curve at the step ``place``: that of the last point at or before it."""
    if not steps:
        return None
    index = max(bisect_right(steps, place) - 1, 0)
    return medians_ms[index]
