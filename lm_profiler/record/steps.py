"""The rows of a run's steps, one per step and rank (also of warm-up), and the files that store them.

During a run, each rank appends to a CSV file of its own. At the end, one CSV or Parquet file has the rows of all ranks.
"""

from __future__ import annotations

import csv
import io
import math
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
from lm_profiler.record.files import RecordError, read_plain, write_whole
from lm_profiler.record.parts import missing_parts
from lm_profiler.record.quantities import MEMORY, STEP_COLUMNS, TIMED

# a value in bytes for each of ``MEMORY`` (allocated, reserved, resident); None if this machine does not report it
Peaks = tuple[int | None, ...]

UNKNOWN: Peaks = (None,) * len(MEMORY)

_UNKNOWN_SECONDS = (None,) * len(TIMED)

# the positions in ``STEP_COLUMNS`` of the times on the device, the times on the host, the tokens, and the bytes
_DEVICE = slice(2, 2 + len(TIMED))
_HOST = slice(2 + len(TIMED), 2 + 2 * len(TIMED))
_TOKENS = _HOST.stop
_MEMORY = slice(-1 - len(MEMORY), -1)

# Rows are converted to columns in chunks of this size while a file is read: columns need a third of the memory.
_CHUNK_ROWS = 4096


def largest_peaks(readings: Iterable[Peaks]) -> Peaks:
    """Return the largest value of each kind over all ``readings``; None for a kind that no reading has."""
    largest: list[int | None] = []
    for values in zip(UNKNOWN, *readings, strict=True):
        reported = [value for value in values if value is not None]
        largest.append(max(reported, default=None))
    return tuple(largest)


@dataclass(frozen=True, slots=True)  # slots halve the memory of a million rows
class StepRow:
    """One step of one rank. None means unknown."""

    step: int
    stage: str
    # the time of each of ``TIMED`` on the device; unknown for the last steps before a device died
    seconds: tuple[float, ...] | None
    # the time of each of ``TIMED`` on the host's clock
    host_seconds: tuple[float, ...]
    tokens: int | None = None
    memory: Peaks = UNKNOWN
    rank: int = 0

    def time(self, part: str, clock: str = "device") -> float:
        """Return the seconds of ``part`` on a ``clock``, "device" or "host"; ValueError if they are unknown."""
        seconds = self.seconds if clock == "device" else self.host_seconds
        if seconds is None:
            raise ValueError(f"step {self.step}: the device's time is unknown")
        if part == "forward_backward":
            return seconds[TIMED.index("forward")] + seconds[TIMED.index("backward")]
        return seconds[TIMED.index(part)]


@dataclass(frozen=True)
class PackedArray:
    """Tells pydantic to write an array as base64 text, and how to read it back."""

    dtype: DTypeLike  # the type in which values are written
    width: int | None = None  # values per row; None for an array with one dimension

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Any
    ) -> core_schema.CoreSchema:
        """Return pydantic's schema: an array, which is written to JSON with ``encode`` and read with ``decode``."""
        text = core_schema.str_schema(strict=True)
        return core_schema.json_or_python_schema(
            json_schema=core_schema.no_info_after_validator_function(self.decode, text),
            python_schema=core_schema.is_instance_schema(np.ndarray),
            serialization=core_schema.plain_serializer_function_ser_schema(
                self.encode, when_used="json"
            ),
        )

    def encode(self, column: NDArray[Any]) -> str:
        """Return ``column`` as text."""
        content = np.ascontiguousarray(column, self.dtype).tobytes()
        return b64encode(content).decode()

    def decode(self, text: str) -> NDArray[Any]:
        """Return the column that ``text`` encodes."""
        content = b64decode(text, validate=True)
        values = np.frombuffer(content, self.dtype)
        if values.dtype.kind == "S":
            values = values.astype(np.str_)
        if self.width is None:
            return values
        return values.reshape(-1, self.width)


Counts = Annotated[NDArray[np.int64], PackedArray(np.int64)]
Codes = Annotated[NDArray[np.uint8], PackedArray(np.uint8)]
Reals = Annotated[NDArray[np.float64], PackedArray(np.float64)]
Words = Annotated[NDArray[np.str_], PackedArray("S16")]
_Times = Annotated[NDArray[np.float64], PackedArray(np.float64, len(TIMED))]
_Bytes = Annotated[NDArray[np.float64], PackedArray(np.float64, len(MEMORY))]


