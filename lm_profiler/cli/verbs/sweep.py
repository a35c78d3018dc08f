"""The verb ``sweep``: many cells, each a call in its own process."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from lm_profiler.analysis.conclude import with_unfinished
from lm_profiler.cli.endings import interrupting
from lm_profiler.cli.option_errors import message_in
from lm_profiler.cli.options import read_config
from lm_profiler.cli.verbs.shared import write
from lm_profiler.measure.boundary import say
from lm_profiler.models.config import check_size_name, other_meanings
from lm_profiler.processes.fork_server import CellEnded, CellServer, ServerError
from lm_profiler.record.calls import FAILED, INTERRUPTED, OK, WRONG_CALL, command_line
from lm_profiler.record.entry import Collection, collect
from lm_profiler.record.quantities import counted
from lm_profiler.record.sweep_files import Cell
from lm_profiler.report.tables.rows import raw_runs_table, runs_table
from lm_profiler.report.tables.run_groups import repeats_together
from lm_profiler.sweep.display import Display
from lm_profiler.sweep.schedule import Schedule
from lm_profiler.sweep.sweep_folder import SweepFolder
from lm_profiler.sweep.sweep_plan import SweepRequest, part_of, plan_of, run_order, shell_line
from lm_profiler.usage_error import UsageError

EXAMPLES = """\
for example:
  lm_profiler sweep demo
  lm_profiler sweep --config demo --grid.data.context_length 64,128,256 --repeats 3"""

SPAWNING = (sys.executable, "-m", "lm_profiler.processes.fork_server", "lm_profiler")
FORKING = (*SPAWNING, "torch.utils.tensorboard", "lm_profiler.cli.verbs.trainer")
# The program that starts cells. Outside of Linux, a process that has imported torch cannot be forked safely.
SERVER = FORKING if sys.platform == "linux" else SPAWNING

_MOST_CHECKS = 40  # the most calls that are checked before a sweep, each in about 0.3 s

# the statuses that count as results: a sweep may look for the size at which memory runs out
_GOOD_STATUSES = ("ok", "oom", "refused")


def run(request: SweepRequest) -> int:
    """Run a sweep and return the exit code: 1 where a cell failed, timed out or was killed."""
    texts = {path: read_config(path)[1] for path in dict.fromkeys(request.configs)}
    plan = plan_of(request, texts)
    part = None if request.part is None else part_of(request.part)
    for line in other_meanings(cell.overrides.get("model.size", "") for cell in plan.cells):
        say(line)
    if request.dry_run:
        for cell in run_order(plan) if part is None else part.cells_of(run_order(plan)):
            print(shell_line(cell))
        return OK
    try:
        with SweepFolder(request.folder, plan, part=part) as folder:
            return _ending(folder, _run(request, folder), request)
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


def _run(request: SweepRequest, folder: SweepFolder) -> bool:
    """Run the missing cells and return whether the sweep was interrupted."""
    missing = folder.missing()
    if not missing:
        return False
    cells, devices = folder.cells, request.devices or (None,)
    console = Console(stderr=request.format == "json")
    display = Display(cells, len(cells) - len(missing), len(devices), folder.path, console)
    with CellServer(SERVER, folder.lock) as server:
        work = Schedule(folder.path, missing, server, display, devices, request.timeout_s)
        # The check costs seconds; a resumed sweep has passed it.
        if folder.is_new:
            check_calls(server, cells_to_check(folder.plan.cells), request.timeout_s)
            folder.begin()
        with display.shown(), interrupting(partial(setattr, work, "interrupted", True)):
            work.run()
    return work.interrupted


def cells_to_check(cells: Sequence[Cell]) -> list[Cell]:
    """Return a few cells that together have every verb with its options, and every kind of value of each option.

    The cells of a grid are combinations: the cell with the most values that no other has shown yet goes first.
    """
    to_show = {cell.id: _shown_by(cell) for cell in cells}
    by_id = {cell.id: cell for cell in cells}
    chosen: list[Cell] = []
    while to_show and len(chosen) < _MOST_CHECKS:
        best = max(to_show, key=lambda cell_id: len(to_show[cell_id]))
        shown = to_show.pop(best)
        if not shown:
            break
        chosen.append(by_id[best])
        for left in to_show.values():
            left -= shown
    return chosen


def _shown_by(cell: Cell) -> set[tuple[str, ...]]:
    """Return what a check of the cell's call shows: that its verb has its options, and that each value can be read."""
    shown: set[tuple[str, ...]] = {(cell.arguments[0], *cell.overrides)}
    for option, value in cell.overrides.items():
        # If the parser takes one whole number, it takes all; only the number of nodes is judged by its value.
        is_like_others = value.isdecimal() and option != "trainer.num_nodes"
        shown.add((option, "a whole number" if is_like_others else value))
    return shown


