"""Run the cells of a search, one at a time, and show how it goes on."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lm_profiler.improve.cell_calls import setting_of
from lm_profiler.improve.cells import Interrupted
from lm_profiler.processes.fork_server import CellServer
from lm_profiler.record.calls import WRONG_CALL
from lm_profiler.record.improve import ImproveRecord, Tried
from lm_profiler.record.quantities import counted, duration_text
from lm_profiler.record.sweep import Cell, CellOutcome, read_outcome
from lm_profiler.report.run.improve_table import improve_table, saved_text, verdict_text
from lm_profiler.report.tables.table import Table
from lm_profiler.sweep.display import LiveDisplay, stage_of
from lm_profiler.sweep.outcome import OUTPUT_FILE
from lm_profiler.sweep.schedule import Schedule, own_compile_cache
from lm_profiler.sweep.sweep_folder import SweepFolder


class ImproveDisplay(LiveDisplay):
    """Shows how a search goes on.

    Args:
        folder: The improvement's folder, which holds the output of running cells.
        budget_s: Seconds for all runs.
    """

    def __init__(
        self,
        folder: Path,
        budget_s: float,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(console, clock)
        self._folder, self._budget_s = folder, budget_s
        self._record: ImproveRecord | None = None
        self._running: tuple[Cell, float] | None = None
        self._told: list[Tried] = []

    def tell(self, record: ImproveRecord) -> None:
        """Show the state of the search."""
        self._record = record
        done = [tried for tried in record.tried if tried.verdict is not None and tried.verdict != "REFUSED"]
        if not self._console.is_terminal:
            for tried in (of for of in done if of not in self._told):
                self._say(f"[{duration_text(record.elapsed_s)} of {duration_text(self._budget_s)}] {tried_text(tried)}")
        self._told = done
        self.tick()

    def began(self, cell: Cell, device: str | None) -> None:
        self._running = cell, self._clock()
        self.tick()

    def ended(self, cell: Cell, outcome: CellOutcome) -> None:
        self._running = None
        if outcome.status != "ok" and outcome.exit_code != WRONG_CALL and not self._console.is_terminal:
            self._say(f"{outcome.status:<8} {cell.id}" + (f"  {outcome.reason}" if outcome.reason else ""))
        self.tick()

    def _table(self) -> Table:
        table = Table() if self._record is None else improve_table(self._record)
        return replace(table, below=[*table.below, *self._running_text()])

    def _running_text(self) -> list[str]:
        if self._running is None:
            return []
        cell, since = self._running
        return [f"{stage_of(self._folder / cell.id / OUTPUT_FILE)}: {cell.id}, {duration_text(self._clock() - since)}"]


def tried_text(tried: Tried) -> str:
    """Return one change as a line: what it saved, and whether it is kept."""
    of = f" of {duration_text(tried.a_s)} in {counted(tried.pairs, 'pair')}" if tried.a_s is not None else ""
    brought = f"; saved {saved_text(tried)} ms{of}" if tried.saved_s is not None else ""
    return f"{tried.name}: {verdict_text(tried)}{brought}" + (f"; {tried.why}" if tried.why else "")


_LOOK_S = 0.5  # seconds between two checks for an interrupt


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
        """Remove the compile caches."""
        shutil.rmtree(self._caches, ignore_errors=True)

    def __call__(self, cell: Cell, limit_s: float) -> None:
        if self.interrupted:
            raise Interrupted
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
        if self.interrupted:
            raise Interrupted

    def pause(self, seconds: float) -> None:
        """Wait for other programs to free memory."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0.0:
            if self.interrupted:
                raise Interrupted
            time.sleep(min(left_s, _LOOK_S))
            self._display.tick()

    def interrupt(self) -> None:
        """Let the running cell end, and begin no other."""
        self.interrupted = True
        if self._schedule is not None:
            self._schedule.interrupted = True
