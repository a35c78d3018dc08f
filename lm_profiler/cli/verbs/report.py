"""``report``: tables, plots and pages of any runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lm_profiler.analysis.steps.cuts import with_unfinished
from lm_profiler.cli.verbs.report_kernels import readable_kernels, table_of_all, tables_of_each
from lm_profiler.cli.verbs.report_options import Options
from lm_profiler.cli.verbs.report_output import writable, write
from lm_profiler.cli.verbs.report_table import make_table
from lm_profiler.measure.boundary import say
from lm_profiler.record.collection import Collection, collect
from lm_profiler.record.entry import Entry
from lm_profiler.record.exit_codes import FAILED, OK
from lm_profiler.report.pictures.plots import WAY_DOWN, save_plot, save_way_down
from lm_profiler.report.pictures.steps_plot import unreadable
from lm_profiler.report.run.improve_table import improve_table
from lm_profiler.report.run.run_page import run_page
from lm_profiler.report.tables.remedies import remedies
from lm_profiler.report.tables.table import Table
from lm_profiler.report.tables.table_columns import every_column
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
  lm_profiler report logs --layout warmups     a row for each pass and warm-up
  lm_profiler report logs/sweep --plot phases --by data.context_length --output phases.svg"""

_OF_TABLES = ("columns", "group_by", "pivot", "layout", "warmup", "steps", "kernels")
"""Options that ask for a table, of a single run, too; so do formats for programs."""


def run(options: Options) -> int:
    """Print or write what is asked for; returns the exit code, 1 where nothing of what is there can be used.

    Raises:
        UsageError: a wrong call.
    """
    if options.columns == ["help"]:
        write(Collection(), every_column(), "terminal", None)
        return OK
    runs = _collect(options.runs)
    problems, shown = _show(runs, options)
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


def _show(runs: Collection, options: Options) -> tuple[list[str], bool]:
    """Show the runs; returns what was wrong with some of them, and whether there was anything to show."""
    if options.plot is not None and options.output is not None:
        return _draw(runs, options.plot, options.output, options.by)
    kind = options.format or "terminal"
    plain = kind in ("terminal", "markdown") and not any(getattr(options, name) for name in _OF_TABLES)
    searches = runs.searches if plain else []  # their own tables speak for their runs
    entries = [entry for entry in runs.entries if not any(entry.folder.is_relative_to(of.folder) for of in searches)]
    tables, problems = _tables(entries, options, kind, plain) if entries else ([], [])
    tables += [improve_table(of.record, of.folder) for of in searches]
    if tables:
        if kind == "html":
            runs.problems.extend(unreadable(entries))
        write(runs, tables, kind, options.output)
    return problems, bool(tables)


def _draw(runs: Collection, plot: str, output: Path, by: str | None) -> tuple[list[str], bool]:
    entries = runs.entries
    with writable(output):
        if plot == WAY_DOWN:
            save_way_down([of.record for of in runs.searches], output)
        elif entries:
            save_plot(plot, entries, output, by)
    problems = unreadable(entries) if plot == "steps" else []
    return problems, plot == WAY_DOWN or len(problems) < len(entries)


def _tables(entries: Sequence[Entry], options: Options, kind: str, plain: bool) -> tuple[list[Table], list[str]]:
    """Of the runs that are no search's; and what was wrong with some of them."""
    if len(entries) == 1 and plain and entries[0].record is not None:
        return [*run_page(entries[0].record, entries[0].folder), Table(above=remedies(entries))], []
    if options.kernels:
        traced, problems = readable_kernels(entries)
        people = kind in ("terminal", "markdown")
        return (tables_of_each(traced, len(entries) > 1) if people else table_of_all(traced)), problems
    table, problems = make_table(entries, options)
    return [] if table is None else [replace(table, below=[*table.below, *remedies(entries)])], problems
