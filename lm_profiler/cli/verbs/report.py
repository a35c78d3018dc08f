"""The verb ``report``: tables, plots and pages of any runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast, get_args

from lm_profiler.analysis.conclude import concluded_again, with_unfinished
from lm_profiler.analysis.steps.summaries import WARMUPS, cut_anew, long_enough, readable
from lm_profiler.cli.verbs.report_options import Options, writable, write, write_text
from lm_profiler.measure.boundary import say
from lm_profiler.models.config import TransformerConfig, preset
from lm_profiler.record.calls import FAILED, OK
from lm_profiler.record.entry import Collection, Entry, collect, unreadable
from lm_profiler.record.kernels import KernelTable, kernel_files, read_kernels
from lm_profiler.record.memory_timeline import MemoryTimeline, read_timelines
from lm_profiler.record.run import RecordError
from lm_profiler.report.pictures.over_time import named
from lm_profiler.report.pictures.plots import TIMELINE, save_plot, save_timelines
from lm_profiler.report.run.comparison_table import CiFormat, changes_table, ci_text, measured_by
from lm_profiler.report.run.improve_table import improve_table
from lm_profiler.report.run.kernel_tables import kernel_rows, kernel_tables
from lm_profiler.report.run.plan_table import allocation_tables
from lm_profiler.report.run.run_page import run_page
from lm_profiler.report.run.watch_tables import is_watched, watch_tables
from lm_profiler.report.tables.formats import FOR_PROGRAMS
from lm_profiler.report.tables.layouts import blocks, devices, modes, pivot, warmup_rows, warmups, wide
from lm_profiler.report.tables.rows import best_checkpoints, by_facts, raw_rows, remedies, repeats_together, rows
from lm_profiler.report.tables.table import Heading, Table, TableCell
from lm_profiler.report.tables.table_columns import Column, columns_named, every_column
from lm_profiler.usage_error import UsageError

EXAMPLES = """\
for example:
  lm_profiler report logs
  lm_profiler report logs --columns name,device,data.batch_size,step_s,allocated_peak_bytes --output runs.csv
  lm_profiler report logs/sweep --group_by size,precision
  lm_profiler report logs/sweep --pivot size precision --value tokens_per_s --format markdown
  lm_profiler report logs/small --warmup 0 1 2 5
  lm_profiler report logs --layout wide --warmup 0 5 --steps 10
  lm_profiler report --columns help            the name of every column
  lm_profiler report logs --layout blocks      each step, then Model, Params, Forward (s), Backward (s)
  lm_profiler report logs --layout wide        a wide row a run, means and standard deviations
  lm_profiler report logs --layout devices     sizes down, devices across
  lm_profiler report logs --layout modes       forward alone, forward + backward, full step: mean ± std
  lm_profiler report logs --layout warmups     a row for each pass and warm-up
  lm_profiler report logs/old --again          by the rules of this version, and what differs
  lm_profiler report logs/small --plot memory_timeline --output memory.png
  lm_profiler report logs/small --allocations  what holds the memory, and what backward needs
  lm_profiler report logs/sweep --plot phases --by data.context_length --output phases.svg"""

# options that ask for a table even of a single run, as the formats for programs do
_TABLE_OPTIONS = ("columns", "group_by", "pivot", "layout", "warmup", "steps", "kernels", "allocations")


def run(options: Options) -> int:
    """Print or write what is asked for and return the exit code: 1 where none of the runs can be shown.

    Raises:
        UsageError: a wrong call.
    """
    if options.columns == ["help"]:
        write(Collection(), every_column(), "terminal", None)
        return OK
    runs, changes = _collect(options.runs), list[Table]()
    if options.again:
        runs, changes = _again(runs)
    problems, shown = _show(runs, options, changes)
    for problem in [*runs.problems, *problems]:
        say(f"warning: {problem}")
    return OK if shown else FAILED


def _collect(paths: Sequence[Path]) -> Collection:
    try:
        runs = with_unfinished(collect(paths))
    except FileNotFoundError as error:
        raise UsageError(f"RUNS: expected folders, given {error}, which is not a folder") from None
    if not (runs.entries or runs.searches or runs.problems):
        searched = ", ".join(map(str, paths))
        raise UsageError(f"RUNS: expected folders with runs, found none below {searched}; `lm_profiler fit` makes one")
    return runs


def _again(runs: Collection) -> tuple[Collection, list[Table]]:
    """Conclude the runs anew; return them with a table of changes for each. Runs without evidence stay as they are."""
    entries, tables = [], []
    for entry in runs.entries:
        try:
            if entry.record is not None and entry.record.status != "unfinished":
                record, changes = concluded_again(entry.folder, entry.record)
                entry = replace(entry, record=record)
                tables.append(changes_table(entry.folder, changes))
        except RecordError as error:
            runs.problems.append(str(error))
        entries.append(entry)
    return replace(runs, entries=entries), tables


def _show(runs: Collection, options: Options, changes: Sequence[Table]) -> tuple[list[str], bool]:
    """Show the runs and return their problems, and whether there was anything to show."""
    if options.plot is not None and options.output is not None:
        return _draw(runs, options.plot, options.output, options.by)
    kind = options.format or "terminal"
    if kind in get_args(CiFormat):
        write_text(ci_text(measured_by(runs.entries), cast(CiFormat, kind)), kind, options.output)
        return [], bool(runs.entries)
    plain = kind in ("terminal", "markdown") and not any(getattr(options, name) for name in _TABLE_OPTIONS)
    searches = runs.searches if plain else []  # the table of a search stands for all its runs
    entries = [entry for entry in runs.entries if not any(entry.folder.is_relative_to(of.folder) for of in searches)]
    tables, problems = _tables(entries, options, kind, plain) if entries else ([], [])
    tables += [improve_table(of.record, of.folder) for of in searches]
    tables += changes if plain else []
    if tables:
        if kind == "html":
            runs.problems.extend(unreadable(entries))
        write(runs, tables, kind, options.output)
    return problems, bool(tables)


def _draw(runs: Collection, plot: str, output: Path, by: str | None) -> tuple[list[str], bool]:
    entries = runs.entries
    with writable(output):
        if plot == TIMELINE:
            told, problems = _timelines(entries)
            names = [str(entry.folder) if len(told) > 1 else "" for entry, _ in told]
            known = zip(names, told, strict=True)
            save_timelines({t: of for name, (_, one) in known for t, of in named(one, name).items()}, output)
            return problems, True
        elif entries:
            save_plot(plot, entries, output, by)
    return [], bool(entries)


def _tables(entries: Sequence[Entry], options: Options, kind: str, plain: bool) -> tuple[list[Table], list[str]]:
    """Return tables of the runs outside of searches, and the problems of some of them."""
    if len(entries) == 1 and plain and entries[0].record is not None:
        folder = entries[0].folder
        watched = watch_tables(folder) if is_watched(folder) else []
        return [*run_page(entries[0].record, folder), Table(above=remedies(entries)), *watched], []
    if options.kernels:
        traced, problems = _readable_kernels(entries)
        people = kind in ("terminal", "markdown")
        return (_kernels_of_each(traced, len(entries) > 1) if people else _kernels_of_all(traced)), problems
    if options.allocations:
        told, problems = _timelines(entries)
        return (_allocations_of_each if kind in ("terminal", "markdown") else _allocations_of_all)(told), problems
    table, problems = _make_table(entries, options)
    return [] if table is None else [
        replace(table, below=[*table.below, *best_checkpoints(entries), *remedies(entries)])
    ], problems


# -- which table -------------------------------------------------------------------------------------------------------


def _make_table(entries: Sequence[Entry], options: Options) -> tuple[Table | None, list[str]]:
    """Return the table of ``entries``, None where none can be used, and the problems of some of them.

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
        return {"wide": wide, "devices": devices, "blocks": blocks, "modes": modes}[options.layout](entries)
    if options.pivot is not None:
        down, across = (_facts(names.split(","), entries) for names in options.pivot)
        [value] = columns_named([options.value or "step_s"], entries)
        return pivot(entries, down, across, value)
    columns = columns_named(options.columns, entries) if options.columns else None
    by = _facts(options.group_by, entries)
    groups = list(by_facts(entries, by).values()) if by else repeats_together(entries)
    if options.format == "html" and columns is None and not by and len(groups) == len(entries):
        return Table([], [])  # the HTML page draws its own row for each run
    return (raw_rows if options.format in FOR_PROGRAMS else rows)(groups, columns, by)


