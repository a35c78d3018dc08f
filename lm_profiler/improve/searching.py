"""Drive a search: run the cells that answer its questions, write the record after each answer, show its progress."""

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
from lm_profiler.improve.cells import CellCalls, Cells, Interrupted, NoSteps, setting_of
from lm_profiler.improve.decision import Checked, Compared, Ran
from lm_profiler.improve.search import Searcher
from lm_profiler.improve.tolerance import checked_numbers
from lm_profiler.processes.fork_server import CellServer
from lm_profiler.record.calls import WRONG_CALL
from lm_profiler.record.improve_record import IMPROVE_FILE, Ended, Final, ImproveRecord, Numerics, Tried
from lm_profiler.record.process_spread import known_spread
from lm_profiler.record.quantities import counted, duration_text
from lm_profiler.record.sweep_files import Cell, CellOutcome, read_outcome
from lm_profiler.report.run.improve_table import saved_text, verdict_text
from lm_profiler.sweep.display import LineDisplay
from lm_profiler.sweep.schedule import Schedule, own_compile_cache
from lm_profiler.sweep.sweep_folder import SweepFolder

_SHARED = (
    "{} of {} runs shared the machine with other programs: their steps count without the time that they waited for a "
    "CPU, and the search needs more pairs than on a quiet machine"
)

_COPIED = ("pairs", "a_s", "b_s", "verdict", "accepted", "why")


@dataclass(frozen=True)
class Account:
    """The parts of an improvement's record that do not change during the search."""

    request: ImproveRequest  # the options of the call
    started: str  # when the improvement first began
    look_s: float = 0.0  # seconds that the first setting's own run took
    refused: Sequence[Candidate] = ()  # changes that are not tried
    notes: Sequence[str] = ()  # notes that hold for any result

    def record(self, search: Searcher | None, ended: Ended, runs: int, shared: int = 0) -> ImproveRecord:
        """Return the current record. ``shared`` counts the ``runs`` during which something else used the machine."""
        results: dict[str, Any] = {}
        if search is not None:
            results["first_s"] = None if search.first is None else search.first.seconds
            results["options"], results["left"] = dict(search.options), [candidate.name for candidate in search.left]
            results["final"] = None if search.last is None else _final(search.last)
        tried = [] if search is None else [_tried(compared) for compared in search.tried]
        refused = [Tried(**_fields(one), verdict="REFUSED", why=one.refused) for one in self.refused]
        return ImproveRecord(
            name=self.request.name,
            command=self.request.command,
            started=self.started,
            budget_s=self.request.budget_s,
            elapsed_s=self.look_s + (0.0 if search is None else search.spent_s),
            ended=ended,
            tried=[*tried, *refused],
            runs=runs,
            **results,
            notes=[*self.notes, *([_SHARED.format(shared, runs)] if shared else [])],
        )


def _fields(candidate: Candidate) -> dict[str, Any]:
    return {**vars(candidate), "options": dict(candidate.options)}  # a record ignores what is not its own


def _tried(compared: Compared) -> Tried:
    facts: dict[str, Any] = {name: getattr(compared, name) for name in _COPIED}
    facts |= dict(zip(("saved_s", "low_s", "high_s"), compared.saved_s or (), strict=False))
    checked = compared.checked
    if checked is not None:
        loss = checked.loss if checked.loss is not None and isfinite(checked.loss) else None
        facts["numerics"] = Numerics(loss=loss, gradients=checked.gradients, within=checked.within)
    return Tried(**_fields(compared.candidate), **facts, a_bytes=_bytes(compared.a), b_bytes=_bytes(compared.b))


def _final(last: Compared) -> Final | None:
    """Return the comparison of the first and the final setting; None if too few of its runs succeeded."""
    if (interval := last.interval) is None or last.a_s is None or last.b_s is None:
        return None
    return Final(
        pairs=last.pairs,
        first_s=last.a_s,
        final_s=last.b_s,
        ratio=1.0 / interval.ratio,
        low=1.0 / interval.high,
        high=1.0 / interval.low,
        first_bytes=_bytes(last.a),
        final_bytes=_bytes(last.b),
    )


def _bytes(runs: Sequence[Ran]) -> int | None:
    """Return the median of the runs' peak bytes; None where none is known."""
    known = [run.memory_bytes for run in runs if run.memory_bytes is not None]
    return round(median(known)) if known else None


# -- questions and answers ---------------------------------------------------------------------------------------------


