"""The same cells as jobs of a cluster, through submitit; each job writes its cell's outcome itself."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_profiler.record.sweep import OUTCOME_FILE, Cell, CellOutcome, read_outcome
from lm_profiler.sweep.folder import is_done
from lm_profiler.sweep.outcome import Ended, record_outcome
from lm_profiler.sweep.schedule import GRACE_S, Schedule, Watcher
from lm_profiler.sweep.server import CellServer

_FOLDER = "submitit"
_MARGIN_S = 120.0
"""A job's time beyond its cell's: to start Python, and to let the cell end."""
_POLL_S = 1.0
_BY_ITSELF = {"SLURM_JOB_NAME": "interactive"}
"""Lightning starts a run's ranks itself, as it does everywhere else, where it takes the job for an interactive one."""


class ClusterError(ValueError):
    """The cluster cannot be used so; the message is a line for the terminal."""


class Jobs:
    """The cells of the sweep in ``folder`` as jobs.

    Args:
        folder: The sweep's, seen from every machine under this path.
        server: The program that starts a cell, without fork.
        launcher: A cluster that submitit knows.
        options: Parameters of its executor.
        timeout_s: How long a cell may run.

    Raises:
        ClusterError: submitit is not installed, or does not take these options.
    """

    def __init__(
        self, folder: Path, server: Sequence[str], launcher: str, options: Mapping[str, Any], timeout_s: float
    ) -> None:
        try:
            import submitit
        except ImportError:
            raise ClusterError(
                "launcher: expected submitit to be installed, given none; pip install 'lm_profiler[slurm]'"
            ) from None
        self._folder, self._server, self._timeout_s = folder.resolve(), tuple(server), timeout_s
        minutes = math.ceil((timeout_s + GRACE_S + _MARGIN_S) / 60)
        self._executor = submitit.AutoExecutor(folder=self._folder / _FOLDER, cluster=launcher)
        try:
            self._executor.update_parameters(**{"timeout_min": minutes, "name": folder.name, **options})
        except (NameError, ValueError, TypeError, AssertionError) as error:
            raise ClusterError(f"launcher: {str(error).splitlines()[0][:300]}") from None
        self.interrupted = False
        """Set it, from a signal's handler say, to wait no longer; the jobs go on."""

    def run(self, cells: Sequence[Cell], watcher: Watcher, sleep: Callable[[float], None] = time.sleep) -> None:
        """Submit a job for each of ``cells``, and wait until all have an outcome."""
        for cell in cells:  # what an interrupted try left would be taken for this one's
            (self._folder / cell.id / OUTCOME_FILE).unlink(missing_ok=True)
        with self._executor.batch():
            jobs = [self._executor.submit(run_job, self._folder, cell, self._server, self._timeout_s) for cell in cells]
        waiting = list(zip(cells, jobs, strict=True))
        for cell in cells:
            watcher.began(cell, None)
        while waiting and not self.interrupted:
            for cell, job in list(waiting):
                outcome = self._outcome(cell, job)
                if outcome is not None:
                    waiting.remove((cell, job))
                    watcher.ended(cell, outcome)
            watcher.tick()
            if waiting:
                sleep(_POLL_S)

    def _outcome(self, cell: Cell, job: Any) -> CellOutcome | None:
        done = job.done()  # asked first: an outcome may come between the two questions
        outcome = read_outcome(self._folder, cell.id)
        if outcome is None and done:
            (self._folder / cell.id).mkdir(exist_ok=True)
            outcome = record_outcome(self._folder, cell, self._ended(job.state, job.stderr()))
        return outcome

    def _ended(self, state: str, said: str | None) -> Ended:
        """How a cell ended whose job did not live to tell."""
        if state.startswith("OUT_OF_ME"):
            return Ended(-signal.SIGKILL, 0.0, memory_kills=1)
        if state == "TIMEOUT":
            return Ended(None, 0.0, timeout_s=self._timeout_s)
        lines = (said or "").strip().splitlines()
        return Ended(None, 0.0, lost=f"its job ended as {state}" + (f": {lines[-1][:300]}" if lines else ""))


def run_job(folder: Path, cell: Cell, server: Sequence[str], timeout_s: float) -> None:
    """Run one cell, within its job, unless it is done; of two jobs with the same cell, the second waits."""
    lock = os.open(folder / _FOLDER / f"{cell.id}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_done(folder, cell):
            with CellServer(server, lock) as starter:
                Schedule(folder, [cell], starter, _Nobody(), (None,), timeout_s, _BY_ITSELF).run()
    finally:
        os.close(lock)


class _Nobody:
    """Watches nothing: there is no terminal in a job."""

    def began(self, cell: Cell, device: str | None) -> None: ...

    def ended(self, cell: Cell, outcome: CellOutcome) -> None: ...

    def tick(self) -> None: ...
