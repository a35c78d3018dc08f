"""A run that is going on, or whose process was killed, as far as it came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lm_profiler.record.quantities import counted
from lm_profiler.record.run import RunRecord
from lm_profiler.record.steps import StepRow
from lm_profiler.report.shares import odd, shares, typical
from lm_profiler.report.summary import mean_over_ranks, summaries, throughput

WHY = "it is still running, or its process was killed"


def as_far_as_it_came(record: RunRecord, rows: Sequence[StepRow]) -> RunRecord:
    """``record``, which says nothing of its steps yet, with the figures of those in ``rows``.

    Nobody has looked for warm-up beyond what the options say, nor whether the steps were steady.
    """
    steps = mean_over_ranks(rows)
    timed = [row for row in steps if row.seconds is not None]
    measured = [row for row in timed if row.stage == "measure"]
    facts: dict[str, Any] = {"steps": dict(Counter(row.stage for row in steps))}
    if timed:
        facts["first_step_s"] = timed[0].time("step")
    if measured:
        facts |= {"time": summaries(measured, "device"), "host_time": summaries(measured, "host")}
        facts |= {"shares": shares(typical(measured)), "odd_steps": odd(measured)}
        facts["throughput"] = throughput(measured, facts["time"])
    note = f"unfinished: {WHY}; figures are of the {counted(len(measured), 'measured step')} that it finished"
    return record.model_copy(update={**facts, "notes": [*record.notes, note]})
