"""``steps.parquet``: the columns of ``steps.csv``, for runs with too many rows for text. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.extras import MissingExtra, require
from lm_profiler.record.quantities import MEMORY, STEP_COLUMNS, TIMED
from lm_profiler.record.reading import BEYOND, RecordError, read_plain
from lm_profiler.record.steps import StepTable

_NUMBERS = tuple(name for name in STEP_COLUMNS if name != "stage")


def as_parquet(table: StepTable) -> bytes:
    """The file's content. Times are in single precision, whose 7 digits are finer than any clock here."""
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
    yield from table.seconds.astype(np.float32).T
    yield from table.host_seconds.astype(np.float32).T
    for counts in (table.tokens, *table.memory.T):
        yield np.ma.masked_array(np.nan_to_num(counts).astype(np.int64), np.isnan(counts))
    yield table.rank.astype(np.int32)


def read_parquet(path: Path) -> StepTable:
    """Read ``steps.parquet`` back. Columns that a later version may have added are passed over.

    Raises:
        RecordError: it cannot be read, is no steps.parquet, or damaged; or pyarrow is not installed.
    """
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
    """Takes the columns out of ``numbers``, so that none is held twice."""
    device, host = STEP_COLUMNS[2 : 2 + len(TIMED)], STEP_COLUMNS[2 + len(TIMED) : 2 + 2 * len(TIMED)]
    groups = (device, host, STEP_COLUMNS[-1 - len(MEMORY) : -1])
    seconds, host_seconds, memory = (np.column_stack([numbers.pop(name) for name in names]) for names in groups)
    step, rank = (numbers[name].astype(np.int64) for name in ("step", "rank"))
    return StepTable(step, stage, seconds, host_seconds, numbers["tokens"], memory, rank)
