"""Runs what the search asks for, each in a process of its own; what has run already is read from its folder.

A cell stands for a setting and a number, whoever asked for it: its folder is all that a search that was killed needs.
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

PAUSES_S = (5.0, 15.0)
"""Before a run that was short of memory is tried again."""


_SHORTEST_S = 1.0
"""A run is not begun for less."""


class Interrupted(Exception):
    """Somebody does not want to wait for the rest; or a run was ended from outside, and the message says how."""


class Cells:
    """All runs of one improvement.

    Args:
        folder: Where they are; its plan grows by each cell that is asked for.
        call: The arguments of the first setting's call, the verb first.
        run: Runs a cell for so many seconds at most, and returns when it has an outcome; until then, it was
            interrupted.
        pause: Lets so many seconds pass.
        clock: In seconds.

    ``left_s`` is how much of the budget is left, ``longest_s`` how long a cell may run, ``first`` the first setting's
    own run, once that is known.
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
        """The first setting, with all instruments."""
        return self._done(look_cell(self.folder.path, self._call))

    def check(self, options: Mapping[str, str]) -> RanCell:
        """A setting whose numbers are looked at."""
        return self._done(check_cell(self.folder.path, self._call, options))

    def under(self, seed: int) -> RanCell:
        """The first setting's losses under another seed."""
        return self._done(seed_cell(self.folder.path, self._call, seed))

    def time(self, options: Mapping[str, str], number: int) -> RanCell:
        """A setting, timed for the ``number``-th time."""
        more = warm_up(options, self.first)
        if self._memory.has_fitted(setting_of(timed_cell(self.folder.path, self._call, options, number))):
            more |= NOT_REHEARSED
        return self._done(timed_cell(self.folder.path, self._call, options, number, more))

    def _done(self, cell: Cell) -> RanCell:
        """What became of ``cell``, which is run if it has not been, and again where what was missing may be there now.

        Raises:
            Interrupted: somebody does not want to wait.
        """
        known, again = is_done(self.folder.path, cell), cell.id in self._asked
        self._asked.add(cell.id)
        done = self._read(cell) if known else None
        if done is None or (not again and self._may_end_otherwise(cell, done)):
            done = self._tried(cell)
        self._memory.saw(setting_of(cell), done)
        return replace(done, took_s=0.0) if again else done

    def _may_end_otherwise(self, cell: Cell, done: RanCell) -> bool:
        """Whether it was short of memory that may be free now, or of time of which there is more."""
        short = done.outcome.status == "timeout" and done.outcome.duration_s < min(self.left_s, self.longest_s)
        return short or self._memory.is_passing(setting_of(cell), done)

    def _tried(self, cell: Cell) -> RanCell:
        """Run ``cell``, and again after a pause where it was short of memory that may be free then.

        It took all the time since the cell before it.
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
        """Since a cell ended last."""
        return self._clock() - self._since_s

    def _read(self, cell: Cell) -> RanCell | None:
        """What its folder says of it; None where it has not come to an end of its own."""
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
        """Processes that were asked for."""
        return len(self._asked)

    @property
    def shared(self) -> int:
        """Those of them that shared the machine with something else."""
        return len(self._shared)

    def _add(self, cell: Cell) -> None:
        """Have the plan name the cell before there is anything of it."""
        plan = self.folder.plan
        if cell.id not in {known.id for known in plan.cells}:
            self.folder.plan = plan.model_copy(update={"cells": [*plan.cells, cell]})
            self.folder.begin()


def _killed(outcome: CellOutcome) -> bool:
    """Whether it alone was, as by the kernel where memory is out: the search goes on without it."""
    return outcome.exit_code == -signal.SIGKILL


def _never_began(path: Path, cell: Cell) -> RanCell:
    """Of a cell for which there is no time."""
    why = "the budget ended before it began"
    outcome = CellOutcome(
        cell=cell.id, status="timeout", reason=why, run=None, ended="", duration_s=0.0, exit_code=None
    )
    return RanCell(Entry(path / cell.id, None, cell, outcome, path), outcome, 0.0, cut=True)


def begun(path: Path, plan: SweepPlan) -> SweepPlan:
    """``plan``, with the cells that were asked for where the same improvement has begun at ``path``.

    Raises:
        UsageError: something else was begun there.
    """
    try:
        known = read_plan(path)
    except RecordError:  # nothing, or nothing that can be read: that is told where the folder is taken
        return plan
    unlike = difference(known.model_copy(update={"cells": known.cells[:1]}), plan)
    if unlike is not None:
        raise UsageError(
            f"name: expected what was begun in {path}, given a call with {unlike}; "
            "name another with --name, or remove that folder"
        )
    return known


def plan_of(name: str, command: str, configs: Mapping[str, str], cells: Sequence[Cell]) -> SweepPlan:
    """The plan of an improvement that has asked for ``cells`` so far."""
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
