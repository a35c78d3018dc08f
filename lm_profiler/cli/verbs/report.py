"""``report``: tables, plots and pages of any runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lm_profiler.analysis.steps.unfinished import with_unfinished
from lm_profiler.cli.verbs.report_kernels import readable_kernels, table_of_all, tables_of_each
from lm_profiler.cli.verbs.report_options import Options
from lm_profiler.cli.verbs.report_output import writable, write
from lm_profiler.cli.verbs.report_table import make_table
from lm_profiler.measure.boundary import say
from lm_profiler.record.collection import Collection, collect
from lm_profiler.record.exit_codes import FAILED, OK
from lm_profiler.report.pictures.plots import save_plot
from lm_profiler.report.pictures.steps_plot import unreadable
from lm_profiler.report.run.terminal import run_page
from lm_profiler.report.tables.options import every_column
from lm_profiler.report.tables.table import Table
from lm_profiler.training.fits.remedies import remedies
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
    if not runs.entries and not runs.problems:
        searched = ", ".join(map(str, paths))
        raise UsageError(f"RUNS: expected folders with runs, found none below {searched}; `lm_profiler fit` makes one")
    return runs


def _show(runs: Collection, options: Options) -> tuple[list[str], bool]:
    """Show the runs; returns what was wrong with some of them, and whether there was anything to show."""
    entries = runs.entries
    if not entries:
        return [], False
    if options.plot is not None and options.output is not None:
        with writable(options.output):
            save_plot(options.plot, entries, options.output, options.by)
        problems = unreadable(entries) if options.plot == "steps" else []
        return problems, len(problems) < len(entries)
    kind = options.format or "terminal"
    people = kind in ("terminal", "markdown")
    if len(entries) == 1 and people and entries[0].record and not any(getattr(options, name) for name in _OF_TABLES):
        page = [*run_page(entries[0].record, entries[0].folder), Table(above=remedies(entries))]
        write(runs, page, kind, options.output)
        return [], True
    if options.kernels:
        traced, problems = readable_kernels(entries)
        tables = tables_of_each(traced, len(entries) > 1) if people else table_of_all(traced)
    else:
        table, problems = make_table(entries, options)
        tables = [] if table is None else [replace(table, below=[*table.below, *remedies(entries)])]
    if tables:
        if kind == "html":
            runs.problems.extend(unreadable(entries))
        write(runs, tables, kind, options.output)
    return problems, bool(tables)
