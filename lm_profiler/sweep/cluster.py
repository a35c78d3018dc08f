"""Run the cells of a sweep as jobs of a cluster, through submitit. Each job writes the outcome of its cell."""

from __future__ import annotations

import fcntl
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from lm_profiler.processes.fork_server import CellServer
from lm_profiler.record.calls import require
from lm_profiler.record.sweep import OUTCOME_FILE, Cell, CellOutcome, read_outcome
from lm_profiler.sweep.schedule import GRACE_S, Ended, Schedule, Watcher, record_outcome
from lm_profiler.sweep.sweep_folder import is_done
from lm_profiler.sweep.sweep_plan import SweepRequest
from lm_profiler.usage_error import UsageError

_FOLDER = "submitit"
_MARGIN_S = 120.0  # seconds of a job beyond the limit of its cell: to start Python, and to let the cell end
_POLL_S = 1.0
# makes Lightning start a run's ranks itself: in other jobs of SLURM it waits for srun to start them
_INTERACTIVE = {"SLURM_JOB_NAME": "interactive"}


class Jobs:
    """The ``cells`` of the sweep in ``folder``, which every machine sees under this path, as jobs.

    ``server`` is the program that starts a cell, without fork. Setting ``interrupted`` ends the waiting; the jobs go
    on.
    """

    def __init__(
        self,
        folder: Path,
        cells: Sequence[Cell],
        server: Sequence[str],
        watcher: Watcher,
        request: SweepRequest,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder, self._cells, self._server = folder.resolve(), cells, tuple(server)
        self._watcher, self._sleep, self._timeout_s = watcher, sleep, request.timeout_s or 0.0
        self._executor = _executor(self._folder, request)
        self._at_once = len(cells) if request.launcher == "slurm" else 1  # side by side they would disturb each other
        self.interrupted = False

    def run(self) -> None:
        """Submit a job for each cell, and wait until all have an outcome."""
        for cell in self._cells:  # an outcome of an interrupted sweep would be taken for this job's
            (self._folder / cell.id / OUTCOME_FILE).unlink(missing_ok=True)
        left, waiting = deque(self._cells), list[tuple[Cell, Any]]()
        while (left or waiting) and not self.interrupted:
            if not waiting:
                waiting = self._submit([left.popleft() for _ in range(self._at_once)])
            for cell, job in [pair for pair in waiting if pair[1].done()]:
                waiting.remove((cell, job))
                self._watcher.ended(cell, self._outcome(cell, job))
            self._watcher.tick()
            if waiting:
                self._sleep(_POLL_S)

    def _submit(self, cells: Sequence[Cell]) -> list[tuple[Cell, Any]]:
        with self._executor.batch():
            submit = self._executor.submit
            jobs = [submit(run_job, self._folder, cell, self._server, self._timeout_s) for cell in cells]
        for cell in cells:
            self._watcher.began(cell, None)
        return list(zip(cells, jobs, strict=True))

    def _outcome(self, cell: Cell, job: Any) -> CellOutcome:
        """Return the outcome that the job wrote, else what the cluster says of the job."""
        (self._folder / cell.id).mkdir(exist_ok=True)  # the job may have died before it made the folder
        if (told := read_outcome(self._folder, cell.id)) is not None:
            return told
        if job.state.startswith("OUT_OF_ME"):
            ended = Ended(-signal.SIGKILL, 0.0, memory_kills=1)
        elif job.state == "TIMEOUT":
            ended = Ended(None, 0.0, timeout_s=self._timeout_s)
        else:
            lines = (job.stderr() or "").strip().splitlines()
            said = f": {lines[-1][:300]}" if lines else ""
            ended = Ended(None, 0.0, lost=f"its job ended as {job.state}{said}")
        return record_outcome(self._folder, cell, ended)


def _executor(folder: Path, request: SweepRequest) -> Any:
    """Return submitit's executor; UsageError where it does not take the options, MissingExtra where it is missing."""
    require("submitit", "launcher")
    import submitit

    minutes = math.ceil(((request.timeout_s or 0.0) + GRACE_S + _MARGIN_S) / 60)
    options = {f"slurm_{name}": yaml.safe_load(text) for name, text in request.slurm.items()}
    try:
        executor = submitit.AutoExecutor(folder=folder / _FOLDER, cluster=request.launcher)
        executor.update_parameters(**{"timeout_min": minutes, "name": request.name, **options})
    except (RuntimeError, NameError, ValueError, TypeError, AssertionError) as error:
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
