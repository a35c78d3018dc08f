"""The verb ``run``: start a user's program unchanged, and have its training loop profiled."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lm_profiler.external_callbacks import CLAIMED
from lm_profiler.external_loops import VARIABLE
from lm_profiler.measure.boundary import print_message
from lm_profiler.record.calls import check_folder_name
from lm_profiler.record.run_record import Verb
from lm_profiler.usage_error import expect

EXAMPLES = """\
for example:
  lm_profiler run -- python train.py --lr 0.1
  lm_profiler run --measure_steps=100 --name=nightly -- torchrun --nproc_per_node=2 train.py
  lm_profiler run --verb=validate --trainer=2 -- python -m package.train"""

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # the exit codes of a shell

# fields of ``Options`` that are not arguments of ``profiling_callbacks``
_NOT_PASSED = ("trainer", "program", "command")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Run a program unchanged, and profile its Lightning Trainer, or otherwise the first loop that steps an optimizer.

    After the measurement the program continues training. The profiler prints to stderr. lm_profiler must be installed
    for the Python that runs the program.

    Args:
        warmup_steps: Number of steps before the measured ones.
        measure_steps: Number of steps to measure.
        trace_steps: Number of steps to trace with torch.profiler; 0 for none.
        memory_steps: Number of steps in which memory is measured by phase; 0 for none.
        action_steps: Number of steps in which each action of the loop is timed by its name; 0 for none.
        name: Name of the run.
        log_dir: Folder of all runs; this run is written to <name>/version_<n> in it.
        verb: What to profile: fit, validate, test or predict.
        trainer: Number of the Trainer in the program, counted from 1; if not given, the first that runs the verb.
        watch: Keep watching until training ends, and report when and why it gets slower.
        export_trackers: Also log the main figures to the Trainer's loggers when the stages are over; `all` logs every
            figure.
        verbose: Print all figures at the end, not only the most important ones.
    """

    warmup_steps: int = 5
    measure_steps: int = 40
    trace_steps: int = 2
    memory_steps: int = 1
    action_steps: int = 3
    name: str = "lm_profiler"
    log_dir: Path = Path("logs")
    verb: Verb = "fit"
    trainer: int | None = None
    watch: bool = False
    export_trackers: bool | Literal["all"] = False
    verbose: bool = False
    program: Sequence[str] = ()
    command: str = ""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name.endswith("_steps"):
                minimum = 1 if name == "measure_steps" else 0
                expect(value >= minimum, name, f"{minimum} or more", value)
        expect("" not in self.program[:1], "run", "a program after --", "an empty word")
        expect(
            self.trainer is None or self.trainer >= 1,
            "trainer",
            "1 or more",
            self.trainer,
        )
        check_folder_name(self.name, self.log_dir)
        expect(
            self.log_dir.is_dir() or not self.log_dir.exists(),
            "log_dir",
            "a folder",
            str(self.log_dir),
        )


def run(options: Options) -> int:
    """Replace this process by the program; return an exit code only if the program cannot be started."""
    # a folder in which the processes of the program agree on which Trainer or loop is profiled
    claims = Path(tempfile.mkdtemp(prefix="lm_profiler-run-"))
    arguments = {
        name: value
        for name, value in asdict(options).items()
        if name not in _NOT_PASSED
    }
    # The path is absolute, because the program may change its working folder.
    arguments["log_dir"] = str(options.log_dir.absolute())
    request = {
        "options": arguments,
        "command": options.command,
        "trainer": options.trainer,
        "claims": str(claims),
    }
    os.environ[VARIABLE] = json.dumps(request)
    # Torch reads this variable once, when it is imported. Without it, its tracer would print two lines about our trace
    # into the program's output.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    program = options.program[0]
    if shutil.which(program) is not None:
        # Otherwise no program starts, and there is nothing to wait for.
        _watch_for_end(claims, options)
    sys.stdout.flush()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores these signals, and the program would inherit this.
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(program, [*options.program])
    except FileNotFoundError:
        reason, code = "command not found", _NOT_FOUND
    except OSError as error:
        reason, code = str(error.strerror), _NOT_EXECUTABLE
    print_message(f"{program}: {reason}")
    shutil.rmtree(claims, ignore_errors=True)
    return code


def _watch_for_end(claims: Path, options: Options) -> None:
    """Start a process that waits until the program ends, reports if nothing was profiled, and removes ``claims``.

    The program will replace this process. The waiting process is a grandchild, because a program may wait for all of
    its children.
    """
    if not hasattr(os, "pidfd_open"):  # not Linux
        return
    program = os.pidfd_open(os.getpid())
    child = os.fork()
    if child > 0:
        os.close(program)
        os.waitpid(child, 0)
        return
    try:
        if os.fork() > 0:
            return
        os.setsid()  # so that Ctrl-C reaches only the program
        # A reader of the program's output waits until all processes have closed it. Only stderr stays open, for the
        # message.
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, 0)
        os.dup2(devnull, 1)
        os.closerange(3, program)
        os.closerange(program + 1, os.sysconf("SC_OPEN_MAX"))
        select.select([program], [], [])
        was_started = claims.is_dir()
        if was_started and not os.path.lexists(claims / CLAIMED):
            print_message(_reason_why_nothing_was_profiled(options))
        shutil.rmtree(claims, ignore_errors=True)
    finally:
        os._exit(0)


def _reason_why_nothing_was_profiled(options: Options) -> str:
    """Return the likely reason why nothing was profiled, and what to do."""
    remedies = "if another Python runs the program, install lm_profiler for it"
    is_for_any_loop = options.verb == "fit" and options.trainer is None
    if is_for_any_loop:
        reason = "no Lightning Trainer ran fit, and no other loop called the step() of an optimizer of torch"
        remedies += (
            "; if the program changes its weights by itself, use an optimizer of torch.optim; "
            "if it compiles the whole step, call `lm_profiler.profile` and run.phase(...) in it"
        )
    elif options.trainer is None:
        reason = f"no Lightning Trainer ran {options.verb}"
    else:
        reason = (
            f"no Lightning Trainer with the number {options.trainer} ran {options.verb}"
        )
    return f"nothing was profiled: {reason}; {remedies}"


VERBS = {"run": (Options, EXAMPLES, run)}
