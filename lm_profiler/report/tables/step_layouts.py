"""Layouts of recorded steps: a block a run with each of its steps, and the same steps after each setting of warm-up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from lm_profiler.analysis.steps.summaries import Steps, steps_after
from lm_profiler.record.entry import Cut, Entry
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run import TimeSummary
from lm_profiler.record.steps import StepRow
from lm_profiler.report.tables.layouts import names, six_figures
from lm_profiler.report.tables.merged import WORDS, distinct, rank
from lm_profiler.report.tables.rows import fact_cell, heading, naming, same_in_all, told
from lm_profiler.report.tables.table import Heading, Table, TableCell, figure
from lm_profiler.report.tables.table_columns import COLUMNS

_PASSES = {"forward": "Forward pass", "forward_backward": "Forward + Backward pass"}
_SUMMARY = ("Model", "Params", "Forward (s)", "Backward (s)")


def blocks(entries: Sequence[Entry]) -> Table:
    """Return a block of text for each entry, under a banner for each cut of the steps, and a table that sums them up.

    Raises:
        RecordError: an entry's steps cannot be read.
    """
    above: list[str] = []
    rows = []
    ordered = sorted(entries, key=lambda entry: rank(COLUMNS["warmup_steps"].get(entry)))
    for cut, group in groupby(zip(ordered, names(ordered), strict=True), lambda pair: pair[0].cut):
        named = list(group)
        above += _banner([entry for entry, _ in named], cut)
        for entry, name in named:
            steps = steps_after(entry) if entry.shows_steps else None
            above += [*_block(entry, name, steps), ""]
            rows.append(_row(entry, name, steps))
    headings = [Heading(title, title, title == "Params") for title in _SUMMARY]
    return Table(headings, rows, above, verbatim=True)


def _banner(entries: Sequence[Entry], cut: Cut | None) -> list[str]:
    given = {} if cut is None else {"warm-up": cut.warmup, "steps": cut.steps}
    facts = [f"{title} {value}" for title, value in given.items() if value is not None]
    for of in map(COLUMNS.__getitem__, ("device", "verb", "batch_size", "context_length", "precision")):
        values = [of.get(entry) for entry in entries]
        if None not in values and len(distinct(values)) == 1:
            facts.append(told(of, values[0]))
    text = ", ".join(facts)
    rule = "=" * min(len(text), 80)
    return [rule, text, rule, ""]


def _block(entry: Entry, name: str, steps: Steps | None) -> list[str]:
    size = str(COLUMNS["size"].get(entry) or entry.name)
    lines = [
        f"{size.upper()} MODEL{name[len(size) :]}",
        f"Parameters: {fact_cell([entry], COLUMNS['parameters']).text or 'unknown'}",
    ]
    if entry.status != "ok":
        word = WORDS.get(entry.status, entry.status)
        lines.append(f"{word}: {entry.reason}" if entry.reason else word)
    if steps is None:
        return lines
    for part, title in _PASSES.items():
        if part == "forward" or steps.times["backward"].max:
            lines += _pass(part, title, steps)
    forward_s, backward_s = steps.times["forward"].mean, steps.times["backward"].mean
    if backward_s:
        ratio = f" ({backward_s / forward_s:.2f}x forward)" if forward_s else ""
        lines.append(f"  Backward-only: {backward_s:.6f} seconds{ratio}")
    return lines


def _pass(part: str, title: str, steps: Steps) -> list[str]:
    each = _steps("Measurement", "Step", steps.rows, part)
    before = _steps("Warm-up", "Warm-up", steps.left_out, part) if steps.left_out else []
    time = steps.times[part]
    cv = "" if time.cv is None else f" (CV: {time.cv:.2%})"
    mean = f"  Mean: {_mean_std(time, ' ± ')} seconds{cv}" if time.n else "  no steps left"
    return [f"{title}:", *before, *each, mean]


def _steps(which: str, each: str, rows: Sequence[StepRow], part: str) -> list[str]:
    shown = (f"    {each} {number}: {row.time(part):.6f} seconds" for number, row in enumerate(rows, 1))
    return [f"  {which} steps:", *shown]


def _mean_std(time: TimeSummary, sign: str) -> str:
    return f"{time.mean:.6f}" + (f"{sign}{time.std:.6f}" if time.std is not None else "")


def _row(entry: Entry, name: str, steps: Steps | None) -> list[TableCell]:
    facts = [TableCell(name, name), fact_cell([entry], COLUMNS["parameters"])]
    if steps is None:
        return [*facts, *[TableCell(text=WORDS.get(entry.status, entry.status), status=entry.status)] * 2]
    times = (steps.times[part] for part in ("forward", "backward"))
    return [*facts, *(TableCell(time.mean, _mean_std(time, "±")) if time.max else TableCell() for time in times)]


_PARTS = ("forward", "backward", "forward_backward", "step")
_TIME = TIMES["step"]


def warmups(runs: Sequence[tuple[Entry, Sequence[int]]], count: int | None = None) -> Table:
    """Return rows for each entry and part: the same steps after each of its settings of warm-up."""
    alone = [[entry] for entry, _ in runs]
    apart = naming(alone)
    body = []
    for at, part, setting, time in _cuts(runs, _PARTS, count):
        title = TableCell(part, TIMES[part].title)
        body.append([*(fact_cell(alone[at], of) for of in apart), title, *_cells(setting, time)])
    headings = [*(heading(of, alone) for of in apart), Heading("part", "part"), *_HEADINGS]
    return Table(headings, body, same_in_all(alone, apart), [_MEANING])


def warmup_rows(runs: Sequence[tuple[Entry, Sequence[int]]], count: int | None = None) -> Table:
    """Return the same for each pass as published reports have it: the mean seconds and their standard deviation."""
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
