"""The verb ``report``: tables, plots and pages of any runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from lm_profiler.analysis.conclude import concluded_again
from lm_profiler.analysis.evidence import read_batch_counts
from lm_profiler.analysis.steps.summaries import WARMUPS, judged_after_warmups, readable
from lm_profiler.cli.verbs.shared import (
    choose_format,
    runs_below,
    show,
    writable,
    write,
    write_for_github,
    write_text,
)
from lm_profiler.measure.boundary import print_message
from lm_profiler.record.calls import FAILED, OK
from lm_profiler.record.entry import Collection, Entry, unreadable
from lm_profiler.record.kernels import KernelTable, kernel_files, read_kernels
from lm_profiler.record.memory_timeline import MemoryTimeline, read_timelines
from lm_profiler.record.run_record import RecordError, RunRecord, none_if_unreadable
from lm_profiler.report.pictures.over_time import memory_timelines, titled_timelines
from lm_profiler.report.pictures.plots import (
    ANY_FIGURE,
    KINDS,
    LOGARITHMIC,
    TIMELINE,
    draw,
    save_figure,
)
from lm_profiler.report.run.comparison_table import (
    changes_table,
    checked_runs,
    junit_text,
)
from lm_profiler.report.run.improve_table import improve_table
from lm_profiler.report.run.kernel_tables import kernel_rows, kernel_tables
from lm_profiler.report.run.mfu_table import mfu_table
from lm_profiler.report.run.plan_table import allocation_tables, block_table
from lm_profiler.report.run.run_page import run_page
from lm_profiler.report.run.watch_tables import is_watched, watch_tables
from lm_profiler.report.tables import formats
from lm_profiler.report.tables.column import Column
from lm_profiler.report.tables.filters import entries_where
from lm_profiler.report.tables.kernel_layout import kernel_layout
from lm_profiler.report.tables.layouts import by_size, laid_out, pivot
from lm_profiler.report.tables.relative import (
    baseline_named,
    with_relative,
    with_speedups,
)
from lm_profiler.report.tables.remedies import best_checkpoints, remedies
from lm_profiler.report.tables.rows import raw_runs_table, runs_table
from lm_profiler.report.tables.run_groups import (
    facts_named,
    group_by_facts,
    repeats_together,
    single_run_groups,
)
from lm_profiler.report.tables.table import Heading, Table, TableCell
from lm_profiler.report.tables.table_columns import (
    COLUMNS,
    column_tables,
    columns_named,
    model_config,
)
from lm_profiler.usage_error import UsageError, expect, expect_one_of

EXAMPLES = """\
for example:
  lm_profiler report logs
  lm_profiler report logs --columns name,device,data.batch_size,step_s,allocated_peak_bytes --output runs.csv
  lm_profiler report --columns help            prints the names of all columns
  lm_profiler report logs --where verb=fit,precision!=32-true
  lm_profiler report logs/sweep --group_by size,precision
  lm_profiler report logs/sweep --pivot size precision --value tokens_per_s --format markdown
  lm_profiler report logs/attention --columns attention,step_s --relative attention=sdpa
  lm_profiler report logs/small --warmup 0 1 2 5
  lm_profiler report logs --layout wide --warmup 0 5 --steps 10
  lm_profiler report logs --layout modes       forward only, forward + backward, full step: mean ± std
  lm_profiler report logs/old --again          judged by the rules of this version, with the differences
  lm_profiler report logs/small --plot memory_timeline --output memory.png
  lm_profiler report logs/attention --plot heat --by context_length --value step_s --output heat.svg
  lm_profiler report logs/sweep --plot phases --by data.context_length --output phases.svg"""

_FOR_PEOPLE = ("terminal", "markdown")
# Options that request a table. Without them, and in a format for people, a single run is shown as a page.
_TABLE_OPTIONS = (
    "columns",
    "group_by",
    "pivot",
    "relative",
    "layout",
    "warmup",
    "steps",
    "kernels",
    "allocations",
    "mfu",
)
# options that decide what is shown; a call may have only one of them
_WAYS = ("columns", "pivot", "kernels", "allocations", "mfu", "plot", "layout")

Content = TypeVar("Content")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Print tables of any mix of runs, folders of runs, and sweeps.

    The repeats of a sweep share a row. A single run is shown as a page with all its figures, unless an option requests
    a table. CSV, JSON and Parquet contain SI values and all properties; the other formats are for people.

    Args:
        config: A YAML file of these options.
        runs: Folders of runs or sweeps, or a folder above them.
        where: Use only runs that meet all of these conditions, such as verb=fit,size=small; != excludes a value.
            Several values for one name are alternatives, as in size=small,size=large.
        columns: Names of properties, figures, or options such as data.batch_size; `help` lists the names.
        group_by: Runs with equal values of these properties or options share a row; `folder` gives each run its own.
        pivot: Two properties or options, for the rows and for the columns; each may be several, separated by commas.
        value: The figure of a pivot, or of a plot of kind line, bars or heat; if not given, step_s.
        relative: A baseline, such as attention=sdpa. Each figure is followed by its ratio, with an interval, to the row
            that has this value and is otherwise equal. A pivot gets further columns with the speed-up.
        layout: A table as in published reports. blocks: each step, then forward and backward. wide: one wide row per
            run with means and standard deviations. devices: a row per size, a column per device. modes: forward only,
            forward + backward, full step. warmups: a row for each pass and number of warm-up steps. kernels: by context
            length, the share of matmuls, the largest kernel of each pass, and the largest kernel that is not a matrix
            product.
        warmup: Leave out this many steps at the beginning of each run, instead of the run's own warm-up steps; several
            numbers give several rows.
        steps: Use this many steps of each run, and leave out runs with fewer steps.
        kernels: Print the kernels that took the most time, from the trace of each run.
        mfu: Print the MFU of each run by the conventions of several projects, with their formulas and sources.
        again: Compute the conclusions about each run again from its stored evidence, by the rules of this version, and
            show the differences.
        allocations: Print the largest allocations at the peak of one step, the tensors that are saved for backward, and
            the memory at three moments.
        plot: phases, memory, memory_timeline, attention, tokens, mfu or overlap; or line, bars or heat, which show the
            figure of --value; with --output FILE.svg, .png, .pdf or .html.
        by: The property or option on the horizontal axis of a plot, or in the rows of bars and heat.
        log: Draw a plot with logarithmic axes.
        format: terminal, markdown, latex, typst, csv, json, parquet, html, or junit for CI services; if not given, it
            follows from the suffix of output.
        github: Append the tables to the summary of a GitHub job; if not given, only if GITHUB_STEP_SUMMARY is set.
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
    relative: str | None = None
    layout: (
        Literal["blocks", "wide", "devices", "modes", "warmups", "kernels"] | None
    ) = None
    warmup: Sequence[int] = ()
    steps: int | None = None
    kernels: bool = False
    mfu: bool = False
    allocations: bool = False
    again: bool = False
    plot: str | None = None
    by: str | None = None
    log: bool = False
    format: str | None = None
    github: bool | None = None
    output: Path | None = None

    def __post_init__(self) -> None:
        """Fill in the format, and raise UsageError for a wrong value or a wrong combination of options."""
        expect(self.steps is None or self.steps >= 1, "steps", "1 or more", self.steps)
        least_warmup = min(self.warmup, default=0)
        expect(least_warmup >= 0, "warmup", "0 or more", least_warmup)
        if self.format is not None:
            kinds = (*formats.SUFFIXES.values(), "junit")
            expect_one_of(kinds, "format", self.format)
        if self.plot is not None:
            expect_one_of((*KINDS, TIMELINE), "plot", self.plot)
        else:
            object.__setattr__(self, "format", choose_format(self.format, self.output))
        if not self.runs and self.columns != ["help"]:
            raise UsageError(
                "RUNS: expected folders of runs, given none; try `report logs`"
            )
        self._check_together()

    def _check_together(self) -> None:
        """Raise UsageError if options exclude each other, or need another one that is missing."""
        ways = [name for name in _WAYS if getattr(self, name)]
        if self.kernels or self.allocations or self.mfu or self.plot:
            ways += [name for name in ("warmup", "steps") if getattr(self, name)]
        if len(ways) > 1:
            raise UsageError(
                f"{ways[1]}: cannot be combined with --{ways[0]}; leave one out"
            )
        if self.group_by and ways not in ([], ["columns"]):
            raise UsageError(
                f"group_by: works only with the table of runs, not with --{ways[0]}; leave one out"
            )
        if self.relative is not None and ways not in ([], ["columns"], ["pivot"]):
            raise UsageError(
                f"relative: works only with the table of runs or a pivot, not with --{ways[0]}; leave one out"
            )
        self._check_options_of_figures()
        if self.kernels or self.allocations:
            expect(
                self.format != "html",
                "format",
                f"another with --{ways[0]}",
                self.format,
            )
        if self.plot and self.output is None:
            raise UsageError(
                "plot: expected --output FILE, given none; end FILE with .svg, .png, .pdf or .html"
            )
        if self.plot and self.format is not None:
            raise UsageError(
                "format: not allowed with --plot, because the suffix of FILE sets the format; leave it out"
            )

    def _check_options_of_figures(self) -> None:
        """Raise UsageError if ``value``, ``by`` or ``log`` is given without the pivot or plot that it is for."""
        uses_value = self.pivot is not None or self.plot in ANY_FIGURE
        if self.value is not None and not uses_value:
            raise UsageError(
                f"value: works only with --pivot or --plot {'|'.join(ANY_FIGURE)}; add one of them"
            )
        if self.by is not None and self.plot is None:
            raise UsageError("by: works only with --plot; add it")
        if self.log and self.plot not in LOGARITHMIC:
            raise UsageError(
                f"log: works only with --plot {'|'.join(LOGARITHMIC)}, given {self.plot or 'none'}"
            )


def run(options: Options) -> int:
    """Print or write what is requested and return the exit code: 1 if none of the runs can be shown."""
    if options.columns == ["help"]:
        write(Collection(), column_tables(), "terminal", output=None)
        return OK
    runs = runs_below(options.runs, "RUNS")
    if options.where:
        runs = replace(runs, entries=entries_where(runs.entries, options.where))
    changes: list[Table] = []
    if options.again:
        runs, changes = _conclude_again(runs)
    problems: list[str] = []
    is_shown = _show(runs, options, changes, problems)
    for problem in [*runs.problems, *problems]:
        print_message(f"warning: {problem}")
    return OK if is_shown else FAILED


def _conclude_again(runs: Collection) -> tuple[Collection, list[Table]]:
    """Conclude the runs again; return them, and a table of changes for each. Runs without evidence are unchanged."""
    entries: list[Entry] = []
    tables: list[Table] = []
    for entry in runs.entries:
        is_finished = entry.record is not None and entry.record.status != "unfinished"
        conclusion = None
        if is_finished:
            conclusion = none_if_unreadable(
                concluded_again, entry.folder, entry.record, problems=runs.problems
            )
        if conclusion is not None:
            record, changes = conclusion
            entry = replace(entry, record=record)
            tables.append(changes_table(entry.folder, changes))
        entries.append(entry)
    return replace(runs, entries=entries), tables


def _show(
    runs: Collection, options: Options, changes: Sequence[Table], problems: list[str]
) -> bool:
    """Print or write the runs, and return whether any was shown; ``problems`` gets the reasons why others were not."""
    if options.plot is not None and options.output is not None:
        with writable(options.output):
            return _draw(runs.entries, options, options.output, problems)
    format_name = options.format or "terminal"
    if format_name == "junit":
        text = junit_text(checked_runs(runs.entries))
        write_text(text, format_name, options.output)
        return bool(runs.entries)

    asks_for_table = any(getattr(options, name) for name in _TABLE_OPTIONS)
    is_plain = format_name in _FOR_PEOPLE and not asks_for_table
    # A search is shown by its own table instead of its runs.
    searches = runs.searches if is_plain else {}
    entries = []
    for entry in runs.entries:
        if not _is_in_search(entry.folder, searches):
            entries.append(entry)
    tables = _requested_tables(entries, options, format_name, is_plain, problems)
    tables += [improve_table(record, folder) for folder, record in searches.items()]
    if is_plain:
        tables += changes
    if not tables:
        return False
    if format_name == "html":
        runs.problems.extend(unreadable(entries))
    write(runs, tables, format_name, options.output)

    def summary() -> str:
        shown_tables = tables
        if format_name not in _FOR_PEOPLE:
            shown_tables = _requested_tables(
                entries, options, "markdown", is_plain, problems=[]
            )
        return formats.render(shown_tables, "markdown")

    write_for_github(options.github, summary)
    return True


def _is_in_search(folder: Path, searches: Mapping[Path, object]) -> bool:
    return any(folder.is_relative_to(search_folder) for search_folder in searches)


def _draw(
    entries: Sequence[Entry], options: Options, output: Path, problems: list[str]
) -> bool:
    """Draw the plot that ``options`` request into ``output``; return whether there was anything to draw."""
    if options.plot == TIMELINE:
        _draw_timelines(entries, output, problems)
        return True
    if not entries:
        return False
    plot = options.plot or ""
    save_figure(
        partial(draw, plot, entries, options.by, options.value, options.log), output
    )
    return True


def _draw_timelines(
    entries: Sequence[Entry], output: Path, problems: list[str]
) -> None:
    """Draw the memory timelines of ``entries`` into ``output``, and print the table of one block for each."""
    runs_with_timelines = _read_all(
        entries, read_timelines, "memory timeline", problems
    )
    by_title: dict[str, MemoryTimeline] = {}
    for entry, timelines in runs_with_timelines:
        run_name = str(entry.folder) if len(runs_with_timelines) > 1 else ""
        by_title.update(titled_timelines(timelines, run_name))
    save_figure(partial(memory_timelines, by_title), output)
    for title, timeline in by_title.items():
        if timeline.block is not None:
            table = block_table(timeline.block)
            show(replace(table, above=[title, *filter(None, table.above)]))


def _requested_tables(
    entries: Sequence[Entry],
    options: Options,
    format_name: str,
    is_plain: bool,
    problems: list[str],
) -> list[Table]:
    """Return the tables of runs that the options request; with ``is_plain`` a single run is a page."""
    if not entries:
        return []
    if is_plain and len(entries) == 1 and entries[0].record is not None:
        return _page_tables(entries[0], entries[0].record, problems)
    is_for_programs = format_name in formats.FOR_PROGRAMS
    if options.kernels:
        runs_with_kernels = _read_all(
            entries, _read_first_kernels, "table of kernels", problems
        )
        if is_for_programs:
            return _flat_table(_all_kernel_rows(runs_with_kernels))
        return _kernel_tables(runs_with_kernels, has_headings=len(entries) > 1)
    if options.allocations:
        runs_with_timelines = _read_all(
            entries, read_timelines, "memory timeline", problems
        )
        if is_for_programs:
            return _flat_table(_all_allocation_rows(runs_with_timelines))
        return _allocation_tables(runs_with_timelines)
    if options.mfu:
        return _mfu_tables(entries, is_for_programs, problems)
    if options.layout == "kernels":
        return kernel_layout(by_size(entries))
    table = _table_of_runs(entries, options, format_name, problems)
    if table is None:
        return []
    lines = list(table.below)
    lines += best_checkpoints(entries)
    lines += remedies(entries)
    return [replace(table, below=lines)]


def _page_tables(entry: Entry, record: RunRecord, problems: list[str]) -> list[Table]:
    """Return the tables of one run: all its figures, and what was watched after its measured steps."""
    tables = run_page(record, entry.folder)
    tables.append(Table(above=remedies([entry])))
    if is_watched(entry.folder):
        watched = _read_all([entry], watch_tables, "watched steps", problems)
        for _, tables_of_watch in watched:
            tables += tables_of_watch
    return tables


def _read_all(
    entries: Sequence[Entry],
    read: Callable[[Path], Content | None],
    content_name: str,
    problems: list[str],
) -> list[tuple[Entry, Content]]:
    """Return pairs of a run and what ``read`` returns for its folder; ``problems`` gets a line for each other run."""
    runs_with_content: list[tuple[Entry, Content]] = []
    for entry in entries:
        try:
            content = read(entry.folder)
        except RecordError as error:
            problems.append(str(error))
            continue
        if content:
            runs_with_content.append((entry, content))
        else:
            problems.append(f"{entry.folder}: no {content_name}")
    return runs_with_content


# -- which table -------------------------------------------------------------------------------------------------------


def _table_of_runs(
    entries: Sequence[Entry], options: Options, format_name: str, problems: list[str]
) -> Table | None:
    """Return the table of ``entries``, None if none can be used; ``problems`` gets a line for each unusable run."""
    warmups: Sequence[int] = options.warmup
    if not warmups and options.layout == "warmups":
        warmups = WARMUPS
    if warmups or options.steps is not None:
        # Without a number of warm-up steps each run keeps its own.
        entries, cut_problems = judged_after_warmups(
            entries, warmups or [None], options.steps, read_batch_counts
        )
        problems += cut_problems
    if options.layout == "blocks":
        # This layout shows the steps of each run, and one line for a run without steps.
        entries = _with_readable_steps(entries, problems)
    if not entries:
        return None
    return _grouped_table(entries, options, format_name)


def _with_readable_steps(entries: Sequence[Entry], problems: list[str]) -> list[Entry]:
    """Return the entries without runs whose steps cannot be read; runs without steps are kept."""
    runs_with_steps = [entry for entry in entries if entry.shows_steps]
    readable_runs, unreadable_lines = readable(runs_with_steps)
    problems += unreadable_lines
    usable = []
    for entry in entries:
        if entry in readable_runs or not entry.shows_steps:
            usable.append(entry)
    return usable


def _grouped_table(
    entries: Sequence[Entry], options: Options, format_name: str
) -> Table:
    """Return the table that the options request: a layout, a pivot, or a row for each group of runs."""
    if options.layout is not None:
        return laid_out(entries, options.layout)
    if options.pivot is not None:
        row_names, column_names = options.pivot
        row_facts = facts_named(row_names.split(","), entries, "pivot")
        column_facts = facts_named(column_names.split(","), entries, "pivot")
        [value] = columns_named([options.value or "step_s"], entries)
        table = pivot(entries, row_facts, column_facts, value)
        if options.relative is None:
            return table
        baseline = baseline_named(options.relative, single_run_groups(entries))
        return with_speedups(table, entries, row_facts, column_facts, value, baseline)

    columns = columns_named(options.columns, entries) if options.columns else None
    facts = facts_named(options.group_by, entries, "group_by")
    groups = _runs_by_row(entries, facts)
    if options.relative is not None:
        baseline = baseline_named(options.relative, groups)
        make_table = (
            raw_runs_table if format_name in formats.FOR_PROGRAMS else runs_table
        )
        return with_relative(make_table(groups, columns, facts), groups, baseline)
    if format_name in formats.FOR_PROGRAMS:
        return raw_runs_table(groups, columns, facts)
    has_row_per_run = not facts and len(groups) == len(entries)
    if format_name == "html" and columns is None and has_row_per_run:
        return Table([], [])  # the HTML page draws its own row for each run
    return runs_table(groups, columns, facts)


def _runs_by_row(
    entries: Sequence[Entry], facts: Sequence[Column]
) -> Sequence[Sequence[Entry]]:
    """Return the runs that share a row: those with equal ``facts``, or the repeats if there are no facts."""
    if not facts:
        return repeats_together(entries)
    return list(group_by_facts(entries, facts).values())


# -- kernels and allocations -------------------------------------------------------------------------------------------


def _read_first_kernels(folder: Path) -> KernelTable | None:
    """Return the table of kernels of the first rank that was traced; None if none was."""
    for file in kernel_files(folder):
        return read_kernels(file)
    return None


def _kernel_tables(
    runs_with_kernels: Sequence[tuple[Entry, KernelTable]], has_headings: bool
) -> list[Table]:
    """Return the tables of each run's kernels for people, below the run's folder if ``has_headings``."""
    all_tables: list[Table] = []
    for entry, kernels in runs_with_kernels:
        config = model_config(entry)
        head_width = None if config is None else config.head_dim
        tables = kernel_tables(kernels, COLUMNS["forward_s"].get(entry), head_width)
        if has_headings:
            tables = _with_lines_above(tables, [str(entry.folder)])
        all_tables += tables
    return all_tables


def _all_kernel_rows(
    runs_with_kernels: Sequence[tuple[Entry, KernelTable]],
) -> list[dict[str, Any]]:
    """Return the rows of the kernels of all runs, each with the folder of its run."""
    rows: list[dict[str, Any]] = []
    for entry, kernels in runs_with_kernels:
        for row in kernel_rows(kernels):
            rows.append({"folder": str(entry.folder), **row})
    return rows


def _mfu_tables(
    entries: Sequence[Entry], is_for_programs: bool, problems: list[str]
) -> list[Table]:
    """Return the MFU of each run by all conventions; one table for programs."""
    tables: list[Table] = []
    rows: list[dict[str, Any]] = []
    for entry in entries:
        table = None if entry.record is None else mfu_table(entry.record)
        if table is None:
            problems.append(f"{entry.folder}: FLOPs or tokens of the run are unknown")
            continue
        tables += _with_lines_above([table], [str(entry.folder)])
        rows += [{"folder": str(entry.folder), **row} for row in table.records()]
    return _flat_table(rows) if is_for_programs else tables


def _allocation_tables(
    runs_with_timelines: Sequence[tuple[Entry, Sequence[MemoryTimeline]]],
) -> list[Table]:
    """Return the tables of each timeline for people, below the run's folder."""
    tables: list[Table] = []
    for entry, timelines in runs_with_timelines:
        for timeline in timelines:
            tables += _with_lines_above(
                [*allocation_tables(timeline)], ["", str(entry.folder)]
            )
    return tables


