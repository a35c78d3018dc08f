"""Runs concluded from what lies in their folders: those that were cut short, and old ones by the rules of today."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from lm_profiler.analysis.conclude import conclude
from lm_profiler.analysis.evidence import Evidence, read_evidence
from lm_profiler.analysis.steps.summaries import world_of
from lm_profiler.record.entry import UNFINISHED, Collection
from lm_profiler.record.quantities import counted
from lm_profiler.record.run import RecordError, RunRecord, first_end, read_ends
from lm_profiler.record.steps import StepTable
from lm_profiler.record.text import ranks_text

# Relative distance below which two figures count as the same. Rows in a file are rounded to a nanosecond.
_ALIKE = 1e-6

_INPUTS = frozenset(of.name for of in fields(Evidence)) - {"notes"}


@dataclass(frozen=True)
class Change:
    """A change of ``field``, a dotted path in the record; None where the record did not have it, or has it no more."""

    field: str
    before: Any
    now: Any


def concluded_again(folder: Path, record: RunRecord) -> tuple[RunRecord, list[Change]]:
    """The record of the run in ``folder`` by the rules of today, and what differs from ``record``, which it left.

    Raises:
        RecordError: its evidence is not there, or is damaged.
    """
    now = conclude(read_evidence(folder))
    return now, list(_changes(record.model_dump(exclude=set(_INPUTS)), now.model_dump(exclude=set(_INPUTS))))


def _changes(before: Any, now: Any, path: str = "") -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*before, *now]):
            yield from _changes(before.get(name), now.get(name), f"{path}.{name}".lstrip("."))
    elif isinstance(before, Sequence) and isinstance(now, Sequence) and not isinstance(before, str):
        for at in range(max(len(before), len(now))):
            was, is_ = (of[at] if at < len(of) else None for of in (before, now))
            yield from _changes(was, is_, f"{path}[{at}]")
    elif not (before == now or _alike(before, now)):
        yield Change(path, before, now)


def _alike(before: Any, now: Any) -> bool:
    numbers = isinstance(before, (int, float)) and isinstance(now, (int, float))
    return numbers and math.isclose(before, now, rel_tol=_ALIKE, abs_tol=1e-9)


def with_unfinished(runs: Collection) -> Collection:
    """``runs``, those that are unfinished with the figures of the steps that they finished."""
    entries, problems = list(runs.entries), list(runs.problems)
    for at, entry in enumerate(entries):
        if entry.record is not None and entry.record.status == "unfinished":
            try:
                ended = as_its_ranks_ended(entry.record, entry.folder)
                entries[at] = replace(entry, record=as_far_as_it_came(ended, entry.rows))
            except RecordError as error:
                problems.append(str(error))
    return replace(runs, entries=entries, problems=problems)


def as_its_ranks_ended(record: RunRecord, folder: Path) -> RunRecord:
    """``record`` of a run whose rank 0 wrote no more, with the first cause of those ends that ranks left in
    ``folder``."""
    cause = first_end(read_ends(folder), range(world_of(record) or 1), {})
    return record if cause is None else record.model_copy(update={"status": cause.status, "failure": cause.failure})


def as_far_as_it_came(record: RunRecord, rows: StepTable) -> RunRecord:
    """``record``, which says nothing of its steps yet, with what those in ``rows`` say."""
    known = {of.name: getattr(record, of.name) for of in fields(Evidence) if of.name in RunRecord.model_fields}
    told = conclude(Evidence(**known, rows=rows, world_size=world_of(record) or 1))
    ranks, measured = np.unique(rows.rank).tolist(), told.steps.get("measure", 0)
    whose = f" of {ranks_text(ranks)}, whose steps are here" if len(ranks) > 1 else ""
    finished = f"the {counted(measured, 'measured step')} that it finished{whose}"
    why = f"unfinished: {UNFINISHED}" if record.status == "unfinished" else "rank 0 wrote no end of the run"
    note = f"{why}; figures are of {finished}"
    return told.model_copy(update={"notes": [*told.notes, note]})