def search(
    cells: Cells,
    calls: CellCalls,
    candidates: Sequence[Candidate],
    account: Account,
    tell: Callable[[ImproveRecord], None],
) -> ImproveRecord:
    """Try ``candidates`` within the rest of the budget and return the record, which is also written to the folder.

    Steps are scaled to the samples of the first setting's own run; ``tell`` gets the record after each answer.
    """
    request, first = account.request, calls.first
    assert first is not None

    def write(ended: Ended) -> ImproveRecord:
        record = account.record(searching, ended, len(cells.asked), len(cells.shared))
        record.write(cells.folder.path / IMPROVE_FILE)
        tell(record)
        return record

    def before_a_run() -> None:  # which may be killed
        write("unfinished")
        cells.left_s = request.budget_s - account.look_s - searching.spent_s

    def time_setting(options: Mapping[str, str], number: int) -> Ran:
        before_a_run()
        fitted = setting_of(calls.time(options, number)) in cells.fitted
        return cells.done(calls.time(options, number, fitted)).ran(first)

    def check(compared: Compared) -> Checked:
        before_a_run()
        return _checked(cells, calls, compared, request.global_batch == "free")

    left_s, known = request.budget_s - account.look_s, known_spread(first.environment)
    searching = Searcher(candidates, left_s, time_setting, check, request.accept_numerics, known)
    try:
        return write(searching.improve())
    except Interrupted as why:
        if why.args:
            account = replace(account, notes=[*account.notes, f"interrupted: {why}"])
        return write("interrupted")


def _checked(cells: Cells, calls: CellCalls, compared: Compared, free_batch: bool) -> Checked:
    sides = []
    for options in (compared.a_options, compared.b_options):
        sides.append(cells.done(calls.check(options)))
        cells.left_s -= sides[-1].took_s
    took_s = sum(side.took_s for side in sides)
    try:
        a, b = (side.record for side in sides)
    except NoSteps as error:
        return Checked(None, took_s, why=f"its numbers are unknown: {error}")
    base = None
    with suppress(NoSteps):  # the first winner was compared with it: no further run
        base = cells.done(calls.check({})).record if compared.a_options else None
    return replace(checked_numbers(a, b, compared.candidate.may_change, free_batch, base), took_s=took_s)


# -- processes and display ---------------------------------------------------------------------------------------------


class Runner:
    """Runs one cell at a time until it is interrupted.

    Cells of one setting share a compile cache: first steps are not compared here, and compilation takes minutes.
    """

    def __init__(self, folder: SweepFolder, server: CellServer, display: ImproveDisplay) -> None:
        self._folder, self._server, self._display = folder, server, display
        self._caches = folder.path / "compile_caches"
        shutil.rmtree(self._caches, ignore_errors=True)  # a call that was killed may have left files
        self._schedule: Schedule | None = None
        self.interrupted = False

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._caches, ignore_errors=True)

    def __call__(self, cell: Cell, limit_s: float) -> None:
        self._raise_if_interrupted()
        setting = self._caches / setting_of(cell)
        self._schedule = Schedule(
            self._folder.path,
            [cell],
            self._server,
            self._display,
            timeout_s=round(limit_s, 1),
            environment=own_compile_cache(setting),
        )
        self._schedule.run()
        outcome = read_outcome(self._folder.path, cell.id)
        if outcome is None or outcome.status != "ok":  # a half-written file would fail the next cell
            shutil.rmtree(setting, ignore_errors=True)
        self._raise_if_interrupted()

    def interrupt(self) -> None:
        """Let the running cell end, and begin no other."""
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
        self._budget_s, self._elapsed_s, self._told = budget_s, 0.0, list[Tried]()

    def tell(self, record: ImproveRecord) -> None:
        """Print a line for each comparison that has ended since the last call."""
        self._elapsed_s = record.elapsed_s
        done = [tried for tried in record.tried if tried.verdict is not None and tried.verdict != "REFUSED"]
        for tried in (of for of in done if of not in self._told):
            self._say(f"[{self.progress()}] {_tried_text(tried)}")
        self._told = done
        self.tick()

    def ended(self, cell: Cell, outcome: CellOutcome) -> None:
        if outcome.status != "ok" and outcome.exit_code != WRONG_CALL:
            self._say(f"{outcome.status:<8} {cell.id}" + (f"  {outcome.reason}" if outcome.reason else ""))
        super().ended(cell, outcome)

    def progress(self) -> str:
        return f"{duration_text(self._elapsed_s)} of {duration_text(self._budget_s)}"


def _tried_text(tried: Tried) -> str:
    """Return one change as a line: what it saved, and whether it is kept."""
    of = f" of {duration_text(tried.a_s)} in {counted(tried.pairs, 'pair')}" if tried.a_s is not None else ""
    brought = f"; saved {saved_text(tried)} ms{of}" if tried.saved_s is not None else ""
    return f"{tried.name}: {verdict_text(tried)}{brought}" + (f"; {tried.why}" if tried.why else "")
