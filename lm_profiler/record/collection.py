"""Finds and reads what lies below some folders: runs, sweeps, and what is neither and ought to be."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from lm_profiler.record.entry import Entry
from lm_profiler.record.improve import IMPROVE_FILE, Searched, read_improve
from lm_profiler.record.run import RecordError, RunRecord, read_run
from lm_profiler.record.step_files import COLUMNS_FILE, STEPS_FILE
from lm_profiler.record.sweep import OUTCOME_FILE, PLAN_FILE, read_outcomes, read_plan

_LEFT_BY_A_RUN = (STEPS_FILE, COLUMNS_FILE, "config.yaml")


@dataclass(frozen=True)
class Collection:
    """What was found. ``problems`` name each file that could not be used, in a line."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    searches: list[Searched] = field(default_factory=list)
    """Calls of ``improve``; their runs are among the entries."""


def collect(paths: Iterable[Path]) -> Collection:
    """All runs and cells at and below ``paths``, each once, in the order of their folders. Links are not followed.

    Raises:
        FileNotFoundError: one of ``paths`` is no folder.
    """
    search = _Search()
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(path)
        search.walk(path)
    search.collection.problems.extend(filter(None, map(search.missed_behind, search.links)))
    return search.collection


class _Search:
    """One search: what it found, the folders that it has seen, and the links that it has passed over."""

    def __init__(self) -> None:
        self.collection = Collection()
        self.links: list[Path] = []
        self._seen: set[str] = set()

    def walk(self, top: Path) -> None:
        for here, folders, files in os.walk(top, onerror=self._unreadable):
            folder = Path(here)
            folders.sort(key=_by_number)
            if IMPROVE_FILE in files and self._first_time(folder / IMPROVE_FILE):
                self._searched(folder)
            if PLAN_FILE in files:
                if not self._first_time(folder) or self._sweep(folder):
                    folders.clear()
            elif "run.json" in (*files, *folders):  # a folder of that name is told as one that cannot be read
                folders.clear()
                if self._first_time(folder) and (record := self._record(folder)) is not None:
                    self.collection.entries.append(Entry(folder, record))
            elif any(name in files for name in _LEFT_BY_A_RUN):
                folders.clear()
                if self._first_time(folder):
                    self._problem(f"{folder}: no run.json: the run was killed, or is still running")
            else:
                self.links += [link for name in (*folders, *files) if (link := folder / name).is_symlink()]

    def missed_behind(self, link: Path) -> str | None:
        """Why what is behind ``link`` is in no table; None where nothing is missing."""
        if not link.exists():
            return f"{link}: is a link to {link.readlink()}, which does not exist"
        is_run = any((link / name).exists() for name in (PLAN_FILE, "run.json"))
        if is_run and os.path.realpath(link) not in self._seen:
            return f"{link}: is a link, and links are not followed; give {link.resolve()} itself"
        return None

    def _sweep(self, folder: Path) -> bool:
        """A sweep's cells in the order of its plan; those that were not tried yet are ``not run``.

        False where the plan cannot be read: then its runs are found like any others.
        """
        try:
            plan, outcomes = read_plan(folder), read_outcomes(folder)
        except (RecordError, OSError) as error:
            self._problem(str(error))
            return False
        entries = self.collection.entries
        first = len(entries)
        for cell in plan.cells:
            outcome = outcomes.get(cell.id)
            if outcome is None and (left := folder / cell.id / OUTCOME_FILE).exists():
                self._problem(f"{left}: cannot be read; the cell counts as not run")
            run = _begun(folder / cell.id) if outcome is None else outcome.run and folder / outcome.run
            if not run or self._first_time(run):
                record = self._record(run) if run else None
                entries.append(Entry(run or folder / cell.id, record, cell, outcome, folder))
        entries[first:] = _with_siblings(entries[first:])
        return True

    def _searched(self, folder: Path) -> None:
        try:
            self.collection.searches.append(Searched(folder, read_improve(folder)))
        except RecordError as error:
            self._problem(str(error))

    def _record(self, folder: Path) -> RunRecord | None:
        """None where it cannot be read, which is told."""
        try:
            return read_run(folder)
        except RecordError as error:
            self._problem(str(error))
            return None

    def _first_time(self, folder: Path) -> bool:
        real = os.path.realpath(folder)
        new = real not in self._seen
        self._seen.add(real)
        return new

    def _unreadable(self, error: OSError) -> None:
        self._problem(f"{error.filename}: cannot be read: {error.strerror}")

    def _problem(self, line: str) -> None:
        self.collection.problems.append(line)


def _begun(cell: Path) -> Path | None:
    """The last run of a cell whose outcome is not known: it is still going on, or was killed with its sweep."""
    runs = [path.parent for path in cell.glob("version_*/run.json") if not path.parent.is_symlink()]
    return max(runs, key=lambda run: _by_number(run.name), default=None)


def _by_number(name: str) -> list[str | int]:
    """``version_2`` before ``version_10``."""
    return [int(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d+)", name))]


def _with_siblings(cells: list[Entry]) -> list[Entry]:
    """``cells`` of one sweep, those that know too little each with one that knows; none of a sweep over devices."""
    knowing = [cell for cell in cells if cell.environment is not None and cell.config is not None]
    if len({cell.environment.device_name for cell in knowing if cell.environment is not None}) != 1:
        return cells
    return [
        replace(cell, sibling=knowing[0]) if cell.environment is None or cell.config is None else cell for cell in cells
    ]