@dataclass(frozen=True, eq=False)
class StepTable(Sequence[StepRow]):
    """A sequence of ``StepRow``, stored as columns in a third of the memory. NaN stands for an unknown value."""

    step: Counts
    stage: Words
    seconds: _Times
    host_seconds: _Times
    tokens: Reals
    memory: _Bytes
    rank: Counts

    @staticmethod
    def from_rows(rows: Iterable[StepRow]) -> StepTable:
        """Return ``rows`` as columns; a table is returned unchanged."""
        if isinstance(rows, StepTable):
            return rows
        rows = list(rows)
        seconds = np.array(
            [row.seconds or _UNKNOWN_SECONDS for row in rows], np.float64
        )
        host_seconds = np.array([row.host_seconds for row in rows], np.float64)
        memory = np.array([row.memory for row in rows], np.float64)
        return StepTable(
            step=np.array([row.step for row in rows], np.int64),
            stage=np.array([row.stage for row in rows], np.str_),
            # reshape sets the width if there are no rows
            seconds=seconds.reshape(-1, len(TIMED)),
            host_seconds=host_seconds.reshape(-1, len(TIMED)),
            tokens=np.array([row.tokens for row in rows], np.float64),
            memory=memory.reshape(-1, len(MEMORY)),
            rank=np.array([row.rank for row in rows], np.int64),
        )

    @staticmethod
    def concatenate(tables: Iterable[StepTable]) -> StepTable:
        """Return the rows of all ``tables``, sorted by step and then by rank."""
        tables = list(tables)
        if not tables:
            return StepTable.from_rows(())
        table = tables[0]
        if len(tables) > 1:
            columns = []
            for field in fields(StepTable):
                columns.append(
                    np.concatenate([getattr(table, field.name) for table in tables])
                )
            table = StepTable(*columns)

        step_increase = np.diff(table.step)
        rank_increase = np.diff(table.rank)
        is_same_step = step_increase == 0
        is_in_order = (step_increase > 0) | (is_same_step & (rank_increase >= 0))
        if np.all(is_in_order):
            return table
        order = np.lexsort((table.rank, table.step))  # the last key counts most
        return table.select(order)

    def select(self, rows: Any) -> StepTable:
        """Return the rows that a mask, indices or a slice selects."""
        columns = [getattr(self, field.name)[rows] for field in fields(self)]
        return StepTable(*columns)

    def of_stages(self, *stages: str) -> StepTable:
        is_in_stages = np.logical_or.reduce([self.stage == stage for stage in stages])
        return self.select(is_in_stages)

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """The columns of ``steps.csv`` by their names."""
        columns: list[NDArray[Any]] = [self.step, self.stage]
        columns += [*self.seconds.T]  # one for each part
        columns += [*self.host_seconds.T]
        columns.append(self.tokens)
        columns += [*self.memory.T]  # one for each kind of memory
        columns.append(self.rank)
        return dict(zip(STEP_COLUMNS, columns, strict=True))

    @property
    def sums(self) -> dict[str, NDArray[Any]]:
        """Two columns that no file contains, by name: the time of forward and backward together, on each clock."""
        parts = [TIMED.index("forward"), TIMED.index("backward")]
        return {
            "forward_backward_s": self.seconds[:, parts].sum(axis=1),
            "forward_backward_host_s": self.host_seconds[:, parts].sum(axis=1),
        }

    def to_pandas(self) -> Any:
        """Return a ``DataFrame`` of the columns and of ``sums``; pandas must be installed."""
        pandas = import_module("pandas")
        return pandas.DataFrame(self.columns | self.sums)

    @property
    def timed(self) -> StepTable:
        """The rows whose time on the device is known."""
        is_unknown = np.isnan(self.seconds[:, -1])
        return self.select(~is_unknown)

    def finished_by_all(self) -> StepTable:
        """Return the rows of a run that was cut short, up to the last step that all ranks with rows have finished."""
        table = StepTable.concatenate([self])
        # Rows are sorted by step, so the last value that is set for a rank is its last step.
        last_steps = dict(zip(table.rank.tolist(), table.step.tolist(), strict=True))
        last_step = min(last_steps.values(), default=0)
        return table.select(table.step <= last_step)

    @property
    def largest_memory(self) -> Peaks:
        """The largest value of each kind of memory over all rows."""
        if not len(self):
            return UNKNOWN
        largest = np.fmax.reduce(self.memory)  # NaN only if all are
        return tuple([_count_unless_nan(value) for value in largest.tolist()])

    def __len__(self) -> int:
        return len(self.step)

    def __iter__(self) -> Iterator[StepRow]:
        """Yield the rows one after the other."""
        columns = [getattr(self, field.name).tolist() for field in fields(self)]
        for step, stage, seconds, host_seconds, tokens, memory, rank in zip(
            *columns, strict=True
        ):
            # If the device's times are unknown, all of them are.
            are_unknown = math.isnan(seconds[-1])
            yield StepRow(
                step,
                sys.intern(stage),
                None if are_unknown else tuple(seconds),
                tuple(host_seconds),
                _count_unless_nan(tokens),
                tuple([_count_unless_nan(value) for value in memory]),
                rank,
            )

    @overload
    def __getitem__(self, key: int) -> StepRow: ...
    @overload
    def __getitem__(self, key: slice) -> StepTable: ...
    @overload
    def __getitem__(self, key: str) -> NDArray[Any]: ...
    def __getitem__(self, key: int | slice | str) -> StepRow | StepTable | NDArray[Any]:
        """Return a row by its index, a slice of the rows, or a column by its name."""
        if isinstance(key, str):
            return (self.columns | self.sums)[key]
        if isinstance(key, slice):
            return self.select(key)
        (row,) = self.select([key])
        return row


