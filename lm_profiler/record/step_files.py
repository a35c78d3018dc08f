"""The files of a run's rows: one for each rank while it runs, one for all at its end, as CSV or Parquet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.calls import MissingExtra, require
from lm_profiler.record.files import BEYOND, RecordError, read_plain, write_whole
from lm_profiler.record.quantities import MEMORY, STEP_COLUMNS, TIMED
from lm_profiler.record.steps import StepRow, StepTable, read_steps, write_steps

STEPS_FILE, COLUMNS_FILE = "steps.csv", "steps.parquet"

# A run with more than both writes ``steps.parquet``. 20,000 rows of CSV are read in 0.3 s, which does not justify
# another library; 56,000 rows take 0.6 s, or 0.1 s as Parquet with the import of pyarrow, in a fifth of the bytes
# (benchmarks/ranks.py).
FEW_RANKS, FEW_ROWS = 8, 20_000

_OF_A_RANK = re.compile(r"steps\.rank(\d+)\.csv")


def rank_file(folder: Path, rank: int) -> Path:
    """Return the file to which ``rank`` adds its rows as they come."""
    return folder / (f"steps.rank{rank}.csv" if rank else STEPS_FILE)


def begin_rows(folder: Path, rank: int) -> None:
    """Make the file to which ``rank`` adds its rows, and its folder where this host does not share one."""
    folder.mkdir(parents=True, exist_ok=True)
    write_steps(rank_file(folder, rank), ())


def rank_files(folder: Path) -> dict[int, Path]:
    """Return the files of ranks other than the first in ``folder`` that were not joined yet, by rank."""
    matches = ((_OF_A_RANK.fullmatch(path.name), path) for path in folder.glob("steps.rank*.csv"))
    return {int(match[1]): path for match, path in matches if match}


def read_rows(folder: Path, growing: bool = False) -> StepTable:
    """Return all rows of the run in ``folder``, each once, by step and rank; ``growing`` where it may not have ended.

    Raises:
        RecordError: a file cannot be read, or needs pyarrow, which is not installed.
    """
    columns = folder / COLUMNS_FILE
    first = read_parquet(columns) if columns.exists() else read_steps(folder / STEPS_FILE, growing)
    return with_rows_left(first, folder)


def with_rows_left(rows: Iterable[StepRow], folder: Path) -> StepTable:
    """Return ``rows`` together with those that further ranks left in ``folder``."""
    left = [read_steps(path, growing=True) for _, path in sorted(rank_files(folder).items())]
    return _each_once(StepTable.joined([StepTable.of(rows), *left])) if left else StepTable.of(rows)


def _each_once(table: StepTable) -> StepTable:
    again = (np.diff(table.step, prepend=-1) == 0) & (np.diff(table.rank, prepend=-1) == 0)
    return table.where(~again)


def write_rows(folder: Path, rows: Iterable[StepRow], all_ended: bool) -> list[str]:
    """Write all ranks' ``rows`` into one file, and return notes for the reader of the run."""
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


_NUMBERS = tuple(name for name in STEP_COLUMNS if name != "stage")


def as_parquet(table: StepTable) -> bytes:
    """Return the content of ``steps.parquet``."""
    import pyarrow
    from pyarrow import parquet

    columns = dict(zip(STEP_COLUMNS, _columns(table), strict=True))
    times = [name for name, values in columns.items() if values.dtype == np.float32]
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(
        pyarrow.table({name: pyarrow.array(values, from_pandas=True) for name, values in columns.items()}),  # NaN: null
        sink,
        compression="zstd",
        use_dictionary=[name for name in columns if name not in times],
        use_byte_stream_split=times,
    )
    return bytes(sink.getvalue())


def _columns(table: StepTable) -> Iterator[NDArray[Any]]:
    yield table.step.astype(np.int32)
    yield table.stage
    # Single precision has 7 digits, which is finer than any clock here.
    yield from table.seconds.astype(np.float32).T
    yield from table.host_seconds.astype(np.float32).T
    for counts in (table.tokens, *table.memory.T):
        yield np.ma.masked_array(np.nan_to_num(counts).astype(np.int64), np.isnan(counts))
    yield table.rank.astype(np.int32)


def read_parquet(path: Path) -> StepTable:
    """Read ``steps.parquet`` back. Columns that a later version may have added are passed over."""
    try:
        require("pyarrow", str(path))
    except MissingExtra as missing:
        raise RecordError(str(missing)) from None
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(read_plain(path)), read_dictionary=["stage"])
        if missing_columns := set(STEP_COLUMNS) - set(file.schema_arrow.names):
            raise RecordError(f"{path}: expected the columns of steps.csv too, given no {min(missing_columns)}")
        table = file.read(list(STEP_COLUMNS))
        stage = table.column("stage").combine_chunks()
        numbers = {name: _numbers(table.column(name).to_numpy()) for name in _NUMBERS}
    except (pyarrow.ArrowException, OSError, TypeError, AttributeError) as error:
        raise RecordError(f"{path}: is damaged: {error}") from None
    except ValueError as error:
        raise error if isinstance(error, RecordError) else RecordError(f"{path}: is damaged: {error}") from None
    return _table(numbers, np.asarray(stage.dictionary.to_pylist(), np.str_)[stage.indices.to_numpy()])


def _numbers(values: NDArray[Any]) -> NDArray[np.float64]:
    values = values.astype(np.float64)
    if np.abs(values[~np.isnan(values)]).max(initial=0.0) >= BEYOND:
        raise ValueError(f"expected finite numbers below {BEYOND:g}")
    return values


def _table(numbers: dict[str, NDArray[np.float64]], stage: NDArray[np.str_]) -> StepTable:
    device, host = STEP_COLUMNS[2 : 2 + len(TIMED)], STEP_COLUMNS[2 + len(TIMED) : 2 + 2 * len(TIMED)]
    groups = (device, host, STEP_COLUMNS[-1 - len(MEMORY) : -1])
    seconds, host_seconds, memory = (np.column_stack([numbers.pop(name) for name in names]) for names in groups)
    step, rank = (numbers[name].astype(np.int64) for name in ("step", "rank"))
    return StepTable(step, stage, seconds, host_seconds, numbers["tokens"], memory, rank)
