"""The same steps after each setting of warm-up, one below the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lm_profiler.analysis.steps.cuts import steps_after
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run import TimeSummary
from lm_profiler.report.tables.layouts import names, six_figures
from lm_profiler.report.tables.rows import fact_cell, heading, naming, same_in_all
from lm_profiler.report.tables.table import Heading, Table, TableCell, figure

_PARTS = ("forward", "backward", "forward_backward", "step")
_TIME = TIMES["step"]


def warmups(runs: Sequence[tuple[Entry, Sequence[int]]], count: int | None = None) -> Table:
    """For each entry and part, the same steps after each of its settings of warm-up, one below the other."""
    alone = [[entry] for entry, _ in runs]
    apart = naming(alone)
    body = []
    for at, part, setting, time in _cuts(runs, _PARTS, count):
        title = TableCell(part, TIMES[part].title)
        body.append([*(fact_cell(alone[at], of) for of in apart), title, *_cells(setting, time)])
    headings = [*(heading(of, alone) for of in apart), Heading("part", "part"), *_HEADINGS]
    return Table(headings, body, same_in_all(alone, apart), [_MEANING])


def warmup_rows(runs: Sequence[tuple[Entry, Sequence[int]]], count: int | None = None) -> Table:
    """The same of each pass as published reports have it: seconds on average, and their standard deviation."""
    titles = ("", "forward_only", "warmup_steps", "benchmark_steps", "avg", "std")
    headings = [Heading(title or "model", title, at > 1) for at, title in enumerate(titles)]
    called = names([entry for entry, _ in runs])
    body = []
    for at, part, setting, time in _cuts(runs, ("forward", "forward_backward"), count):
        facts = [TableCell(fact, str(fact)) for fact in (called[at], part == "forward", setting, time.n)]
        body.append([*facts, *map(six_figures, (time.mean, time.std))])
    return Table(headings, body)


def _cuts(
    runs: Sequence[tuple[Entry, Sequence[int]]], parts: Sequence[str], count: int | None
) -> Iterator[tuple[int, str, int, TimeSummary]]:
    """Of each run, by its place, each part that occurred after each setting; forward + backward where both did."""
    for at, (entry, settings) in enumerate(runs):
        cuts = [(setting, steps_after(entry, setting, count).times) for setting in settings]
        for part in parts:
            if any(times["backward" if part == "forward_backward" else part].max for _, times in cuts):
                yield from ((at, part, setting, times[part]) for setting, times in cuts)


_MEANING = "warm-up: how many of the first recorded steps are left out; the run is the same"
_HEADINGS = (
    Heading("warmup_steps", "warm-up", figures=True),
    Heading("steps", "steps", figures=True),
    Heading("mean_s", f"mean [95 % interval] ({_TIME.shown_unit})", figures=True),
    *(Heading(f"{name}_s", f"{name} ({_TIME.shown_unit})", figures=True) for name in ("std", "median")),
    Heading("cv", "CV", figures=True),
)


def _cells(setting: int, time: TimeSummary) -> list[TableCell]:
    counts = [TableCell(count, str(count)) for count in (setting, time.n)]
    mean = figure(_TIME, time.mean, time.mean_low, time.mean_high)
    std, median = (figure(_TIME, value) for value in (time.std, time.median))
    return [*counts, mean, std, median, TableCell(time.cv, "" if time.cv is None else f"{time.cv:.1%}")]
