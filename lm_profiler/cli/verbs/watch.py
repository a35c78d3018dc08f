"""The verbs ``watch`` and ``trace``: show a running training, and request traces, through files in its folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lm_profiler.cli.verbs.shared import AnswerFormat, show, write_json
from lm_profiler.measure.boundary import print_message
from lm_profiler.record.calls import FAILED, OK, WRONG_CALL
from lm_profiler.record.kernels import KernelTable, kernel_files, read_kernels
from lm_profiler.record.quantities import duration_text
from lm_profiler.record.run_record import RecordError
from lm_profiler.record.watch_files import (
    MOST_TRACED,
    STATUS,
    TraceRequest,
    WatchStatus,
    process_has_ended,
    read_status,
    read_watched,
    request_file,
    watched_ranks,
)
from lm_profiler.report.run.kernel_tables import kernel_tables
from lm_profiler.report.run.watch_tables import is_watched, watch_tables
from lm_profiler.report.tables.formats import lines
from lm_profiler.usage_error import UsageError, expect, expect_one_of

EXAMPLES = """\
for example:
  lm_profiler fit --config demo --watch=true --trainer.max_steps 10000 &
  lm_profiler watch logs/demo/version_0          updated on a terminal until the training ends
  lm_profiler watch logs/demo/version_0 | cat    printed once"""
TRACE_EXAMPLES = """\
for example:
  lm_profiler trace logs/demo/version_0
  lm_profiler trace logs/demo/version_0 --steps 4 --rank 3"""

_REDRAW_S = 1.0  # between two updates of the output
_POLL_S = 0.5  # between two checks whether a trace was written
# A training reports every ten seconds, also while a step is stalled. Without a report for this long it has ended.
_SILENT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show where the time of a watched training (fit --watch=true) goes, its phases, and its events.

    On a terminal the output is updated until the training ends or has not reported for a minute. The run may be on
    another machine, because only its files are read. If it has already ended, its last state is shown. The exit code
    is 2 if the training failed or was killed.

    Args:
        run: The folder of the run.
        format: terminal or json; json prints the state once.
    """

    WORDS: ClassVar[str] = "run"

    run: Path | None = None
    format: AnswerFormat = "terminal"


def run(options: Options) -> int:
    """Show the run and return the exit code: 2 if the training failed or was killed."""
    folder = watched_folder(options.run)
    try:
        if options.format == "json":
            write_json(read_watched(folder))
            return OK
        return _watch(folder)
    except RecordError as error:
        raise UsageError(str(error)) from None


