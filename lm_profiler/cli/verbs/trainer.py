"""``fit``, ``validate``, ``test`` and ``predict``: one run of a Trainer's verb, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from lightning.pytorch import Trainer

from lm_profiler.cli.ahead import call_off, look_back, plan_ahead
from lm_profiler.cli.attempt import local_rank
from lm_profiler.cli.call import Call
from lm_profiler.cli.keeper import Keeper, kept
from lm_profiler.cli.prose import wrong_call
from lm_profiler.cli.quiet import quiet
from lm_profiler.cli.spawned import leave_group
from lm_profiler.cli.trainer_cli import ProfilerCLI
from lm_profiler.measure.boundary import try_or_note
from lm_profiler.record.calls import FAILED, OK, WRONG_CALL

_PATIENCE_S = 5.0


def run(call: Call) -> int:
    """Run a Trainer verb; returns the exit code.

    Raises:
        UsageError: a wrong call. Nothing was built, and nothing is left of it but the record of a refusal.
    """
    sys.path.append(str(Path.cwd()))  # a script has not; a user's own module lies beside his configs
    with quiet():
        try:
            cli = ProfilerCLI(call)
        except SystemExit as done:  # --help and --print_config end so
            return done.code if isinstance(done.code, int) else OK
        except Exception as error:  # nothing of the user's has been built: whatever it is, the call is to blame
            raise wrong_call(error) from error
        try:
            with kept(Keeper(cli.attempt, partial(_children, cli))):
                cli.begin()
                met = plan_ahead(cli)
                cli.run_verb()
                del met
                leave_group()
            record = cli.attempt.record  # where the instruments failed, nothing was measured
            return FAILED if record is not None and record.failure is not None else OK
        except (KeyboardInterrupt, SystemExit) as error:
            return cli.attempt.ended(error)
        except Exception as error:
            if not cli.attempt.is_refusal(error):
                code = cli.attempt.failed(error)
                try_or_note("what would have fitted", partial(look_back, cli), [])
                return code
            call_off(cli)
            cli.attempt.discard()
            if local_rank() > 0:  # the process that started this one says it
                return WRONG_CALL
            raise wrong_call(error) from error
        finally:
            _end_children(getattr(cli, "trainer", None))


def _children(cli: ProfilerCLI) -> list[subprocess.Popen[bytes]]:
    """The ranks that Lightning started as commands of their own."""
    launcher = cli.trainer.strategy.launcher if hasattr(cli, "trainer") else None
    return [child for child in getattr(launcher, "procs", []) if isinstance(child, subprocess.Popen)]


def _end_children(trainer: Trainer | None) -> None:
    """Let the processes that Lightning started end, and end those that do not."""
    launcher = trainer.strategy.launcher if trainer is not None else None
    processes = getattr(launcher, "procs", [])
    children = list(processes)
    processes.clear()  # Lightning's observer kills this process too once it sees one of them fail
    try:
        for child in children:
            _wait(child, _PATIENCE_S)
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
