"""The verb ``report``: tables, plots and pages of any runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

from lm_profiler.analysis.conclude import concluded_again
from lm_profiler.analysis.evidence import read_batch_counts
from lm_profiler.analysis.steps.summaries import WARMUPS, cut_anew, readable
from lm_profiler.cli.verbs.shared import choose_format, runs_below, writable, write, write_for_github, write_text
from lm_profiler.measure.boundary import say
from lm_profiler.record.calls import FAILED, OK
from lm_profiler.record.entry import Collection, Entry, unreadable
from lm_profiler.record.kernels import KernelTable, kernel_files, read_kernels
from lm_profiler.record.memory_timeline import MemoryTimeline, read_timelines
from lm_profiler.record.run_record import RecordError, none_if_unreadable
from lm_profiler.report.pictures.over_time import memory_timelines, titled_timelines
from lm_profiler.report.pictures.plots import KINDS, TIMELINE, draw, save_figure
from lm_profiler.report.run.comparison_table import CiFormat, changes_table, ci_text, measured_by
from lm_profiler.report.run.improve_table import improve_table
from lm_profiler.report.run.kernel_tables import kernel_rows, kernel_tables
from lm_profiler.report.run.plan_table import allocation_tables
from lm_profiler.report.run.run_page import run_page
from lm_profiler.report.run.watch_tables import is_watched, watch_tables
from lm_profiler.report.tables import formats
from lm_profiler.report.tables.filters import entries_where
from lm_profiler.report.tables.layouts import laid_out, pivot
from lm_profiler.report.tables.remedies import best_checkpoints, remedies
from lm_profiler.report.tables.rows import raw_runs_table, runs_table
from lm_profiler.report.tables.run_groups import group_by_facts, repeats_together
from lm_profiler.report.tables.table import Heading, Table, TableCell
from lm_profiler.report.tables.table_columns import COLUMNS, Column, column_tables, columns_named, model_config
from lm_profiler.usage_error import UsageError, expect, expect_one_of

EXAMPLES = """\
for example:
  lm_profiler report logs
  lm_profiler report logs --columns name,device,data.batch_size,step_s,allocated_peak_bytes --output runs.csv
  lm_profiler report --columns help            the name of every column
  lm_profiler report logs --where verb=fit,precision!=32-true
  lm_profiler report logs/sweep --group_by size,precision
  lm_profiler report logs/sweep --pivot size precision --value tokens_per_s --format markdown
  lm_profiler report logs/small --warmup 0 1 2 5
  lm_profiler report logs --layout wide --warmup 0 5 --steps 10
  lm_profiler report logs --layout modes       forward alone, forward + backward, full step: mean ± std
  lm_profiler report logs/old --again          by this version's rules, and what differs
  lm_profiler report logs/small --plot memory_timeline --output memory.png
  lm_profiler report logs/sweep --plot phases --by data.context_length --output phases.svg"""

_PEOPLE = ("terminal", "markdown")
# options that ask for a table even of a single run, as the formats for programs do
_TABLE_OPTIONS = ("columns", "group_by", "pivot", "layout", "warmup", "steps", "kernels", "allocations")

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tables of runs, of folders of runs and of sweeps, in any mix.

    A sweep's repeats share a row; a single run is shown as a page of all its figures, unless an option asks for a
    table. CSV, JSON and Parquet carry SI values and every fact; the others are for people.

    Args:
        config: A YAML file of these options.
        runs: Folders of runs or sweeps, or a folder above them.
        where: Use only runs with these facts, such as verb=fit,size=small; != excludes. Of one fact several values may
            be given, as in size=small,size=large.
        columns: Facts and figures by name, or options such as data.batch_size; `help` lists the names.
        group_by: One row for all runs that have these facts in common; `folder` gives each run its own.
        pivot: Two facts, one down and one across; several with commas between.
        value: What a pivot shows; if not given, step_s.
        layout: A table as in published reports. blocks: each step, then forward and backward. wide: one wide row per
            run, means and standard deviations. devices: sizes down, devices across. modes: forward alone, forward +
            backward, full step. warmups: a row for each pass and warm-up.
        warmup: Leave out this many first steps of each run instead of its own warm-up; several numbers give a row each.
        steps: Use this many steps of each run, and leave out runs with fewer.
        kernels: The kernels that took the device's time, from the trace of each run.
        again: Conclude again, by this version's rules, from each run's evidence, and show what differs from its record.
        allocations: The largest allocations at the peak of one step, tensors saved for backward, and three moments.
        plot: phases, memory, memory_timeline, attention, tokens, mfu or overlap; with --output FILE.svg, .png, .pdf or
            .html.
        by: What a plot is drawn against.
        format: terminal, markdown, latex, typst, csv, json, parquet or html; if not given, by output's suffix; for
            CI services bmf (Bencher), github-action-benchmark or junit.
        github: Append the tables to the file that GitHub's variable names, for the page of a job; if not given, only if
            GITHUB_STEP_SUMMARY is set.
        output: Write to this file.
    """

    WORDS: ClassVar[str] = "runs"

    config: str | None = None
    runs: Sequence[Path] = ()
    where: Sequence[str] = ()
    columns: Sequence[str] = ()
    group_by: Sequence[str] = ()
    pivot: tuple[str, str] | None = None
    value: str | None = None
    layout: Literal["blocks", "wide", "devices", "modes", "warmups"] | None = None
    warmup: Sequence[int] = ()
    steps: int | None = None
    kernels: bool = False
    allocations: bool = False
    again: bool = False
    plot: str | None = None
    by: str | None = None
    format: str | None = None
    github: bool | None = None
    output: Path | None = None

    def __post_init__(self) -> None:
        expect(self.steps is None or self.steps >= 1, "steps", "1 or more", self.steps)
        expect(min(self.warmup, default=0) >= 0, "warmup", "0 or more", min(self.warmup, default=0))
        if self.format is not None:
            expect_one_of((*formats.SUFFIXES.values(), *get_args(CiFormat)), "format", self.format)
        if self.plot is not None:
            expect_one_of((*KINDS, TIMELINE), "plot", self.plot)
        else:
            object.__setattr__(self, "format", choose_format(self.format, self.output))
        if not self.runs and self.columns != ["help"]:
            raise UsageError("RUNS: expected folders of runs, given none; `report logs`, say")
        self._check_together()

    def _check_together(self) -> None:
        known = ("columns", "pivot", "kernels", "allocations", "plot", "layout")
        ways = [name for name in known if getattr(self, name)]
        if self.kernels or self.allocations or self.plot:
            ways += [name for name in ("warmup", "steps") if getattr(self, name)]
        if len(ways) > 1:
            raise UsageError(f"{ways[1]}: expected one way to show the runs, given --{ways[0]} too; leave one out")
        if self.group_by and ways not in ([], ["columns"]):
            raise UsageError(f"group_by: expected a table of rows, given --{ways[0]} too; leave one out")
        for name, needs in (("value", "pivot"), ("by", "plot")):
            if getattr(self, name) is not None and not getattr(self, needs):
                raise UsageError(f"{name}: expected --{needs} with it, given none")
        if self.kernels or self.allocations:
            expect(self.format != "html", "format", f"another with --{ways[0]}", self.format)
        if self.plot and self.output is None:
            raise UsageError("plot: expected --output FILE, given none; end it with .svg, .png, .pdf or .html")
        if self.plot and self.format is not None:
            raise UsageError("format: expected none with --plot, whose FILE's suffix says it; leave it out")


