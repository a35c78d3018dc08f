"""The Improve view, as plain JSON: of each search the way down, and the table of all that was tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from lm_profiler.record.improve import ImproveRecord
from lm_profiler.record.quantities import TIMES
from lm_profiler.report.page.answers import Json, table_of
from lm_profiler.report.run.improve import improve_table, way_texts


def searched(searches: Mapping[str, ImproveRecord]) -> list[Json]:
    """By name, the one that began last first. ``way`` is in seconds, its texts under
    ``way_titles``; empty where nothing helped."""
    latest = sorted(searches.items(), key=lambda of: of[1].started, reverse=True)
    return [_search(name, record) for name, record in latest]


def _search(name: str, record: ImproveRecord) -> Json:
    table = improve_table(record)
    said, *below = table.below
    return {
        "name": name,
        "ended": record.ended,
        "headline": said,
        "command": record.command,
        "way_titles": [TIMES["step"].heading, "interval"],
        "way": [
            {**asdict(point), "text": text, "interval": interval}
            for point, (text, interval) in zip(record.way, way_texts(record), strict=True)
        ],
        "table": table_of(replace(table, below=below, title="")),
    }
