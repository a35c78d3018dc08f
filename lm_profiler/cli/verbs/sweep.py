"""The verb ``sweep``: run many cells, each of which is a call in its own process."""

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
from lm_profiler.measure.boundary import print_message
from lm_profiler.models.config import ambiguous_size_notes, check_size_name
from lm_profiler.processes.cell_processes import CellProcesses
from lm_profiler.record.calls import FAILED, INTERRUPTED, OK, WRONG_CALL, command_line
from lm_profiler.record.entry import Collection, collect
from lm_profiler.record.quantities import count_text
from lm_profiler.record.sweep_files import Cell
from lm_profiler.report.tables.rows import raw_runs_table, runs_table
from lm_profiler.report.tables.run_groups import repeats_together
from lm_profiler.sweep.display import Display
from lm_profiler.sweep.schedule import Schedule
from lm_profiler.sweep.sweep_folder import SweepFolder
from lm_profiler.sweep.sweep_plan import (
    SweepRequest,
    part_of,
    plan_of,
    run_order,
    shell_line,
)
from lm_profiler.usage_error import UsageError

EXAMPLES = """\
for example:
  lm_profiler sweep demo
  lm_profiler sweep --config demo --grid.data.context_length 64,128,256 --repeats 3"""

# what the fork server imports for all cells
LOADED = ("torch.utils.tensorboard", "lm_profiler.cli.verbs.trainer")

# calls that are checked before a sweep at most; each check takes about 0.3 s
_MAX_CHECKS = 40

# the statuses that count as results: a sweep may look for the size at which memory runs out
_GOOD_STATUSES = ("ok", "oom", "refused")


def run(request: SweepRequest) -> int:
    """Run a sweep and return the exit code: 1 if a cell failed, timed out or was killed."""
    texts: dict[str, str] = {}
    for path in request.configs:
        if path not in texts:  # A pipe can be read only once.
            _, texts[path] = read_config(path)
    plan = plan_of(request, texts)
    part = None if request.part is None else part_of(request.part)
    for line in ambiguous_size_notes(
        cell.overrides.get("model.size", "") for cell in plan.cells
    ):
        print_message(line)
    if request.dry_run:
        cells = run_order(plan)
        if part is not None:
            cells = part.cells_of(cells)
        for cell in cells:
            print(shell_line(cell))
        return OK
    try:
        with SweepFolder(request.folder, plan, part=part) as folder:
            is_interrupted = _run(request, folder)
            return _print_end(folder, is_interrupted, request)
    except BrokenPipeError:
        # ``main`` handles this OSError, which means that the reader of stdout has closed it.
        raise
    except OSError as error:  # a full disk, or a folder that was removed
        print_message(
            f"log_dir: cannot write to {request.folder} ({error.strerror}); "
            "run the same command again for the missing cells"
        )
        return FAILED


def _run(request: SweepRequest, folder: SweepFolder) -> bool:
    """Run the missing cells and return whether the sweep was interrupted."""
    missing = folder.missing()
    if not missing:
        return False
    cells = folder.cells
    devices = request.devices or (None,)
    console = Console(stderr=request.format == "json")
    display = Display(
        cells,
        ended_cells=len(cells) - len(missing),
        slots=len(devices),
        folder=folder.path,
        console=console,
    )
    with cell_processes(folder.lock) as processes:
        schedule = Schedule(
            folder.path, missing, processes, display, devices, request.timeout_s
        )
        # The check takes seconds, and a resumed sweep has passed it before.
        if folder.is_new:
            check_calls(processes, cells_to_check(folder.plan.cells), request.timeout_s)
            folder.begin()
        with (
            display.live_line(),
            interrupting(partial(setattr, schedule, "interrupted", True)),
        ):
            schedule.run()
    return schedule.interrupted


def cell_processes(lock: int | None = None) -> CellProcesses:
    """Return the object that starts the processes of cells.

    On Linux they are forks of a server that has imported torch. Elsewhere such a process cannot be forked safely.
    """
    modules = LOADED if sys.platform == "linux" else ()
    return CellProcesses("lm_profiler", modules, lock)


