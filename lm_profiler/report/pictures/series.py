"""The steps of a run in the order of their time, as pictures show them."""

from __future__ import annotations

from collections.abc import Iterable

from lm_profiler.analysis.steps.summaries import mean_over_ranks
from lm_profiler.record.collection import Entry
from lm_profiler.record.run import RecordError
from lm_profiler.record.steps import StepRow


def series(entry: Entry) -> tuple[list[StepRow], int, int]:
    """Each warm-up and measured step of a run's ``steps.csv``, averaged over the ranks; other stages are not timed.

    The first so many were warm-up by the options, the next so many were found to be and are in no summary either. A
    device that died never said how long its last steps took: those are left out.

    Raises:
        RecordError: it cannot be read.
    """
    timed = [row for row in entry.rows if row.stage in ("warmup", "measure")]
    rows = [row for row in mean_over_ranks(timed) if row.seconds is not None]
    left_out = entry.record.steps_left_out if entry.record is not None else 0
    return rows, sum(row.stage == "warmup" for row in rows), left_out


def unreadable(entries: Iterable[Entry]) -> list[str]:
    """What is wrong with the ``steps.csv`` of runs that finished steps, a line each: no picture shows those."""
    problems = []
    for entry in entries:
        if entry.record is not None and any(entry.record.steps.values()):
            try:
                series(entry)
            except RecordError as error:
                problems.append(str(error))
    return problems
