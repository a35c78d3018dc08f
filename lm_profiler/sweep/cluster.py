"""Run the cells of a sweep as jobs of a cluster, through submitit. Each job writes the outcome of its cell."""

from __future__ import annotations

import fcntl
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lm_profiler.processes.fork_server import CellServer
from lm_profiler.record.calls import require
from lm_profiler.record.sweep import OUTCOME_FILE, Cell, CellOutcome, read_outcome
from lm_profiler.sweep.outcome import Ended, record_outcome
from lm_profiler.sweep.request import Request
from lm_profiler.sweep.schedule import GRACE_S, Schedule, Watcher
from lm_profiler.sweep.sweep_folder import is_done
from lm_profiler.usage_error import UsageError

_FOLDER = "submitit"
_MARGIN_S = 120.0  # seconds of a job beyond the limit of its cell: to start Python, and to let the cell end

_POLL_S = 1.0
# makes Lightning start a run's ranks itself: in other jobs of SLURM it waits for srun to start them
_INTERACTIVE = {"SLURM_JOB_NAME": "interactive"}


class Jobs:
    """The ``cells`` of the sweep in ``folder`` as jobs.

    Args:
        folder: The sweep's folder, which every machine sees under this path.
        cells: The cells to run.
        server: The program that starts a cell, without fork.
        watcher: Is told of each cell's begin and end.
        request: The sweep's options, with the launcher, its own options and the time limit of a cell.

    Raises:
        UsageError: submitit does not take these options.
        MissingExtra: submitit is not installed.
    """

    def __init__(
        self,
        folder: Path,
        cells: Sequence[Cell],
        server: Sequence[str],
        watcher: Watcher,
        request: Request,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder, self._cells, self._server = folder.resolve(), cells, tuple(server)
        self._watcher, self._sleep, self._timeout_s = watcher, sleep, request.timeout_s or 0.0
        self._executor = _executor(self._folder, request)
        self._here = request.launcher != "slurm"
        self.interrupted = False
        """A signal handler sets this to stop waiting; the jobs go on."""

    def run(self) -> None:
        """Submit a job for each cell, and wait until all have an outcome.

        Jobs on this machine run one after the other: side by side they would disturb each other's times.
        """
        for cell in self._cells:  # an outcome of an interrupted sweep would be taken for this job's
            (self._folder / cell.id / OUTCOME_FILE).unlink(missing_ok=True)
        left, at_once = deque(self._cells), 1 if self._here else len(self._cells)
        waiting: list[tuple[Cell, Any]] = []
        while (left or waiting) and not self.interrupted:
            if left and not waiting:
                waiting = self._submit([left.popleft() for _ in range(at_once)])
            for cell, running in [pair for pair in waiting if pair[1].done()]:
                waiting.remove((cell, running))
                self._watcher.ended(cell, self._outcome(cell, running))
            self._watcher.tick()
            if waiting:
                self._sleep(_POLL_S)

    def _submit(self, cells: Sequence[Cell]) -> list[tuple[Cell, Any]]:
        job = partial(self._executor.submit, run_job, self._folder)
        with self._executor.batch():
            waiting = [(cell, job(cell, self._server, self._timeout_s)) for cell in cells]
        for cell in cells:
            self._watcher.began(cell, None)
        return waiting

    def _outcome(self, cell: Cell, job: Any) -> CellOutcome:
        (self._folder / cell.id).mkdir(exist_ok=True)  # the job may have died before it made the folder
        told = read_outcome(self._folder, cell.id)
        return told or record_outcome(self._folder, cell, self._ended(job.state, job.stderr()))

    def _ended(self, state: str, said: str | None) -> Ended:
        """Return how a cell ended whose job wrote no outcome, from the state of the job."""
        if state.startswith("OUT_OF_ME"):
            return Ended(-signal.SIGKILL, 0.0, memory_kills=1)
        if state == "TIMEOUT":
            return Ended(None, 0.0, timeout_s=self._timeout_s)
        lines = (said or "").strip().splitlines()
        return Ended(None, 0.0, lost=f"its job ended as {state}" + (f": {lines[-1][:300]}" if lines else ""))


def _executor(folder: Path, request: Request) -> Any:
    require("submitit", "launcher")
    import submitit

    minutes = math.ceil(((request.timeout_s or 0.0) + GRACE_S + _MARGIN_S) / 60)
    try:
        executor = submitit.AutoExecutor(folder=folder / _FOLDER, cluster=request.launcher)
        executor.update_parameters(**{"timeout_min": minutes, "name": request.name, **request.cluster})
    except RuntimeError as error:
        raise UsageError(
            f"launcher: expected a machine of the cluster, given another ({error}); try --launcher local"
        ) from None
    except (NameError, ValueError, TypeError, AssertionError) as error:
        raise UsageError(f"launcher: {str(error).splitlines()[0][:300]}") from None
    return executor


def run_job(folder: Path, cell: Cell, server: Sequence[str], timeout_s: float) -> None:
    """Run one cell within its job, unless it is done; a second job of the same cell waits for the first."""
    # After Ctrl-C the jobs go on, and the same call may submit their cells once more.
    with (folder / _FOLDER / f"{cell.id}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_done(folder, cell):
            with CellServer(server, lock.fileno()) as starter:
                Schedule(folder, [cell], starter, Watcher(), (None,), timeout_s, _INTERACTIVE).run()