def cells_to_check(cells: Sequence[Cell]) -> list[Cell]:
    """Return a few cells that together cover every verb with its options, and every kind of value of each option.

    Repeatedly choose the cell with the most facts that no chosen cell has covered yet.
    """
    facts_by_cell = {cell.id: _facts_of_check(cell) for cell in cells}
    cells_by_id = {cell.id: cell for cell in cells}
    chosen: list[Cell] = []
    while facts_by_cell and len(chosen) < _MAX_CHECKS:
        best_id = max(facts_by_cell, key=lambda cell_id: len(facts_by_cell[cell_id]))
        new_facts = facts_by_cell.pop(best_id)
        if not new_facts:
            break
        chosen.append(cells_by_id[best_id])
        for facts in facts_by_cell.values():
            facts -= new_facts
    return chosen


def _facts_of_check(cell: Cell) -> set[tuple[str, ...]]:
    """Return what a check of the cell's call confirms: of two cells with the same facts, one is checked.

    One fact is that the verb has these options: the verb and their names. Further facts are that an option accepts its
    value: the option and the value, or the word for any whole number.
    """
    verb = cell.arguments[0]
    options_of_verb = (verb, *cell.overrides)
    facts: set[tuple[str, ...]] = {options_of_verb}
    for option, value in cell.overrides.items():
        # An option that accepts one whole number accepts all, except for the number of nodes, which must be 1.
        if value.isdecimal() and option != "trainer.num_nodes":
            facts.add((option, "a whole number"))
        else:
            facts.add((option, value))
    return facts


def check_calls(
    processes: CellProcesses, cells: Iterable[Cell], timeout_s: float | None = None
) -> None:
    """Raise UsageError for the first cell whose call is wrong.

    If a check takes longer than a cell may run, the remaining calls are not checked: their cells will fail.
    """
    with tempfile.TemporaryDirectory(prefix="lm_profiler-calls-") as folder:
        file = Path(folder, "output.txt")
        for cell in cells:
            processes.start(cell.id, [*cell.arguments, "--print_config"], file, {})
            ended = processes.wait_for_ends(timeout_s)
            if not ended:
                processes.signal(cell.id, signal.SIGKILL)
                processes.wait_for_ends(timeout_s=None)
                return
            code = ended[0].code
            printed = file.read_text(encoding="utf-8", errors="replace")
            if code == WRONG_CALL:
                raise UsageError(message_in(printed))
            if code == OK:
                _check_config(yaml.safe_load(printed), cell)


def _check_config(config: Mapping[str, Any], cell: Cell) -> None:
    """Raise UsageError for settings of a cell that its parser accepts, but that cannot run in a sweep."""
    nodes = config["trainer"]["num_nodes"]
    if nodes != 1:  # a sweep starts no processes on other machines
        remedy = f"run {cell.id} with torchrun or srun"
        raise UsageError(
            f"trainer.num_nodes: expected 1 in a cell of a sweep, given {nodes}; {remedy}"
        )
    model = config.get("model") or {}
    init_args = model.get("init_args", {})
    is_ours = str(model.get("class_path", "")).startswith("lm_profiler.")
    if is_ours and "size" in init_args:
        try:
            check_size_name(init_args["size"])
        except UsageError as error:
            raise UsageError(f"model.{error}") from None


def _print_end(folder: SweepFolder, is_interrupted: bool, request: SweepRequest) -> int:
    """Print the table of the cells that this process runs, and return the exit code."""
    cell_ids = {cell.id for cell in folder.cells}
    entries = []
    for entry in with_unfinished(collect([folder.path])).entries:
        if entry.name in cell_ids:
            entries.append(entry)
    groups = repeats_together(entries)
    counts = Counter(entry.status for entry in entries)
    if request.format == "json":
        write(Collection(), [raw_runs_table(groups)], "json", output=None)
    else:
        write(Collection(), [runs_table(groups)], request.format, output=None)
        print(_counts_line(counts, folder, request))
        print(f"tables and plots: {command_line(('report', str(folder.path)))}")
    if is_interrupted or counts.keys() & {"interrupted", "missing"}:
        print_message("cells are missing; run the same command again to run them")
    if is_interrupted:
        return INTERRUPTED
    return OK if counts.keys() <= set(_GOOD_STATUSES) else FAILED


def _counts_line(
    counts: Counter[str], folder: SweepFolder, request: SweepRequest
) -> str:
    """Return a line with the number of cells by status."""
    cells = count_text(counts.total(), "cell")
    if request.part is not None:
        cells += f" (part {request.part} of {len(folder.plan.cells):,})"
    statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{cells}: {statuses}; written to {folder.path}"


VERBS = {"sweep": (SweepRequest, EXAMPLES, run)}
