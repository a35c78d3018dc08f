"""Drive a search: run the cells that it requests, write the record before each run, and show the progress."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from lm_profiler.analysis.remedies.remedy import Candidate
from lm_profiler.improve.candidates import ImproveRequest
from lm_profiler.improve.cells import (
    CellCalls,
    Cells,
    FinishedCell,
    Interrupted,
    NoSteps,
    setting_of,
)
from lm_profiler.improve.decision import NumericsCheck, PairedComparison, TimedRun
from lm_profiler.improve.search import Searcher
from lm_profiler.improve.tolerance import check_numbers
from lm_profiler.processes.cell_processes import CellProcesses
from lm_profiler.record.calls import WRONG_CALL
from lm_profiler.record.improve_record import (
    IMPROVE_FILE,
    Ended,
    Final,
    ImproveRecord,
    Numerics,
    Tried,
)
from lm_profiler.record.process_spread import known_spread
from lm_profiler.record.quantities import count_text, duration_text
from lm_profiler.record.sweep_files import Cell, CellOutcome, read_outcome
from lm_profiler.report.run.improve_table import saved_text, verdict_text
from lm_profiler.sweep.display import LineDisplay
from lm_profiler.sweep.schedule import Schedule, own_compile_cache
from lm_profiler.sweep.sweep_folder import SweepFolder

_SHARED = (
    "{} of {} runs shared the machine with other programs: their step times exclude waits for a CPU, and the search "
    "needs more pairs of runs than on a quiet machine"
)


@dataclass(frozen=True)
class Account:
    """The fields of the record of ``improve`` that do not change during the search."""

    request: ImproveRequest  # the options of the call
    started: str  # when the search first began
    baseline_s: float = 0.0  # seconds that the first setting's own run took
    refused: Sequence[Candidate] = ()  # changes that are not tried
    notes: Sequence[str] = ()  # notes that do not depend on the result

    def record(
        self, searcher: Searcher | None, end: Ended, runs: int, shared_runs: int = 0
    ) -> ImproveRecord:
        """Return the current record. During ``shared_runs`` of the ``runs`` other programs used the machine."""
        results: dict[str, Any] = {}
        elapsed_s = self.baseline_s
        tried = []
        if searcher is not None:
            results = _search_results(searcher)
            elapsed_s += searcher.spent_s
            tried += [_tried_row(comparison) for comparison in searcher.tried]
        for candidate in self.refused:
            tried.append(
                Tried(
                    **_candidate_fields(candidate),
                    verdict="REFUSED",
                    why=candidate.refused,
                )
            )
        notes = list(self.notes)
        if shared_runs:
            notes.append(_SHARED.format(shared_runs, runs))
        return ImproveRecord(
            name=self.request.name,
            command=self.request.command,
            started=self.started,
            budget_s=self.request.budget_s,
            elapsed_s=elapsed_s,
            ended=end,
            tried=tried,
            runs=runs,
            notes=notes,
            **results,
        )


def _search_results(searcher: Searcher) -> dict[str, Any]:
    """Return the fields of the record about the search as a whole."""
    results: dict[str, Any] = {
        "options": dict(searcher.options),
        "left": [candidate.name for candidate in searcher.untried],
    }
    if searcher.first_run is not None:
        results["first_s"] = searcher.first_run.step_s
    if searcher.final is not None:
        results["final"] = _final_comparison(searcher.final)
    return results


def _candidate_fields(candidate: Candidate) -> dict[str, Any]:
    # The record ignores the fields that only a candidate has.
    return {**vars(candidate), "options": dict(candidate.options)}


def _tried_row(comparison: PairedComparison) -> Tried:
    """Return the record's row of a change that was compared."""
    saved_s, low_s, high_s = comparison.saved_s or (None, None, None)
    return Tried(
        **_candidate_fields(comparison.candidate),
        pairs=comparison.pairs,
        a_s=comparison.a_s,
        b_s=comparison.b_s,
        saved_s=saved_s,
        low_s=low_s,
        high_s=high_s,
        a_bytes=_median_peak_bytes(comparison.runs_a),
        b_bytes=_median_peak_bytes(comparison.runs_b),
        numerics=_numerics_row(comparison.numerics),
        verdict=comparison.verdict,
        accepted=comparison.accepted,
        why=comparison.reason,
    )


