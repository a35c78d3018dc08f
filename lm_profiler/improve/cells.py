"""Run the cells that a search asks for, each in its own process, and read what they measured.

A cell is identified by a setting and a number, not by who asked for it. So a search that was killed asks for the same
cells again, and those that have run are read from their folders.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lm_profiler.analysis.compare.sides import comparable_step_s
from lm_profiler.improve.decision import Ran
from lm_profiler.improve.tolerance import other_step
from lm_profiler.record.entry import Entry
from lm_profiler.record.files import if_readable
from lm_profiler.record.run_record import RunRecord, read_run
from lm_profiler.record.sweep_files import Cell, CellOutcome, read_outcome
from lm_profiler.sweep.sweep_folder import SweepFolder, is_done
from lm_profiler.sweep.sweep_plan import safe_name

# options of cells that are only timed: they leave out all stages after the measured steps
_TIMED = {f"{name}.steps": "0" for name in ("actions", "memory", "trace")} | {"numerics.audit": "false"}
_AUDITED = {"numerics.audit": "true", "numerics.losses": "10"}
# an option for a setting that fitted before: planning it again takes a fifth of a cell's time
_NOT_REHEARSED = {"check_memory": "false"}

_PREFETCH = 2  # batches that each worker of a torch DataLoader prefetches by default (``prefetch_factor``)


@dataclass(frozen=True)
class CellCalls:
    """The calls of an improvement's cells: the first setting's ``call`` with options and instruments."""

    folder: Path  # of all runs
    call: Sequence[str]
    first: RunRecord | None = None  # the first setting's own run, once there is one

    def look(self) -> Cell:
        """Return the first of all cells: the first setting with all instruments."""
        return self._cell({}, "look", _AUDITED)

    def check(self, options: Mapping[str, str]) -> Cell:
        """Return a cell whose losses and gradients are compared."""
        return self._cell(options, "check", {**_TIMED, **_AUDITED, "memory.steps": "1"})

    def time(self, options: Mapping[str, str], number: int, fitted: bool = False) -> Cell:
        """Return the cell that times a setting, which may have ``fitted`` before, for the ``number``-th time."""
        more = _NOT_REHEARSED if fitted else {}
        return self._cell(options, f"r{number}", {**_TIMED, **self._warm_up(options), **more}, number)

    def _warm_up(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return a longer warm-up where workers prefetch more batches than the first run's warm-up uses."""
        first = self.first
        if first is None or first.loader is None:
            return {}
        workers = [int(text) for name, text in options.items() if name.endswith(".num_workers") and text.isdecimal()]
        ahead = max([first.loader.ahead or 0, *(_PREFETCH * count for count in workers)])
        batches = 1 if first.model is None else first.model.accumulate_grad_batches
        steps = 1 + math.ceil(ahead / batches)  # one more: batches are prefetched during the first step
        return {} if steps <= first.steps_planned.get("warmup", steps) else {"stages.warmup_steps": str(steps)}

    def _cell(self, options: Mapping[str, str], suffix: str, instruments: Mapping[str, str], number: int = 0) -> Cell:
        # Sorted, so that a setting has one name whatever the order of its options.
        options = dict(sorted(options.items()))
        text = ",".join(f"{name.removeprefix('trainer.')}={value}" for name, value in options.items())
        cell_id = f"{safe_name(text, options) if options else 'first'},{suffix}"
        words = [f"--{name}={text}" for name, text in {**instruments, **options}.items()]
        arguments = [*self.call, *words, f"--log_dir={self.folder}", f"--name={cell_id}"]
        audit = {"numerics.audit": "true"} if "numerics.losses" in instruments else {}
        return Cell(id=cell_id, overrides={**options, **audit}, repeat=number, arguments=arguments)


def setting_of(cell: Cell) -> str:
    """Return the part of the cell's id that all cells of its setting share."""
    return cell.id.rpartition(",")[0]


class NoSteps(Exception):
    """A run without a usable mean step; the message says why."""


