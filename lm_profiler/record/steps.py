"""The rows of steps, one for each step and rank, warm-up included, and the files that hold them.

During a run each rank appends to its own CSV file; at its end one CSV or Parquet file has the rows of all.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray
from pydantic_core import core_schema

from lm_profiler.record.calls import MissingExtra, require
from lm_profiler.record.files import BEYOND, RecordError, read_plain, write_whole
from lm_profiler.record.parts import lacked
from lm_profiler.record.quantities import MEMORY, STEP_COLUMNS, TIMED

# a value in bytes for each of ``MEMORY`` (allocated, reserved, resident); None if this machine does not report it
Peaks = tuple[int | None, ...]

UNKNOWN: Peaks = (None,) * len(MEMORY)

# the slices of a row with its times on the device and on the host, and its bytes
_DEVICE, _HOST = slice(2, 2 + len(TIMED)), slice(2 + len(TIMED), 2 + 2 * len(TIMED))
_MEMORY = slice(-1 - len(MEMORY), -1)

_AT_ONCE = 4096  # how many rows are read before they become columns, which take a third of the memory


def largest(readings: Iterable[Peaks]) -> Peaks:
    """Return the largest of each reading; None only if none is known."""
    columns = zip(UNKNOWN, *readings, strict=True)
    return tuple(max((value for value in column if value is not None), default=None) for column in columns)


@dataclass(frozen=True, slots=True)  # slots halve the memory of a million rows
class StepRow:
    """One step of one rank: times for each of ``TIMED``, bytes for each of ``MEMORY``, in that order. None is unknown.

    The times of the last steps of a device that died are unknown.
    """

    step: int
    stage: str
    seconds: tuple[float, ...] | None
    host_seconds: tuple[float, ...]
    tokens: int | None = None
    memory: Peaks = UNKNOWN
    rank: int = 0

    def time(self, part: str, clock: str = "device") -> float:
        """Return the seconds of ``part`` on a clock; ValueError where the device's time is unknown."""
        seconds = self.seconds if clock == "device" else self.host_seconds
        if seconds is None:
            raise ValueError(f"step {self.step}: the device's time is unknown")
        if part == "forward_backward":
            return seconds[TIMED.index("forward")] + seconds[TIMED.index("backward")]
        return seconds[TIMED.index(part)]


@dataclass(frozen=True)
class PackedArray:
    """How pydantic writes and reads an array of ``dtype``, ``width`` values per row, whatever type was sent."""

    dtype: DTypeLike
    width: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        text = core_schema.str_schema(strict=True)
        return core_schema.json_or_python_schema(
            json_schema=core_schema.no_info_after_validator_function(self.read, text),
            python_schema=core_schema.is_instance_schema(np.ndarray),
            serialization=core_schema.plain_serializer_function_ser_schema(self.written, when_used="json"),
        )

    def written(self, column: NDArray[Any]) -> str:
        return b64encode(np.ascontiguousarray(column, self.dtype).tobytes()).decode()

    def read(self, text: str) -> NDArray[Any]:
        flat = np.frombuffer(b64decode(text, validate=True), self.dtype)
        flat = flat.astype(np.str_) if flat.dtype.kind == "S" else flat
        return flat if self.width is None else flat.reshape(-1, self.width)


Counts = Annotated[NDArray[np.int64], PackedArray(np.int64)]
Codes = Annotated[NDArray[np.uint8], PackedArray(np.uint8)]
Reals = Annotated[NDArray[np.float64], PackedArray(np.float64)]
Words = Annotated[NDArray[np.str_], PackedArray("S16")]
_Times = Annotated[NDArray[np.float64], PackedArray(np.float64, len(TIMED))]
_Bytes = Annotated[NDArray[np.float64], PackedArray(np.float64, len(MEMORY))]


