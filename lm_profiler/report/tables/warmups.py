"""The same steps after each setting of warm-up, one below the other."""

from __future__ import annotations

from collections.abc import Sequence

from lm_profiler.analysis.steps.cuts import steps_after
from lm_profiler.record.collection import Entry
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run import TimeSummary
from lm_profiler.report.tables.rows import fact_cell, heading, naming, same_in_all
from lm_profiler.report.tables.table import Heading, Table, TableCell, figure

_PARTS = ("forward", "backward", "forward_backward", "step")
_TIME = TIMES["step"]


def warmups(runs: Sequence[tuple[Entry, Sequence[int]]], count: int | None = None) -> Table:
    """For each entry and part, the same steps after each of its settings of warm-up, one below the other."""
    alone = [[entry] for entry, _ in runs]
    names = naming(alone)
    body = []
    for entry, settings in runs:
        facts = [fact_cell([entry], of) for of in names]
        cuts = [(setting, steps_after(entry, setting, count).times) for setting in settings]
        for part in _PARTS:
            if any(times[part].max for _, times in cuts):  # a phase that never took time did not occur
                title = TableCell(part, TIMES[part].title)
                body += [[*facts, title, *_cells(setting, times[part])] for setting, times in cuts]
    headings = [*(heading(of, alone) for of in names), Heading("part", "part"), *_HEADINGS]
    return Table(headings, body, same_in_all(alone, names), [_MEANING])


_MEANING = "warm-up: how many of the first recorded steps are left out; the run is the same"
_HEADINGS = (
    Heading("warmup_steps", "warm-up", figures=True),
    Heading("steps", "steps", figures=True),
    *(Heading(f"{name}_s", f"{name} ({_TIME.shown_unit})", figures=True) for name in ("mean", "std")),
    Heading("cv", "CV", figures=True),
    Heading("median_s", f"median [95 % interval] ({_TIME.shown_unit})", figures=True),
)


def _cells(setting: int, time: TimeSummary) -> list[TableCell]:
    counts = [TableCell(count, str(count)) for count in (setting, time.n)]
    mean, std = (figure(_TIME, value) for value in (time.mean, time.std))
    cv = TableCell(time.cv, "" if time.cv is None else f"{time.cv:.1%}")
    return [*counts, mean, std, cv, figure(_TIME, time.median, time.ci_low, time.ci_high)]
