"""Run the cells that a search requests, each in its own process, and read what they measured.

A cell is identified by a setting and a number, not by the comparison that requested it. A search that was killed
requests the same cells again, and cells that have run are read from their folders.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lm_profiler.analysis.compare.sides import comparable_step_s
from lm_profiler.improve.decision import TimedRun
from lm_profiler.improve.tolerance import size_difference
from lm_profiler.record.entry import Entry
from lm_profiler.record.files import none_if_unreadable
from lm_profiler.record.run_record import RunRecord, read_run
from lm_profiler.record.sweep_files import Cell, CellOutcome, read_outcome
from lm_profiler.sweep.sweep_folder import SweepFolder, is_done
from lm_profiler.sweep.sweep_plan import safe_name

# options of cells that are only timed: no stages after the measured steps
_TIMED = {
    "actions.steps": "0",
    "memory.steps": "0",
    "trace.steps": "0",
    "numerics.audit": "false",
}
# options of cells whose losses and gradients are compared
_AUDITED = {"numerics.audit": "true", "numerics.losses": "10"}
# the option for a setting that has already fitted into memory: planning it again would take a fifth of a cell's time
_NOT_REHEARSED = {"check_memory": "false"}

_PREFETCH = 2  # batches that each worker of a torch DataLoader prefetches by default (``prefetch_factor``)


@dataclass(frozen=True)
class CellCalls:
    """Makes the cells of a search.

    The call of a cell is the first setting's ``call`` with the options and the instruments of the cell.
    """

    folder: Path  # the folder of all runs
    call: Sequence[str]
    # the record of the first setting's run; None until the run has ended
    first_record: RunRecord | None = None

    def baseline(self) -> Cell:
        """Return the first of all cells: the first setting with all instruments."""
        return self._cell({}, "look", _AUDITED)

    def check(self, options: Mapping[str, str]) -> Cell:
        """Return a cell whose losses and gradients are compared."""
        instruments = _TIMED | _AUDITED | {"memory.steps": "1"}
        return self._cell(options, "check", instruments)

    def time(
        self, options: Mapping[str, str], number: int, has_fitted: bool = False
    ) -> Cell:
        """Return the cell that times a setting for the ``number``-th time.

        ``has_fitted`` is whether an earlier run of the setting fitted into memory.
        """
        instruments = _TIMED | self._warm_up(options)
        if has_fitted:
            instruments |= _NOT_REHEARSED
        return self._cell(options, f"r{number}", instruments, number)

    def _warm_up(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return the option of a longer warm-up if workers prefetch more batches than the first run's warm-up uses.

        Without it, measured steps would use batches that were loaded before, and the loader would seem too fast.
        """
        if self.first_record is None or self.first_record.loader is None:
            return {}
        prefetched = self.first_record.loader.ahead or 0
        for name, text in options.items():
            if name.endswith(".num_workers") and text.isdecimal():
                prefetched = max(prefetched, _PREFETCH * int(text))
        batches = 1
        if self.first_record.model is not None:
            batches = self.first_record.model.accumulate_grad_batches
        # One more step is needed, because batches are prefetched during the first step.
        steps = 1 + math.ceil(prefetched / batches)
        planned_steps = self.first_record.steps_planned.get("warmup")
        if planned_steps is None or steps <= planned_steps:
            return {}
        return {"stages.warmup_steps": str(steps)}

    def _cell(
        self,
        options: Mapping[str, str],
        suffix: str,
        instruments: Mapping[str, str],
        number: int = 0,
    ) -> Cell:
        """Return the ``number``-th cell that runs the setting ``options`` with the options of ``instruments``.

        ``suffix`` distinguishes the ids of a setting's cells.
        """
        # Sorted, so that a setting has one name whatever the order of its options.
        options = dict(sorted(options.items()))
        cell_id = f"{_setting_name(options)},{suffix}"
        all_options = dict(instruments)
        all_options.update(options)
        arguments = list(self.call)
        for name, text in all_options.items():
            arguments.append(f"--{name}={text}")
        arguments += [f"--log_dir={self.folder}", f"--name={cell_id}"]
        overrides = dict(options)
        is_numerics_check = "numerics.losses" in instruments
        if is_numerics_check:
            # so that its overrides differ from those of the cells that time the same setting
            overrides["numerics.audit"] = "true"
        return Cell(id=cell_id, overrides=overrides, repeat=number, arguments=arguments)


def _setting_name(options: Mapping[str, str]) -> str:
    """Return a name of the setting that is valid on any file system."""
    if not options:
        return "first"
    changes = [
        f"{name.removeprefix('trainer.')}={text}" for name, text in options.items()
    ]
    return safe_name(",".join(changes), options)


def setting_of(cell: Cell) -> str:
    """Return the part of the cell's id that all cells of its setting share."""
    return cell.id.rpartition(",")[0]


class NoSteps(Exception):
    """A run without a usable mean step; the message says why."""


