"""The verb ``ab``: run two trees of one repository in turns, in fresh processes, until it is clear which is faster."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lm_profiler.analysis.compare.comparison import Comparison, compare
from lm_profiler.analysis.compare.ratio import RatioInterval, change
from lm_profiler.cli.verbs.compare import tell
from lm_profiler.improve.candidates import seconds_of
from lm_profiler.improve.decision import LOOKS, repeated_interval, spread
from lm_profiler.measure.boundary import say
from lm_profiler.record.calls import FAILED
from lm_profiler.record.entry import Entry, collect
from lm_profiler.record.process_spread import ASSUMED_SPREAD, ProcessSpread, known_spread
from lm_profiler.usage_error import UsageError, expect

EXAMPLES = """\
for example:
  lm_profiler ab --a git:main --b . -- fit --config demo
  lm_profiler ab --a git:main --b . --budget 10m --fail_on slower -- run -- python train.py
  lm_profiler ab --b_options "--model.compile=true" -- fit --config demo"""

_ERROR = 0.05  # in how many of all calls the interval may miss the true ratio, at any look

_OURS = ("--name", "--log_dir")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Run a verb in tree A and in tree B, in turns and each time in a fresh process, until B is FASTER, SLOWER or SAME.

    A tree is a folder, or `git:REF` for that state of this repository, in a worktree that is removed afterwards. After
    -- comes a call of lm_profiler: `fit`, `validate`, or `run` with a program of your own.

    Args:
        a: The tree of A.
        b: The tree of B.
        a_options: Options that A's call gets more.
        b_options: Options that B's call gets more.
        budget: Time for all runs, such as 90s, 10m or 1h.
        fail_on: Exit with 1 where B's step is SLOWER.
        log_dir: Folder of the runs, a/version_<n> and b/version_<n>; logs/ab_2 where logs/ab is there already.
        format: terminal, markdown, json; or for CI services bmf (Bencher), github-action-benchmark or junit.
        github: Write a summary and outputs for GitHub, as compare does.
        output: Write to this file instead of the terminal.
    """

    a: str = "."
    b: str = "."
    a_options: str = ""
    b_options: str = ""
    budget: str = "10m"
    fail_on: Literal["slower"] | None = None
    log_dir: Path = Path("logs/ab")
    format: Literal["terminal", "markdown", "json", "bmf", "github-action-benchmark", "junit"] = "terminal"
    github: bool | None = None
    output: Path | None = None
    program: Sequence[str] = ()

    def __post_init__(self) -> None:
        seconds_of(self.budget)
        verbs = ("fit", "validate", "test", "predict", "run")
        expect(self.program[0] in verbs, "ab", f"one of {', '.join(verbs)} after --", self.program[0])
        if given := [word for word in self.program if word.partition("=")[0] in _OURS]:
            raise UsageError(f"ab: expected a call without {' and '.join(_OURS)}, which ab sets; given {given[0]}")
        if (self.a, self.a_options) == (self.b, self.b_options):
            raise UsageError(f"ab: expected two sides that differ, given {self.a} for both; name --a git:main, say")


def run(options: Options) -> int:
    """Run the pairs, print the comparison and return the exit code.

    Raises:
        UsageError: a tree is not there, or a call cannot be read.
    """
    whole = _numbered(options.log_dir.absolute())
    with _tree("a", options.a) as tree_a, _tree("b", options.b) as tree_b:
        trees = {"a": (tree_a, options.a_options), "b": (tree_b, options.b_options)}

        def measured(side: str) -> Entry:
            tree, more = trees[side]
            return _run(options.program, shlex.split(more), tree, whole / side)

        try:
            sides, why = in_turns(measured, seconds_of(options.budget), time.monotonic)
        except _RunFailed as error:
            say(f"ab: {error}")
            return FAILED
    machine = sides["a"][0].environment
    known = known_spread(machine)
    return tell(_decided(compare(sides["a"], sides["b"], known), sides, known, why), options, "ab")


