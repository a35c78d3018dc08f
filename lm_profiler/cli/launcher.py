"""Start and end the ranks that Lightning launches, by commands or by multiprocessing (ddp_spawn, ddp_fork, …)."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from lightning.pytorch import Trainer
from torch import distributed
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lm_profiler.cli.endings import handled, terminate
from lm_profiler.cli.run_context import RunContext
from lm_profiler.cli.surroundings import quiet
from lm_profiler.cli.watchdog import Watchdog, watched
from lm_profiler.lightning_names import LAUNCHED_BY, LAUNCHER, RUNS_RANK, START_METHOD
from lm_profiler.record.calls import INTERRUPTED
from lm_profiler.usage_error import UsageError

_PATIENCE_S = 20.0  # seconds that all ranks together have to write their records after SIGTERM, before they are killed

_LEAVING_S = 5.0  # seconds that each rank has to end by itself once the run of this process is over


class Launcher(LAUNCHER.as_base()):  # type: ignore[misc]  # a private class, looked up at run time
    """Lightning's multiprocessing launcher with ranks that end as ranks of the command line do.

    Lightning calls ``on_exception`` in the process that called the launcher, where no step runs. And a rank that is
    interrupted ends with exit code 0, so that Lightning's launcher waits for ever for its results.
    """

    def __init__(
        self, strategy: Any, start_method: Literal["spawn", "fork", "forkserver"], context: RunContext | None = None
    ) -> None:
        self._codes: Any = ()
        super().__init__(strategy, start_method)
        self._method, self._ranks_of = start_method, strategy
        self._context = context

    @property
    def codes(self) -> dict[int, int]:
        """The exit codes of this node's failed ranks at the moment when the other ranks were asked to end."""
        strategy = self._ranks_of
        first = strategy.node_rank * strategy.num_processes
        return {first + index: code for index, code in enumerate(self._codes) if code}

    @property
    def procs(self) -> list[Any]:  # Lightning sets it once all have begun
        """The processes of the ranks that this process has started."""
        return self._procs

    @procs.setter
    def procs(self, processes: list[Any]) -> None:
        self._procs = processes
        for process in processes:  # torch terminates all others once one has failed
            process.terminate = partial(self._terminate, process.terminate)

    def _terminate(self, terminate: Callable[[], None]) -> None:
        """Publish the exit codes before SIGTERM, so that a rank does not take the signal for a user's interrupt."""
        for index, process in enumerate(self._procs):
            self._codes[index] = process.exitcode or 0
        terminate()

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Run the ranks.

        Raises:
            UsageError: a rank found the call wrong.
            KeyboardInterrupt: a rank was interrupted.
            SystemExit: a rank has ended and recorded why.
            ProcessException: a rank has ended without a record.
        """
        count = getattr(self._ranks_of, "num_processes", 1)
        self._codes = get_context(self._method).RawArray("i", count)  # in memory that the ranks share
        try:
            return super().launch(*args, **kwargs)
        except KeyboardInterrupt:
            self._ask_to_end()
            raise
        except ProcessRaisedException as error:
            raise UsageError(raised(str(error))) from error
        except ProcessExitedException as error:
            if error.exit_code == INTERRUPTED:
                raise KeyboardInterrupt from error
            if error.exit_code > 0 and self._context is not None and self._context.record is not None:
                raise SystemExit(error.exit_code) from error
            raise

    def _ask_to_end(self) -> None:
        self.kill(signal.SIGTERM)
        until = time.monotonic() + _PATIENCE_S
        for process in self.procs:
            process.join(max(until - time.monotonic(), 0.0))

    def _wrapping_function(self, process_idx: int, trainer: Trainer | None, *args: Any) -> None:
        assert self._context is not None
        strategy = self._ranks_of
        context = self._context.of_rank(strategy.node_rank * strategy.num_processes + process_idx)
        with quiet(), handled({signal.SIGTERM: terminate}), watched(Watchdog(context, list)):
            try:
                super()._wrapping_function(process_idx, trainer, *args)
            except BaseException as error:
                for number in (signal.SIGTERM, signal.SIGINT):  # this rank is ending already
                    signal.signal(number, signal.SIG_IGN)
                if trainer is not None and context.profiler is not None:
                    context.profiler.on_exception(trainer, trainer.lightning_module, error)
                if context.is_refusal(error):
                    raise
                sys.exit(context.failed(error) if isinstance(error, Exception) else context.ended(error))
            finally:
                leave_group()


def take_over(trainer: Trainer, context: RunContext) -> None:
    """Replace ``trainer``'s multiprocessing launcher, if it has one, by ``Launcher`` for the ranks of ``context``."""
    strategy, launcher = trainer.strategy, trainer.strategy.launcher
    method = START_METHOD.of_or(launcher)
    if type(launcher) is LAUNCHER.find_or(None) and method is not None and RUNS_RANK.of_or(launcher) is not None:
        setattr(strategy, LAUNCHED_BY.name, Launcher(strategy, method, context))


def raised(text: str) -> str:
    """Return the error message at the end of the traceback ``text``."""
    lines = text.rstrip().splitlines()
    last_frame = max((at for at, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return "\n".join(lines[last_frame + 1 :]).partition(": ")[2]


def leave_group() -> None:
    """Destroy the process group: Gloo's threads may abort a process that ends before them (pytorch issue 190489)."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def rank_commands(trainer: Trainer | None) -> list[subprocess.Popen[bytes]]:
    """Return the ranks that Lightning started as commands."""
    launcher = trainer.strategy.launcher if trainer is not None else None
    return [child for child in getattr(launcher, "procs", []) if isinstance(child, subprocess.Popen)]


def end_ranks(trainer: Trainer | None) -> None:
    """Wait for the ranks that Lightning started, and kill those that do not end."""
    launcher = trainer.strategy.launcher if trainer is not None else None
    processes = getattr(launcher, "procs", [])
    children = list(processes)
    processes.clear()  # otherwise Lightning's observer kills this process too once one of them fails
    try:
        for child in children:
            _wait(child, _LEAVING_S)
    finally:
        for child in children:
            child.kill()
            _wait(child)


def _wait(child: subprocess.Popen[bytes] | BaseProcess, timeout: float | None = None) -> None:
    if isinstance(child, BaseProcess):  # a rank of ddp_spawn, ddp_fork or ddp_notebook
        child.join(timeout)
        return
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout)