def _numerics_row(check: NumericsCheck | None) -> Numerics | None:
    """Return the record's row of a check of the numbers; an infinite error becomes None."""
    if check is None:
        return None
    return Numerics(
        loss=_finite_or_none(check.loss_error),
        gradients=_finite_or_none(check.gradient_error),
        within=check.is_tolerated,
    )


def _finite_or_none(error: float | None) -> float | None:
    if error is None or not isfinite(error):
        return None
    return error


def _final_comparison(comparison: PairedComparison) -> Final | None:
    """Return the comparison of the first and the final setting; None if too few of its runs succeeded."""
    interval = comparison.interval
    if interval is None or comparison.a_s is None or comparison.b_s is None:
        return None
    return Final(
        pairs=comparison.pairs,
        first_s=comparison.a_s,
        final_s=comparison.b_s,
        ratio=1.0 / interval.ratio,
        low=1.0 / interval.high,
        high=1.0 / interval.low,
        first_bytes=_median_peak_bytes(comparison.runs_a),
        final_bytes=_median_peak_bytes(comparison.runs_b),
    )


def _median_peak_bytes(runs: Sequence[TimedRun]) -> int | None:
    """Return the median of the runs' peak bytes; None if none is known."""
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    if not peaks:
        return None
    return round(median(peaks))


# -- the search --------------------------------------------------------------------------------------------------------


def search(
    cells: Cells,
    calls: CellCalls,
    candidates: Sequence[Candidate],
    account: Account,
    show: Callable[[ImproveRecord], None],
) -> ImproveRecord:
    """Try ``candidates`` within the rest of the budget and return the record, which is also written to the folder.

    Step times are scaled to the samples of the first setting's run. ``show`` is called with each new record.
    """
    return _Search(cells, calls, candidates, account, show).run()


class _Search:
    """One search. It makes the runs that its ``Searcher`` requests, and writes the record before each of them."""

    def __init__(
        self,
        cells: Cells,
        calls: CellCalls,
        candidates: Sequence[Candidate],
        account: Account,
        show: Callable[[ImproveRecord], None],
    ) -> None:
        assert calls.first_record is not None
        self._cells = cells
        self._calls = calls
        self._first_record = calls.first_record
        self._account = account
        self._show = show
        self._budget_s = account.request.budget_s - account.baseline_s
        self._searcher = Searcher(
            candidates,
            budget_s=self._budget_s,
            time=self._time_setting,
            check=self._check_numerics,
            accept_numerics=account.request.accept_numerics,
            machine_spread=known_spread(self._first_record.environment),
        )

    def run(self) -> ImproveRecord:
        """Search until the searcher is done or the user interrupts it; return the record."""
        account = self._account
        try:
            ended = self._searcher.improve()
        except Interrupted as interruption:
            ended = "interrupted"
            # A run that was ended from outside has a reason; an interruption by the user has none.
            has_reason = bool(interruption.args)
            if has_reason:
                notes = [*account.notes, f"interrupted: {interruption}"]
                account = replace(account, notes=notes)
        return self._write(ended, account)

    def _write(self, ended: Ended, account: Account) -> ImproveRecord:
        """Write, show and return the current record."""
        cells = self._cells
        record = account.record(
            self._searcher, ended, len(cells.requested), len(cells.shared)
        )
        record.write(cells.folder.path / IMPROVE_FILE)
        self._show(record)
        return record

    def _prepare_run(self) -> None:
        """Write the record, because the run may be killed, and limit the run to the rest of the budget."""
        self._write("unfinished", self._account)
        self._cells.left_s = self._budget_s - self._searcher.spent_s

    def _time_setting(self, options: Mapping[str, str], number: int) -> TimedRun:
        """Run the setting for the ``number``-th time; its memory is planned only if no earlier run has fitted."""
        self._prepare_run()
        cell = self._calls.time(options, number)
        if setting_of(cell) in self._cells.fitted:
            cell = self._calls.time(options, number, has_fitted=True)
        return self._cells.result(cell).timed_run(self._first_record)

    def _check_numerics(self, comparison: PairedComparison) -> NumericsCheck:
        self._prepare_run()
        free_batch = self._account.request.global_batch == "free"
        return _compare_numerics(self._cells, self._calls, comparison, free_batch)


