"""``compare``: is B faster than A?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from lm_profiler.analysis.compare.comparison import Comparison, compare
from lm_profiler.analysis.compare.sides import NotComparable
from lm_profiler.analysis.steps.unfinished import with_unfinished
from lm_profiler.cli.endings import FAILED, OK
from lm_profiler.cli.usage import UsageError
from lm_profiler.cli.verbs.report_output import writable
from lm_profiler.measure.boundary import say
from lm_profiler.record.collection import Entry, collect
from lm_profiler.record.files import write_whole
from lm_profiler.record.run import RecordError
from lm_profiler.report.run.comparison import as_json, comparison_table, verdict_line
from lm_profiler.report.tables.formats import render

_DESCRIPTION = """\
Compares B with A: the step, its phases, tokens/s and memory, each with a ratio, how sure it is, and a word: FASTER,
SLOWER, SAME or UNCLEAR. Several runs on a side are repeats of one another."""

_EXAMPLES = """\
for example:
  python -m lm_profiler compare logs/before logs/after
  python -m lm_profiler compare --a logs/main/version_0 logs/main/version_1 --b logs/new/version_0 logs/new/version_1
  python -m lm_profiler compare logs/main logs/new --fail_on slower"""


_FORMATS = ("terminal", "markdown", "json")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"compare: {message}; see compare --help")


def run(arguments: Sequence[str]) -> int:
    """Print or write the comparison; returns the exit code, 1 where ``--fail_on`` finds what it looks for.

    Raises:
        UsageError: a wrong call, a damaged folder, or runs that are not alike.
    """
    options = _parser().parse_args(arguments)
    a, b = _sides(options)
    try:
        comparison = compare(_entries("A", a), _entries("B", b))
    except (NotComparable, RecordError) as error:
        raise UsageError(f"compare: {error}") from None
    if comparison.unlike and not options.unlike:
        raise UsageError(_refusal(comparison))
    _show(comparison, options)
    if options.fail_on == "slower" and comparison.step.verdict == "SLOWER":
        alone = " (one run against one: repeat both to be sure)" if len(comparison.a) == len(comparison.b) == 1 else ""
        say(f"compare: {verdict_line(comparison)}{alone}")
        return FAILED
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m lm_profiler compare",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="A B", help="two folders: of a run, its repeats, or a sweep's cell"
    )
    for side in "ab":
        text = f"the runs of {side.upper()}, where they lie in several folders"
        parser.add_argument(f"--{side}", nargs="+", type=Path, metavar="RUN", help=text)
    parser.add_argument("--unlike", action="store_true", help="compare runs of unlike work, too")
    parser.add_argument(
        "--fail_on", type=_one_of("slower"), metavar="slower", help="exit with 1 where B's step is SLOWER"
    )
    parser.add_argument("--format", type=_one_of(*_FORMATS), default="terminal", metavar="|".join(_FORMATS))
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to FILE instead of the terminal")
    return parser


def _one_of(*words: str) -> Callable[[str], str]:
    def check(given: str) -> str:
        if given not in words:
            raise argparse.ArgumentTypeError(f"expected {' or '.join(words)}, given {given!r}")
        return given

    return check


def _sides(options: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    if options.a and options.b and not options.paths:
        return options.a, options.b
    if len(options.paths) == 2 and not options.a and not options.b:
        return options.paths[:1], options.paths[1:]
    given = [*map(str, options.paths), *(f"--{side}" for side in "ab" if getattr(options, side))]
    raise UsageError(
        f"compare: expected two folders, or --a RUN ... --b RUN ..., given {', '.join(given) or 'none'}; see --help"
    )


def _entries(label: str, paths: Sequence[Path]) -> list[Entry]:
    try:
        found = with_unfinished(collect(paths))
    except FileNotFoundError as error:
        raise UsageError(f"compare: {label}: expected a folder, given {error}") from None
    if found.problems:
        raise UsageError(f"compare: {label}: {found.problems[0]}\nname the runs to compare: --a RUN ... --b RUN ...")
    if not found.entries:
        raise UsageError(f"compare: {label}: expected runs, found none at or below {', '.join(map(str, paths))}")
    return found.entries


def _refusal(comparison: Comparison) -> str:
    differ = ", ".join(f"{row.path} {row.a} and {row.b}" for row in comparison.unlike)
    return (
        f"compare: expected runs of the same work on the same device, given {differ}\n"
        "to compare them all the same: --unlike"
    )


def _show(comparison: Comparison, options: argparse.Namespace) -> None:
    file = sys.stdout if options.output is None else None
    text = (
        as_json(comparison)
        if options.format == "json"
        else render([comparison_table(comparison)], options.format, file)
    )
    if options.output is None:
        sys.stdout.write(text)
        return
    with writable(options.output):
        write_whole(options.output, text)
