"""The verb ``ab``: run two versions of a program alternately until it is clear which is faster."""

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
from pathlib import Path
from typing import ClassVar

from lm_profiler.analysis.compare.comparison import (
    Comparison,
    PartChange,
    compare,
    decide,
)
from lm_profiler.analysis.compare.ratio import (
    MARGIN,
    RatioInterval,
    minimum_detectable_effect,
)
from lm_profiler.cli.verbs.compare import ComparisonOptions, write_comparison
from lm_profiler.improve.candidates import budget_seconds
from lm_profiler.improve.decision import LOOKS
from lm_profiler.improve.pairs import paired_changes
from lm_profiler.measure.boundary import print_message
from lm_profiler.record.calls import FAILED, OK, WRONG_CALL
from lm_profiler.record.entry import Entry, collect, machine_of
from lm_profiler.record.process_spread import ProcessSpread, known_spread
from lm_profiler.usage_error import UsageError, expect

# The share of calls of ``ab`` whose interval may miss the true ratio at any look. If processes differ by twice the
# assumed spread, 4.2 % of 1,000 simulated calls were wrong; with all LOOKS and an error of 5 % it was 10 %.
ERROR = 0.03
AB_LOOKS = LOOKS[1:]  # the numbers of pairs after which the result is checked
_FEWEST_PAIRS = 2  # pairs that run even if the budget is too short

_NARROWEST = 1e-3  # half width of the narrowest interval for which pairs are predicted, as a logarithm
_NO_SUCH_PROGRAM = 127  # the exit code of a shell if the command was not found
_SET_BY_AB = ("--name", "--log_dir")
_VERBS = ("fit", "validate", "test", "predict", "run")

EXAMPLES = """\
for example:
  lm_profiler ab --a git:main --b . -- fit --config demo
  lm_profiler ab --a git:main --b . --budget 10m --fail_on slower -- run -- python train.py
  lm_profiler ab --b_options="--model.compile=true" -- fit --config demo"""


@dataclass(frozen=True, kw_only=True)
class Options(ComparisonOptions):
    """Run a verb in two trees A and B, alternately and in fresh processes, until B is FASTER, SLOWER or the SAME.

    A tree is a folder, or `git:REF` for a commit of this repository, which is checked out into a temporary worktree.
    After -- comes a call of lm_profiler: `fit`, `validate`, or `run` with your own program.

    Args:
        a: The tree of A.
        b: The tree of B.
        a_options: Options that are added to the call in A.
        b_options: Options that are added to the call in B.
        budget: Time for all runs, such as 90s, 10m or 1h.
        log_dir: Folder for the runs, which are stored in a/version_<n> and b/version_<n> below it. If the folder
            exists, _2 is appended to its name.
    """

    PROGRAM_EXAMPLE: ClassVar[str] = "fit --config demo"

    a: str = "."
    b: str = "."
    a_options: str = ""
    b_options: str = ""
    budget: str = "10m"
    log_dir: Path = Path("logs/ab")
    program: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        budget_seconds(self.budget)
        try:
            _ = shlex.split(self.a_options), shlex.split(self.b_options)
        except ValueError as error:
            raise UsageError(
                f"a_options, b_options: cannot be split into words as a shell does ({error})"
            ) from None
        can_write = self.output is None or self.output.absolute().parent.is_dir()
        expect(can_write, "output", "a file in an existing folder", self.output)
        expect(
            self.program[0] in _VERBS,
            "ab",
            f"one of {', '.join(_VERBS)} after --",
            self.program[0],
        )
        for word in self.program:
            if word.partition("=")[0] in _SET_BY_AB:
                options = " and ".join(_SET_BY_AB)
                raise UsageError(
                    f"ab: expected a call without {options}, which ab sets; given {word}"
                )
        if (self.a, self.a_options) == (self.b, self.b_options):
            raise UsageError(
                f"ab: expected two different sides, given {self.a} for both; use for example --a git:main"
            )


def run(options: Options) -> int:
    """Run the pairs, print the comparison and return the exit code."""
    folder = _new_folder(options.log_dir.absolute())
    with _tree("a", options.a) as tree_a, _tree("b", options.b) as tree_b:

        def run_side(side: str) -> Entry:
            side_options, tree = options.b_options, tree_b
            if side == "a":
                side_options, tree = options.a_options, tree_a
            words = shlex.split(side_options)
            return _run(options.program, words, tree, folder / side)

        try:
            pairs = run_in_turns(
                run_side,
                budget_seconds(options.budget),
                time.monotonic,
                options.process_spread,
            )
        except _RunFailed as error:
            print_message(str(error))
            return FAILED
    return write_comparison(_compare_pairs(pairs, options.same_within), options, "ab")


