"""The recorded steps cut anew: what the same run would have said after another warm-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run import RecordError, TimeSummary
from lm_profiler.record.steps import StepRow
from lm_profiler.report.collection import Entry
from lm_profiler.report.rows import fact_cell, heading, naming, same_in_all
from lm_profiler.report.summary import mean_over_ranks, summaries
from lm_profiler.report.table import Cell, Heading, Table, figure_text, title_with_unit

WARMUPS = (0, 1, 2, 5)
"""The settings that reports in this field compare."""

_PARTS = ("forward", "backward", "forward_backward", "step")
_TIME = TIMES["step"]


@dataclass(frozen=True)
class Steps:
    """A run's steps, each a mean over the ranks, and the summary of its parts on the device's clock."""

    rows: Sequence[StepRow]
    times: Mapping[str, TimeSummary]


def steps_after(entry: Entry, warmup: int | None = None) -> Steps:
    """All recorded steps but the first ``warmup``; without it, the measured steps that the run's own figures are of.

    Raises:
        RecordError: its ``steps.csv`` cannot be read.
    """
    stages = ("measure",) if warmup is None else ("warmup", "measure")
    steadiness = entry.record.steadiness if entry.record is not None else None
    cut = warmup if warmup is not None else steadiness.cut if steadiness is not None else 0
    rows = mean_over_ranks([row for row in entry.rows if row.stage in stages and row.seconds is not None])[cut:]
    return Steps(rows, summaries(rows, "device"))


def readable(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Those of ``entries`` that have steps to cut, and what is wrong with the others, a line each."""
    good, problems = [], []
    for entry in entries:
        try:
            if entry.record is not None and entry.record.steps and steps_after(entry, 0).rows:
                good.append(entry)
            else:
                problems.append(f"{entry.folder}: no steps to cut ({entry.status})")
        except RecordError as error:
            problems.append(str(error))
    return good, problems


def warmups(entries: Sequence[Entry], settings: Sequence[int]) -> Table:
    """For each entry and part, the same steps after each of ``settings`` steps of warm-up, one below the other."""
    alone = [[entry] for entry in entries]
    names = naming(alone)
    body = []
    for entry in entries:
        facts = [fact_cell([entry], found) for found in names]
        cuts = [(setting, steps_after(entry, setting).times) for setting in settings]
        for part in _PARTS:
            if any(times[part].max for _, times in cuts):  # a phase that never took time did not occur
                title = Cell(part, TIMES[part].title)
                body += [[*facts, title, *_cells(setting, times[part])] for setting, times in cuts]
    headings = [*(heading(found, alone) for found in names), Heading("part", "part"), *_HEADINGS]
    return Table(headings, body, same_in_all(alone, names), [_MEANING])


_MEANING = "warm-up: that many of the recorded steps left out, from the first; the same steps otherwise"
_HEADINGS = (
    Heading("warmup_steps", "warm-up", figures=True),
    Heading("steps", "steps", figures=True),
    *(Heading(f"{name}_s", title_with_unit(name, _TIME.shown_unit), figures=True) for name in ("mean", "std")),
    Heading("cv", "CV", figures=True),
    Heading("median_s", f"median [95 % interval] ({_TIME.shown_unit})", figures=True),
)


def _cells(setting: int, time: TimeSummary) -> list[Cell]:
    def shown(value: float | None, low: float | None = None, high: float | None = None) -> Cell:
        return Cell(value, "" if value is None else figure_text(_TIME, value, low, high), low, high)

    cv = Cell(time.cv, "" if time.cv is None else f"{time.cv:.1%}")
    counts = [Cell(count, str(count)) for count in (setting, time.n)]
    return [*counts, shown(time.mean), shown(time.std), cv, shown(time.median, time.ci_low, time.ci_high)]