def run(options: Options) -> int:
    """Print or write what is asked for and return the exit code: 1 where none of the runs can be shown."""
    if options.columns == ["help"]:
        write(Collection(), column_tables(), "terminal", None)
        return OK
    runs, changes = runs_below(options.runs, "RUNS"), list[Table]()
    if options.where:
        runs = replace(runs, entries=entries_where(runs.entries, options.where))
    if options.again:
        runs, changes = _again(runs)
    problems, shown = _show(runs, options, changes)
    for problem in [*runs.problems, *problems]:
        say(f"warning: {problem}")
    return OK if shown else FAILED


def _again(runs: Collection) -> tuple[Collection, list[Table]]:
    """Conclude the runs again; return them with a table of changes for each. Runs without evidence stay unchanged."""
    entries, tables = [], []
    for entry in runs.entries:
        if entry.record is not None and entry.record.status != "unfinished":
            again = none_if_unreadable(concluded_again, entry.folder, entry.record, problems=runs.problems)
            if again is not None:
                entry = replace(entry, record=again[0])
                tables.append(changes_table(entry.folder, again[1]))
        entries.append(entry)
    return replace(runs, entries=entries), tables


def _show(runs: Collection, options: Options, changes: Sequence[Table]) -> tuple[list[str], bool]:
    """Show the runs and return their problems, and whether any run was shown."""
    if options.plot is not None and options.output is not None:
        return _draw(runs, options.plot, options.output, options.by)
    kind = options.format or "terminal"
    if kind in get_args(CiFormat):
        write_text(ci_text(measured_by(runs.entries), cast(CiFormat, kind)), kind, options.output)
        return [], bool(runs.entries)
    plain = kind in _PEOPLE and not any(getattr(options, name) for name in _TABLE_OPTIONS)
    searches = runs.searches if plain else {}  # the table of a search stands for all its runs
    entries = [entry for entry in runs.entries if not any(entry.folder.is_relative_to(folder) for folder in searches)]
    tables, problems = _tables(entries, options, kind, plain) if entries else ([], [])
    tables += [improve_table(of, folder) for folder, of in searches.items()]
    tables += changes if plain else []
    if tables:
        if kind == "html":
            runs.problems.extend(unreadable(entries))
        write(runs, tables, kind, options.output)
        again = partial(_tables, entries, options, "markdown", plain)  # the chosen format may be for programs
        write_for_github(options.github, lambda: formats.render(tables if kind in _PEOPLE else again()[0], "markdown"))
    return problems, bool(tables)