def _watch(
    folder: Path,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Print the tables of a watched run; on a terminal, update them until the training ends or stops reporting.

    Return the exit code.
    """
    status = read_status(folder)
    ending = _ending_text(status)
    if ending or not sys.stdout.isatty():
        for table in watch_tables(folder):
            show(table)
            print()
        if not ending:
            return OK
        print_message(f"{folder}: the training {ending}; this is its last state")
        return _exit_code_of_ended(status)

    console = Console()
    # when the last report was written, by the clock of the training's machine
    written_s: float | None = None
    # when it was first seen here, by this machine's clock, because the two clocks may differ
    report_s = clock()
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            live.update(
                Text.from_ansi(_text_of_run(folder, console.width)), refresh=True
            )
            status = read_status(folder)
            ending = _ending_text(status)
            if ending:
                print_message(f"{folder}: the training {ending}")
                return _exit_code_of_ended(status)
            now_s = clock()
            if status.written_s != written_s:
                written_s = status.written_s
                report_s = now_s
            elif now_s - report_s >= _SILENT_S:
                break
            sleep(_REDRAW_S)
    print_message(
        f"{folder}: no report for {duration_text(_SILENT_S)}: the training was killed, or its files do not reach "
        "this machine"
    )
    return FAILED


def _exit_code_of_ended(status: WatchStatus) -> int:
    has_succeeded = status.ended and status.error is None
    return OK if has_succeeded else WRONG_CALL


def _text_of_run(folder: Path, width: int) -> str:
    """Return the tables of a watched run as text of at most ``width`` columns, with an empty line after each table."""
    picture: list[str] = []
    for table in watch_tables(folder):
        picture += lines(table, width, is_coloured=True)
        picture.append("")
    return "\n".join(picture)


def _ending_text(status: WatchStatus) -> str:
    """Return how a run ended; empty if it is still running, or if this is not known on this machine."""
    if status.error is not None:
        return f"failed with {status.error}"
    if status.ended:
        return "has ended"
    if process_has_ended(status.process):
        return "was killed"
    return ""


def watched_folder(run: Path | None) -> Path:
    """Return the folder of a watched run: ``run`` itself, or its latest version."""
    try:
        if run is None or not run.is_dir():
            raise UsageError(
                f"RUN: expected the folder of a run, such as logs/demo/version_0, given {run}"
            )
        status_files = sorted(
            run.glob(f"version_*/{STATUS}"), key=lambda file: file.stat().st_mtime
        )
        if status_files and not is_watched(run):
            run = status_files[-1].parent
        if not is_watched(run):
            raise UsageError(
                f"RUN: {run} is not watched: it has no {STATUS}, "
                "which `lm_profiler fit --watch=true` writes when the stages are over"
            )
        read_status(run)
    except RecordError as error:
        raise UsageError(str(error)) from None
    except OSError as error:  # the folder of another user
        raise UsageError(f"RUN: cannot read {run} ({error.strerror})") from None
    return run


# -- trace -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Trace the next steps of a watched training (fit --watch=true), and print where their time went.

    The trace is written into the run's folder, and is shown in TensorBoard's tab. The training is not interrupted.

    Args:
        run: The folder of the run.
        steps: Number of steps to trace.
        rank: The rank to trace.
        patience_s: Seconds to wait for the trace. If steps take longer, the trace is written later.
        format: terminal, or json.
    """

    WORDS: ClassVar[str] = "run"

    run: Path | None = None
    steps: int = 2
    rank: int = 0
    patience_s: float = 120.0
    format: AnswerFormat = "terminal"

    def __post_init__(self) -> None:
        is_in_range = 0 < self.steps <= MOST_TRACED
        expect(
            is_in_range,
            "steps",
            f"1 to {MOST_TRACED} (all traced steps are kept in memory)",
            self.steps,
        )
        expect(self.patience_s > 0, "patience_s", "a positive number", self.patience_s)


def run_trace(
    options: TraceOptions, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Write a request into the run's folder, wait for the trace, print its kernels and return the exit code."""
    folder = watched_folder(options.run)
    expect_one_of(watched_ranks(folder), "rank", options.rank)
    status = read_status(folder, options.rank)
    ending = _ending_text(status)
    if ending:
        raise UsageError(
            f"RUN: the training of {folder} {ending}; its traces are in that folder"
        )
    if not status.traces:
        raise UsageError(
            f"RUN: {folder} cannot be traced, because it runs with watch.traces=false"
        )
    request = request_file(folder, options.rank)
    earlier_files = _files_of_kernels(folder, options.rank)
    if request.exists():
        raise UsageError(
            f"RUN: {folder} already has a pending trace request; wait for it to finish"
        )
    try:
        TraceRequest(steps=options.steps, rank=options.rank).write(request)
    except OSError as error:
        raise UsageError(f"RUN: cannot write to {folder} ({error.strerror})") from None

    deadline_s = time.monotonic() + options.patience_s
    while time.monotonic() < deadline_s:
        sleep(_POLL_S)
        new_files = _files_of_kernels(folder, options.rank) - earlier_files
        if new_files:
            file = min(new_files)
            print_message(f"traced: {file}")
            _show(read_kernels(file), options.format)
            return OK
        if _ending_text(read_status(folder, options.rank)):
            break
    if request.exists():
        request.unlink(missing_ok=True)
        print_message(
            f"{folder}: no trace was taken: the training has ended, was killed, or is stalled"
        )
    else:
        print_message(
            f"{folder}: no trace yet; it will be written when the training continues"
        )
    return FAILED


def _show(kernels: KernelTable, format_name: AnswerFormat) -> None:
    """Print the kernels of a trace in the requested format."""
    if format_name == "json":
        write_json(kernels)
        return
    for table in kernel_tables(kernels):
        show(table)
        print()


def _files_of_kernels(folder: Path, rank: int) -> set[Path]:
    """Return the files with tables of kernels that ``rank`` has written."""
    return {
        path for path in kernel_files(folder) if path.name.startswith(f"rank{rank}.")
    }


VERBS = {
    "watch": (Options, EXAMPLES, run),
    "trace": (TraceOptions, TRACE_EXAMPLES, run_trace),
}
