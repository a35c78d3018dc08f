"""The Improve view, which shows all searches: bars of the step time after each accepted change, and all changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lm_profiler.record.improve_record import ImproveRecord
from lm_profiler.record.quantities import TIMES
from lm_profiler.report.pictures.drawing import PALE, SERIES_COLOURS
from lm_profiler.report.run.improve_table import improve_table, way_texts
from lm_profiler.report.views.blocks import (
    Json,
    bar,
    bars,
    card,
    command,
    line,
    piece,
    table,
    whisker,
)


def improve_blocks(searches: Mapping[str, ImproveRecord]) -> list[Json]:
    """Return a card for each search, the latest first."""
    latest_first = sorted(
        searches.items(), key=lambda item: item[1].started, reverse=True
    )
    if not latest_first:
        return [
            line(
                "There is no search for faster settings yet. To start one: lm_profiler improve --config demo",
                "quiet",
            )
        ]
    return [_search(name, record) for name, record in latest_first]


def _search(name: str, record: ImproveRecord) -> Json:
    """Return the card of one search: its conclusion, the bars of accepted changes, and a row for each change."""
    tried = improve_table(record)
    headline, *lines_below = tried.below
    step_bars = [_step_bars(record)] if record.steps_after_changes else []
    rows = table(replace(tried, below=lines_below, title=""))
    return card(
        name,
        line(headline, "headline"),
        *step_bars,
        *rows,
        command(record.command),
        words=[record.ended],
    )


def _step_bars(record: ImproveRecord) -> Json:
    """Return a bar of the step time after each accepted change; a pale piece shows what the change saved."""
    points = record.steps_after_changes
    ends_s = [max(point.step_s, point.high_s or 0.0) for point in points]
    # seconds × scale: the share of the track on which bars are drawn
    scale = 1.0 / max(ends_s)
    rows = []
    before_s = points[0].step_s
    for point, (step_ms, interval) in zip(points, way_texts(record), strict=True):
        end = point.step_s * scale
        pieces = [piece(0.0, end, SERIES_COLOURS[0], tip=f"{step_ms} ms")]
        if before_s > point.step_s:
            saved = piece(end, before_s * scale, PALE, tip="saved", is_pale=True)
            pieces.append(saved)
        span = whisker(point.low_s, point.high_s, scale, tip=f"interval {interval}")
        rows.append(bar(point.name, pieces, [step_ms, interval], whisker=span))
        before_s = point.step_s
    return bars(["", "", TIMES["step"].heading, "interval"], rows)
