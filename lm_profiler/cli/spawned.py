"""Ranks that Lightning starts by multiprocessing (ddp_spawn, ddp_fork, ddp_notebook): they run no command line."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import distributed
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.cli.quiet import quiet
from lm_profiler.record.exit_codes import INTERRUPTED
from lm_profiler.usage_error import UsageError

_WRONG_CALLS = ("UsageError", "MisconfigurationException")


class RankRaised(Exception):
    """An error of another process, whose traceback is the text of ``__cause__``."""


class Launcher(_MultiProcessingLauncher):
    """Lightning's, whose ranks end as those do that run the command line.

    Lightning tells callbacks of an error where the launcher was called, which here is a process without a run. And a
    rank that is interrupted ends as one that went well does, so that its launcher waits for ever for its results.
    """

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Run the ranks.

        Raises:
            UsageError: a rank found the call wrong.
            RankRaised: a rank raised anything else.
            KeyboardInterrupt: a rank was interrupted.
            SystemExit: a rank left.
            ProcessExitedException: a rank was killed.
        """
        try:
            return super().launch(*args, **kwargs)
        except ProcessRaisedException as error:
            name, message = raised(str(error))
            wrong = name.rpartition(".")[2] in _WRONG_CALLS
            raise (UsageError(message) if wrong else RankRaised(f"{name}: {message}".removesuffix(": "))) from error
        except ProcessExitedException as error:
            if error.exit_code == INTERRUPTED:
                raise KeyboardInterrupt from error
            if error.exit_code > 0:
                raise SystemExit(error.exit_code) from error
            raise

    def _wrapping_function(self, process_idx: int, trainer: Trainer | None, *args: Any) -> None:
        with quiet():
            try:
                super()._wrapping_function(process_idx, trainer, *args)
            except BaseException as error:
                if trainer is not None:
                    _tell(trainer, error)
                if isinstance(error, KeyboardInterrupt):
                    sys.exit(INTERRUPTED)
                raise
            finally:
                leave_group()


def _tell(trainer: Trainer, error: BaseException) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # the stubs lack it
        if isinstance(callback, TrainingProfiler):
            callback.on_exception(trainer, trainer.lightning_module, error)


def take_over(trainer: Trainer) -> None:
    """Have ``trainer`` start its ranks by ``Launcher``, if it starts them by multiprocessing at all."""
    strategy, launcher = trainer.strategy, trainer.strategy.launcher
    if type(launcher) is _MultiProcessingLauncher:
        strategy._launcher = Launcher(launcher._strategy, launcher._start_method)


def raised(text: str) -> tuple[str, str]:
    """Type and first line of the error whose traceback ``text`` ends with."""
    lines = text.rstrip().splitlines()
    last_frame = max((at for at, line in enumerate(lines) if line.startswith("  ")), default=-1)
    name, _, message = (lines[last_frame + 1 :] or [""])[0].partition(": ")
    return name, message


def leave_group() -> None:
    """Leave the other ranks. Gloo's threads, left running, may abort a process that ends (pytorch issue 190489)."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
