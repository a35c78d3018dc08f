"""Run cells, one in each slot, each within its time limit; a failed cell does not stop the others."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lm_profiler.processes.fork_server import CellEnded, CellServer
from lm_profiler.record.sweep import Cell, CellOutcome
from lm_profiler.sweep.outcome import OUTPUT_FILE, Ended, memory_kills, record_outcome
from lm_profiler.sweep.sweep_folder import clear

GRACE_S = 10.0  # seconds between SIGTERM, at which a cell writes its record, and SIGKILL

_REDRAW_S = 0.5

_CACHE = "compile_cache"


def own_compile_cache(own: Path) -> dict[str, str]:
    """Return the variables that give a cell a compile cache of its own, below its folder ``own``, while it runs.

    With a shared cache only the first cell would compile, so that first steps could not be compared, and a file that a
    killed process left half written would fail every later cell. A cache that the user has set is kept.
    """
    folders = {"TORCHINDUCTOR_CACHE_DIR": own / _CACHE, "TRITON_CACHE_DIR": own / _CACHE / "triton"}
    return {} if folders.keys() & os.environ.keys() else {name: str(path.resolve()) for name, path in folders.items()}


class Watcher:
    """Receives the events of a schedule; this one ignores them."""

    def began(self, cell: Cell, device: str | None) -> None:
        """A cell was started."""

    def ended(self, cell: Cell, outcome: CellOutcome) -> None:
        """A cell has its outcome."""

    def tick(self) -> None:
        """Time has passed: redraw what shows it."""


@dataclass
class _Running:
    cell: Cell
    device: str | None
    kills: int
    began: float  # the time at which the process began; before that is known, the time of the request
    # the time of the next signal: SIGTERM, at which the cell may write its record, then SIGKILL
    stop_at: float = math.inf
    asked_to_stop: bool = False
    timed_out: bool = False


class Schedule:
    """Runs ``cells`` in their order, as many at a time as there are ``devices``.

    Args:
        folder: The sweep's folder.
        cells: The cells to run.
        starter: Starts their processes.
        watcher: Is told of each cell's begin and end.
        devices: The CUDA_VISIBLE_DEVICES of each slot's cells; None leaves the variable as it is.
        timeout_s: The time limit of a cell in seconds; None for no limit.
        environment: Variables of every cell, which override those that the schedule sets.
    """

    def __init__(
        self,
        folder: Path,
        cells: Sequence[Cell],
        starter: CellServer,
        watcher: Watcher,
        devices: Sequence[str | None] = (None,),
        timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._starter, self._watcher = folder, starter, watcher
        self._waiting, self._free = deque(cells), deque(devices)
        self._running: dict[str, _Running] = {}
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._environment, self._clock = environment or {}, clock
        self.interrupted = False
        """A signal handler sets this: running cells are asked to end, and no other cell begins."""

    def run(self) -> None:
        """Run until every cell has an outcome, or, after an interrupt, until the running cells have ended.

        Raises:
            ServerError: no process can be started at all.
        """
        while self._running or (self._waiting and not self.interrupted):
            while self._waiting and self._free and not self.interrupted:
                self._begin(self._waiting.popleft(), self._free.popleft())
            for event in self._starter.events(self._wait_s()):
                if isinstance(event, CellEnded):
                    self._end(event)
                else:
                    running = self._running[event.cell]
                    running.began = self._clock()
                    running.stop_at = running.began + self._timeout_s
            self._enforce()
            self._watcher.tick()

    def _begin(self, cell: Cell, device: str | None) -> None:
        own = clear(self._folder, cell)
        self._running[cell.id] = _Running(cell, device, memory_kills(), self._clock())
        visible = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        environment = {**own_compile_cache(own), **self._environment, **visible}
        self._starter.start(cell.id, cell.arguments, own / OUTPUT_FILE, environment)
        self._watcher.began(cell, device)

    def _end(self, event: CellEnded) -> None:
        running = self._running.pop(event.cell)
        # Compiled kernels of many cells would fill the disk.
        shutil.rmtree(self._folder / event.cell / _CACHE, ignore_errors=True)
        self._free.append(running.device)
        ended = Ended(
            code=event.code,
            duration_s=self._clock() - running.began,
            timeout_s=self._timeout_s if running.timed_out else None,
            memory_kills=memory_kills() - running.kills,
            lost=event.lost,
        )
        self._watcher.ended(running.cell, record_outcome(self._folder, running.cell, ended))

    def _enforce(self) -> None:
        """Signal the cells that are over their limit, and all of them after an interrupt."""
        now = self._clock()
        for running in self._running.values():
            if now < running.stop_at and (running.asked_to_stop or not self.interrupted):
                continue
            # The first signal asks, so that the record is written; only a cell that ignores it is killed.
            running.timed_out |= not (self.interrupted or running.asked_to_stop)
            self._starter.signal(running.cell.id, signal.SIGKILL if running.asked_to_stop else signal.SIGTERM)
            running.asked_to_stop, running.stop_at = True, now + GRACE_S

    def _wait_s(self) -> float:
        """Return the seconds until a cell's limit or the next redraw."""
        return max(min([_REDRAW_S, *(running.stop_at - self._clock() for running in self._running.values())]), 0.0)
