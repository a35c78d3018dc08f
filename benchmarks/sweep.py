"""Seconds that a sweep adds to each of its cells: the fork server against a fresh interpreter a cell.

    python -m benchmarks.sweep [--cells 10]

The same tiny run, again and again, on the CPU. A cell's overhead is the time from asking for its process until its end
is told, less the run's own duration as its record says it (from having read its options to its last figure): starting
Python, imports, reading the options, and ending. What the server costs once, before its first cell, stands beside it.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from lm_profiler.cli.verbs.sweep import LOADED
from lm_profiler.measure.device.environment import device_name
from lm_profiler.processes.cell_processes import CellProcesses
from lm_profiler.record.run_record import read_run
from lm_profiler.report.tables.formats import markdown
from lm_profiler.report.tables.table import text_table

TINY = (
    *(
        "--model.d_model=16",
        "--model.d_ff=24",
        "--model.num_layers=2",
        "--model.num_heads=2",
        "--model.vocab_size=50",
    ),
    *("--data.batch_size=2", "--data.context_length=8", "--trainer.accelerator=cpu"),
    *(
        "--stages.warmup_steps=1",
        "--stages.measure_steps=3",
        "--actions.steps=0",
        "--memory.steps=0",
        "--trace.steps=0",
    ),
)


def time_cells(
    modules: Sequence[str], cells: int
) -> tuple[float, list[float], list[float]]:
    """Seconds before the first cell, of each cell, and of each cell's own run."""
    walls, runs = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        CellProcesses("lm_profiler", modules) as program,
    ):
        begun = time.perf_counter()
        one_cell(program, ["--version"], Path(folder, "once.txt"))
        once = time.perf_counter() - begun
        for cell in map(str, range(cells)):
            call = ["fit", *TINY, f"--log_dir={folder}", f"--name={cell}"]
            asked = time.perf_counter()
            one_cell(program, call, Path(folder, "output.txt"))
            walls.append(time.perf_counter() - asked)
            runs.append(read_run(Path(folder, cell, "version_0")).duration_s)
    return once, walls, runs


def one_cell(program: CellProcesses, call: Sequence[str], output: Path) -> None:
    program.start("cell", call, output, {})
    program.wait_for_ends(None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=10)
    cells = parser.parse_args().cells
    # otherwise each cell would import this program once more, as no cell of a user's sweep does
    sys.modules["__main__"] = ModuleType("__main__")
    cpu = device_name(torch.device("cpu"))
    print(
        f"{cpu}, {platform.platform()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"{cells} cells one after the other; medians\n")
    rows = []
    for name, modules in (
        ("fork server", LOADED),
        ("a fresh interpreter each", ()),
    ):
        once, walls, runs = time_cells(modules, cells)
        added = [wall - run for wall, run in zip(walls, runs, strict=True)]
        figures = (
            once,
            statistics.median(walls),
            statistics.median(runs),
            statistics.median(added),
        )
        spread = f"{min(added):.2f} ... {max(added):.2f}"
        rows.append([name, *(f"{figure:.2f}" for figure in figures), spread])
    titles = (
        "",
        "once (s)",
        "a cell (s)",
        "its own run (s)",
        "overhead a cell (s)",
        "min ... max",
    )
    print(markdown(text_table(titles, rows)), end="")


if __name__ == "__main__":
    main()