def _draw(runs: Collection, plot: str, output: Path, by: str | None) -> tuple[list[str], bool]:
    entries = runs.entries
    with writable(output):
        if plot == TIMELINE:
            told, problems = _each(entries, read_timelines, "memory timeline")
            several = len(told) > 1
            of_runs = {
                t: of for entry, one in told for t, of in titled_timelines(one, str(entry.folder) * several).items()
            }
            save_figure(partial(memory_timelines, of_runs), output)
            return problems, True
        elif entries:
            save_figure(partial(draw, plot, entries, by), output)
    return [], bool(entries)


def _tables(entries: Sequence[Entry], options: Options, kind: str, plain: bool) -> tuple[list[Table], list[str]]:
    """Return tables of the runs outside of searches, and the problems of some of them."""
    if len(entries) == 1 and plain and entries[0].record is not None:
        folder = entries[0].folder
        watched, problems = _each(entries if is_watched(folder) else (), watch_tables, "watched steps")
        shown = [*run_page(entries[0].record, folder), Table(above=remedies(entries))]
        return [*shown, *(table for _, tables in watched for table in tables)], problems
    if options.kernels:
        traced, problems = _each(
            entries, lambda of: next(map(read_kernels, kernel_files(of)), None), "table of kernels"
        )
        if kind not in formats.FOR_PROGRAMS:
            return _kernels_of_each(traced, len(entries) > 1), problems
        each_row = [{"folder": str(entry.folder), **row} for entry, kernels in traced for row in kernel_rows(kernels)]
        return _flat(each_row), problems
    if options.allocations:
        told, problems = _each(entries, read_timelines, "memory timeline")
        return (_allocations_of_all if kind in formats.FOR_PROGRAMS else _allocations_of_each)(told), problems
    table, problems = _make_table(entries, options)
    if table is not None:
        table = replace(table, below=[*table.below, *best_checkpoints(entries), *remedies(entries)])
    return [] if table is None else [table], problems


