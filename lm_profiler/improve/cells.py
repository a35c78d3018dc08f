"""Run the cells that the search asks for, each in its own process; a cell that has run is read from its folder.

A cell is identified by a setting and a number, not by who asked for it. So a search that was killed asks for the same
cells again and goes on from their folders.
"""

from __future__ import annotations

import hashlib
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lm_profiler.improve.cell_calls import (
    NOT_REHEARSED,
    check_cell,
    look_cell,
    seed_cell,
    setting_of,
    timed_cell,
    warm_up,
)
from lm_profiler.improve.ran import MemorySeen, RanCell
from lm_profiler.record.entry import Entry
from lm_profiler.record.files import RecordError
from lm_profiler.record.run import RunRecord, read_run
from lm_profiler.record.sweep import Cell, CellOutcome, SweepPlan, read_outcome, read_plan
from lm_profiler.sweep.sweep_folder import SweepFolder, difference, is_done
from lm_profiler.usage_error import UsageError

# seconds to wait before a run that was short of memory is tried again, for the first and the second time
PAUSES_S = (5.0, 15.0)

_SHORTEST_S = 1.0  # no run begins with fewer seconds left in the budget


class Interrupted(Exception):
    """A user interrupted the search, or a run was ended from outside, in which case the message says how."""


class Cells:
    """All runs of one improvement.

    Args:
        folder: The folder of the runs; its plan grows by each cell that is asked for.
        call: The arguments of the first setting's call, the verb first.
        run: Runs a cell within a limit in seconds. If the cell has no outcome afterwards, it was interrupted.
        pause: Waits for a number of seconds.
        clock: Returns the time in seconds.

    ``left_s`` is the rest of the budget, ``longest_s`` the time limit of a cell, and ``first`` the first setting's own
    run, once there is one.
    """

    def __init__(
        self,
        folder: SweepFolder,
        call: Sequence[str],
        run: Callable[[Cell, float], None],
        pause: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self._call, self._run, self._pause = folder, call, run, pause
        self._clock, self._since_s = clock, clock()
        self.left_s = self.longest_s = math.inf
        self.first: RunRecord | None = None
        self._asked: set[str] = set()
        self._shared: set[str] = set()
        self._memory = MemorySeen()

    def look(self) -> RanCell:
        """Run the first setting with all instruments."""
        return self._done(look_cell(self.folder.path, self._call))

    def check(self, options: Mapping[str, str]) -> RanCell:
        """Run a setting to compare its losses and gradients."""
        return self._done(check_cell(self.folder.path, self._call, options))

    def under(self, seed: int) -> RanCell:
        """Run the first setting under another seed to compare its losses."""
        return self._done(seed_cell(self.folder.path, self._call, seed))

    def time(self, options: Mapping[str, str], number: int) -> RanCell:
        """Time a setting for the ``number``-th time."""
        more = warm_up(options, self.first)
        if self._memory.has_fitted(setting_of(timed_cell(self.folder.path, self._call, options, number))):
            more |= NOT_REHEARSED
        return self._done(timed_cell(self.folder.path, self._call, options, number, more))

    def _done(self, cell: Cell) -> RanCell:
        """Return how ``cell`` ended. It runs if it has not, and again if memory or time were short and may suffice now.

        Raises:
            Interrupted: a user interrupted the search.
        """
        known, again = is_done(self.folder.path, cell), cell.id in self._asked
        self._asked.add(cell.id)
        done = self._read(cell) if known else None
        if done is None or (not again and self._may_end_otherwise(cell, done)):
            done = self._tried(cell)
        self._memory.saw(setting_of(cell), done)
        # A cell that is asked for twice has been paid for: its time must not leave the budget again.
        return replace(done, took_s=0.0) if again else done

    def _may_end_otherwise(self, cell: Cell, done: RanCell) -> bool:
        """Whether the cell was short of memory that may be free now, or of time of which there is more now."""
        short = done.outcome.status == "timeout" and done.outcome.duration_s < min(self.left_s, self.longest_s)
        return short or self._memory.is_passing(setting_of(cell), done)

    def _tried(self, cell: Cell) -> RanCell:
        """Run ``cell``, and again after a pause where it was short of memory that may be free then.

        Its ``took_s`` counts from the end of the cell before it, so that the budget includes the time between cells.
        """
        if self.left_s - self._passed_s < _SHORTEST_S:
            return _never_began(self.folder.path, cell)
        self._add(cell)
        tries_s = 0.0
        for pause_s in (*PAUSES_S, math.inf):
            self._run(cell, max(min(self.left_s - self._passed_s, self.longest_s), 0.0))
            done = self._ended(cell)
            tries_s += done.outcome.duration_s
            passed_s = max(self._passed_s, tries_s)
            if passed_s + pause_s >= self.left_s or not self._memory.is_passing(setting_of(cell), done):
                break
            self._pause(pause_s)
        self._since_s = self._clock()
        return replace(done, took_s=passed_s)

    def _ended(self, cell: Cell) -> RanCell:
        if (done := self._read(cell)) is None:
            outcome = read_outcome(self.folder.path, cell.id)
            raise Interrupted(*[outcome.reason] if outcome is not None and outcome.reason else [])
        return done

    @property
    def _passed_s(self) -> float:
        """Seconds since the last cell ended."""
        return self._clock() - self._since_s

    def _read(self, cell: Cell) -> RanCell | None:
        """Read a cell from its folder; None where it has not ended by itself."""
        path = self.folder.path
        outcome = read_outcome(path, cell.id)
        if outcome is None or (outcome.status == "interrupted" and not _killed(outcome)):
            return None
        run = path / outcome.run if outcome.run is not None else path / cell.id
        try:
            record = read_run(run)
        except RecordError:
            record = None
        if record is not None and "shared" in record.words:
            self._shared.add(cell.id)
        cut = outcome.status == "timeout" and self.left_s <= self.longest_s
        return RanCell(Entry(run, record, cell, outcome, path), outcome, outcome.duration_s, cut)

    @property
    def count(self) -> int:
        """The number of cells that were asked for."""
        return len(self._asked)

    @property
    def shared(self) -> int:
        """The number of cells during which something else used the machine."""
        return len(self._shared)

    def _add(self, cell: Cell) -> None:
        """Add the cell to the plan on disk before its folder is made."""
        plan = self.folder.plan
        if cell.id not in {known.id for known in plan.cells}:
            self.folder.plan = plan.model_copy(update={"cells": [*plan.cells, cell]})
            self.folder.begin()


def _killed(outcome: CellOutcome) -> bool:
    """Whether only the cell was killed, as by the OOM killer: then the search goes on without it."""
    return outcome.exit_code == -signal.SIGKILL


def _never_began(path: Path, cell: Cell) -> RanCell:
    """Return the outcome of a cell for which no time is left."""
    why = "the budget ended before it began"
    outcome = CellOutcome(
        cell=cell.id, status="timeout", reason=why, run=None, ended="", duration_s=0.0, exit_code=None
    )
    return RanCell(Entry(path / cell.id, None, cell, outcome, path), outcome, 0.0, cut=True)


def begun(path: Path, plan: SweepPlan) -> SweepPlan:
    """Return the plan at ``path`` if the same improvement has begun there, else ``plan``.

    Raises:
        UsageError: another improvement or sweep has begun there.
    """
    try:
        known = read_plan(path)
    except RecordError:  # no plan, or a damaged one, which SweepFolder refuses
        return plan
    # Only the first cell is the same for each call: the others depend on how far the search came.
    unlike = difference(known.model_copy(update={"cells": known.cells[:1]}), plan)
    if unlike is not None:
        raise UsageError(
            f"name: expected what was begun in {path}, given a call with {unlike}; "
            "name another with --name, or remove that folder"
        )
    return known


def plan_of(name: str, command: str, configs: Mapping[str, str], cells: Sequence[Cell]) -> SweepPlan:
    """Return the plan of an improvement that has asked for ``cells`` so far."""
    texts = "".join(configs.values()).encode()
    return SweepPlan(
        name=name,
        command=command,
        verb="fit",
        seed=0,
        config_sha256=hashlib.sha256(texts).hexdigest() if configs else None,
        configs=dict(configs),
        cells=list(cells),
    )