def in_turns(
    measured: Callable[[str], Entry], budget_s: float, clock: Callable[[], float]
) -> tuple[dict[str, list[Entry]], str]:
    """Return the runs of both sides, and why there are no more pairs.

    Args:
        measured: Runs side ``a`` or ``b``.
        budget_s: Seconds for all pairs; the first pairs, without which there is no interval, run in any case.
        clock: Returns the time in seconds.
    """
    sides: dict[str, list[Entry]] = {"a": [], "b": []}
    began_s = clock()
    while len(sides["a"]) < LOOKS[-1]:
        pairs, spent_s = len(sides["a"]), clock() - began_s
        if pairs >= LOOKS[0] and spent_s + spent_s / pairs > budget_s:
            return sides, f"the budget ended it after {pairs} pairs"
        for side in "ab" if pairs % 2 else "ba":
            sides[side].append(measured(side))
        machine = sides["a"][0].environment
        if pairs + 1 in LOOKS and change(interval_of(sides, known_spread(machine))) != "UNCLEAR":
            return sides, f"clear after {pairs + 1} pairs"
    return sides, f"not clear after {LOOKS[-1]} pairs"


def interval_of(sides: dict[str, list[Entry]], known: ProcessSpread = ASSUMED_SPREAD) -> RatioInterval | None:
    """Return the interval of B's mean step over A's, which holds at all looks together."""
    a, b = ([_step_s(entry) for entry in sides[side]] for side in "ab")
    ratios = [of_b / of_a for of_a, of_b in zip(a, b, strict=True)]
    return repeated_interval(ratios, _ERROR, spread([a, b], known))


def _step_s(entry: Entry) -> float:
    step = None if entry.record is None else entry.record.time.get("step")
    if step is None or step.mean is None:
        raise _RunFailed(f"{entry.folder}: {entry.reason or 'no step was measured'}")
    return step.mean


class _RunFailed(Exception):
    """A run did not end well; the message says which and why."""


def _run(program: Sequence[str], more: Sequence[str], tree: Path, folder: Path) -> Entry:
    """Run the call in ``tree`` in a fresh process, and return its run."""
    verb, *words = program
    at = words.index("--") if "--" in words else len(words)
    own = [f"--log_dir={folder.parent}", f"--name={folder.name}", *more]
    call = [sys.executable, "-m", "lm_profiler", verb, *words[:at], *own, *words[at:]]
    done = subprocess.run(call, cwd=tree, capture_output=True, text=True, errors="replace", check=False)
    runs = collect([folder]).entries if folder.is_dir() else []
    if not runs or (verb != "run" and done.returncode):
        last = (done.stderr.strip() or "nothing was profiled").splitlines()[-1]
        raise _RunFailed(f"{folder.name}: `{shlex.join(call[2:])}` in {tree} ended with {done.returncode}: {last}")
    return runs[-1]


@contextmanager
def _tree(side: str, given: str) -> Iterator[Path]:
    """Yield the folder of a tree; a worktree for ``git:REF``, which is removed afterwards.

    Raises:
        UsageError: there is no such folder or no such state.
    """
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
    """Return what git prints; None where it fails or is not there."""
    try:
        done = subprocess.run(["git", *words], cwd=cwd, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()


def _numbered(folder: Path) -> Path:
    """Return ``folder``, or where it is there ``folder_2`` and so on: earlier calls are not mixed in."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}_{number}")
    return free


def _decided(comparison: Comparison, sides: dict[str, list[Entry]], known: ProcessSpread, why: str) -> Comparison:
    """Return the comparison with the interval that holds at all looks, and with why the runs ended."""
    interval = interval_of(sides, known)
    step = replace(comparison.step, interval=interval, verdict=change(interval))
    return replace(comparison, step=step, notes=[*comparison.notes, why])
