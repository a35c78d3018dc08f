"""Where the rows of a run are: what each rank writes as they come, and in the end one file with those of all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lm_profiler.record.extras import MissingExtra, require
from lm_profiler.record.files import write_whole
from lm_profiler.record.steps import StepRow, StepTable, read_steps, write_steps
from lm_profiler.record.steps_parquet import as_parquet, read_parquet

STEPS_FILE, COLUMNS_FILE = "steps.csv", "steps.parquet"

FEW_RANKS, FEW_ROWS = 8, 20_000
"""A run with more of both has ``steps.parquet``. So many rows of CSV are read in 0.3 s, which is no reason yet to ask
for a library; 56,000 take 0.6 s, as Parquet 0.1 s with the import of pyarrow, in a fifth of the bytes
(benchmarks/ranks.py)."""

_OF_A_RANK = re.compile(r"steps\.rank(\d+)\.csv")


def rank_file(folder: Path, rank: int) -> Path:
    """Where ``rank`` writes its rows as they come."""
    return folder / (f"steps.rank{rank}.csv" if rank else STEPS_FILE)


def begin_rows(folder: Path, rank: int) -> None:
    """Make the file to which ``rank`` adds its rows, also where no other rank sees it.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_steps(rank_file(folder, rank), ())


def rank_files(folder: Path) -> dict[int, Path]:
    """What ranks other than the first left in ``folder`` and nobody has brought together yet."""
    matches = ((_OF_A_RANK.fullmatch(path.name), path) for path in folder.glob("steps.rank*.csv"))
    return {int(match[1]): path for match, path in matches if match}


def read_rows(folder: Path, growing: bool = False) -> StepTable:
    """All rows of the run in ``folder``, each once, by step and rank; ``growing`` where it may not have ended.

    Raises:
        RecordError: a file cannot be read, or needs pyarrow, which is not installed.
    """
    columns = folder / COLUMNS_FILE
    first = read_parquet(columns) if columns.exists() else read_steps(folder / STEPS_FILE, growing)
    return with_rows_left(first, folder)


def with_rows_left(rows: Iterable[StepRow], folder: Path) -> StepTable:
    """``rows`` and those that further ranks left in ``folder``.

    Raises:
        RecordError: one of their files cannot be read.
    """
    left = [read_steps(path, growing=True) for _, path in sorted(rank_files(folder).items())]
    return _each_once(StepTable.joined([StepTable.of(rows), *left])) if left else StepTable.of(rows)


def _each_once(table: StepTable) -> StepTable:
    """What a rank wrote as it came may be in the file of all ranks too."""
    again = (np.diff(table.step, prepend=-1) == 0) & (np.diff(table.rank, prepend=-1) == 0)
    return table.where(~again)


def write_rows(folder: Path, rows: Iterable[StepRow], all_ended: bool) -> list[str]:
    """Write all ranks' ``rows`` into one file; returns what a reader must know of it.

    What the ranks wrote as they came is removed where ``all_ended``: otherwise they may be writing still.

    Raises:
        OSError: it cannot be written.
    """
    table, notes = StepTable.of(rows), []
    in_columns = len(table) > FEW_ROWS and len(np.unique(table.rank)) > FEW_RANKS
    if in_columns:
        try:
            require("pyarrow", f"{len(table):,} rows of steps are in {STEPS_FILE}, which is slow to read")
        except MissingExtra as missing:
            notes, in_columns = [str(missing)], False
    if in_columns:
        write_whole(folder / COLUMNS_FILE, as_parquet(table))
        (folder / STEPS_FILE).unlink(missing_ok=True)
    else:
        write_steps(folder / STEPS_FILE, table)
    if all_ended:
        there = set(np.unique(table.rank).tolist())
        for rank, path in rank_files(folder).items():
            if rank in there:
                path.unlink(missing_ok=True)
    return notes
