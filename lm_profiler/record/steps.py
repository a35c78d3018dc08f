"""The rows of steps and ``steps.csv``, which has a row for each step and rank, warm-up included."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, overload

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.columns import Counts, PackedArray, Reals, Words
from lm_profiler.record.files import BEYOND, RecordError, read_plain, write_whole
from lm_profiler.record.quantities import MEMORY, STEP_COLUMNS, TIMED

# a value in bytes for each of ``MEMORY`` (allocated, reserved, resident); None where this machine cannot say
Peaks = tuple[int | None, ...]

UNKNOWN: Peaks = (None,) * len(MEMORY)


_AT_ONCE = 4096  # how many rows are read before they become columns, which take a third of the memory


def largest(readings: Iterable[Peaks]) -> Peaks:
    """Return the largest of each reading; None only where none is known."""
    columns = zip(UNKNOWN, *readings, strict=True)
    return tuple(max((value for value in column if value is not None), default=None) for column in columns)


@dataclass(frozen=True, slots=True)  # slots halve the memory of a million rows
class StepRow:
    """One step of one rank.

    ``seconds`` (the device's stream, or the host where there is none) and ``host_seconds`` hold a value for each of
    ``TIMED``, in that order; ``memory`` a value in bytes for each of ``MEMORY``. None where unknown: a device that
    died never says how long its last steps took.
    """

    step: int
    stage: str
    seconds: tuple[float, ...] | None
    host_seconds: tuple[float, ...]
    tokens: int | None = None
    memory: Peaks = UNKNOWN
    rank: int = 0

    def time(self, part: str, clock: str = "device") -> float:
        """Return the seconds of ``part`` (of ``TIMED``, or ``forward_backward``) on ``clock`` (``device`` or ``host``).

        Raises:
            ValueError: the device's time is unknown.
        """
        seconds = self.seconds if clock == "device" else self.host_seconds
        if seconds is None:
            raise ValueError(f"step {self.step}: the device's time is unknown")
        if part == "forward_backward":
            return seconds[TIMED.index("forward")] + seconds[TIMED.index("backward")]
        return seconds[TIMED.index(part)]


@dataclass(frozen=True, eq=False)
class StepTable(Sequence[StepRow]):
    """Rows as columns, of any number of ranks: a sequence of ``StepRow`` that takes a third of the memory.

    A column has the name of the field of ``StepRow``; times and bytes are float64 with a further axis for ``TIMED`` and
    ``MEMORY``, and NaN where a value is unknown.
    """

    step: Counts
    stage: Words
    seconds: Annotated[NDArray[np.float64], PackedArray(np.float64, len(TIMED))]
    host_seconds: Annotated[NDArray[np.float64], PackedArray(np.float64, len(TIMED))]
    tokens: Reals
    memory: Annotated[NDArray[np.float64], PackedArray(np.float64, len(MEMORY))]
    rank: Counts

    @staticmethod
    def of(rows: Iterable[StepRow]) -> StepTable:
        """Return ``rows`` as columns; a table is returned as it is."""
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
        """Return the rows of these stages."""
        return self.where(np.logical_or.reduce([self.stage == stage for stage in stages]))

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
        """The largest of each reading; None only where none is known."""
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
    def __getitem__(self, at: int | slice) -> StepRow | StepTable:
        return self.where(at) if isinstance(at, slice) else next(iter(self.where([at])))


def write_steps(path: Path, rows: Iterable[StepRow]) -> None:
    """Write ``rows`` as ``steps.csv``; an unknown value is an empty field. ``append_steps`` adds more."""
    write_whole(path, _text((STEP_COLUMNS, *map(_fields, rows))))


def append_steps(path: Path, rows: Iterable[StepRow]) -> None:
    """Add ``rows`` in one go: whatever kills the process leaves whole rows."""
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
    """Read ``steps.csv``; of a ``growing`` one, all but the line that is being written."""
    content = read_plain(path)
    whole = content[: content.rfind(b"\n") + 1] if growing else content
    reader = csv.reader(io.TextIOWrapper(io.BytesIO(whole), encoding="utf-8", newline=""))
    try:
        header = tuple(next(reader, ()))
        if set(STEP_COLUMNS) <= set(header):
            known = itemgetter(*map(header.index, STEP_COLUMNS))
            rows = (_row(known(_whole(fields, len(header)))) for fields in reader)
            return StepTable.joined(StepTable.of(some) for some in iter(lambda: list(islice(rows, _AT_ONCE)), []))
    except UnicodeDecodeError:
        raise RecordError(f"{path}: is not text") from None
    except (ValueError, IndexError, csv.Error) as error:
        raise RecordError(f"{path}: line {reader.line_num} is damaged: {error}") from None
    raise RecordError(f"{path}: expected the columns of steps.csv, found {', '.join(header)[:80] or 'nothing'}")


def _whole(fields: Sequence[str], columns: int) -> Sequence[str]:
    if len(fields) != columns:
        raise ValueError(f"expected {columns} fields, given {len(fields)}")
    return fields


def _row(fields: Sequence[str]) -> StepRow:
    n = len(TIMED)
    device, host = fields[2 : 2 + n], fields[2 + n : 2 + 2 * n]
    seconds, host_seconds = (_times(device) if any(device) else None), _times(host)
    tokens, *memory = (_count(field) if field else None for field in fields[2 + 2 * n : -1])
    stage = sys.intern(fields[1])
    return StepRow(_count(fields[0]), stage, seconds, host_seconds, tokens, tuple(memory), _count(fields[-1]))


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
