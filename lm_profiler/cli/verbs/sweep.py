"""The verb ``sweep``: many cells, each a call in its own process."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import yaml

from lm_profiler.analysis.conclude import with_unfinished
from lm_profiler.cli.arguments import read_config
from lm_profiler.cli.endings import interrupting
from lm_profiler.cli.errors import TOLD_IN, answered
from lm_profiler.measure.boundary import say
from lm_profiler.models.config import other_meanings
from lm_profiler.processes.cell_server import CellEnded, CellServer, ServerError
from lm_profiler.record.calls import FAILED, INTERRUPTED, OK, command_line
from lm_profiler.record.entry import collect
from lm_profiler.record.quantities import counted
from lm_profiler.record.sweep import Cell, SweepPlan
from lm_profiler.report.tables.formats import terminal
from lm_profiler.report.tables.rows import repeats_together, rows
from lm_profiler.sweep.cluster import Jobs
from lm_profiler.sweep.display import Display
from lm_profiler.sweep.request import Request, SweepPart, part_of
from lm_profiler.sweep.schedule import Schedule
from lm_profiler.sweep.sweep_folder import SweepFolder
from lm_profiler.sweep.sweep_plan import plan_of, run_order, shell_line
from lm_profiler.usage_error import UsageError

Options = Request
EXAMPLES = """\
for example:
  lm_profiler sweep demo
  lm_profiler sweep --config demo --grid.data.context_length 64,128,256 --repeats 3"""

SPAWNING = (sys.executable, "-m", "lm_profiler.processes.fork_server", "lm_profiler")
FORKING = (*SPAWNING, "torch.utils.tensorboard", "lm_profiler.cli.verbs.trainer")
# The program that starts cells. Outside of Linux, a process that has imported torch cannot be forked safely.
SERVER = FORKING if sys.platform == "linux" else SPAWNING

_OUTPUT = "output.txt"

# the statuses that count as results: a sweep may look for the size at which memory runs out
_GOOD_STATUSES = ("ok", "oom", "refused")


def run(request: Request) -> int:
    """Run a sweep and return the exit code: 1 where a cell failed, timed out or was killed.

    Raises:
        UsageError: a wrong call; nothing was run.
    """
    texts = {path: read_config(path)[1] for path in dict.fromkeys(request.configs)}
    plan = plan_of(request, texts)
    part = part_of(request.part, os.environ if request.launcher is None else {})
    for line in other_meanings(cell.overrides.get("model.size", "") for cell in plan.cells):
        say(line)
    if request.dry_run:
        for cell in run_order(plan) if part is None else part.of(run_order(plan)):
            print(shell_line(cell))
        return OK
    try:
        with SweepFolder(request.folder, plan, part=part) as folder:
            folder.take_over()
            return _ending(folder, _run(request, folder), part)
    except ServerError as error:
        say(str(error))
        return FAILED
    except BrokenPipeError:  # an OSError that main handles: the reader of stdout has gone
        raise
    except OSError as error:  # a full disk, or a folder that was removed
        say(
            f"log_dir: expected a folder that can be written to, given {request.folder} ({error.strerror}); "
            "run the same command again for the missing cells"
        )
        return FAILED


def _run(request: Request, folder: SweepFolder) -> bool:
    """Run the missing cells and return whether the sweep was interrupted."""
    missing = folder.missing()
    if not missing:
        return False
    here = request.launcher is None
    cells, devices = folder.cells, request.devices or (None,)
    display = Display(cells, len(cells) - len(missing), len(devices) if here else None, folder.path)
    with CellServer(SERVER, folder.lock) as server:
        work = (
            Schedule(folder.path, missing, server, display, devices, request.timeout_s)
            if here
            else Jobs(folder.path, missing, SPAWNING, display, request)
        )
        # The check costs seconds; a sweep that goes on has passed it.
        if folder.is_new:
            _check_options(server, folder.plan, request.timeout_s)
            folder.begin()
        with display.shown(), interrupting(partial(setattr, work, "interrupted", True)):
            work.run()
    return work.interrupted


def _check_options(server: CellServer, plan: SweepPlan, timeout_s: float | None) -> None:
    """Raise UsageError for an unknown option of a cell; a bad value fails its own cell only."""
    # Cells with the same options and number of nodes differ in values alone: one of them is checked.
    alike = {
        (cell.arguments[0], *cell.overrides, cell.overrides.get("trainer.num_nodes")): cell
        for cell in reversed(plan.cells)
    }
    check_calls(server, alike.values(), timeout_s, values=False)


def check_calls(server: CellServer, cells: Iterable[Cell], timeout_s: float | None = None, values: bool = True) -> None:
    """Raise UsageError for the first cell whose call is wrong; for bad values only with ``values``.

    Once a check takes longer than a cell may run, the rest is not checked: the cells themselves will fail.
    """
    with tempfile.TemporaryDirectory(prefix="lm_profiler-calls-") as folder:
        wrong = Path(folder, "wrong.json")
        for cell in cells:
            code = _parse(server, cell, wrong, timeout_s)
            if code is not None and code < 0:
                return
            if (told := answered(wrong)) and (values or told["unknown_option"] is not None):
                raise UsageError(told["message"])
            if code == 0:
                _check_nodes(Path(folder, _OUTPUT), cell)


def _check_nodes(printed: Path, cell: Cell) -> None:
    """Raise UsageError for a cell of several machines: a sweep starts no processes on the others."""
    nodes = yaml.safe_load(printed.read_text(encoding="utf-8"))["trainer"]["num_nodes"]
    if nodes != 1:
        raise UsageError(
            f"trainer.num_nodes: expected 1 in a cell of a sweep, given {nodes}; run {cell.id} with torchrun or srun"
        )


def _parse(server: CellServer, cell: Cell, wrong: Path, timeout_s: float | None) -> int | None:
    """Parse a cell's call without running it, and return the exit code, that of SIGKILL after ``timeout_s``.

    The file ``wrong`` gets what is wrong with the call.
    """
    output = wrong.with_name(_OUTPUT)
    server.start(cell.id, [*cell.arguments, "--print_config"], output, {TOLD_IN: str(wrong)})
    limit_s = None
    while True:
        events = server.events(limit_s)
        for event in events:
            if isinstance(event, CellEnded):
                return event.code
            limit_s = timeout_s  # the process has started; its end is the next event
        if limit_s is not None and not events:
            server.signal(cell.id, signal.SIGKILL)
            limit_s = None


def _ending(folder: SweepFolder, interrupted: bool, part: SweepPart | None) -> int:
    """Print the table of the cells that were this process's own, and return the exit code."""
    own = {cell.id for cell in folder.cells}
    entries = [each for each in with_unfinished(collect([folder.path])).entries if each.name in own]
    sys.stdout.write(terminal(rows(repeats_together(entries)), sys.stdout))
    words = Counter(entry.status for entry in entries)
    told = ", ".join(f"{count} {word}" for word, count in words.items())
    of_whole = "" if part is None else f" (part {part} of {len(folder.plan.cells):,})"
    print(f"{counted(len(entries), 'cell')}{of_whole}: {told}; written to {folder.path}")
    print(f"tables and plots: {command_line(('report', str(folder.path)))}")
    if interrupted or words.keys() & {"interrupted", "missing"}:
        say("cells are missing; run the same command again for them")
    if interrupted:
        return INTERRUPTED
    return OK if words.keys() <= set(_GOOD_STATUSES) else FAILED
