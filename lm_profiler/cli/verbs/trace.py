"""The verb ``trace``: ask a training that goes on, by a file in its folder, for a trace of its next steps."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lm_profiler.cli.verbs.watch import watched_folder
from lm_profiler.measure.boundary import say
from lm_profiler.record.calls import FAILED, OK
from lm_profiler.record.kernels import kernel_files, read_kernels
from lm_profiler.record.watch_files import TraceRequest, ranks_watched, read_status, request_file
from lm_profiler.report.run.kernel_tables import kernel_tables
from lm_profiler.report.tables.formats import terminal
from lm_profiler.usage_error import UsageError, expect, expect_one_of

EXAMPLES = """\
for example:
  lm_profiler trace logs/demo/version_0
  lm_profiler trace logs/demo/version_0 --steps 4 --rank 3"""

_LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Options:
    """Ask a training that is watched (fit --watch=true) for a trace of its next steps, and print where they went.

    The trace is in the run's folder, and in TensorBoard's tab. The training goes on as it is.

    Args:
        config: A YAML file of these options.
        run: The folder of the run.
        steps: Whole steps to trace.
        rank: The rank that traces.
        patience_s: Seconds to wait for the trace; it may come later, where a step takes longer.
    """

    WORDS: ClassVar[str] = "run"

    config: str | None = None
    run: Path | None = None
    steps: int = 2
    rank: int = 0
    patience_s: float = 120.0

    def __post_init__(self) -> None:
        expect(self.run is not None, "trace", "the folder of a run, such as logs/demo/version_0", None)
        expect(self.steps > 0, "steps", "1 or more", self.steps)
        expect(self.patience_s > 0, "patience_s", "a positive number", self.patience_s)


def run(options: Options) -> int:
    """Ask, wait for the trace, print its kernels and return the exit code.

    Raises:
        UsageError: there is no such run, it has ended, takes no traces, or its folder cannot be written to.
    """
    folder = watched_folder(options.run)
    expect_one_of(ranks_watched(folder), "rank", options.rank)
    status = read_status(folder, options.rank)
    if status.ended:
        raise UsageError(f"RUN: expected a run that goes on, given {folder}, which has ended; its traces are in it")
    if not status.traces:
        raise UsageError(f"RUN: expected a run that takes traces, given {folder}, which runs with watch.traces=false")
    asked, before = request_file(folder, options.rank), set(_tables(folder, options.rank))
    if asked.exists():
        raise UsageError(f"RUN: expected a run that nobody asks for a trace, given {folder}; wait for that one")
    try:
        TraceRequest(steps=options.steps, rank=options.rank).write(asked)
    except OSError as error:
        raise UsageError(f"RUN: expected a folder that can be written to, given {folder} ({error.strerror})") from None
    deadline_s = time.monotonic() + options.patience_s
    while time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
        if new := sorted(set(_tables(folder, options.rank)) - before):
            say(f"traced: {new[0]}")
            for table in kernel_tables(read_kernels(new[0])):
                sys.stdout.write(terminal(table, sys.stdout) + "\n")
            return OK
        if read_status(folder, options.rank).ended:
            break
    if asked.exists():
        asked.unlink(missing_ok=True)
        say(f"{folder}: nobody took the request: the training has ended, was killed, or stands still")
    else:
        say(f"{folder}: no trace by now; it comes where the training goes on")
    return FAILED


def _tables(folder: Path, rank: int) -> list[Path]:
    return [path for path in kernel_files(folder) if path.name.startswith(f"rank{rank}.")]