@dataclass(frozen=True)
class FinishedCell:
    """A cell that has run."""

    entry: Entry  # the run with its record
    outcome: CellOutcome  # how the cell ended
    # seconds of the budget; 0 if this search has already requested the cell
    took_s: float
    was_cut: bool = False  # whether the end of the budget ended it

    @property
    def record(self) -> RunRecord:
        """The record of a run that succeeded; raises NoSteps for any other."""
        if self.outcome.status != "ok" or self.entry.record is None:
            raise NoSteps(f"{self.outcome.status}: {self._reason}")
        return self.entry.record

    @property
    def _reason(self) -> str:
        return self.outcome.reason or "no reason given"

    def timed_run(self, first_record: RunRecord) -> TimedRun:
        """Return the result of the run, its step scaled to the samples or tokens of the first setting's step.

        A run that was refused or failed has no step.
        """
        # A process that was killed may have been killed for lack of memory.
        may_lack_memory = self.outcome.status in ("oom", "interrupted")
        without_step = TimedRun(
            step_s=None,
            took_s=self.took_s,
            was_cut=self.was_cut,
            may_lack_memory=may_lack_memory,
        )
        if self.outcome.status == "refused":
            return replace(without_step, refusal=self._reason)
        try:
            record = self.record
            step_s = self._scaled_step_s(first_record)
        except NoSteps as error:
            return replace(without_step, failure=str(error))
        return replace(without_step, step_s=step_s, peak_bytes=_peak_bytes(record))

    def _scaled_step_s(self, first_record: RunRecord) -> float:
        """Return the seconds of the run's mean step, for as many samples or tokens as the first setting's step has."""
        # The mean is used, because several workers deliver batches in bursts, whose rate a median does not show.
        step_s = comparable_step_s(self.entry)
        if step_s is None:
            raise NoSteps("too few measured steps: raise --stages.measure_steps")
        difference = size_difference(first_record, self.record)
        if difference is None:
            return step_s
        return step_s * difference.size_a / difference.size_b


def _peak_bytes(record: RunRecord) -> int | None:
    """Return the peak bytes of the measured steps: those of the device's tensors, else those of the process."""
    if record.memory is None:
        return None
    peaks = record.memory.measured
    if peaks.allocated_peak is not None:
        return peaks.allocated_peak
    return peaks.resident_peak


class Interrupted(Exception):
    """A user interrupted the search, or a run was ended from outside, in which case the message reports how."""


class Cells:
    """All runs of one improvement; the plan of their ``folder`` grows by each cell that is requested.

    ``run`` runs a cell within a limit in seconds; if the cell has no outcome afterwards, it was interrupted.
    """

    def __init__(
        self,
        folder: SweepFolder,
        run: Callable[[Cell, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._run = run
        self._clock = clock
        self._latest_end_s = clock()  # when the latest cell ended
        # seconds of the budget that were left when the latest cell ended
        self.left_s = math.inf
        self.limit_s = math.inf  # time limit of a cell in seconds
        self.requested: set[str] = set()  # ids of cells that were requested
        # ids of cells during which other programs used the machine
        self.shared: set[str] = set()
        self.fitted: set[str] = set()  # settings that fitted into memory

    def result(self, cell: Cell) -> FinishedCell:
        """Return how ``cell`` ended. It is run if it has no result, or if it timed out and there is more time now."""
        was_requested = cell.id in self.requested
        self.requested.add(cell.id)
        finished = None
        if is_done(self.folder.path, cell):
            finished = self._read_cell(cell)
        should_repeat = (
            finished is not None
            and not was_requested
            and self._has_more_time_for(finished)
        )
        if finished is None or should_repeat:
            finished = self._run_cell(cell)
        if finished.outcome.status == "ok":
            self.fitted.add(setting_of(cell))
        if was_requested:
            # The time of a cell that was requested before is already subtracted from the budget.
            return replace(finished, took_s=0.0)
        return finished

    def _has_more_time_for(self, finished: FinishedCell) -> bool:
        """Return whether a cell that ran out of time would have more time now."""
        limit_s = min(self.left_s, self.limit_s)
        return (
            finished.outcome.status == "timeout"
            and finished.outcome.duration_s < limit_s
        )

    def _run_cell(self, cell: Cell) -> FinishedCell:
        """Run ``cell``. Its ``took_s`` begins when the previous cell ended, so that no time is lost."""
        since_latest_end_s = self._clock() - self._latest_end_s
        left_s = self.left_s - since_latest_end_s
        self._add(cell)
        limit_s = max(0.0, min(left_s, self.limit_s))
        self._run(cell, limit_s)
        finished = self._read_cell(cell)
        if finished is None:
            outcome = read_outcome(self.folder.path, cell.id)
            if outcome is not None and outcome.reason:
                raise Interrupted(outcome.reason)
            raise Interrupted
        end_s = self._clock()
        took_s = max(end_s - self._latest_end_s, finished.outcome.duration_s)
        self._latest_end_s = end_s
        return replace(finished, took_s=took_s)

    def _read_cell(self, cell: Cell) -> FinishedCell | None:
        """Read a cell from its folder; None if it has not ended by itself."""
        folder = self.folder.path
        outcome = read_outcome(folder, cell.id)
        if outcome is None:
            return None
        # A cell that was killed alone, for example by the OOM killer, has ended: the search continues without it.
        was_killed = outcome.exit_code == -signal.SIGKILL
        if outcome.status == "interrupted" and not was_killed:
            return None
        run_folder = folder / (outcome.run or cell.id)
        record = none_if_unreadable(read_run, run_folder)
        if record is not None and record.contended:
            self.shared.add(cell.id)
        # a cell that ran out of time was ended by the budget if less of it was left than the limit of a cell
        was_cut = outcome.status == "timeout" and self.left_s <= self.limit_s
        entry = Entry(run_folder, record, cell, outcome, folder)
        return FinishedCell(entry, outcome, outcome.duration_s, was_cut)

    def _add(self, cell: Cell) -> None:
        """Add the cell to the plan on disk, before its folder is created."""
        plan = self.folder.plan
        planned_ids = {planned.id for planned in plan.cells}
        if cell.id in planned_ids:
            return
        self.folder.plan = plan.model_copy(update={"cells": [*plan.cells, cell]})
        self.folder.begin()