def _compare_pairs(pairs: Pairs, same_within: float) -> Comparison:
    """Return the comparison of all runs, in which the deciding row is replaced by the result of the paired test.

    The deciding row is the step, or a row of ``work``, which decides on a busy machine. A comparison assumes how far
    processes differ; the pairs show it, so the assumption is removed.
    """
    spread = pairs.spread
    comparison = compare(pairs.a, pairs.b, spread, same_within)
    decision = pairs.decision(is_final=True, same_within=same_within)
    step = comparison.step
    work = list(comparison.work)
    if decision.part == "step":
        step = decision
    else:
        work = _with_row(work, decision)
    detectable = None
    if decision.interval is not None:
        detectable = minimum_detectable_effect(decision.interval)
    notes = [
        *comparison.notes,
        f"{pairs.end_reason}; the interval of the deciding figure is corrected for repeated checks",
        f"{spread.text}; the differences measured between the pairs have more weight",
    ]
    return replace(
        comparison,
        step=step,
        work=work,
        decision=decision,
        detectable=detectable,
        notes=notes,
        assumption=None,
        advice=_advice_text(decision, len(pairs.a)),
    )


def _with_row(rows: Sequence[PartChange], new_row: PartChange) -> list[PartChange]:
    """Return the rows with ``new_row`` in the place of the row of its part."""
    result: list[PartChange] = []
    for row in rows:
        result.append(new_row if row.part == new_row.part else row)
    return result


def _new_folder(preferred: Path) -> Path:
    """Return the ``preferred`` folder, or a similar free name, so that runs of earlier calls stay separate."""
    folder = preferred
    number = 1
    while folder.exists():
        number += 1
        folder = preferred.with_name(f"{preferred.name}_{number}")
    return folder


def _advice_text(decision: PartChange, pairs: int) -> str:
    """Return what would make the result clear; ``pairs`` is the number of pairs so far."""
    if decision.interval is None:
        return "use a larger --budget"
    needed = pairs_needed(decision.interval, pairs)
    if needed > AB_LOOKS[-1]:
        return f"about {needed:,} pairs like these would give a clear result: measure longer (--stages.until_ci=0.005)"
    return f"about {needed} pairs would give a clear result: use a larger --budget"


@dataclass
class Pairs:
    """The runs of both sides so far, and why no more pairs ran."""

    a: list[Entry]
    b: list[Entry]
    users_spread: ProcessSpread | None = None
    end_reason: str = ""

    @property
    def spread(self) -> ProcessSpread:
        """How far equal processes differ: the user's option, or else the value that is known for the machine."""
        return self.users_spread or known_spread(machine_of(self.a))

    def decision(
        self, is_final: bool = False, same_within: float = MARGIN
    ) -> PartChange:
        """Return the row that decides, with an interval that holds at all looks together.

        If ``is_final``, there is no later look, so those that were planned do not widen the interval.
        """
        looks: tuple[int, ...] = AB_LOOKS
        if is_final:
            pairs = len(self.a)
            looks_before = [look for look in AB_LOOKS if look < pairs]
            looks = (*looks_before, pairs)
        return decide(
            paired_changes(self.a, self.b, ERROR, self.spread, looks, same_within)
        )


def run_in_turns(
    run_side: Callable[[str], Entry],
    budget_s: float,
    clock: Callable[[], float],
    spread: ProcessSpread | None = None,
) -> Pairs:
    """Run pairs until the result is clear or the budget ends, and return the runs of both sides.

    ``run_side`` runs the side "a" or "b". The sides take turns to run first. Two pairs run in any case.
    """
    pairs = Pairs(a=[], b=[], users_spread=spread)
    start_s = clock()
    for number in range(AB_LOOKS[-1]):
        if number >= _FEWEST_PAIRS:
            spent_s = clock() - start_s
            mean_pair_s = spent_s / number
            if spent_s + mean_pair_s > budget_s:
                pairs.end_reason = f"the budget ended after {number} pairs"
                return pairs
        order = "ab" if number % 2 else "ba"
        for side in order:
            runs = pairs.a if side == "a" else pairs.b
            runs.append(_require_measured(run_side(side)))
        if number + 1 in AB_LOOKS and pairs.decision().verdict != "UNCLEAR":
            pairs.end_reason = f"clear after {number + 1} pairs"
            return pairs
    pairs.end_reason = f"not clear after {AB_LOOKS[-1]} pairs"
    return pairs


def pairs_needed(interval: RatioInterval, pairs: int) -> int:
    """Return about how many pairs in total would give a clear verdict; ``interval`` is that of ``pairs`` pairs."""
    distance = abs(math.log(interval.ratio))
    half_width = math.log(interval.high / interval.ratio)
    # A clear interval lies within the margin around 1, or does not contain 1.
    needed_half_width = max(MARGIN - distance, _NARROWEST)
    if distance > MARGIN:
        needed_half_width = max(needed_half_width, distance)
    # The width falls with the square root of the number of pairs.
    factor = (half_width / needed_half_width) ** 2
    return max(pairs + 1, math.ceil(pairs * factor))


def _require_measured(entry: Entry) -> Entry:
    """Return ``entry``, which must have a measured step."""
    step = None if entry.record is None else entry.record.time.get("step")
    if step is None or step.mean is None:
        raise _RunFailed(
            f"ab: {entry.folder}: {entry.reason or 'no step was measured'}"
        )
    return entry


