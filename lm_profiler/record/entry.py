"""Entries of tables (a run, or a cell of a sweep), and the search for them in folders."""

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
from lm_profiler.record.run_record import (
    Environment,
    RunRecord,
    none_if_unreadable,
    read_run,
)
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

UNFINISHED = "the run is still running, or its process was killed"  # the reason for the status unfinished


@dataclass(frozen=True)
class Cut:
    """A selection of the recorded steps for figures: ``steps`` of them after the first ``warmup`` steps."""

    warmup: int | None = None  # None stands for the warm-up of the run itself
    steps: int | None = None  # None stands for all steps


@dataclass(frozen=True)
class Entry:
    """A run, or a cell of a sweep, which may have no run. Each is a line of a table."""

    folder: Path  # the folder of the run, or of the cell if there is no run
    # None if a cell has no record, because it timed out, was killed, or was a wrong call
    record: RunRecord | None
    cell: Cell | None = None  # None for a run that belongs to no sweep
    outcome: CellOutcome | None = None  # how the cell ended, as the sweep recorded it
    sweep: Path | None = None  # the sweep's folder
    # For a cell without a run: another cell of the sweep, whose run shows the options that the sweep does not vary.
    sibling: Entry | None = None
    # the steps from which the figures of ``record`` were computed again; None for the run's own figures
    cut: Cut | None = None

    @property
    def name(self) -> str:
        """The name of the cell, or else of the run."""
        if self.cell is not None:
            return self.cell.id
        if self.record is not None:
            return self.record.name
        return "unknown"

    @property
    def status(self) -> str:
        """How the run ended: the status of its cell in a sweep, or else that of its own record."""
        # The sweep knows better: a run that it stopped at the time limit records itself as interrupted.
        if self.outcome is not None:
            run_is_gone = self.outcome.run is not None and self.record is None
            return "missing" if run_is_gone else self.outcome.status
        if self.record is not None:
            return self.record.status
        return "not run"

    @property
    def reason(self) -> str | None:
        """Why the run failed, as the sweep or the run itself recorded it; None if neither did."""
        if self.outcome is not None and self.outcome.reason is not None:
            return self.outcome.reason
        if self.status == "unfinished":
            return UNFINISHED
        if self.record is None or self.record.failure is None:
            return None
        failure = self.record.failure
        if self.status == "refused":  # the type of the exception adds nothing
            return "; ".join(failure.message.splitlines())
        return f"{failure.type}: {failure.message}".removesuffix(": ")

    @property
    def overrides(self) -> Mapping[str, str]:
        """The swept options of a cell; for a run without a sweep, the options of its command line."""
        if self.cell is not None:
            return {
                name: mask_option(name, value)
                for name, value in self.cell.overrides.items()
            }
        if self.record is not None:
            return self.record.overrides
        return {}

    def option(self, path: str) -> Any:
        """Return the option ``path`` of the resolved config; for a cell without a run, from the sweep or a sibling."""
        if self.config is not None:
            return _config_value(self.config, path)
        if path in self.overrides:
            return _parsed_value(self.overrides[path])
        if self.sibling is None or path in self.sibling.overrides:
            return None
        return self.sibling.option(path)

    @property
    def verb(self) -> str | None:
        """The verb of the run, such as ``fit``; for a cell without a run, the verb of its call."""
        if self.record is not None:
            return self.record.verb
        if self.cell is not None and self.cell.arguments:
            return self.cell.arguments[0]
        return None

    @property
    def environment(self) -> Environment | None:
        """The machine of the run; for a cell without a run, that of a sibling. None if it is unknown."""
        if self.record is not None and self.record.environment is not None:
            return self.record.environment
        if self.sibling is not None:
            return self.sibling.environment
        return None

    @property
    def config(self) -> dict[str, Any] | None:
        return None if self.record is None else self.record.config

    @property
    def shows_steps(self) -> bool:
        """Whether the steps of this run can be shown: it has times, and has succeeded or is unfinished."""
        has_times = self.record is not None and bool(self.record.time)
        return has_times and self.status in ("ok", "unfinished")

    @cached_property
    def rows(self) -> StepTable:
        """The rows of all steps, ranks and stages; after a failure only those of steps that all ranks finished."""
        status = None if self.record is None else self.record.status
        rows = read_rows(self.folder, status == "unfinished")
        return rows if status == "ok" else rows.finished_by_all()


def machine_of(entries: Iterable[Entry]) -> Environment | None:
    """Return the first known machine of ``entries``; None if none is known."""
    for entry in entries:
        if entry.environment is not None:
            return entry.environment
    return None