@dataclass(frozen=True, eq=False)
class StepTable(Sequence[StepRow]):
    """Rows as columns: a sequence of ``StepRow`` in a third of the memory, with NaN where a value is unknown."""

    step: Counts
    stage: Words
    seconds: _Times
    host_seconds: _Times
    tokens: Reals
    memory: _Bytes
    rank: Counts

    @staticmethod
    def of(rows: Iterable[StepRow]) -> StepTable:
        """Return ``rows`` as columns; a table is returned unchanged."""
        if isinstance(rows, StepTable):
            return rows
        rows = list(rows)
        nowhere = (None,) * len(TIMED)
        return StepTable(
            np.array([row.step for row in rows], np.int64),
            np.array([row.stage for row in rows], np.str_),
            np.array([row.seconds or nowhere for row in rows], np.float64).reshape(-1, len(TIMED)),
            np.array([row.host_seconds for row in rows], np.float64).reshape(-1, len(TIMED)),
            np.array([row.tokens for row in rows], np.float64),
            np.array([row.memory for row in rows], np.float64).reshape(-1, len(MEMORY)),
            np.array([row.rank for row in rows], np.int64),
        )

    @staticmethod
    def joined(tables: Iterable[StepTable]) -> StepTable:
        """Return all rows of ``tables``, by step and then by rank."""
        parts = list(tables) or [StepTable.of(())]
        whole = parts[0]
        if len(parts) > 1:
            whole = StepTable(*(np.concatenate([getattr(part, of.name) for part in parts]) for of in fields(StepTable)))
        steps, ranks = np.diff(whole.step), np.diff(whole.rank)
        in_order = np.all((steps > 0) | ((steps == 0) & (ranks >= 0)))
        return whole if in_order else whole.where(np.lexsort((whole.rank, whole.step)))

    def where(self, chosen: Any) -> StepTable:
        """Return the rows that ``chosen`` picks, which is a mask, indices or a slice."""
        return StepTable(*(getattr(self, of.name)[chosen] for of in fields(self)))

    def of_stages(self, *stages: str) -> StepTable:
        return self.where(np.logical_or.reduce([self.stage == stage for stage in stages]))

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """The columns by their names in ``steps.csv``."""
        values = (self.step, self.stage, *self.seconds.T, *self.host_seconds.T, self.tokens, *self.memory.T, self.rank)
        return dict(zip(STEP_COLUMNS, values, strict=True))

    @property
    def sums(self) -> dict[str, NDArray[Any]]:
        """The columns that are sums of others, which no file has: forward and backward together, on each clock."""
        forward, backward = TIMED.index("forward"), TIMED.index("backward")
        return {
            "forward_backward_s": self.seconds[:, forward] + self.seconds[:, backward],
            "forward_backward_host_s": self.host_seconds[:, forward] + self.host_seconds[:, backward],
        }

    def to_pandas(self) -> Any:
        """Return a ``DataFrame`` of the columns and of ``sums``, where pandas is installed."""
        return import_module("pandas").DataFrame({**self.columns, **self.sums})

    @property
    def timed(self) -> StepTable:
        """The rows whose time on the device is known."""
        return self.where(~np.isnan(self.seconds[:, -1]))

    def finished_by_all(self) -> StepTable:
        """Return the rows of a run that was cut short, up to the last step that every rank with rows finished."""
        whole = StepTable.joined([self])
        # Rows are in order of the steps, so each rank's entry ends as its last step.
        last = dict(zip(whole.rank.tolist(), whole.step.tolist(), strict=True))
        return whole.where(whole.step <= min(last.values(), default=0))

    @property
    def largest_memory(self) -> Peaks:
        if not len(self):
            return UNKNOWN
        return tuple(None if np.isnan(value) else int(value) for value in np.fmax.reduce(self.memory))

    def __len__(self) -> int:
        return len(self.step)

    def __iter__(self) -> Iterator[StepRow]:
        columns = (getattr(self, of.name).tolist() for of in fields(self))
        for step, stage, seconds, host_seconds, tokens, memory, rank in zip(*columns, strict=True):
            yield StepRow(
                step,
                sys.intern(stage),
                tuple(seconds) if seconds[-1] == seconds[-1] else None,  # NaN differs from itself: unknown
                tuple(host_seconds),
                int(tokens) if tokens == tokens else None,
                tuple([int(value) if value == value else None for value in memory]),
                rank,
            )

    @overload
    def __getitem__(self, at: int) -> StepRow: ...
    @overload
    def __getitem__(self, at: slice) -> StepTable: ...
    @overload
    def __getitem__(self, at: str) -> NDArray[Any]: ...
    def __getitem__(self, at: int | slice | str) -> StepRow | StepTable | NDArray[Any]:
        if isinstance(at, str):
            return self.sums[at] if at in self.sums else self.columns[at]
        return self.where(at) if isinstance(at, slice) else next(iter(self.where([at])))