def _count_unless_nan(value: float) -> int | None:
    return None if math.isnan(value) else int(value)


# -- rows as text ------------------------------------------------------------------------------------------------------


def write_steps(path: Path, rows: Iterable[StepRow]) -> None:
    """Write ``rows`` as ``steps.csv``; an unknown value is an empty field. ``append_steps`` appends more."""
    write_whole(path, _csv_line(STEP_COLUMNS) + _csv_lines(rows))


def append_steps(path: Path, rows: Iterable[StepRow]) -> None:
    """Append ``rows`` in a single write, so that a killed process leaves only whole rows."""
    with path.open("ab", buffering=0) as file:
        file.write(_csv_lines(rows).encode())


def _csv_line(names: Iterable[str]) -> str:
    return ",".join(names) + "\n"


def _csv_lines(rows: Iterable[StepRow]) -> str:
    """Return the lines of ``rows`` in ``steps.csv``."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow(_csv_fields(row))
    return text.getvalue()


def _csv_fields(row: StepRow) -> list[object]:
    """Return the fields of ``row`` in the order of ``STEP_COLUMNS``; csv writes None as an empty field."""
    host_fields = [f"{seconds:.9f}" for seconds in row.host_seconds]
    device_fields: Sequence[object] = host_fields
    if row.seconds is None:
        device_fields = _UNKNOWN_SECONDS
    elif row.seconds is not row.host_seconds:  # there is a device
        device_fields = [f"{seconds:.9f}" for seconds in row.seconds]
    times = [*device_fields, *host_fields]
    return [row.step, row.stage, *times, row.tokens, *row.memory, row.rank]


def read_steps(path: Path, growing: bool = False) -> StepTable:
    """Read ``steps.csv``; if it is ``growing``, skip a last line that is not complete yet."""
    content = read_plain(path)
    if growing:
        end_of_last_line = content.rfind(b"\n") + 1
        content = content[:end_of_last_line]
    lines = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", newline="")
    reader = csv.reader(lines)
    try:
        header = tuple(next(reader, ()))
        if not missing_parts(header, STEP_COLUMNS):
            return _table_of(_parsed_rows(reader, header))
    except UnicodeDecodeError:
        raise RecordError(f"{path}: is not text") from None
    except (ValueError, csv.Error) as error:
        raise RecordError(
            f"{path}: line {reader.line_num} is damaged: {error}"
        ) from None
    header_text = ", ".join(header)[:80] or "nothing"
    raise RecordError(f"{path}: expected the columns of steps.csv, found {header_text}")


def _table_of(rows: Iterator[StepRow]) -> StepTable:
    """Return ``rows`` as a table, which is made in chunks, because rows take three times the memory of columns."""
    tables = []
    while chunk := list(islice(rows, _CHUNK_ROWS)):
        tables.append(StepTable.from_rows(chunk))
    return StepTable.concatenate(tables)


def _parsed_rows(
    lines: Iterable[Sequence[str]], header: Sequence[str]
) -> Iterator[StepRow]:
    """Yield the rows of ``lines``; columns that a later version may have added are skipped."""
    pick_columns = itemgetter(*[header.index(name) for name in STEP_COLUMNS])
    for line in lines:
        if len(line) != len(header):
            raise ValueError(f"has {len(line)} fields instead of {len(header)}")
        yield _parsed_row(pick_columns(line))


def _parsed_row(texts: Sequence[str]) -> StepRow:
    """Return the row of a line of ``steps.csv``, from texts in the order of ``STEP_COLUMNS``; ValueError if damaged."""
    seconds = None
    if any(texts[_DEVICE]):
        seconds = _parsed_times(texts[_DEVICE])
    return StepRow(
        step=_parsed_count(texts[0]),
        stage=sys.intern(texts[1]),
        seconds=seconds,
        host_seconds=_parsed_times(texts[_HOST]),
        tokens=_parsed_count_if_known(texts[_TOKENS]),
        memory=tuple([_parsed_count_if_known(text) for text in texts[_MEMORY]]),
        rank=_parsed_count(texts[-1]),
    )


def _parsed_times(texts: Sequence[str]) -> tuple[float, ...]:
    """Return the seconds that ``texts`` state; raise ValueError if one is not a finite number."""
    seconds = tuple(map(float, texts))
    if not math.isfinite(sum(seconds)):
        raise ValueError(f"expected finite numbers, found {', '.join(texts)[:80]}")
    return seconds


def _parsed_count_if_known(text: str) -> int | None:
    if not text:
        return None
    return _parsed_count(text)


def _parsed_count(text: str) -> int:
    """Return the whole number that ``text`` states; raise ValueError if it states none."""
    is_count = text.isdecimal() and len(text) < 20
    if not is_count:
        raise ValueError(f"expected a count, found {text[:30]!r}")
    return int(text)


# -- the files of a run ------------------------------------------------------------------------------------------------

STEPS_FILE, COLUMNS_FILE = "steps.csv", "steps.parquet"

# A run with more ranks and more rows writes ``steps.parquet``. Reading 20,000 rows of CSV takes 0.3 s, which does not
# justify another library; 56,000 rows take 0.6 s. As Parquet they take 0.1 s, including the import of pyarrow, and a
# fifth of the bytes (benchmarks/ranks.py).
FEW_RANKS = 8
FEW_ROWS = 20_000

_RANK_FILE = re.compile(r"steps\.rank(\d+)\.csv")


def rank_file(folder: Path, rank: int) -> Path:
    """Return the file to which ``rank`` appends its rows during the run."""
    if rank == 0:
        return folder / STEPS_FILE
    return folder / f"steps.rank{rank}.csv"


def begin_rows(folder: Path, rank: int) -> None:
    """Create the file to which ``rank`` appends its rows, and its folder if this host has none yet."""
    folder.mkdir(parents=True, exist_ok=True)
    write_steps(rank_file(folder, rank), ())


def rank_files(folder: Path) -> dict[int, Path]:
    """Return the files of ranks other than 0 in ``folder`` that have not been merged yet, by rank."""
    files = {}
    for path in folder.glob("steps.rank*.csv"):
        match = _RANK_FILE.fullmatch(path.name)
        if match is not None:
            files[int(match[1])] = path
    return files


def read_rows(folder: Path, growing: bool = False) -> StepTable:
    """Return all rows of a run, sorted by step and rank. Pass ``growing`` if the run may still be going on."""
    return join_rank_files(_read_joined_file(folder, growing), folder)


def _read_joined_file(folder: Path, growing: bool) -> StepTable:
    """Return the rows in the run's ``steps.parquet`` if that file exists, else in ``steps.csv``."""
    parquet_file = folder / COLUMNS_FILE
    if parquet_file.exists():
        return read_parquet(parquet_file)
    return read_steps(folder / STEPS_FILE, growing)


