"""Columns about the first step: how much longer each pass takes there, which is what compiling and autotuning cost."""

from __future__ import annotations

from functools import partial

from lm_profiler.analysis.steps.summaries import first_step
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run_record import RecordError
from lm_profiler.report.tables.column import Column, asked_column

_PASSES = ("forward", "backward")


def first_step_columns() -> list[Column]:
    """Return a column for each pass."""
    columns = []
    for phase in _PASSES:
        title = f"first {phase}, extra"
        meaning = f"the first {phase} beyond the mean of the measured ones: autotuning, compilation, first allocations"
        extra_s = partial(_extra_s, phase)
        name = f"first_{phase}_extra_s"
        columns.append(asked_column(name, title, meaning, extra_s, "ms"))
    return columns


def _extra_s(phase: str, entry: Entry) -> float | None:
    """Return how much longer ``phase`` took in the first step than on average; None if either is unknown."""
    if entry.record is None:
        return None
    mean_s = TIMES[phase].get(entry.record)
    try:
        row = first_step(entry)
    except (OSError, RecordError):
        return None
    if mean_s is None or row is None:
        return None
    return float(row.time(phase) - mean_s)