def write_steps(path: Path, rows: Iterable[StepRow]) -> None:
    """Write ``rows`` as ``steps.csv``; an unknown value is an empty field. ``append_steps`` adds more."""
    write_whole(path, _text((STEP_COLUMNS, *map(_fields, rows))))


def append_steps(path: Path, rows: Iterable[StepRow]) -> None:
    """Add ``rows`` in one write, so that a killed process leaves only whole rows."""
    with path.open("ab", buffering=0) as file:
        file.write(_text(map(_fields, rows)).encode())


def _fields(row: StepRow) -> tuple[object, ...]:
    seconds = row.seconds if row.seconds is not None else (None,) * len(TIMED)
    times = ("" if value is None else f"{value:.9f}" for value in (*seconds, *row.host_seconds))
    rest = ("" if value is None else value for value in (row.tokens, *row.memory))
    return (row.step, row.stage, *times, *rest, row.rank)


def _text(lines: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def read_steps(path: Path, growing: bool = False) -> StepTable:
    """Read ``steps.csv``; if it is ``growing``, without the line that is being written."""
    content = read_plain(path)
    whole = content[: content.rfind(b"\n") + 1] if growing else content
    reader = csv.reader(io.TextIOWrapper(io.BytesIO(whole), encoding="utf-8", newline=""))
    try:
        header = tuple(next(reader, ()))
        if not lacked(header, STEP_COLUMNS):
            known = itemgetter(*map(header.index, STEP_COLUMNS))
            rows = (_row(known(fields), len(fields) - len(header)) for fields in reader)
            return StepTable.joined(StepTable.of(some) for some in iter(lambda: list(islice(rows, _AT_ONCE)), []))
    except UnicodeDecodeError:
        raise RecordError(f"{path}: is not text") from None
    except (ValueError, IndexError, csv.Error) as error:
        raise RecordError(f"{path}: line {reader.line_num} is damaged: {error}") from None
    raise RecordError(f"{path}: expected the columns of steps.csv, found {', '.join(header)[:80] or 'nothing'}")


def _row(fields: Sequence[str], too_many: int) -> StepRow:
    if too_many:
        raise ValueError(f"has {too_many:+} fields")
    device, tokens, *memory = fields[_DEVICE], *fields[_HOST.stop : -1]
    seconds, host_seconds = (_times(device) if any(device) else None), _times(fields[_HOST])
    counts = [_count(field) if field else None for field in (tokens, *memory)]
    stage = sys.intern(fields[1])
    return StepRow(_count(fields[0]), stage, seconds, host_seconds, counts[0], tuple(counts[1:]), _count(fields[-1]))


def _times(fields: Sequence[str]) -> tuple[float, ...]:
    values = tuple(map(float, fields))
    total = sum(values)
    if total != total or not max(map(abs, values)) < BEYOND:  # NaN differs from itself, and `max` may miss it
        raise ValueError(f"expected finite numbers below {BEYOND:g}, found {', '.join(fields)[:80]}")
    return values


def _count(field: str) -> int:
    if not (field.isdecimal() and len(field) < 20):
        raise ValueError(f"expected a count, found {field[:30]!r}")
    return int(field)


# -- the files of a run ------------------------------------------------------------------------------------------------

STEPS_FILE, COLUMNS_FILE = "steps.csv", "steps.parquet"

# A run with more than both writes ``steps.parquet``. Reading 20,000 rows of CSV takes 0.3 s, which does not justify
# another library; 56,000 rows take 0.6 s, or 0.1 s as Parquet with the import of pyarrow, in a fifth of the bytes
# (benchmarks/ranks.py).
FEW_RANKS, FEW_ROWS = 8, 20_000

_OF_A_RANK = re.compile(r"steps\.rank(\d+)\.csv")


def rank_file(folder: Path, rank: int) -> Path:
    """Return the file to which ``rank`` adds its rows as they come."""
    return folder / (f"steps.rank{rank}.csv" if rank else STEPS_FILE)


def begin_rows(folder: Path, rank: int) -> None:
    """Make the file to which ``rank`` adds its rows, and its folder if this host does not share one."""
    folder.mkdir(parents=True, exist_ok=True)
    write_steps(rank_file(folder, rank), ())


def rank_files(folder: Path) -> dict[int, Path]:
    """Return the files of ranks other than the first in ``folder`` that were not joined yet, by rank."""
    matches = ((_OF_A_RANK.fullmatch(path.name), path) for path in folder.glob("steps.rank*.csv"))
    return {int(match[1]): path for match, path in matches if match}


def read_rows(folder: Path, growing: bool = False) -> StepTable:
    """Return all rows of a run, each once, by step and rank; ``growing`` if it may not have ended."""
    columns = folder / COLUMNS_FILE
    first = read_parquet(columns) if columns.exists() else read_steps(folder / STEPS_FILE, growing)
    return with_rows_left(first, folder)


def with_rows_left(rows: Iterable[StepRow], folder: Path) -> StepTable:
    """Return ``rows`` together with the rows that further ranks left in ``folder``."""
    left = [read_steps(path, growing=True) for _, path in sorted(rank_files(folder).items())]
    table = StepTable.joined([StepTable.of(rows), *left]) if left else StepTable.of(rows)
    again = (np.diff(table.step, prepend=-1) == 0) & (np.diff(table.rank, prepend=-1) == 0)
    return table.where(~again) if left else table  # rows of a rank's own file may be in the file of all ranks too


def write_rows(folder: Path, rows: Iterable[StepRow], all_ended: bool) -> list[str]:
    """Write all ranks' ``rows`` into one file, and return notes for the reader of the run."""
    table, notes = StepTable.of(rows), list[str]()
    there = set(np.unique(table.rank).tolist())
    in_columns = len(table) > FEW_ROWS and len(there) > FEW_RANKS
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
    for rank, path in rank_files(folder).items() if all_ended else ():  # otherwise the ranks may still be writing
        if rank in there:
            path.unlink(missing_ok=True)
    return notes


def as_parquet(table: StepTable) -> bytes:
    import pyarrow
    from pyarrow import parquet

    counts = (np.ma.masked_array(np.nan_to_num(of), np.isnan(of)) for of in (table.tokens, *table.memory.T))
    # Single precision has 7 digits, which is finer than any clock here.
    seconds = [*table.seconds.astype(np.float32).T, *table.host_seconds.astype(np.float32).T]
    step, rank = (of.astype(np.int32) for of in (table.step, table.rank))
    values = (step, table.stage, *seconds, *(of.astype(np.int64) for of in counts), rank)
    columns = dict(zip(STEP_COLUMNS, values, strict=True))
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


def read_parquet(path: Path) -> StepTable:
    """Read ``steps.parquet`` back. Columns that a later version may have added are skipped."""
    try:
        require("pyarrow", str(path))
    except MissingExtra as missing:
        raise RecordError(str(missing)) from None
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(read_plain(path)), read_dictionary=["stage"])
        if absent := lacked(file.schema_arrow.names, STEP_COLUMNS):
            raise RecordError(f"{path}: expected the columns of steps.csv too, given no {absent[0]}")
        table = file.read(list(STEP_COLUMNS))
        stage = table.column("stage").combine_chunks()
        stages = np.asarray(stage.dictionary.to_pylist(), np.str_)[stage.indices.to_numpy()]
        numbers: list[Any] = [
            None if name == "stage" else _numbers(table.column(name).to_numpy()) for name in STEP_COLUMNS
        ]
    except RecordError:
        raise
    except (pyarrow.ArrowException, OSError, TypeError, AttributeError, ValueError) as error:
        raise RecordError(f"{path}: is damaged: {error}") from None
    seconds, host_seconds, memory = (np.column_stack(numbers[names]) for names in (_DEVICE, _HOST, _MEMORY))
    step, rank = (np.asarray(numbers[at], np.int64) for at in (0, -1))
    return StepTable(step, stages, seconds, host_seconds, np.asarray(numbers[_HOST.stop]), memory, rank)


def _numbers(values: NDArray[Any]) -> NDArray[np.float64]:
    values = values.astype(np.float64)
    if np.abs(values[~np.isnan(values)]).max(initial=0.0) >= BEYOND:
        raise ValueError(f"expected finite numbers below {BEYOND:g}")
    return values