def join_rank_files(rows: Iterable[StepRow], folder: Path) -> StepTable:
    """Return ``rows`` and the rows in the files of other ranks in ``folder``, without duplicates."""
    tables = [StepTable.from_rows(rows)]
    for _, path in sorted(rank_files(folder).items()):
        tables.append(read_steps(path, growing=True))
    if len(tables) == 1:
        return tables[0]
    # Rows of a rank's own file may also be in the file of all ranks. Ordered by step and rank, equal rows are adjacent.
    table = StepTable.concatenate(tables)
    is_same_step = np.diff(table.step, prepend=-1) == 0
    is_same_rank = np.diff(table.rank, prepend=-1) == 0
    is_repeated = is_same_step & is_same_rank
    return table.select(~is_repeated)


def write_rows(folder: Path, rows: Iterable[StepRow], all_ended: bool) -> list[str]:
    """Write the rows of all ranks into one file; return notes for the user, such as a package that is missing.

    If ``all_ended``, the files of the individual ranks are deleted. Otherwise ranks may still be writing them.
    """
    table = StepTable.from_rows(rows)
    notes: list[str] = []
    ranks = set(np.unique(table.rank).tolist())
    write_parquet = len(table) > FEW_ROWS and len(ranks) > FEW_RANKS
    if write_parquet:
        try:
            require(
                "pyarrow",
                f"{len(table):,} rows of steps are in {STEPS_FILE}, which is slow to read",
            )
        except MissingExtra as missing:
            notes.append(str(missing))
            write_parquet = False
    if write_parquet:
        write_whole(folder / COLUMNS_FILE, as_parquet(table))
        (folder / STEPS_FILE).unlink(missing_ok=True)
    else:
        write_steps(folder / STEPS_FILE, table)
    if all_ended:
        for rank, path in rank_files(folder).items():
            if rank in ranks:
                path.unlink(missing_ok=True)
    return notes