def _compare_numerics(
    cells: Cells, calls: CellCalls, comparison: PairedComparison, free_batch: bool
) -> NumericsCheck:
    """Run both settings of ``comparison`` with recorded losses and gradients, and compare these.

    ``free_batch`` is whether the user allows another global batch.
    """
    finished_a = _run_check(cells, calls, comparison.a_options)
    finished_b = _run_check(cells, calls, comparison.b_options)
    took_s = finished_a.took_s + finished_b.took_s
    try:
        record_a, record_b = finished_a.record, finished_b.record
    except NoSteps as error:
        return NumericsCheck(
            is_tolerated=None, took_s=took_s, reason=f"its numbers are unknown: {error}"
        )
    first_record = None
    if comparison.a_options:
        # The first setting has run for the check of the first accepted change, so this only reads its record.
        with suppress(NoSteps):
            first_record = cells.result(calls.check({})).record
    may_change = comparison.candidate.may_change
    return replace(
        check_numbers(record_a, record_b, may_change, free_batch, first_record),
        took_s=took_s,
    )


def _run_check(
    cells: Cells, calls: CellCalls, options: Mapping[str, str]
) -> FinishedCell:
    finished = cells.result(calls.check(options))
    cells.left_s -= finished.took_s
    return finished


# -- processes and display ---------------------------------------------------------------------------------------------


class Runner:
    """Runs one cell at a time until it is interrupted.

    Cells of one setting share a compile cache: first steps are not compared here, and compilation takes minutes.
    """

    def __init__(
        self, folder: SweepFolder, processes: CellProcesses, display: ImproveDisplay
    ) -> None:
        self._folder = folder
        self._processes = processes
        self._display = display
        self._caches = folder.path / "compile_caches"
        # a call that was killed may have left files
        shutil.rmtree(self._caches, ignore_errors=True)
        self._schedule: Schedule | None = None
        self.interrupted = False

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._caches, ignore_errors=True)

    def __call__(self, cell: Cell, limit_s: float) -> None:
        """Run ``cell`` for at most ``limit_s`` seconds, with a compile cache for its setting."""
        self._raise_if_interrupted()
        cache = self._caches / setting_of(cell)
        self._schedule = Schedule(
            self._folder.path,
            [cell],
            self._processes,
            self._display,
            timeout_s=round(limit_s, 1),
            environment=own_compile_cache(cache),
        )
        self._schedule.run()
        outcome = read_outcome(self._folder.path, cell.id)
        if outcome is None or outcome.status != "ok":
            # A half-written file would make the next cell fail.
            shutil.rmtree(cache, ignore_errors=True)
        self._raise_if_interrupted()

    def interrupt(self) -> None:
        """Stop the search once the run in progress has ended."""
        self.interrupted = True
        if self._schedule is not None:
            self._schedule.interrupted = True

    def _raise_if_interrupted(self) -> None:
        if self.interrupted:
            raise Interrupted


class ImproveDisplay(LineDisplay):
    """Shows the progress of the search in ``folder``."""

    def __init__(
        self,
        folder: Path,
        budget_s: float,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(folder, console, clock)
        self._budget_s = budget_s
        self._elapsed_s = 0.0
        self._shown_changes: list[Tried] = []

    def show(self, record: ImproveRecord) -> None:
        """Print a line for each comparison that has ended since the last call."""
        self._elapsed_s = record.elapsed_s
        ended_comparisons = []
        for tried in record.tried:
            if tried.verdict is not None and tried.verdict != "REFUSED":
                ended_comparisons.append(tried)
        for tried in ended_comparisons:
            if tried not in self._shown_changes:
                self.print_line(f"[{self.progress()}] {_tried_text(tried)}")
        self._shown_changes = ended_comparisons
        self.tick()

    def cell_ends(self, cell: Cell, outcome: CellOutcome) -> None:
        """Print how a cell ended, unless it succeeded or its call was wrong."""
        if outcome.status != "ok" and outcome.exit_code != WRONG_CALL:
            line = f"{outcome.status:<8} {cell.id}"
            if outcome.reason:
                line += f"  {outcome.reason}"
            self.print_line(line)
        super().cell_ends(cell, outcome)

    def progress(self) -> str:
        return f"{duration_text(self._elapsed_s)} of {duration_text(self._budget_s)}"


def _tried_text(tried: Tried) -> str:
    """Return a line about one change: its verdict, what it saved, and whether it is kept."""
    text = f"{tried.name}: {verdict_text(tried)}"
    if tried.saved_s is not None:
        text += f"; saved {saved_text(tried)} ms"
        if tried.a_s is not None:
            text += (
                f" of {duration_text(tried.a_s)} in {count_text(tried.pairs, 'pair')}"
            )
    if tried.why:
        text += f"; {tried.why}"
    return text
