"""A line of any table, which is a run or a cell of a sweep, and the search for them below a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lm_profiler.record.improve_record import IMPROVE_FILE, ImproveRecord, read_improve
from lm_profiler.record.run_record import Environment, RunRecord, none_if_unreadable, read_run
from lm_profiler.record.secrets import mask_option
from lm_profiler.record.steps import COLUMNS_FILE, STEPS_FILE, StepTable, read_rows
from lm_profiler.record.sweep_files import (
    OUTCOME_FILE,
    PLAN_FILE,
    Cell,
    CellOutcome,
    SweepPlan,
    read_outcome,
    read_outcomes,
    read_plan,
)

UNFINISHED = "it is still running, or its process was killed"  # the reason of a run whose status is unfinished


@dataclass(frozen=True)
class Cut:
    """The recorded steps that figures use: ``steps`` of them after the first ``warmup``."""

    warmup: int | None = None  # None: the run's own
    steps: int | None = None  # None: all


@dataclass(frozen=True)
class Entry:
    """A line of any table: a run, or a cell of a sweep that may have left none."""

    folder: Path  # the run's folder, or the cell's if there is no run
    record: RunRecord | None  # None if the cell left no record (it timed out, was killed, or was a wrong call)
    cell: Cell | None = None  # none for a run that belongs to no sweep
    outcome: CellOutcome | None = None  # how the cell ended, as the sweep recorded it
    sweep: Path | None = None  # the sweep's folder
    # another cell of the sweep, whose run has the options that the sweep does not vary, if this cell left no run
    sibling: Entry | None = None
    # the new cut of the recorded steps for the figures of ``record``; None for the run's own figures
    cut: Cut | None = None

    @property
    def name(self) -> str:
        return self.cell.id if self.cell is not None else self.record.name if self.record is not None else "unknown"

    @property
    def status(self) -> str:
        # The sweep's status goes first: a run that was stopped at its time limit calls itself interrupted.
        if self.outcome is not None:
            lost = self.outcome.run is not None and self.record is None
            return "missing" if lost else self.outcome.status
        return self.record.status if self.record is not None else "not run"

    @property
    def reason(self) -> str | None:
        if self.outcome is not None and self.outcome.reason is not None:
            return self.outcome.reason
        if self.status == "unfinished":
            return UNFINISHED
        failure = self.record.failure if self.record is not None else None
        if failure is not None and self.status == "refused":  # the exception's type would only repeat that
            return "; ".join(failure.message.splitlines())
        return None if failure is None else f"{failure.type}: {failure.message}".removesuffix(": ")

    @property
    def overrides(self) -> Mapping[str, str]:
        """The swept options of a cell; for a run without a sweep, the options of its command line."""
        if self.cell is not None:
            return {name: mask_option(name, value) for name, value in self.cell.overrides.items()}
        return self.record.overrides if self.record is not None else {}

    def option(self, path: str) -> Any:
        """Return the option ``path`` of the resolved config; for a cell without a run, the sweep's or a sibling's."""
        if self.config is not None:
            return _at(self.config, path)
        if path in self.overrides:
            return _typed(self.overrides[path])
        return None if self.sibling is None or path in self.sibling.overrides else self.sibling.option(path)

    @property
    def verb(self) -> str | None:
        if self.record is not None:
            return self.record.verb
        return self.cell.arguments[0] if self.cell is not None and self.cell.arguments else None

    @property
    def environment(self) -> Environment | None:
        own = self.record.environment if self.record is not None else None
        return own if own is not None or self.sibling is None else self.sibling.environment

    @property
    def config(self) -> dict[str, Any] | None:
        return self.record.config if self.record is not None else None

    @property
    def shows_steps(self) -> bool:
        """Whether its steps can be shown: it succeeded, or has not ended and has times."""
        return self.status in ("ok", "unfinished") and self.record is not None and bool(self.record.time)

    @cached_property
    def rows(self) -> StepTable:
        """The rows of its steps, all ranks and stages; after a failure only the steps that all ranks finished."""
        status = None if self.record is None else self.record.status
        rows = read_rows(self.folder, status == "unfinished")
        return rows if status == "ok" else rows.finished_by_all()


def machine_of(entries: Iterable[Entry]) -> Environment | None:
    """Return the first known machine of ``entries``; None if none is known."""
    return next((machine for entry in entries if (machine := entry.environment) is not None), None)


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        inner = value.get("init_args")  # a class with arguments, as jsonargparse writes it
        value = value.get(key, inner.get(key) if isinstance(inner, Mapping) else None)
    if isinstance(value, Mapping) and "class_path" in value:
        # Lightning's own classes go by their short names: DDPStrategy.
        return re.sub(r"^lightning\..*\.", "", str(value["class_path"]))
    return value


def _typed(given: str) -> Any:
    try:
        return json.loads(given.lower() if given.lower() in ("true", "false", "null") else given)
    except ValueError:
        return given


_LEFT_BY_A_RUN = (STEPS_FILE, COLUMNS_FILE, "config.yaml")


@dataclass(frozen=True)
class Collection:
    """The result of a search; each of the ``problems`` names a file that could not be used, in a line."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    # the calls of ``improve`` by their folders; their runs are among the entries
    searches: dict[Path, ImproveRecord] = field(default_factory=dict)