# -- rows as Parquet ---------------------------------------------------------------------------------------------------

_TIME_COLUMNS = (*STEP_COLUMNS[_DEVICE], *STEP_COLUMNS[_HOST])


def as_parquet(table: StepTable) -> bytes:
    """Return the content of a Parquet file with the columns of ``table``; unknown values are null."""
    import pyarrow
    from pyarrow import parquet

    arrays = {}
    for name, values in table.columns.items():
        # NaN and masked: null
        arrays[name] = pyarrow.array(_as_stored_type(name, values), from_pandas=True)
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(
        pyarrow.table(arrays),
        sink,
        compression="zstd",
        use_dictionary=[name for name in STEP_COLUMNS if name not in _TIME_COLUMNS],
        use_byte_stream_split=list(_TIME_COLUMNS),
    )
    return bytes(sink.getvalue())


def _as_stored_type(name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return a column in the type in which Parquet stores it: integers, and times in single precision."""
    if name == "stage":
        return values
    if name in ("step", "rank"):
        return values.astype(np.int32)
    if name in _TIME_COLUMNS:
        # the 7 digits of single precision are more than the clocks resolve
        return values.astype(np.float32)
    is_unknown = np.isnan(values)
    return np.ma.masked_array(np.nan_to_num(values), is_unknown).astype(np.int64)


def read_parquet(path: Path) -> StepTable:
    """Read ``steps.parquet``; columns that a later version may have added are skipped."""
    try:
        require("pyarrow", str(path))
    except MissingExtra as missing:
        raise RecordError(str(missing)) from None
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(
            pyarrow.BufferReader(read_plain(path)), read_dictionary=["stage"]
        )
        missing_columns = missing_parts(file.schema_arrow.names, STEP_COLUMNS)
        if missing_columns:
            raise RecordError(
                f"{path}: expected all columns of steps.csv, given none called {missing_columns[0]}"
            )
        table = file.read(list(STEP_COLUMNS))
        stage = table.column("stage").combine_chunks()
        stage_names = np.asarray(stage.dictionary.to_pylist(), np.str_)
        stages = stage_names[stage.indices.to_numpy()]
        numbers = {}
        for name in STEP_COLUMNS:
            if name != "stage":
                numbers[name] = table.column(name).to_numpy().astype(np.float64)
    except RecordError:
        raise
    except (
        pyarrow.ArrowException,
        OSError,
        TypeError,
        AttributeError,
        ValueError,
    ) as error:
        raise RecordError(f"{path}: is damaged: {error}") from None

    def stacked(names: Iterable[str]) -> NDArray[np.float64]:
        return np.column_stack([numbers[name] for name in names])

    return StepTable(
        step=numbers["step"].astype(np.int64),
        stage=stages,
        seconds=stacked(STEP_COLUMNS[_DEVICE]),
        host_seconds=stacked(STEP_COLUMNS[_HOST]),
        tokens=numbers[STEP_COLUMNS[_TOKENS]],
        memory=stacked(STEP_COLUMNS[_MEMORY]),
        rank=numbers["rank"].astype(np.int64),
    )