@dataclass(frozen=True)
class RanCell:
    """A cell that has run."""

    entry: Entry  # the run with its record
    outcome: CellOutcome  # how the cell ended
    took_s: float  # seconds that it takes from the budget, all tries together; 0 if it was asked for before
    cut: bool = False  # whether the end of the budget ended it

    @property
    def record(self) -> RunRecord:
        """The record of a run that succeeded; raises NoSteps for any other."""
        if self.outcome.status != "ok" or self.entry.record is None:
            raise NoSteps(f"{self.outcome.status}: {self.outcome.reason or 'no reason given'}")
        return self.entry.record

    def ran(self, first: RunRecord) -> Ran:
        """Return the result of the run, its step scaled to the samples or tokens of the ``first`` setting's step."""
        failed = refused = seconds = peak = None
        try:
            record = self.record
            other = other_step(first, record)
            # The mean: batches of several workers come in bursts, so a median does not show the rate.
            step_s = comparable_step_s(self.entry)
            if step_s is None:
                raise NoSteps("too few measured steps: raise --stages.measure_steps")
            seconds = step_s
            if other is not None:
                _, first_size, size = other
                seconds = step_s * first_size / size
            peak = _peak_bytes(record)
        except NoSteps as error:
            why, is_refused = str(error), self.outcome.status == "refused"
            failed, refused = (None, why.removeprefix("refused: ")) if is_refused else (why, None)
        no_memory = self.outcome.status in ("oom", "interrupted")
        return Ran(seconds, self.took_s, failed, refused, peak, self.cut, no_memory)


def _peak_bytes(record: RunRecord) -> int | None:
    """Return the peak bytes of the measured steps: those of the device's tensors, else those of the process."""
    measured = None if record.memory is None else record.memory.measured
    if measured is None:
        return None
    return measured.resident_peak if measured.allocated_peak is None else measured.allocated_peak


class Interrupted(Exception):
    """A user interrupted the search, or a run was ended from outside, in which case the message says how."""


class Cells:
    """All runs of one improvement; the plan of their ``folder`` grows by each cell that is asked for.

    ``run`` runs a cell within a limit in seconds; if the cell has no outcome afterwards, it was interrupted. ``left_s``
    is the rest of the budget, ``longest_s`` the time limit of a cell. ``asked``, ``shared`` and ``fitted`` are the ids
    of cells that were asked for and of those during which something else used the machine, and settings that fitted.
    """

    def __init__(
        self,
        folder: SweepFolder,
        run: Callable[[Cell, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self._run = folder, run
        self._clock, self._since_s = clock, clock()
        self.left_s = self.longest_s = math.inf
        self.asked, self.shared, self.fitted = set[str](), set[str](), set[str]()

    def done(self, cell: Cell) -> RanCell:
        """Return how ``cell`` ended. It runs if it has not, and again if it was short of time and there is more now."""
        known, again = is_done(self.folder.path, cell), cell.id in self.asked
        self.asked.add(cell.id)
        done = self._read(cell) if known else None
        longest_s = min(self.left_s, self.longest_s)
        if done is None or (not again and done.outcome.status == "timeout" and done.outcome.duration_s < longest_s):
            done = self._tried(cell)
        if done.outcome.status == "ok":
            self.fitted.add(setting_of(cell))
        # A cell that is asked for twice has been paid for: its time must not leave the budget again.
        return replace(done, took_s=0.0) if again else done

    def _tried(self, cell: Cell) -> RanCell:
        """Run ``cell``. Its ``took_s`` counts from the end of the cell before it, so that no time is left out."""
        left_s = self.left_s - (self._clock() - self._since_s)
        self._add(cell)
        self._run(cell, max(min(left_s, self.longest_s), 0.0))
        if (done := self._read(cell)) is None:
            outcome = read_outcome(self.folder.path, cell.id)
            raise Interrupted(*[outcome.reason] if outcome is not None and outcome.reason else [])
        before_s, self._since_s = self._since_s, self._clock()
        return replace(done, took_s=max(self._since_s - before_s, done.outcome.duration_s))

    def _read(self, cell: Cell) -> RanCell | None:
        """Read a cell from its folder; None if it has not ended by itself."""
        path = self.folder.path
        outcome = read_outcome(path, cell.id)
        # A cell that was killed alone, for example by the OOM killer, has ended: the search continues without it.
        if outcome is None or (outcome.status == "interrupted" and outcome.exit_code != -signal.SIGKILL):
            return None
        run = path / (outcome.run or cell.id)
        record = if_readable(read_run, run)
        if record is not None and "shared" in record.words:
            self.shared.add(cell.id)
        cut = outcome.status == "timeout" and self.left_s <= self.longest_s
        return RanCell(Entry(run, record, cell, outcome, path), outcome, outcome.duration_s, cut)

    def _add(self, cell: Cell) -> None:
        """Add the cell to the plan on disk before its folder is made."""
        plan = self.folder.plan
        if cell.id not in {known.id for known in plan.cells}:
            self.folder.plan = plan.model_copy(update={"cells": [*plan.cells, cell]})
            self.folder.begin()
