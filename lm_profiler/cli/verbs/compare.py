"""The verbs ``compare`` and ``ab``: is B faster than A? ``ab`` runs both, in turns, until it is clear."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, cast, get_args

from lm_profiler.analysis.compare.comparison import Comparison, compare
from lm_profiler.analysis.compare.ratio import MARGIN, RatioInterval, change
from lm_profiler.cli.verbs.shared import runs_below, tell_github, write_text
from lm_profiler.improve.candidates import seconds_of
from lm_profiler.improve.decision import LOOKS, repeated_interval, spread
from lm_profiler.measure.boundary import say
from lm_profiler.record.calls import FAILED, OK, WRONG_CALL
from lm_profiler.record.entry import Entry, collect, machine_of
from lm_profiler.record.files import json_of
from lm_profiler.record.process_spread import ASSUMED_SPREAD, ProcessSpread, known_spread
from lm_profiler.record.run_record import RecordError
from lm_profiler.report.run.comparison_table import (
    CiFormat,
    ci_text,
    comparison_table,
    github_annotation,
    github_outputs,
    github_summary,
    measured_in,
    verdict_line,
)
from lm_profiler.report.tables.formats import render
from lm_profiler.usage_error import UsageError, expect

# The share of calls of ``ab`` whose interval may miss the true ratio at any look, and the pairs after which it is
# checked. If processes differ by twice the assumed spread, 4.2 % of 1,000 calls are wrong; with LOOKS and 5 % it was
# 10 % (benchmarks/README.md).
_ERROR, AB_LOOKS = 0.03, LOOKS[1:]
_FEWEST_PAIRS = 2  # pairs that run whatever the budget

_SET_BY_AB = ("--name", "--log_dir")


@dataclass(frozen=True, kw_only=True)
class _ShowOptions:
    """How a comparison is written.

    Args:
        fail_on: Exit with 1 where B's step is SLOWER.
        format: terminal, markdown, json; or for CI services bmf (Bencher), github-action-benchmark or junit.
        github: Append a summary and the outputs verdict, ratio, low and high to the files that GitHub's variables name,
            and print an annotation. If not given, only if GITHUB_STEP_SUMMARY is set.
        output: Write to this file instead of the terminal.
    """

    fail_on: Literal["slower"] | None = None
    format: Literal["terminal", "markdown", "json", "bmf", "github-action-benchmark", "junit"] = "terminal"
    github: bool | None = None
    output: Path | None = None


def _tell(comparison: Comparison, options: _ShowOptions, verb: str) -> int:
    """Print or write ``comparison`` and return the exit code."""
    if options.format == "json":
        text = json_of(comparison, indent=1) + "\n"
    elif options.format in get_args(CiFormat):
        text = ci_text(measured_in(comparison), cast(CiFormat, options.format))
    else:
        text = render([comparison_table(comparison)], options.format, sys.stdout if options.output is None else None)
    write_text(text, options.format, options.output)
    fails = options.fail_on == "slower" and comparison.step.verdict == "SLOWER"
    if tell_github(options.github, partial(github_summary, comparison), github_outputs(comparison)):
        # GitHub reads both streams; output for programs stays clean
        for_people = options.format == "terminal" or options.output is not None
        (sys.stdout if for_people else sys.stderr).write(github_annotation(comparison, fails))
    if fails:
        alone = " (one run against one: repeat both to be sure)" if len(comparison.a) == len(comparison.b) == 1 else ""
        say(f"{verb}: {verdict_line(comparison)}{alone}")
        return FAILED
    return OK


# -- compare: existing runs --------------------------------------------------------------------------------------------

EXAMPLES = """\
for example:
  lm_profiler compare logs/before logs/after
  lm_profiler compare --a logs/main/version_0 logs/main/version_1 --b logs/new/version_0 logs/new/version_1
  lm_profiler compare logs/main logs/new --fail_on slower"""


@dataclass(frozen=True, kw_only=True)
class Options(_ShowOptions):
    """Compare B with A: the step, its phases, tokens/s and memory.

    Each has a ratio, its interval, and a word: FASTER, SLOWER, SAME or UNCLEAR. Several runs on a side are repeats.

    Args:
        config: A YAML file of these options.
        folders: Two folders, A and B, each of a run, its repeats, or a sweep's cell.
        a: The runs of A, where they lie in several folders.
        b: The runs of B, where they lie in several folders.
        unlike: Also compare runs that do different work.
    """

    WORDS: ClassVar[str] = "folders"

    config: str | None = None
    folders: Sequence[Path] = ()
    a: Sequence[Path] = ()
    b: Sequence[Path] = ()
    unlike: bool = False

    def __post_init__(self) -> None:
        if (len(self.folders), bool(self.a), bool(self.b)) not in ((2, False, False), (0, True, True)):
            given = [*map(str, self.folders), *(f"--{side}" for side in "ab" if getattr(self, side))]
            expected = "two folders, or --a RUN ... --b RUN ..."
            raise UsageError(f"compare: expected {expected}, given {', '.join(given) or 'none'}; see --help")


def run(options: Options) -> int:
    """Print or write the comparison and return the exit code: 1 where B is slower and ``--fail_on`` asks for that."""
    a, b = (options.folders[:1], options.folders[1:]) if options.folders else (options.a, options.b)
    try:
        side_a, side_b = _entries("A", a), _entries("B", b)
        # The spread between processes belongs to a machine, so A's is looked up; different devices are refused below.
        comparison = compare(side_a, side_b, known_spread(machine_of(side_a)))
    except (UsageError, RecordError) as error:
        raise UsageError(f"compare: {error}") from None
    if comparison.unlike and not options.unlike:
        differ = ", ".join(f"{row.path} {row.a} and {row.b}" for row in comparison.unlike)
        expected = "compare: expected runs of the same work on the same device"
        raise UsageError(f"{expected}, given {differ}\n--unlike to compare them anyway")
    return _tell(comparison, options, "compare")


def _entries(label: str, paths: Sequence[Path]) -> list[Entry]:
    runs = runs_below(paths, label)
    if runs.problems:
        raise UsageError(f"{label}: {runs.problems[0]}\nname the runs to compare: --a RUN ... --b RUN ...")
    return runs.entries


# -- ab: new runs ------------------------------------------------------------------------------------------------------

AB_EXAMPLES = """\
for example:
  lm_profiler ab --a git:main --b . -- fit --config demo
  lm_profiler ab --a git:main --b . --budget 10m --fail_on slower -- run -- python train.py
  lm_profiler ab --b_options="--model.compile=true" -- fit --config demo"""


@dataclass(frozen=True, kw_only=True)
class AbOptions(_ShowOptions):
    """Run a verb in trees A and B, in turns and each time in a fresh process, until B is FASTER, SLOWER or SAME.

    A tree is a folder, or `git:REF` for a commit of this repository, in a worktree that is removed afterwards. After
    -- comes a call of lm_profiler: `fit`, `validate`, or `run` with your own program.

    Args:
        a: The tree of A.
        b: The tree of B.
        a_options: Additional options of A's call.
        b_options: Additional options of B's call.
        budget: Time for all runs, such as 90s, 10m or 1h.
        log_dir: Folder of the runs, a/version_<n> and b/version_<n>; logs/ab_2 if logs/ab exists already.
    """

    AFTER: ClassVar[str] = "fit --config demo"

    a: str = "."
    b: str = "."
    a_options: str = ""
    b_options: str = ""
    budget: str = "10m"
    log_dir: Path = Path("logs/ab")
    program: Sequence[str] = ()

    def __post_init__(self) -> None:
        seconds_of(self.budget)
        try:
            _ = shlex.split(self.a_options), shlex.split(self.b_options)
        except ValueError as error:
            raise UsageError(f"a_options, b_options: expected words as a shell has them ({error})") from None
        there = self.output is None or self.output.absolute().parent.is_dir()
        expect(there, "output", "a file in a folder that is there", self.output)
        verbs = ("fit", "validate", "test", "predict", "run")
        expect(self.program[0] in verbs, "ab", f"one of {', '.join(verbs)} after --", self.program[0])
        if given := [word for word in self.program if word.partition("=")[0] in _SET_BY_AB]:
            raise UsageError(f"ab: expected a call without {' and '.join(_SET_BY_AB)}, which ab sets; given {given[0]}")
        if (self.a, self.a_options) == (self.b, self.b_options):
            raise UsageError(f"ab: expected two sides that differ, given {self.a} for both; name --a git:main, say")


def run_ab(options: AbOptions) -> int:
    """Run the pairs, print the comparison and return the exit code."""
    whole, number = options.log_dir.absolute(), 1
    while whole.exists():  # earlier calls are not mixed in
        whole, number = whole.with_name(f"{options.log_dir.name}_{number + 1}"), number + 1
    with _tree("a", options.a) as tree_a, _tree("b", options.b) as tree_b:
        trees = {"a": (tree_a, options.a_options), "b": (tree_b, options.b_options)}

        def measured(side: str) -> Entry:
            tree, more = trees[side]
            return _run(options.program, shlex.split(more), tree, whole / side)

        try:
            sides, why = in_turns(measured, seconds_of(options.budget), time.monotonic)
        except _RunFailed as error:
            say(str(error))
            return FAILED
    known = known_spread(machine_of(sides["a"]))
    comparison, interval = compare(sides["a"], sides["b"], known), interval_of(sides, known)
    step = replace(comparison.step, interval=interval, verdict=change(interval))  # the interval holds at all looks
    if step.verdict == "UNCLEAR":
        if interval is None:
            why += f"; the first interval is that of {AB_LOOKS[0]} pairs"
        else:
            looked = max(look for look in AB_LOOKS if look <= len(sides["a"]))
            why += f"; about {pairs_needed(interval, looked)} pairs would make it clear"
    return _tell(replace(comparison, step=step, notes=[*comparison.notes, why]), options, "ab")


def in_turns(
    measured: Callable[[str], Entry], budget_s: float, clock: Callable[[], float]
) -> tuple[dict[str, list[Entry]], str]:
    """Return the runs of both sides, and why no more pairs ran; the first two run whatever the budget."""
    sides: dict[str, list[Entry]] = {"a": [], "b": []}
    began_s = clock()
    while len(sides["a"]) < AB_LOOKS[-1]:
        pairs, spent_s = len(sides["a"]), clock() - began_s
        if pairs >= _FEWEST_PAIRS and spent_s + spent_s / pairs > budget_s:
            return sides, f"the budget ended it after {pairs} pairs"
        for side in "ab" if pairs % 2 else "ba":
            sides[side].append(measured(side))
        if pairs + 1 in AB_LOOKS and change(interval_of(sides, known_spread(machine_of(sides["a"])))) != "UNCLEAR":
            return sides, f"clear after {pairs + 1} pairs"
    return sides, f"not clear after {AB_LOOKS[-1]} pairs"


def interval_of(sides: dict[str, list[Entry]], known: ProcessSpread = ASSUMED_SPREAD) -> RatioInterval | None:
    """Return the interval of B's mean step over A's, which holds at all looks together."""
    a, b = ([_step_s(entry) for entry in sides[side]] for side in "ab")
    ratios = [of_b / of_a for of_a, of_b in zip(a, b, strict=True)]
    return repeated_interval(ratios, _ERROR, spread([a, b], known), AB_LOOKS)


def pairs_needed(interval: RatioInterval, pairs: int) -> int:
    """Return about how many pairs like the ``pairs`` of an UNCLEAR interval would make its verdict clear."""
    off, half_width = abs(math.log(interval.ratio)), math.log(interval.high / interval.ratio)
    # the interval must exclude 1, or lie within the margin around it
    gap = max(off if off > MARGIN else 0.0, MARGIN - off, 1e-3)
    return max(pairs + 1, math.ceil(pairs * (half_width / gap) ** 2))


def _step_s(entry: Entry) -> float:
    step = None if entry.record is None else entry.record.time.get("step")
    if step is None or step.mean is None:
        raise _RunFailed(f"ab: {entry.folder}: {entry.reason or 'no step was measured'}")
    return step.mean


class _RunFailed(Exception):
    """A run failed; the message says which and why."""


def _run(program: Sequence[str], more: Sequence[str], tree: Path, folder: Path) -> Entry:
    """Run the call in ``tree`` in a fresh process, and return its run."""
    verb, *words = program
    at = words.index("--") if "--" in words else len(words)
    own = [f"--log_dir={folder.parent}", f"--name={folder.name}", *more]
    call = [sys.executable, "-m", "lm_profiler", verb, *words[:at], *own, *words[at:]]
    paths = os.pathsep.join(_paths_in(tree))
    environ = {**os.environ, "PYTHONPATH": paths} if paths else None
    before = {*folder.glob("version_*")}  # a program that fails may leave no run
    done = subprocess.run(call, cwd=tree, env=environ, capture_output=True, text=True, errors="replace", check=False)
    runs = [] if not folder.is_dir() else [run for run in collect([folder]).entries if run.folder not in before]
    if not runs or (verb != "run" and done.returncode):
        last = "; ".join((done.stderr.strip() or "nothing was profiled").splitlines()[-2:])
        kind = UsageError if done.returncode in (WRONG_CALL, 127) else _RunFailed  # 127: there is no such program
        raise kind(f"ab: {folder.name}: `{shlex.join(call[2:])}` in {tree} ended with {done.returncode}: {last}")
    return runs[-1]


def _paths_in(tree: Path) -> list[str]:
    """Return ``PYTHONPATH`` for ``tree``: imports from this repository, editable ones too, then come from there."""
    here, given = Path.cwd(), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    top = Path(_git("rev-parse", "--show-toplevel") or here)
    # setuptools installs some layouts by a finder of modules, which comes after all paths
    finders = (module for name, module in [*sys.modules.items()] if name.startswith("__editable__"))
    editable = [str(Path(path).parent) for finder in finders for path in getattr(finder, "MAPPING", {}).values()]
    paths = list[str]()
    for path in (Path(each).absolute() for each in dict.fromkeys([*given, *sys.path, *editable]) if each):
        there = Path(os.path.normpath(tree / os.path.relpath(path, here)))
        if path.is_relative_to(top) and not path.is_relative_to(sys.prefix) and there.is_dir():
            paths.append(str(there))
        elif str(path) in map(os.path.abspath, filter(None, given)):
            paths.append(str(path))
    return list(dict.fromkeys(paths))


@contextmanager
def _tree(side: str, given: str) -> Iterator[Path]:
    """Yield the folder of a tree; a worktree for ``git:REF``, which is removed afterwards."""
    if not given.startswith("git:"):
        if not Path(given).is_dir():
            raise UsageError(f"{side}: expected a folder or git:REF, given {given}")
        if _git("status", "--porcelain", "--untracked-files=no", cwd=Path(given)):
            say(f"ab: {side.upper()} has changes that are not committed: they are measured too")
        yield Path(given).absolute()
        return
    ref = given.removeprefix("git:")
    if _git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}") is None:
        raise UsageError(f"{side}: expected a state of this repository, such as git:main, given {given}")
    below = Path.cwd().relative_to(_git("rev-parse", "--show-toplevel") or Path.cwd())
    folder = Path(tempfile.mkdtemp(prefix="lm_profiler-ab-"))
    try:
        if _git("worktree", "add", "--detach", str(folder / "tree"), ref) is None:
            raise UsageError(f"{side}: git could not make a worktree of {ref}")
        yield folder / "tree" / below
    finally:
        _git("worktree", "remove", "--force", str(folder / "tree"))
        shutil.rmtree(folder, ignore_errors=True)


def _git(*words: str, cwd: Path | None = None) -> str | None:
    """Return what git prints; None if git fails or is not installed."""
    try:
        done = subprocess.run(["git", *words], cwd=cwd, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()


VERBS = {"compare": (Options, EXAMPLES, run), "ab": (AbOptions, AB_EXAMPLES, run_ab)}