def _config_value(config: Mapping[str, Any], path: str) -> Any:
    """Return the option ``path`` of ``config``; for a class its name. None if there is no such option."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        arguments = value.get("init_args")  # of a class, as jsonargparse writes it
        if key in value:
            value = value[key]
        elif isinstance(arguments, Mapping):
            value = arguments.get(key)
        else:
            return None
    if isinstance(value, Mapping) and "class_path" in value:
        # Lightning's own classes are shown by their short names, such as DDPStrategy
        return re.sub(r"^lightning\..*\.", "", str(value["class_path"]))
    return value


def _parsed_value(text: str) -> Any:
    """Return the value of ``text`` from a command line: parsed as JSON, or the text itself if it is not JSON."""
    if text.lower() in ("true", "false", "null"):
        text = text.lower()
    try:
        return json.loads(text)
    except ValueError:
        return text


# files that show that a folder is that of a run, even if a killed process left no record
_FILES_BESIDE_RECORD = (STEPS_FILE, COLUMNS_FILE, "config.yaml")


@dataclass(frozen=True)
class Collection:
    """The result of a search in folders."""

    entries: list[Entry] = field(default_factory=list)
    # a line about each file that could not be used
    problems: list[str] = field(default_factory=list)
    # the calls of ``improve`` by their folders; their runs are among the entries
    searches: dict[Path, ImproveRecord] = field(default_factory=dict)


def unreadable(entries: Iterable[Entry]) -> list[str]:
    """Return a line for each run with finished steps whose ``steps.csv`` is unreadable, so that it is in no picture."""
    problems: list[str] = []
    for entry in entries:
        if entry.record is not None and any(entry.record.steps.values()):
            none_if_unreadable(getattr, entry, "rows", problems=problems)
    return problems


def collect(paths: Iterable[Path]) -> Collection:
    """Find all runs and cells in ``paths`` and below, each once, ordered by folder. Links are not followed."""
    search = _Search()
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(path)
        if not search.add_cell(path):
            search.walk(path)
    # Links are only reported, and only those that lead to runs which were not found otherwise.
    for link in search.links:
        leads_to_runs = (link / PLAN_FILE).exists() or (link / "run.json").exists()
        if leads_to_runs and search.is_first_visit(link):
            search.collection.problems.append(
                f"{link}: is a link, and links are not followed; give {link.resolve()} instead"
            )
    search.collection.entries[:] = search.entries_in_order()
    return search.collection


class _Search:
    """A search in progress: its results, the folders seen so far, and the links that it did not follow."""

    def __init__(self) -> None:
        self.collection = Collection()
        self._problems = self.collection.problems
        # calls a function that reads a file; returns None if the file is unreadable, which is added to the problems
        self._read_or_note = partial(none_if_unreadable, problems=self._problems)
        self.links: list[Path] = []
        self._visited_paths: set[str] = set()
        # the plans of sweeps whose cells are given one by one; None for an unreadable plan
        self._plans: dict[Path, SweepPlan | None] = {}

    def add_cell(self, path: Path) -> bool:
        """Add the cell whose folder, or whose run's folder, is ``path``; return whether there is such a cell.

        So a cell that the user names by itself, for example by a shell pattern, has its options and its outcome too.
        """
        for folder in (path, path.parent):
            sweep = folder.parent
            if folder.name and (sweep / PLAN_FILE).is_file():
                return self._add_cell_of(sweep, folder.name, path)
        return False

    def _add_cell_of(self, sweep: Path, cell_id: str, path: Path) -> bool:
        """Add the cell ``cell_id`` of the sweep in the folder ``sweep``, and return True.

        Return False, and add nothing, if the plan has no such cell, or if ``path`` is an earlier run in the cell's
        folder: that run is not the cell's result.
        """
        if sweep not in self._plans:
            self._plans[sweep] = none_if_unreadable(read_plan, sweep)
        plan = self._plans[sweep]
        if plan is None:
            return False
        cell = next((cell for cell in plan.cells if cell.id == cell_id), None)
        if cell is None:
            return False
        outcome = read_outcome(sweep, cell_id)
        run = _run_of(sweep / cell_id, outcome)
        is_cell_folder = path.name == cell_id
        is_run_of_cell = path == run
        if not is_cell_folder and not is_run_of_cell:
            return False
        self._add_entry(sweep, cell, outcome, run)
        return True

    def _add_entry(
        self, sweep: Path, cell: Cell, outcome: CellOutcome | None, run: Path | None
    ) -> None:
        """Add a cell, with its run if it has one, unless it was added before."""
        folder = sweep / cell.id if run is None else run
        if self.is_first_visit(folder):
            record = None if run is None else self._read_or_note(read_run, run)
            self.collection.entries.append(Entry(folder, record, cell, outcome, sweep))

    def entries_in_order(self) -> list[Entry]:
        """Return the entries, with the cells of a sweep together and in its order, even if they were given singly."""
        entries: list[Entry] = []
        done_sweeps: set[Path] = set()
        for entry in self.collection.entries:
            plan = None if entry.sweep is None else self._plans.get(entry.sweep)
            if entry.sweep is None or plan is None:
                entries.append(entry)
            elif entry.sweep not in done_sweeps:
                done_sweeps.add(entry.sweep)
                entries += self._cells_in_order(entry.sweep, plan)
        return entries

    def _cells_in_order(self, sweep: Path, plan: SweepPlan) -> list[Entry]:
        """Return the entries of the sweep's cells in the order of its plan."""
        cells = {
            entry.name: entry
            for entry in self.collection.entries
            if entry.sweep == sweep
        }
        return _with_siblings(
            [cells[cell.id] for cell in plan.cells if cell.id in cells]
        )

    def walk(self, top: Path) -> None:
        """Add all runs, sweeps and searches in ``top`` and below.

        Folders within that of a run are skipped; those within a sweep too, unless its plan is unreadable. The runs of a
        search (``improve``) are in folders within its folder.
        """

        def note_error(error: OSError) -> None:
            self._problems.append(f"{error.filename}: cannot be read: {error.strerror}")

        for path, folders, files in os.walk(top, onerror=note_error):
            folder = Path(path)
            folders.sort(key=_natural_key)
            if IMPROVE_FILE in files:
                self._add_search(folder)
            if PLAN_FILE in files:
                cells_are_known = self._add_sweep(folder)
                if cells_are_known:
                    folders.clear()
            elif "run.json" in files or "run.json" in folders:
                # a folder of that name is reported as unreadable
                folders.clear()
                self._add_run(folder)
            elif any(name in files for name in _FILES_BESIDE_RECORD):
                folders.clear()
                if self.is_first_visit(folder):
                    self._problems.append(
                        f"{folder}: no run.json: the run was killed, or is still running"
                    )
            else:
                children = [folder / name for name in (*folders, *files)]
                self.links += [child for child in children if child.is_symlink()]

    def _add_search(self, folder: Path) -> None:
        """Add the search of ``improve`` in ``folder``, unless it was added before or is unreadable."""
        if self.is_first_visit(folder / IMPROVE_FILE):
            record = self._read_or_note(read_improve, folder)
            if record is not None:
                self.collection.searches[folder] = record

    def _add_run(self, folder: Path) -> None:
        """Add the run in ``folder``, unless it was added before or is unreadable."""
        if self.is_first_visit(folder):
            record = self._read_or_note(read_run, folder)
            if record is not None:
                self.collection.entries.append(Entry(folder, record))

    def _add_sweep(self, folder: Path) -> bool:
        """Add the cells of a sweep; return False if its plan is unreadable, so that its runs are found one by one."""
        if not self.is_first_visit(folder):
            return True
        plan = self._read_or_note(read_plan, folder)
        if plan is None:
            return False
        number_before = len(self.collection.entries)
        outcomes = read_outcomes(folder)
        for cell in plan.cells:
            outcome = outcomes.get(cell.id)
            outcome_file = folder / cell.id / OUTCOME_FILE
            if outcome is None and outcome_file.exists():
                self._problems.append(
                    f"{outcome_file}: cannot be read; the cell counts as not run"
                )
            self._add_entry(folder, cell, outcome, _run_of(folder / cell.id, outcome))
        cells = self.collection.entries[number_before:]
        self.collection.entries[number_before:] = _with_siblings(cells)
        return True

    def is_first_visit(self, path: Path) -> bool:
        """Return whether ``path`` has not been visited before (also not by another name), and record the visit."""
        real_path = os.path.realpath(path)
        if real_path in self._visited_paths:
            return False
        self._visited_paths.add(real_path)
        return True


