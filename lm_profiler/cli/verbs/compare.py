"""The verb ``compare``: is B faster than A?"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol, cast, get_args

from lm_profiler.analysis.compare.comparison import Comparison, compare
from lm_profiler.analysis.conclude import with_unfinished
from lm_profiler.cli.verbs.report_options import write_text
from lm_profiler.measure.boundary import say
from lm_profiler.record.calls import FAILED, OK
from lm_profiler.record.entry import Entry, collect
from lm_profiler.record.process_spread import known_spread
from lm_profiler.record.run import RecordError
from lm_profiler.report.run.comparison_table import (
    CiFormat,
    as_json,
    ci_text,
    comparison_table,
    measured_in,
    tell_github,
    verdict_line,
)
from lm_profiler.report.tables.formats import render
from lm_profiler.usage_error import UsageError

EXAMPLES = """\
for example:
  lm_profiler compare logs/before logs/after
  lm_profiler compare --a logs/main/version_0 logs/main/version_1 --b logs/new/version_0 logs/new/version_1
  lm_profiler compare logs/main logs/new --fail_on slower"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare B with A: the step, its phases, tokens/s and memory.

    Each has a ratio, how sure it is, and a word: FASTER, SLOWER, SAME or UNCLEAR. Several runs on a side are repeats.

    Args:
        config: A YAML file of these options.
        folders: Two folders, A and B: of a run, its repeats, or a sweep's cell.
        a: The runs of A, where they lie in several folders.
        b: The runs of B, where they lie in several folders.
        unlike: Compare runs of unlike work, too.
        fail_on: Exit with 1 where B's step is SLOWER.
        format: terminal, markdown, json; or for CI services bmf (Bencher), github-action-benchmark or junit.
        github: Append a summary and the outputs verdict, ratio, low and high to the files that GitHub's variables name,
            and print an annotation. If not given, where GITHUB_STEP_SUMMARY is set.
        output: Write to this file instead of the terminal.
    """

    WORDS: ClassVar[str] = "folders"

    config: str | None = None
    folders: Sequence[Path] = ()
    a: Sequence[Path] = ()
    b: Sequence[Path] = ()
    unlike: bool = False
    fail_on: Literal["slower"] | None = None
    format: Literal["terminal", "markdown", "json", "bmf", "github-action-benchmark", "junit"] = "terminal"
    github: bool | None = None
    output: Path | None = None

    def __post_init__(self) -> None:
        if (len(self.folders), bool(self.a), bool(self.b)) not in ((2, False, False), (0, True, True)):
            given = [*map(str, self.folders), *(f"--{side}" for side in "ab" if getattr(self, side))]
            expected = "two folders, or --a RUN ... --b RUN ..."
            raise UsageError(f"compare: expected {expected}, given {', '.join(given) or 'none'}; see --help")


def run(options: Options) -> int:
    """Print or write the comparison and return the exit code: 1 where B is slower and ``--fail_on`` asks for that.

    Raises:
        UsageError: a wrong call, a damaged folder, or runs that are not alike.
    """
    a, b = (options.folders[:1], options.folders[1:]) if options.folders else (options.a, options.b)
    try:
        side_a, side_b = _entries("A", a), _entries("B", b)
        # The spread between processes belongs to a machine, so A's is looked up; unlike devices are refused below.
        machine = next((run.record.environment for run in side_a if run.record is not None), None)
        comparison = compare(side_a, side_b, known_spread(machine))
    except (UsageError, RecordError) as error:
        raise UsageError(f"compare: {error}") from None
    if comparison.unlike and not options.unlike:
        differ = ", ".join(f"{row.path} {row.a} and {row.b}" for row in comparison.unlike)
        expected = "compare: expected runs of the same work on the same device"
        raise UsageError(f"{expected}, given {differ}\n--unlike to compare them anyway")
    return tell(comparison, options, "compare")


class Shown(Protocol):
    """The options on how a comparison is written."""

    @property
    def format(self) -> str: ...
    @property
    def github(self) -> bool | None: ...
    @property
    def output(self) -> Path | None: ...
    @property
    def fail_on(self) -> str | None: ...


def tell(comparison: Comparison, options: Shown, verb: str) -> int:
    """Print or write ``comparison`` and return the exit code."""
    if options.format == "json":
        text = as_json(comparison)
    elif options.format in get_args(CiFormat):
        text = ci_text(measured_in(comparison), cast(CiFormat, options.format))
    else:
        text = render([comparison_table(comparison)], options.format, sys.stdout if options.output is None else None)
    write_text(text, options.format, options.output)
    if os.environ.get("GITHUB_STEP_SUMMARY") if options.github is None else options.github:
        try:
            sys.stdout.write(tell_github(comparison, os.environ))
        except OSError as error:  # the verdict stands, whoever cannot read the summary
            say(f"{verb}: {error.filename} cannot be written: {error.strerror}")
    if options.fail_on == "slower" and comparison.step.verdict == "SLOWER":
        alone = " (one run against one: repeat both to be sure)" if len(comparison.a) == len(comparison.b) == 1 else ""
        say(f"{verb}: {verdict_line(comparison)}{alone}")
        return FAILED
    return OK


def _entries(label: str, paths: Sequence[Path]) -> list[Entry]:
    try:
        runs = with_unfinished(collect(paths))
    except FileNotFoundError as error:
        raise UsageError(f"{label}: expected a folder, given {error}") from None
    if runs.problems:
        raise UsageError(f"{label}: {runs.problems[0]}\nname the runs to compare: --a RUN ... --b RUN ...")
    if not runs.entries:
        raise UsageError(f"{label}: expected runs, found none at or below {', '.join(map(str, paths))}")
    return runs.entries