def _all_allocation_rows(
    runs_with_timelines: Sequence[tuple[Entry, Sequence[MemoryTimeline]]],
) -> list[dict[str, Any]]:
    """Return the rows of the allocations of all runs, each with the folder of its run."""
    rows: list[dict[str, Any]] = []
    for entry, timelines in runs_with_timelines:
        for timeline in timelines:
            for row in _allocation_rows(timeline):
                rows.append({"folder": str(entry.folder), **row})
    return rows


def _allocation_rows(timeline: MemoryTimeline) -> Iterator[dict[str, Any]]:
    """Yield a row for each of the largest allocations at the peak, and of those that autograd saved."""
    allocations_by_list = {"at_peak": timeline.largest, "saved": timeline.saved}
    for name, allocations in allocations_by_list.items():
        for allocation in allocations:
            yield {"source": timeline.source, "which": name, **allocation.model_dump()}


def _with_lines_above(tables: Sequence[Table], lines: Sequence[str]) -> list[Table]:
    """Return the tables with ``lines`` above the first."""
    first_table, *rest = tables
    return [replace(first_table, above=[*lines, *first_table.above]), *rest]


def _flat_table(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the rows of all runs as one table for programs; no table if there are none."""
    if not rows:
        return []
    headings = [Heading(name, name) for name in rows[0]]
    cells = []
    for row in rows:
        cells.append([TableCell(value) for value in row.values()])
    return [Table(headings, cells)]


VERBS = {"report": (Options, EXAMPLES, run)}
