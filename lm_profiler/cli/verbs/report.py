"""``report``: tables, plots and pages of any runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from lm_profiler.analysis.steps.unfinished import with_unfinished
from lm_profiler.cli.endings import FAILED, OK
from lm_profiler.cli.usage import UsageError, explain
from lm_profiler.cli.verbs.report_kernels import table_of_all, tables_of_each
from lm_profiler.cli.verbs.report_output import format_of, writable, write
from lm_profiler.cli.verbs.report_table import LAYOUTS, make_table
from lm_profiler.measure.boundary import say
from lm_profiler.record.collection import Collection, Entry, collect
from lm_profiler.report.pictures.plots import KINDS, save_plot
from lm_profiler.report.pictures.series import unreadable
from lm_profiler.report.run.terminal import run_page
from lm_profiler.report.tables.formats import FOR_PROGRAMS, SUFFIXES, render
from lm_profiler.report.tables.options import every_column
from lm_profiler.report.tables.table import Table
from lm_profiler.training.fits.remedies import remedies

_DESCRIPTION = """\
Tables of runs, of folders of runs and of sweeps, in any mix. A sweep's repeats share a row; a single run is shown
as a page of all its figures, unless an option asks for a table. CSV, JSON and Parquet carry SI
values and every fact; the others are for people."""

_EXAMPLES = """\
for example:
  python -m lm_profiler report logs
  python -m lm_profiler report logs --columns name,device,data.batch_size,step_s,allocated_peak_bytes --output runs.csv
  python -m lm_profiler report logs/sweep --group_by size,precision
  python -m lm_profiler report logs/sweep --pivot size precision --value tokens_per_s --format markdown
  python -m lm_profiler report logs/small --warmup 0 1 2 5
  python -m lm_profiler report logs --layout wide --warmup 0 5 --steps 10
  python -m lm_profiler report --columns help            the name of every column
  python -m lm_profiler report logs --layout blocks      each step, then Model, Params, Forward (s), Backward (s)
  python -m lm_profiler report logs --layout wide        a wide row a run, means and standard deviations
  python -m lm_profiler report logs --layout devices     sizes down, devices across
  python -m lm_profiler report logs --layout warmups     a row for each pass and warm-up
  python -m lm_profiler report logs/sweep --plot phases --by data.context_length --output phases.svg"""

_OF_TABLES = ("columns", "group_by", "pivot", "layout", "warmup", "steps", "kernels")
"""Options that ask for a table, of a single run, too; so do formats for programs."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if " given " in message:  # one of ours
            raise UsageError(message.removeprefix("argument --"))
        known = {option.removeprefix("--") for action in self._actions for option in action.option_strings}
        raise UsageError(explain(message, known))


def run(arguments: Sequence[str]) -> int:
    """Print or write what is asked for; returns the exit code, 1 where nothing of what is there can be used.

    Raises:
        UsageError: a wrong call.
    """
    options = _options(arguments)
    if options.columns == ["help"]:
        sys.stdout.write(render(every_column(), "terminal", sys.stdout))
        return OK
    found = _collect(options.runs)
    problems, shown = _show(found, options)
    for problem in [*found.problems, *problems]:
        say(f"warning: {problem}")
    return OK if shown else FAILED


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        usage="python -m lm_profiler report RUNS... [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUNS", help="folders of runs or sweeps, or a folder above them")
    names, formats = "NAME,NAME", list(SUFFIXES.values())
    columns = "facts and figures by name, or options such as data.batch_size; `help` lists the names"
    add("--columns", type=_names, metavar=names, help=columns)
    add("--group_by", type=_names, metavar=names, help="one row for all runs with the same facts; `folder`: one each")
    add("--pivot", nargs=2, type=_names, metavar=("ROWS", "ACROSS"), help="one fact down, another across")
    add("--value", metavar="NAME", help="what a pivot shows (step_s)")
    add("--layout", type=_one_of(LAYOUTS), metavar="|".join(LAYOUTS), help="a table as published reports have it")
    add("--warmup", type=_steps, nargs="+", metavar="N", help="cut the recorded steps anew, after N steps of warm-up")
    add("--steps", type=_some_steps, metavar="N", help="N steps of each run, and no run that has fewer")
    add("--kernels", action="store_true", help="where the device's time went in the trace of each run")
    add("--plot", metavar="KIND", help=f"{', '.join(KINDS)}; with --output FILE.svg, .png or .pdf")
    add("--by", metavar="NAME", help="what a plot is drawn against")
    add("--format", type=_one_of(formats), metavar="|".join(formats), help="else as FILE's suffix says")
    add("--output", type=Path, metavar="FILE", help="write to FILE")
    options = parser.parse_intermixed_args(list(arguments))
    if options.plot is None:
        options.format = format_of(options.format, options.output)
    _check_together(options)
    return options


