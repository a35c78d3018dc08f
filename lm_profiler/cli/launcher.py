"""The ranks that Lightning starts: as commands of their own, or by multiprocessing (ddp_spawn, ddp_fork, …)."""

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
from lm_profiler.cli.quiet import quiet
from lm_profiler.cli.run_context import RunContext
from lm_profiler.cli.watchdog import Watchdog, watched
from lm_profiler.lightning_names import LAUNCHED_BY, LAUNCHER, RUNS_RANK, START_METHOD
from lm_profiler.record.calls import INTERRUPTED
from lm_profiler.usage_error import UsageError

_PATIENCE_S = 20.0
"""All ranks that were asked to end have so long to keep what they have."""

_LEAVING_S = 5.0
"""Where a run is over, the ranks that it started have so long to end by themselves."""


class Launcher(LAUNCHER.as_base()):  # type: ignore[misc]  # whose type is known when it is there
    """Lightning's launcher by multiprocessing, whose ranks end as those do that run the command line.

    Lightning tells callbacks of an error where the launcher was called, which here is a process without a run. And a
    rank that is interrupted ends as one that went well does, so that its launcher waits for ever for its results.
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
        """Exit codes of the ranks of this node that had ended badly when the others were asked to; on all of them."""
        strategy = self._ranks_of
        first = strategy.node_rank * strategy.num_processes
        return {first + index: code for index, code in enumerate(self._codes) if code}

    @property
    def procs(self) -> list[Any]:  # Lightning sets it once all have begun
        """The processes of the ranks that this one has started."""
        return self._procs

    @procs.setter
    def procs(self, processes: list[Any]) -> None:
        self._procs = processes
        for process in processes:  # torch terminates those that are left once it has seen one fail
            process.terminate = partial(self._terminate, process.terminate)

    def _terminate(self, terminate: Callable[[], None]) -> None:
        """Let a rank know first of what it is to end: SIGTERM alone reads as if somebody had stopped the run."""
        for index, process in enumerate(self._procs):
            self._codes[index] = process.exitcode or 0
        terminate()

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Run the ranks.

        Raises:
            UsageError: a rank found the call wrong.
            KeyboardInterrupt: a rank was interrupted.
            SystemExit: a rank has ended, and told why.
            ProcessException: a rank has ended without a word.
        """
        count = getattr(self._ranks_of, "num_processes", 1)
        self._codes = get_context(self._method).RawArray("i", count)  # which its ranks inherit
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
                for number in (signal.SIGTERM, signal.SIGINT):  # others that ask this rank to end: it does
                    signal.signal(number, signal.SIG_IGN)
                if trainer is not None and context.profiler is not None:
                    context.profiler.on_exception(trainer, trainer.lightning_module, error)
                if context.is_refusal(error):
                    raise
                sys.exit(context.failed(error) if isinstance(error, Exception) else context.ended(error))
            finally:
                leave_group()


def take_over(trainer: Trainer, context: RunContext) -> None:
    """Have ``trainer`` start the ranks of ``context`` by ``Launcher``, if it starts them by multiprocessing at all."""
    strategy, launcher = trainer.strategy, trainer.strategy.launcher
    method = START_METHOD.of_or(launcher)
    if type(launcher) is LAUNCHER.find_or(None) and method is not None and RUNS_RANK.of_or(launcher) is not None:
        setattr(strategy, LAUNCHED_BY.name, Launcher(strategy, method, context))


def raised(text: str) -> str:
    """The message of the error whose traceback ``text`` ends with."""
    lines = text.rstrip().splitlines()
    last_frame = max((at for at, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return "\n".join(lines[last_frame + 1 :]).partition(": ")[2]


def leave_group() -> None:
    """Leave the other ranks. Gloo's threads, left running, may abort a process that ends (pytorch issue 190489)."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def rank_commands(trainer: Trainer | None) -> list[subprocess.Popen[bytes]]:
    """The ranks that Lightning started as commands of their own."""
    launcher = trainer.strategy.launcher if trainer is not None else None
    return [child for child in getattr(launcher, "procs", []) if isinstance(child, subprocess.Popen)]


def end_ranks(trainer: Trainer | None) -> None:
    """Let the ranks that Lightning started end, and end those that do not."""
    launcher = trainer.strategy.launcher if trainer is not None else None
    processes = getattr(launcher, "procs", [])
    children = list(processes)
    processes.clear()  # Lightning's observer kills this process too once it sees one of them fail
    try:
        for child in children:
            _wait(child, _LEAVING_S)
    finally:
        for child in children:
            child.kill()
            _wait(child)


def _wait(child: subprocess.Popen[bytes] | BaseProcess, timeout: float | None = None) -> None:
    if isinstance(child, BaseProcess):  # of ddp_spawn, ddp_fork, ddp_notebook
        child.join(timeout)
        return
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout)