def _facts(names: Sequence[str], entries: Sequence[Entry]) -> list[Column]:
    columns = columns_named(names, entries)
    for of in columns:
        if of.quantity is not None:
            raise UsageError(f"{of.name}: expected a fact or an option that distinguishes runs, given a figure")
    return columns


def _with_steps(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Return the runs whose steps can be shown or that died, and the problems of the others."""
    good, problems = readable([entry for entry in entries if entry.shows_steps])
    return [entry for entry in entries if entry in good or not entry.shows_steps], problems


def _each_cut(entries: Sequence[Entry], options: Options) -> tuple[Table | None, list[str]]:
    runs, problems = long_enough(entries, options.warmup or WARMUPS, options.steps)
    made = (warmup_rows if options.layout == "warmups" else warmups)(runs, options.steps) if runs else None
    return made, problems


# -- kernels -----------------------------------------------------------------------------------------------------------


def _readable_kernels(entries: Sequence[Entry]) -> tuple[list[tuple[Entry, KernelTable]], list[str]]:
    """Return rank 0's kernel table of each run that has one, and the problems of the others."""
    traced, problems = [], []
    for entry in entries:
        try:
            if files := kernel_files(entry.folder):
                traced.append((entry, read_kernels(files[0])))
            else:
                problems.append(
                    f"{entry.folder}: no table of kernels: nothing was traced, or the trace is another tool's"
                )
        except RecordError as error:
            problems.append(str(error))
    return traced, problems


def _kernels_of_each(traced: Sequence[tuple[Entry, KernelTable]], several: bool) -> list[Table]:
    """Return each run's kernel tables for people; with ``several`` runs, each is headed by its folder."""
    tables = []
    for entry, kernels in traced:
        first, *rest = kernel_tables(kernels, _forward_s(entry), _head_width(entry))
        where = [str(entry.folder)] if several else []
        tables += [replace(first, above=[*where, *first.above]), *rest]
    return tables


def _forward_s(entry: Entry) -> float | None:
    """Return the mean seconds of the forward pass in the measured steps."""
    forward = None if entry.record is None else entry.record.time.get("forward")
    return None if forward is None else forward.mean


def _head_width(entry: Entry) -> int | None:
    """Return the numbers in a query of one head; None for a module that is not ours."""
    given = {field.name: entry.option(f"model.{field.name}") for field in fields(TransformerConfig)}
    try:
        return preset(entry.option("model.size"), **given).head_dim
    except (TypeError, UsageError):
        return None


def _kernels_of_all(traced: Sequence[tuple[Entry, KernelTable]]) -> list[Table]:
    """Return the kernels of all runs as one table for programs; no table where there are none."""
    return _flat([{"folder": str(entry.folder), **row} for entry, kernels in traced for row in kernel_rows(kernels)])


def _flat(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    headings = [Heading(name, name) for name in (rows[0] if rows else ())]
    body = [[TableCell(value) for value in row.values()] for row in rows]
    return [Table(headings, body)] if rows else []


# -- memory timelines --------------------------------------------------------------------------------------------------


def _timelines(entries: Sequence[Entry]) -> tuple[list[tuple[Entry, list[MemoryTimeline]]], list[str]]:
    """Return the memory timelines of each run that has any, and the problems of the others."""
    told, problems = [], []
    for entry in entries:
        try:
            if timelines := read_timelines(entry.folder):
                told.append((entry, timelines))
            else:
                problems.append(f"{entry.folder}: no memory timeline: it was not planned, or an older version wrote it")
        except RecordError as error:
            problems.append(str(error))
    return told, problems


def _allocations_of_each(told: Sequence[tuple[Entry, Sequence[MemoryTimeline]]]) -> list[Table]:
    """Return the tables of each timeline for people, headed by the run's folder."""
    tables = []
    for entry, timelines in told:
        for timeline in timelines:
            first, *rest = allocation_tables(timeline)
            tables += [replace(first, above=["", str(entry.folder), *first.above]), *rest]
    return tables


def _allocations_of_all(told: Sequence[tuple[Entry, Sequence[MemoryTimeline]]]) -> list[Table]:
    """Return the allocations of all runs as one table for programs."""
    return _flat(
        [
            {"folder": str(entry.folder), "source": timeline.source, "which": which, **of.model_dump()}
            for entry, timelines in told
            for timeline in timelines
            for which, rows in (("at_peak", timeline.largest), ("saved", timeline.saved))
            for of in rows
        ]
    )
