"""Runs that are going on, or whose processes were killed, as far as they came."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from lm_profiler.analysis.steps.summaries import mean_over_ranks, model_of, step_figures, world_of
from lm_profiler.record.entry import UNFINISHED, Collection
from lm_profiler.record.quantities import counted
from lm_profiler.record.run import RecordError, RunRecord
from lm_profiler.record.steps import StepTable
from lm_profiler.record.text import ranks_text


def with_unfinished(runs: Collection) -> Collection:
    """``runs``, those that are unfinished with the figures of the steps that they finished."""
    entries, problems = list(runs.entries), list(runs.problems)
    for at, entry in enumerate(entries):
        if entry.record is not None and entry.record.status == "unfinished":
            try:
                entries[at] = replace(entry, record=as_far_as_it_came(entry.record, entry.rows))
            except RecordError as error:
                problems.append(str(error))
    return replace(runs, entries=entries, problems=problems)


def as_far_as_it_came(record: RunRecord, rows: StepTable) -> RunRecord:
    """``record``, which says nothing of its steps yet, with the figures of those in ``rows``.

    Nobody has looked for warm-up beyond what the options say, nor whether the steps were steady.
    """
    steps, ranks = mean_over_ranks(rows, world_of(record)), np.unique(rows.rank).tolist()
    timed = [row for row in steps if row.seconds is not None]
    measured = [row for row in timed if row.stage == "measure"]
    facts: dict[str, Any] = {"steps": dict(Counter(row.stage for row in steps))}
    if timed:
        facts["first_step_s"] = timed[0].time("step")
    if measured:
        facts |= step_figures(measured, model_of(measured, as_they_are=True))
    whose = f" of {ranks_text(ranks)}, whose steps are here" if len(ranks) > 1 else ""
    finished = f"the {counted(len(measured), 'measured step')} that it finished{whose}"
    note = f"unfinished: {UNFINISHED}; figures are of {finished}"
    return record.model_copy(update={**facts, "notes": [*record.notes, note]})