def _run_of(cell_folder: Path, outcome: CellOutcome | None) -> Path | None:
    """Return the folder of a cell's run: the one in its outcome, or the latest if there is no outcome; else None."""
    if outcome is None:
        return _latest_run(cell_folder)
    if not outcome.run:
        return None
    return cell_folder.parent / outcome.run


def _latest_run(cell_folder: Path) -> Path | None:
    runs = [path.parent for path in cell_folder.glob("version_*/run.json")]
    own_runs = [run for run in runs if not run.is_symlink()]
    return max(own_runs, key=lambda run: _natural_key(run.name), default=None)


def _natural_key(name: str) -> list[str | int]:
    """Return a sort key that compares the numbers in names as numbers: ``version_2`` is before ``version_10``."""
    key: list[str | int] = []
    for index, piece in enumerate(re.split(r"(\d+)", name)):
        # split returns text and numbers in turn
        is_number = index % 2 == 1
        key.append(int(piece) if is_number else piece)
    return key


def _with_siblings(cells: list[Entry]) -> list[Entry]:
    """Return the ``cells`` of a sweep; a cell without a config or a machine gets a sibling that has both."""
    siblings = []
    devices = set()
    for cell in cells:
        if cell.environment is not None and cell.config is not None:
            siblings.append(cell)
            devices.add(cell.environment.device_name)
    # In a sweep over devices, siblings do not show on which device a cell would have run.
    if len(devices) != 1:
        return cells
    sibling_ids = {id(cell) for cell in siblings}
    return [
        cell if id(cell) in sibling_ids else replace(cell, sibling=siblings[0])
        for cell in cells
    ]
