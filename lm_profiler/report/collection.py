"""Finds and reads what lies below some folders: runs, sweeps, and what is neither and ought to be."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lm_profiler.record.run import RecordError, RunRecord, read_run
from lm_profiler.record.steps import StepRow, read_steps
from lm_profiler.record.sweep import PLAN_FILE, Cell, CellOutcome, read_outcomes, read_plan

_LEFT_BY_A_RUN = ("steps.csv", "config.yaml")


@dataclass(frozen=True)
class Entry:
    """A line of any table: a run, or a cell of a sweep that may have left none.

    Attributes:
        folder: The run's, or the cell's where there is no run.
        record: None where the cell left none (it timed out, was killed, or was a wrong call).
        cell: None for a run that belongs to no sweep.
        outcome: What the sweep says of the cell.
    """

    folder: Path
    record: RunRecord | None
    cell: Cell | None = None
    outcome: CellOutcome | None = None

    @property
    def name(self) -> str:
        return self.cell.id if self.cell is not None else self.record.name if self.record is not None else "unknown"

    @property
    def status(self) -> str:
        """The sweep's word before the run's own: a run that was stopped for its time calls itself interrupted."""
        if self.outcome is not None:
            return self.outcome.status
        return self.record.status if self.record is not None else "missing"

    @property
    def reason(self) -> str | None:
        """Why it did not end well."""
        if self.outcome is not None and self.outcome.reason is not None:
            return self.outcome.reason
        failure = self.record.failure if self.record is not None else None
        return None if failure is None else f"{failure.type}: {failure.message}"

    @property
    def overrides(self) -> Mapping[str, str]:
        """The swept options of a cell; of a run without a sweep, what its command line gave."""
        if self.cell is not None:
            return self.cell.overrides
        return self.record.overrides if self.record is not None else {}

    @cached_property
    def rows(self) -> list[StepRow]:
        """The rows of its ``steps.csv``, all ranks and stages.

        Raises:
            RecordError: it cannot be read.
        """
        path = self.folder / "steps.csv"
        try:
            return read_steps(path)
        except OSError as error:
            raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:  # UnicodeDecodeError is one
            raise RecordError(str(error) if str(path) in str(error) else f"{path}: is not text") from None


@dataclass(frozen=True)
class Collection:
    """What was found. ``problems`` name each file that could not be used, in a line."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def collect(paths: Iterable[Path]) -> Collection:
    """All runs and cells at and below ``paths``, each once, in the order of their folders. Links are not followed.

    Raises:
        FileNotFoundError: one of ``paths`` is no folder.
    """
    found, seen = Collection(), set[Path]()
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(path)
        _walk(path, found, seen)
    return found


def _walk(top: Path, found: Collection, seen: set[Path]) -> None:
    for here, folders, files in os.walk(top):
        folder = Path(here)
        folders.sort()
        if (real := folder.resolve()) in seen:
            folders.clear()
            continue
        seen.add(real)
        if PLAN_FILE in files:
            folders.clear()
            _sweep(folder, found, seen)
        elif "run.json" in files:
            folders.clear()
            _run(folder, found)
        elif any(name in files for name in _LEFT_BY_A_RUN):
            folders.clear()
            found.problems.append(f"{folder}: no run.json: the run never ended, or is still going on")


def _run(folder: Path, found: Collection, cell: Cell | None = None, outcome: CellOutcome | None = None) -> None:
    try:
        found.entries.append(Entry(folder, read_run(folder), cell, outcome))
    except RecordError as error:
        found.problems.append(str(error))


def _sweep(folder: Path, found: Collection, seen: set[Path]) -> None:
    """A sweep's cells in the order of its plan; those that were not tried yet are ``missing``."""
    try:
        plan = read_plan(folder)
    except RecordError as error:
        found.problems.append(str(error))
        for child in sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()):
            _walk(child, found, seen)
        return
    outcomes = read_outcomes(folder)
    for cell in plan.cells:
        outcome = outcomes.get(cell.id)
        if outcome is not None and outcome.run is not None:
            _run(folder / outcome.run, found, cell, outcome)
        else:
            found.entries.append(Entry(folder / cell.id, None, cell, outcome))