def unreadable(entries: Iterable[Entry]) -> list[str]:
    """Return a line for each run that finished steps but whose ``steps.csv`` is unreadable: no picture shows it."""
    problems = list[str]()
    for entry in entries:
        if entry.record is not None and any(entry.record.steps.values()):
            none_if_unreadable(getattr, entry, "rows", problems=problems)
    return problems


def collect(paths: Iterable[Path]) -> Collection:
    """Find all runs and cells at and below ``paths``, each once, in the order of their folders; follow no links."""
    search = _Search()
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(path)
        if not search.add_cell(path):
            search.walk(path)
    for link in search.links:
        if any((link / name).exists() for name in (PLAN_FILE, "run.json")) and search.first_time(link):
            search.collection.problems.append(f"{link}: is a link, and links are not followed; give {link.resolve()}")
    search.collection.entries[:] = search.in_order_of_sweeps()
    return search.collection


class _Search:
    """A search in progress: its results, the folders seen so far, and the links that it did not follow."""

    def __init__(self) -> None:
        self.collection = Collection()
        self._problems = self.collection.problems
        self._read = partial(none_if_unreadable, problems=self._problems)
        self.links: list[Path] = []
        self._seen: set[str] = set()
        self._plans: dict[Path, SweepPlan | None] = {}  # of sweeps whose cells are given one by one

    def add_cell(self, path: Path) -> bool:
        """Add the cell whose folder, or whose run's folder, is ``path``; return False if it is none.

        So a cell has its options, its outcome and its place in the sweep, also where it is given by a pattern.
        """
        for folder in (path, path.parent):
            sweep = folder.parent
            if folder.name and (sweep / PLAN_FILE).is_file():
                return self._add_cell_of(sweep, folder.name, path)
        return False

    def _add_cell_of(self, sweep: Path, cell_id: str, path: Path) -> bool:
        if sweep not in self._plans:
            self._plans[sweep] = none_if_unreadable(read_plan, sweep)
        plan = self._plans[sweep]
        cells = [] if plan is None else [cell for cell in plan.cells if cell.id == cell_id]
        if not cells:
            return False
        outcome = read_outcome(sweep, cell_id)
        run = _run_of(sweep / cell_id, outcome)
        is_another_run = path.name != cell_id and path != run
        if is_another_run:  # an earlier version in the cell's folder
            return False
        if self.first_time(run or sweep / cell_id):
            record = None if run is None else self._read(read_run, run)
            self.collection.entries.append(Entry(run or sweep / cell_id, record, cells[0], outcome, sweep))
        return True

    def in_order_of_sweeps(self) -> list[Entry]:
        """Return the entries; cells that were given one by one stand together, in the order of their sweep."""
        entries: list[Entry] = []
        done: set[Path] = set()
        for entry in self.collection.entries:
            plan = None if entry.sweep is None else self._plans.get(entry.sweep)
            if entry.sweep is None or plan is None:
                entries.append(entry)
            elif entry.sweep not in done:
                done.add(entry.sweep)
                entries += self._cells_in_order(entry.sweep, plan)
        return entries

    def _cells_in_order(self, sweep: Path, plan: SweepPlan) -> list[Entry]:
        cells = {entry.name: entry for entry in self.collection.entries if entry.sweep == sweep}
        return _with_siblings([cells[cell.id] for cell in plan.cells if cell.id in cells])

    def walk(self, top: Path) -> None:
        """Add all runs, sweeps and searches below ``top``; a folder that is one of them is not searched further."""

        def no_folder(error: OSError) -> None:
            self._problems.append(f"{error.filename}: cannot be read: {error.strerror}")

        for here, folders, files in os.walk(top, onerror=no_folder):
            folder = Path(here)
            folders.sort(key=_by_number)
            searched = IMPROVE_FILE in files and self.first_time(folder / IMPROVE_FILE)
            if searched and (record := self._read(read_improve, folder)) is not None:
                self.collection.searches[folder] = record
            if PLAN_FILE in files:
                if not self.first_time(folder) or self._sweep(folder):
                    folders.clear()
            elif "run.json" in (*files, *folders):  # a folder of that name is reported as unreadable
                folders.clear()
                if self.first_time(folder) and (run := self._read(read_run, folder)) is not None:
                    self.collection.entries.append(Entry(folder, run))
            elif any(name in files for name in _LEFT_BY_A_RUN):
                folders.clear()
                if self.first_time(folder):
                    self._problems.append(f"{folder}: no run.json: the run was killed, or is still running")
            else:
                self.links += [link for name in (*folders, *files) if (link := folder / name).is_symlink()]

    def _sweep(self, folder: Path) -> bool:
        """Add the cells of a sweep; return False if its plan is unreadable: its runs are then found like any others."""
        if (plan := self._read(read_plan, folder)) is None:
            return False
        entries, outcomes = [], read_outcomes(folder)
        for cell in plan.cells:
            outcome = outcomes.get(cell.id)
            if outcome is None and (left := folder / cell.id / OUTCOME_FILE).exists():
                self._problems.append(f"{left}: cannot be read; the cell counts as not run")
            run = _run_of(folder / cell.id, outcome)
            if self.first_time(run or folder / cell.id):
                record = self._read(read_run, run) if run else None
                entries.append(Entry(run or folder / cell.id, record, cell, outcome, folder))
        self.collection.entries.extend(_with_siblings(entries))
        return True

    def first_time(self, folder: Path) -> bool:
        """Return whether ``folder`` was not seen yet, by whatever name."""
        real = os.path.realpath(folder)
        new = real not in self._seen
        self._seen.add(real)
        return new


def _run_of(cell: Path, outcome: CellOutcome | None) -> Path | None:
    """Return the folder of a cell's run: as its outcome says, or the run that it has begun; None if it left none."""
    if outcome is None:
        return _begun(cell)
    if not outcome.run:
        return None
    return cell.parent / outcome.run


def _begun(cell: Path) -> Path | None:
    runs = [path.parent for path in cell.glob("version_*/run.json") if not path.parent.is_symlink()]
    return max(runs, key=lambda run: _by_number(run.name), default=None)


def _by_number(name: str) -> list[str | int]:
    return [int(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d+)", name))]


def _with_siblings(cells: list[Entry]) -> list[Entry]:
    knowing = [cell for cell in cells if cell.environment is not None and cell.config is not None]
    # In a sweep over devices no sibling says where a cell would have run.
    if len({cell.environment.device_name for cell in knowing if cell.environment is not None}) != 1:
        return cells
    known = set(map(id, knowing))
    return [cell if id(cell) in known else replace(cell, sibling=knowing[0]) for cell in cells]
