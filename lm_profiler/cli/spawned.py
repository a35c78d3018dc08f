"""Ranks that Lightning starts by multiprocessing (ddp_spawn, ddp_fork, ddp_notebook): they run no command line."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import distributed
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lm_profiler.cli.attempt import Attempt
from lm_profiler.cli.endings import handled, terminate
from lm_profiler.cli.keeper import Keeper, kept
from lm_profiler.cli.quiet import quiet
from lm_profiler.record.calls import INTERRUPTED
from lm_profiler.usage_error import UsageError

_PATIENCE_S = 20.0
"""For all ranks that were asked to end: each keeps what it has."""


class Launcher(_MultiProcessingLauncher):
    """Lightning's, whose ranks end as those do that run the command line.

    Lightning tells callbacks of an error where the launcher was called, which here is a process without a run. And a
    rank that is interrupted ends as one that went well does, so that its launcher waits for ever for its results.
    """

    def __init__(
        self, strategy: Any, start_method: Literal["spawn", "fork", "forkserver"], attempt: Attempt | None = None
    ) -> None:
        self._codes: Any = ()
        super().__init__(strategy, start_method)
        self._attempt = attempt

    @property
    def codes(self) -> dict[int, int]:
        """Exit codes of the ranks of this node that had ended badly when the others were asked to; on all of them."""
        strategy: Any = self._strategy
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
        count = getattr(self._strategy, "num_processes", 1)
        self._codes = get_context(self._start_method).RawArray("i", count)  # which its ranks inherit
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
            if error.exit_code > 0 and self._attempt is not None and self._attempt.record is not None:
                raise SystemExit(error.exit_code) from error
            raise

    def _ask_to_end(self) -> None:
        self.kill(signal.SIGTERM)
        until = time.monotonic() + _PATIENCE_S
        for process in self.procs:
            process.join(max(until - time.monotonic(), 0.0))

    def _wrapping_function(self, process_idx: int, trainer: Trainer | None, *args: Any) -> None:
        assert self._attempt is not None
        strategy: Any = self._strategy
        attempt = self._attempt.of_rank(strategy.node_rank * strategy.num_processes + process_idx)
        with quiet(), handled({signal.SIGTERM: terminate}), kept(Keeper(attempt, list)):
            try:
                super()._wrapping_function(process_idx, trainer, *args)
            except BaseException as error:
                for number in (signal.SIGTERM, signal.SIGINT):  # others that ask this rank to end: it does
                    signal.signal(number, signal.SIG_IGN)
                if trainer is not None and attempt.profiler is not None:
                    attempt.profiler.on_exception(trainer, trainer.lightning_module, error)
                if attempt.is_refusal(error):
                    raise
                sys.exit(attempt.failed(error) if isinstance(error, Exception) else attempt.ended(error))
            finally:
                leave_group()


def take_over(trainer: Trainer, attempt: Attempt) -> None:
    """Have ``trainer`` start the ranks of ``attempt`` by ``Launcher``, if it starts them by multiprocessing at all."""
    strategy, launcher = trainer.strategy, trainer.strategy.launcher
    if type(launcher) is _MultiProcessingLauncher:
        strategy._launcher = Launcher(launcher._strategy, launcher._start_method, attempt)


def raised(text: str) -> str:
    """The message of the error whose traceback ``text`` ends with."""
    lines = text.rstrip().splitlines()
    last_frame = max((at for at, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return "\n".join(lines[last_frame + 1 :]).partition(": ")[2]


def leave_group() -> None:
    """Leave the other ranks. Gloo's threads, left running, may abort a process that ends (pytorch issue 190489)."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
