"""The verb ``watch``: a training that goes on, from the files that it writes, on this machine or another."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lm_profiler.measure.boundary import say
from lm_profiler.record.calls import FAILED, OK
from lm_profiler.record.quantities import duration_text
from lm_profiler.record.run import RecordError
from lm_profiler.record.watch_files import STATUS, read_status
from lm_profiler.report.run.watch_tables import is_watched, watch_tables
from lm_profiler.report.tables.formats import lines, terminal
from lm_profiler.usage_error import UsageError, expect

EXAMPLES = """\
for example:
  lm_profiler fit --config demo --watch=true --trainer.max_steps 10000 &
  lm_profiler watch logs/demo/version_0          live on a terminal, until the training ends
  lm_profiler watch logs/demo/version_0 | cat    once"""

_APART_S = 1.0
# a training reports every ten seconds, also while a step stands still; without a report for so long it is gone
_SILENT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show a training that is watched (fit --watch=true): where its time goes, its phases, what happened.

    On a terminal the picture stays until the training ends, or has not reported for a minute. The run may be on another
    machine: only its files are read.

    Args:
        config: A YAML file of these options.
        run: The folder of the run.
        once: Show what there is now, and end.
    """

    WORDS: ClassVar[str] = "run"

    config: str | None = None
    run: Path | None = None
    once: bool = False

    def __post_init__(self) -> None:
        expect(self.run is not None, "watch", "the folder of a run, such as logs/demo/version_0", None)


def watched_folder(run: Path | None) -> Path:
    """Return the folder of a watched run: the given one, or the latest version below it.

    Raises:
        UsageError: there is none, or its status is damaged.
    """
    if run is None or not run.is_dir():
        raise UsageError(f"RUN: expected the folder of a run, given {run}, which is not there")
    versions = sorted(run.glob(f"version_*/{STATUS}"), key=lambda status: status.stat().st_mtime)
    if versions and not is_watched(run):
        run = versions[-1].parent
    if not is_watched(run):
        raise UsageError(
            f"RUN: expected a run that is watched, given {run}, which has no {STATUS}; "
            "`lm_profiler fit --watch=true` writes it when the stages are over"
        )
    try:
        read_status(run)
    except RecordError as error:
        raise UsageError(str(error)) from None
    return run


def run(options: Options) -> int:
    """Show the run and return the exit code.

    Raises:
        UsageError: there is no such run, or it is not watched.
        RecordError: a file of it is damaged.
    """
    folder = watched_folder(options.run)
    if options.once or not sys.stdout.isatty() or read_status(folder).ended:
        for table in watch_tables(folder):
            sys.stdout.write(terminal(table, sys.stdout) + "\n")
        return OK
    console, heard = Console(), (0.0, 0.0)
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            shown = [line for table in watch_tables(folder) for line in (*lines(table, console.width, True), "")]
            live.update(Text.from_ansi("\n".join(shown)), refresh=True)
            status, now_s = read_status(folder), time.monotonic()
            if status.ended:
                return OK
            if status.written_s != heard[0]:
                heard = status.written_s, now_s  # by this machine's clock: the training's may differ
            elif now_s - heard[1] >= _SILENT_S:
                break
            time.sleep(_APART_S)
    say(f"{folder}: no report for {duration_text(_SILENT_S)}: the training was killed, or its files do not come here")
    return FAILED
