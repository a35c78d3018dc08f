"""Which table a call of ``report`` asks for."""

from __future__ import annotations

from collections.abc import Sequence

from lm_profiler.analysis.steps.cuts import WARMUPS, cut_anew, long_enough, readable
from lm_profiler.cli.verbs.report_options import Options
from lm_profiler.record.entry import Entry
from lm_profiler.report.tables.formats import FOR_PROGRAMS
from lm_profiler.report.tables.layouts import devices, pivot, wide
from lm_profiler.report.tables.merged import by_facts, repeats_together
from lm_profiler.report.tables.rows import raw_rows, rows
from lm_profiler.report.tables.step_layouts import blocks, warmup_rows, warmups
from lm_profiler.report.tables.table import Table
from lm_profiler.report.tables.table_columns import Column, columns_named
from lm_profiler.usage_error import UsageError


def make_table(entries: Sequence[Entry], options: Options) -> tuple[Table | None, list[str]]:
    """The table of ``entries``, None where none of them can be used; and what is wrong with some of them.

    Raises:
        UsageError: there is no such column, it is a figure where a fact is needed, or too many settings of warm-up.
    """
    problems: list[str] = []
    plain = not any(getattr(options, name) for name in ("layout", "pivot", "columns", "group_by"))
    if options.layout == "warmups" or (plain and options.warmup):
        return _each_cut(entries, options)  # a row for each part of a step and each warm-up
    if options.warmup or options.steps is not None:
        entries, problems = cut_anew(entries, options.warmup or [None], options.steps)
    if options.layout == "blocks":
        entries, unread = _with_steps(entries)
        problems += unread
    return (_make(entries, options) if entries else None), problems


def _make(entries: Sequence[Entry], options: Options) -> Table:
    if options.layout is not None:
        return {"wide": wide, "devices": devices, "blocks": blocks}[options.layout](entries)
    if options.pivot is not None:
        down, across = (_facts(names.split(","), entries) for names in options.pivot)
        [value] = columns_named([options.value or "step_s"], entries)
        return pivot(entries, down, across, value)
    columns = columns_named(options.columns, entries) if options.columns else None
    by = _facts(options.group_by, entries)
    groups = list(by_facts(entries, by).values()) if by else repeats_together(entries)
    if options.format == "html" and columns is None and not by and len(groups) == len(entries):
        return Table([], [])  # a page has a row for each run itself
    return (raw_rows if options.format in FOR_PROGRAMS else rows)(groups, columns, by)


def _facts(names: Sequence[str], entries: Sequence[Entry]) -> list[Column]:
    columns = columns_named(names, entries)
    for of in columns:
        if of.quantity is not None:
            raise UsageError(f"{of.name}: expected a fact or an option that distinguishes runs, given a figure")
    return columns


def _with_steps(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Those whose steps can be shown, or that died; and what is wrong with the others."""
    good, problems = readable([entry for entry in entries if entry.shows_steps])
    return [entry for entry in entries if entry in good or not entry.shows_steps], problems


def _each_cut(entries: Sequence[Entry], options: Options) -> tuple[Table | None, list[str]]:
    runs, problems = long_enough(entries, options.warmup or WARMUPS, options.steps)
    made = (warmup_rows if options.layout == "warmups" else warmups)(runs, options.steps) if runs else None
    return made, problems