def _names(given: str) -> list[str]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"expected names with commas between, given {given!r}")
    return names


def _steps(given: str) -> int:
    if not given.isdecimal():
        raise argparse.ArgumentTypeError(f"expected numbers of steps, given {given!r}; put RUNS before it")
    return int(given)


def _some_steps(given: str) -> int:
    if (count := _steps(given)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, given {given}")
    return count


def _one_of(words: Sequence[str]) -> Callable[[str], str]:
    def check(given: str) -> str:
        if given not in words:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(words)}, given {given!r}")
        return given

    return check


def _check_together(options: argparse.Namespace) -> None:
    if not options.runs and options.columns != ["help"]:
        raise UsageError("RUNS: expected folders of runs, given none; `report logs`, say")
    ways = [name for name in ("columns", "pivot", "kernels", "plot", "layout") if getattr(options, name)]
    if options.kernels or options.plot:
        ways += [name for name in ("warmup", "steps") if getattr(options, name) is not None]
    if len(ways) > 1:
        raise UsageError(f"{ways[1]}: expected one way to show the runs, given --{ways[0]} too; leave one out")
    if options.group_by and ways not in ([], ["columns"]):
        raise UsageError(f"group_by: expected a table of rows, given --{ways[0]} too; leave one out")
    if options.value is not None and not options.pivot:
        raise UsageError("value: expected --pivot ROWS ACROSS, given none")
    if options.by is not None and not options.plot:
        raise UsageError("by: expected --plot KIND, given none")
    if options.kernels and options.format in ("html", "latex"):
        raise UsageError(
            f"format: expected terminal, markdown, {', '.join(FOR_PROGRAMS)} with --kernels, given {options.format}"
        )
    if options.plot and options.output is None:
        raise UsageError("plot: expected --output FILE, given none; end it with .svg, .png or .pdf")
    if options.plot and options.format is not None:
        raise UsageError("format: expected none with --plot, whose FILE's suffix says it; leave it out")


def _collect(paths: Sequence[Path]) -> Collection:
    try:
        found = with_unfinished(collect(paths))
    except FileNotFoundError as error:
        raise UsageError(f"RUNS: expected folders, given {error}, which is no folder") from None
    if not found.entries and not found.problems:
        raise UsageError(
            f"RUNS: expected folders with runs, found none below {', '.join(map(str, paths))}; "
            "`python -m lm_profiler fit` makes one"
        )
    return found


def _show(found: Collection, options: argparse.Namespace) -> tuple[list[str], bool]:
    """Show the runs; returns what was wrong with some of them, and whether there was anything to show."""
    entries = found.entries
    if not entries:
        return [], False
    if options.plot is not None:
        _plot(entries, options)
        problems = unreadable(entries) if options.plot == "steps" else []
        return problems, len(problems) < len(entries)
    people = options.format in (None, "terminal", "markdown")
    failed = [Table(above=remedies(entries))]
    if len(entries) == 1 and people and entries[0].record and not any(getattr(options, name) for name in _OF_TABLES):
        write(found, [*run_page(entries[0].record, entries[0].folder), *failed], options.format, options.output)
        return [], True
    if options.kernels:
        tables, problems = (tables_of_each if people else table_of_all)(entries)
    else:
        table, problems = make_table(entries, options)
        tables = [] if table is None else [replace(table, below=[*table.below, *remedies(entries)])]
    if tables:
        if options.format == "html":
            found.problems.extend(unreadable(entries))
        write(found, tables, options.format, options.output)
    return problems, bool(tables)


def _plot(entries: Sequence[Entry], options: argparse.Namespace) -> None:
    with writable(options.output):
        try:
            save_plot(options.plot, entries, options.output, options.by)
        except ValueError as error:
            raise UsageError(str(error)) from None