class _RunFailed(Exception):
    """A run failed; the message has its folder and the reason."""


def _run(
    program: Sequence[str], options: Sequence[str], tree: Path, folder: Path
) -> Entry:
    """Run the call in ``tree`` in a fresh process, and return its run.

    Raises:
        UsageError: the call is wrong.
        _RunFailed: the run failed, or nothing was profiled.
    """
    call = _call(program, options, folder)
    environment = dict(os.environ)
    paths = _python_paths(tree)
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    earlier_runs = {*folder.glob("version_*")}  # a program that fails may leave no run
    process = subprocess.run(
        [sys.executable, "-m", *call],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    runs: list[Entry] = []
    if folder.is_dir():
        for entry in collect([folder]).entries:
            if entry.folder not in earlier_runs:
                runs.append(entry)
    # With ``run``, the user's program may fail after its training was profiled.
    has_failed = program[0] != "run" and process.returncode != OK
    if runs and not has_failed:
        return runs[-1]

    lines = (process.stderr.strip() or "nothing was profiled").splitlines()
    last_lines = "; ".join(lines[-2:])
    command = shlex.join(call)
    message = f"ab: {folder.name}: `{command}` in {tree} ended with {process.returncode}: {last_lines}"
    if process.returncode in (WRONG_CALL, _NO_SUCH_PROGRAM):
        raise UsageError(message)
    raise _RunFailed(message)


def _call(program: Sequence[str], options: Sequence[str], folder: Path) -> list[str]:
    """Return the call of a side; the side's options are inserted before ``--``, which precedes the user's program."""
    end = len(program)
    if "--" in program:
        end = program.index("--")
    call = ["lm_profiler", *program[:end]]
    call += [f"--log_dir={folder.parent}", f"--name={folder.name}"]
    call += options
    call += program[end:]
    return call


def _python_paths(tree: Path) -> list[str]:
    """Return the folders of ``PYTHONPATH`` for ``tree``.

    Folders of this repository, including those of editable installs, are replaced by the same folders of the tree. Of
    other folders only those of the user's ``PYTHONPATH`` are listed: the process in the tree has the rest anyway.
    """
    current = Path.cwd()
    repository = Path(_git_output("rev-parse", "--show-toplevel") or current)
    users_paths = [
        Path(path).absolute()
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path
    ]
    other_paths = [
        Path(path).absolute() for path in [*sys.path, *_editable_paths()] if path
    ]
    paths: list[str] = []
    for path in [*users_paths, *other_paths]:
        path_in_tree = Path(os.path.normpath(tree / os.path.relpath(path, current)))
        is_of_repository = path.is_relative_to(repository) and not path.is_relative_to(
            sys.prefix
        )
        if is_of_repository and path_in_tree.is_dir():
            path_to_use = path_in_tree
        elif path in users_paths:
            path_to_use = path
        else:
            continue
        if str(path_to_use) not in paths:
            paths.append(str(path_to_use))
    return paths


def _editable_paths() -> list[str]:
    """Return the folders of editable packages that setuptools installed with an import finder instead of a path."""
    paths = []
    for name, module in [*sys.modules.items()]:
        if name.startswith("__editable__"):
            packages = getattr(module, "MAPPING", {})
            paths += [str(Path(path).parent) for path in packages.values()]
    return paths


@contextmanager
def _tree(side: str, tree: str) -> Iterator[Path]:
    """Yield the folder of a tree; for ``git:REF`` it is a worktree, which is removed afterwards."""
    if not tree.startswith("git:"):
        if not Path(tree).is_dir():
            raise UsageError(f"{side}: expected a folder or git:REF, given {tree}")
        if _git_output("status", "--porcelain", "--untracked-files=no", cwd=Path(tree)):
            print_message(
                f"ab: {side.upper()} has uncommitted changes, which are measured too"
            )
        yield Path(tree).absolute()
        return
    ref = tree.removeprefix("git:")
    if _git_output("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}") is None:
        raise UsageError(
            f"{side}: expected a commit of this repository, such as git:main, given {tree}"
        )
    current = Path.cwd()
    current_in_repository = current.relative_to(
        _git_output("rev-parse", "--show-toplevel") or current
    )
    folder = Path(tempfile.mkdtemp(prefix="lm_profiler-ab-"))
    try:
        output = _git_output("worktree", "add", "--detach", str(folder / "tree"), ref)
        if output is None:
            raise UsageError(f"{side}: git could not create a worktree of {ref}")
        yield folder / "tree" / current_in_repository
    finally:
        _git_output("worktree", "remove", "--force", str(folder / "tree"))
        shutil.rmtree(folder, ignore_errors=True)


def _git_output(*words: str, cwd: Path | None = None) -> str | None:
    """Return what git prints; None if git fails or is not installed."""
    try:
        process = subprocess.run(
            ["git", *words], cwd=cwd, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return process.stdout.strip() if process.returncode == 0 else None


VERBS = {"ab": (Options, EXAMPLES, run)}
