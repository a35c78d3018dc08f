"""A block a run with each of its steps, then a summary: the layout of a lab report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from lm_profiler.analysis.steps.cuts import Steps, steps_after
from lm_profiler.record.entry import Cut, Entry
from lm_profiler.record.run import TimeSummary
from lm_profiler.record.steps import StepRow
from lm_profiler.report.tables.columns import COLUMNS
from lm_profiler.report.tables.layouts import names
from lm_profiler.report.tables.merged import WORDS, distinct, rank
from lm_profiler.report.tables.rows import fact_cell, told
from lm_profiler.report.tables.table import Heading, Table, TableCell

_PASSES = {"forward": "Forward pass", "forward_backward": "Forward + Backward pass"}
_SUMMARY = ("Model", "Params", "Forward (s)", "Backward (s)")


def blocks(entries: Sequence[Entry]) -> Table:
    """The blocks above, under a banner for each cut of the steps; the summary as the table.

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
    """What all of the blocks below share."""
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