def _each(
    entries: Sequence[Entry], read: Callable[[Path], Found | None], what: str
) -> tuple[list[tuple[Entry, Found]], list[str]]:
    """Return each run with what ``read`` finds in its folder, and the problems of the others."""
    known, problems = [], []
    for entry in entries:
        try:
            if one := read(entry.folder):
                known.append((entry, one))
            else:
                problems.append(f"{entry.folder}: no {what}")
        except RecordError as error:
            problems.append(str(error))
    return known, problems


# -- which table -------------------------------------------------------------------------------------------------------


def _make_table(entries: Sequence[Entry], options: Options) -> tuple[Table | None, list[str]]:
    """Return the table of ``entries``, None where none can be used, and the problems of some of them."""
    problems: list[str] = []
    warmup = options.warmup or (WARMUPS if options.layout == "warmups" else ())
    if warmup or options.steps is not None:
        entries, problems = cut_anew(entries, warmup or [None], options.steps, read_batch_counts)
    if options.layout == "blocks":  # the runs whose steps can be shown or that died
        good, unread = readable([entry for entry in entries if entry.shows_steps])
        entries = [entry for entry in entries if entry in good or not entry.shows_steps]
        problems += unread
    return (_make(entries, options) if entries else None), problems


def _make(entries: Sequence[Entry], options: Options) -> Table:
    if options.layout is not None:
        return laid_out(entries, options.layout)
    if options.pivot is not None:
        down, across = (_facts(names.split(","), entries) for names in options.pivot)
        [value] = columns_named([options.value or "step_s"], entries)
        return pivot(entries, down, across, value)
    columns = columns_named(options.columns, entries) if options.columns else None
    by = _facts(options.group_by, entries)
    groups = list(group_by_facts(entries, by).values()) if by else repeats_together(entries)
    if options.format == "html" and columns is None and not by and len(groups) == len(entries):
        return Table([], [])  # the HTML page draws its own row for each run
    return (raw_runs_table if options.format in formats.FOR_PROGRAMS else runs_table)(groups, columns, by)


def _facts(names: Sequence[str], entries: Sequence[Entry]) -> list[Column]:
    columns = columns_named(names, entries)
    for of in columns:
        if of.quantity is not None:
            raise UsageError(f"{of.name}: expected a fact or an option that distinguishes runs, given a figure")
    return columns


# -- kernels and allocations -------------------------------------------------------------------------------------------


def _kernels_of_each(traced: Sequence[tuple[Entry, KernelTable]], several: bool) -> list[Table]:
    """Return each run's kernel tables for people; with ``several`` runs, each is headed by its folder."""
    tables = []
    for entry, kernels in traced:
        forward_s, config = COLUMNS["forward_s"].get(entry), model_config(entry)
        of_run = kernel_tables(kernels, forward_s, None if config is None else config.head_dim)
        tables += _headed(of_run, *[str(entry.folder)] * several)
    return tables


def _headed(tables: Iterable[Table], *lines: str) -> list[Table]:
    first, *rest = tables
    return [replace(first, above=[*lines, *first.above]), *rest]


def _flat(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the rows of all runs as one table for programs; no table where there are none."""
    headings = [Heading(name, name) for name in (rows[0] if rows else ())]
    body = [[TableCell(value) for value in row.values()] for row in rows]
    return [Table(headings, body)] if rows else []


def _allocations_of_each(told: Sequence[tuple[Entry, Sequence[MemoryTimeline]]]) -> list[Table]:
    """Return the tables of each timeline for people, headed by the run's folder."""
    each = ((str(entry.folder), allocation_tables(timeline)) for entry, timelines in told for timeline in timelines)
    return [table for folder, tables in each for table in _headed(tables, "", folder)]


def _allocations_of_all(told: Sequence[tuple[Entry, Sequence[MemoryTimeline]]]) -> list[Table]:
    each_row = [
        {"folder": str(entry.folder), "source": timeline.source, "which": which, **of.model_dump()}
        for entry, timelines in told
        for timeline in timelines
        for which, rows in (("at_peak", timeline.largest), ("saved", timeline.saved))
        for of in rows
    ]
    return _flat(each_row)


VERBS = {"report": (Options, EXAMPLES, run)}
