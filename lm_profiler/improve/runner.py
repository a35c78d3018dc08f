"""Runs the cells of a search, one at a time."""

from __future__ import annotations

import shutil
import time

from lm_profiler.improve.calls import setting_of
from lm_profiler.improve.cells import Interrupted
from lm_profiler.improve.display import ImproveDisplay
from lm_profiler.processes.cells import CellServer
from lm_profiler.record.sweep import Cell, read_outcome
from lm_profiler.sweep.folder import SweepFolder
from lm_profiler.sweep.schedule import Schedule, own_compile_cache

_LOOK_S = 0.5
"""Between two looks whether somebody has interrupted."""


class Runner:
    """Runs one cell at a time, for as long as nobody interrupts.

    Cells of one setting share what they compile: no first step is compared here, and compiling takes minutes.
    """

    def __init__(self, folder: SweepFolder, server: CellServer, display: ImproveDisplay) -> None:
        self._folder, self._server, self._display = folder, server, display
        self._caches = folder.path / "compile_caches"
        shutil.rmtree(self._caches, ignore_errors=True)  # of a call that was killed
        self._schedule: Schedule | None = None
        self.interrupted = False

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing of what was compiled."""
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
        if outcome is None or outcome.status != "ok":  # what is half written there would fail the next one
            shutil.rmtree(setting, ignore_errors=True)
        if self.interrupted:
            raise Interrupted

    def pause(self, seconds: float) -> None:
        """Until memory that others hold may be free again."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0.0:
            if self.interrupted:
                raise Interrupted
            time.sleep(min(left_s, _LOOK_S))
            self._display.tick()

    def interrupt(self) -> None:
        """Let the cell end, and begin no other."""
        self.interrupted = True
        if self._schedule is not None:
            self._schedule.interrupted = True
