"""The verb ``compare``: compare existing runs. Its options and its output are shared with ``ab``."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from lm_profiler.analysis.compare.comparison import Comparison, compare
from lm_profiler.analysis.compare.ratio import SAME_WITHIN
from lm_profiler.cli.verbs.shared import runs_below, write_for_github, write_text
from lm_profiler.measure.boundary import print_message
from lm_profiler.record.calls import FAILED, OK
from lm_profiler.record.entry import Entry
from lm_profiler.record.files import json_of
from lm_profiler.record.process_spread import ProcessSpread
from lm_profiler.record.run_record import RecordError
from lm_profiler.report.run.comparison_table import (
    checked_comparison,
    comparison_table,
    github_annotation,
    github_outputs,
    github_summary,
    junit_text,
    verdict_line,
)
from lm_profiler.report.tables.formats import render
from lm_profiler.usage_error import UsageError, expect

# the value of ``--fail_on`` → the verdicts for which the call fails
_FAILING = {None: (), "slower": ("SLOWER",), "unclear": ("SLOWER", "UNCLEAR")}


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """The assumptions of a comparison, and its output.

    Args:
        fail_on: With slower, exit with 1 if B is SLOWER; with unclear, also if the verdict is UNCLEAR.
        spread: Standard deviation of the step time between equal processes, as a share such as 0.03. If not given, the
            value that selftest measured on this machine, or else 0.05.
        same_within: B is SAME if the difference is certainly below this share.
        format: terminal, markdown, json, or junit for CI services.
        github: In a GitHub job, append a summary, set the outputs verdict, ratio, low and high, and print an
            annotation. If not given, only if GITHUB_STEP_SUMMARY is set.
        output: Write to this file instead of the terminal.
    """

    fail_on: Literal["slower", "unclear"] | None = None
    spread: float | None = None
    same_within: float = SAME_WITHIN
    format: Literal["terminal", "markdown", "json", "junit"] = "terminal"
    github: bool | None = None
    output: Path | None = None

    def __post_init__(self) -> None:
        if self.spread is not None:
            expect(
                0.0 < self.spread < 1.0,
                "spread",
                "a share between 0 and 1, such as 0.03",
                self.spread,
            )
        expect(
            0.0 < self.same_within < 1.0,
            "same_within",
            "a share between 0 and 1, such as 0.05",
            self.same_within,
        )

    @property
    def process_spread(self) -> ProcessSpread | None:
        """The spread that the user gave; None if that of the machine should be used."""
        if self.spread is None:
            return None
        return ProcessSpread(self.spread, math.inf, is_set_by_user=True)


def write_comparison(
    comparison: Comparison, options: ComparisonOptions, verb: str
) -> int:
    """Print or write ``comparison`` and return the exit code."""
    if options.format == "json":
        text = json_of(comparison, indent=1) + "\n"
    elif options.format == "junit":
        text = junit_text(checked_comparison(comparison))
    else:
        stream = sys.stdout if options.output is None else None
        text = render([comparison_table(comparison)], options.format, stream)
    write_text(text, options.format, options.output)
    fails = comparison.verdict in _FAILING[options.fail_on]
    is_written_for_github = write_for_github(
        options.github, partial(github_summary, comparison), github_outputs(comparison)
    )
    if is_written_for_github:
        # GitHub reads both streams. The annotation must not be mixed into output for programs.
        is_for_people = options.format == "terminal" or options.output is not None
        stream = sys.stdout if is_for_people else sys.stderr
        stream.write(github_annotation(comparison, fails))
    if not fails:
        return OK
    print_message(f"{verb}: {verdict_line(comparison)}")
    return FAILED


EXAMPLES = """\
for example:
  lm_profiler compare logs/before logs/after
  lm_profiler compare --a logs/main/version_0 logs/main/version_1 --b logs/new/version_0 logs/new/version_1
  lm_profiler compare logs/main logs/new --fail_on slower"""


@dataclass(frozen=True, kw_only=True)
class Options(ComparisonOptions):
    """Compare B with A: the step, its phases, tokens/s and memory.

    Each figure gets a ratio with an interval, and a verdict: FASTER, SLOWER, SAME or UNCLEAR. Several runs of
    one side count as repeats. If other programs used the machine, times are only upper bounds. The verdict then uses
    the step time without waits for a CPU, and the CPU time; if these are unknown, it is UNCLEAR.

    Args:
        config: A YAML file of these options.
        folders: Two folders, A and B; each is a run, a folder of repeated runs, or a cell of a sweep.
        a: The runs of A, if they are in several folders.
        b: The runs of B, if they are in several folders.
        unlike: Compare the runs even if they do different work.
    """

    WORDS: ClassVar[str] = "folders"

    config: str | None = None
    folders: Sequence[Path] = ()
    a: Sequence[Path] = ()
    b: Sequence[Path] = ()
    unlike: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError unless the runs are given as two folders, or as ``--a`` and ``--b``."""
        super().__post_init__()
        by_folders = len(self.folders) == 2 and not self.a and not self.b
        by_sides = not self.folders and self.a and self.b
        if by_folders or by_sides:
            return
        words = [str(folder) for folder in self.folders]
        words += [f"--{side}" for side in "ab" if getattr(self, side)]
        expected = "two folders, or --a RUN ... --b RUN ..."
        raise UsageError(
            f"compare: expected {expected}, given {', '.join(words) or 'none'}; see --help"
        )


def run(options: Options) -> int:
    """Print or write the comparison and return the exit code: 1 if ``--fail_on`` names its verdict."""
    paths_a, paths_b = options.a, options.b
    if options.folders:
        paths_a, paths_b = options.folders[:1], options.folders[1:]
    try:
        entries_a = _entries_below("A", paths_a)
        entries_b = _entries_below("B", paths_b)
        comparison = compare(
            entries_a, entries_b, options.process_spread, options.same_within
        )
    except (UsageError, RecordError) as error:
        raise UsageError(f"compare: {error}") from None
    if comparison.unlike and not options.unlike:
        differences = ", ".join(
            f"{row.path} {row.a} and {row.b}" for row in comparison.unlike
        )
        expected = "compare: expected runs of the same work on the same device"
        raise UsageError(
            f"{expected}, given {differences}\nuse --unlike to compare them anyway"
        )
    return write_comparison(comparison, options, "compare")


def _entries_below(label: str, paths: Sequence[Path]) -> list[Entry]:
    """Return the runs at or below ``paths``; raise UsageError if one cannot be read."""
    runs = runs_below(paths, label)
    if runs.problems:
        raise UsageError(
            f"{label}: {runs.problems[0]}\nname the runs to compare: --a RUN ... --b RUN ..."
        )
    return runs.entries


VERBS = {"compare": (Options, EXAMPLES, run)}