def check_calls(server: CellServer, cells: Iterable[Cell], timeout_s: float | None = None) -> None:
    """Raise UsageError for the first cell whose call is wrong.

    Once a check takes longer than a cell may run, the rest is not checked: the cells themselves will fail.
    """
    with tempfile.TemporaryDirectory(prefix="lm_profiler-calls-") as folder:
        file = Path(folder, "output.txt")
        for cell in cells:
            server.start(cell.id, [*cell.arguments, "--print_config"], file, {})
            code = _end_of(server, cell, timeout_s)
            if code < 0:
                return
            printed = file.read_text(encoding="utf-8", errors="replace")
            if code == WRONG_CALL:
                raise UsageError(message_in(printed))
            if code == OK:
                _check_config(yaml.safe_load(printed), cell)


def _check_config(config: Mapping[str, Any], cell: Cell) -> None:
    """Raise UsageError for settings of a cell that its parser accepts, but that cannot run here."""
    nodes = config["trainer"]["num_nodes"]
    if nodes != 1:  # a sweep starts no processes on other machines
        remedy = f"run {cell.id} with torchrun or srun"
        raise UsageError(f"trainer.num_nodes: expected 1 in a cell of a sweep, given {nodes}; {remedy}")
    model = config.get("model") or {}
    if str(model.get("class_path", "")).startswith("lm_profiler.") and "size" in model.get("init_args", {}):
        try:
            check_size_name(model["init_args"]["size"])
        except UsageError as error:
            raise UsageError(f"model.{error}") from None


def _end_of(server: CellServer, cell: Cell, timeout_s: float | None) -> int:
    """Wait for the end of a cell that was started, kill it ``timeout_s`` after it began, and return its exit code."""
    limit_s = None
    while True:
        events = server.events(limit_s)
        for event in events:
            if isinstance(event, CellEnded):
                return 1 if event.code is None else event.code
            limit_s = timeout_s  # the process has started; its end is the next event
        if limit_s is not None and not events:
            server.signal(cell.id, signal.SIGKILL)
            limit_s = None


def _ending(folder: SweepFolder, interrupted: bool, request: SweepRequest) -> int:
    """Print the table of this process's own cells, and return the exit code."""
    own = {cell.id for cell in folder.cells}
    entries = [each for each in with_unfinished(collect([folder.path])).entries if each.name in own]
    groups, is_json, part = repeats_together(entries), request.format == "json", request.part
    write(Collection(), [(raw_runs_table if is_json else runs_table)(groups)], request.format, None)
    words = Counter(entry.status for entry in entries)
    told = ", ".join(f"{count} {word}" for word, count in words.items())
    of_whole = "" if part is None else f" (part {part} of {len(folder.plan.cells):,})"
    if not is_json:
        print(f"{counted(len(entries), 'cell')}{of_whole}: {told}; written to {folder.path}")
        print(f"tables and plots: {command_line(('report', str(folder.path)))}")
    if interrupted or words.keys() & {"interrupted", "missing"}:
        say("cells are missing; run the same command again for them")
    if interrupted:
        return INTERRUPTED
    return OK if words.keys() <= set(_GOOD_STATUSES) else FAILED


VERBS = {"sweep": (SweepRequest, EXAMPLES, run)}
