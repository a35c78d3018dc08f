"""``report --kernels``: where the device's time went in the traces of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lm_profiler.record.collection import Entry
from lm_profiler.record.kernels import KernelTable, kernel_files, read_kernels
from lm_profiler.record.run import RecordError
from lm_profiler.report.run.kernels import kernel_rows, kernel_tables
from lm_profiler.report.tables.table import Heading, Table, TableCell


def tables_of_each(entries: Sequence[Entry]) -> tuple[list[Table], list[str]]:
    """The kernels of each run for people, with what they ask of them; and what was wrong with some."""
    problems: list[str] = []
    tables = []
    for entry, kernels in _readable(entries, problems):
        first, *rest = kernel_tables(kernels)
        where = [str(entry.folder)] if len(entries) > 1 else []
        tables += [replace(first, above=[*where, *first.above]), *rest]
    return tables, problems


def table_of_all(entries: Sequence[Entry]) -> tuple[list[Table], list[str]]:
    """The kernels of all runs in one table for programs, if there are any; and what was wrong with some."""
    problems: list[str] = []
    rows = [
        {"folder": str(entry.folder), **row}
        for entry, kernels in _readable(entries, problems)
        for row in kernel_rows(kernels)
    ]
    headings = [Heading(name, name) for name in (rows[0] if rows else ())]
    body = [[TableCell(value) for value in row.values()] for row in rows]
    return ([Table(headings, body)] if rows else []), problems


def _readable(entries: Sequence[Entry], problems: list[str]) -> Iterator[tuple[Entry, KernelTable]]:
    """Rank 0's table of each run that has one."""
    for entry in entries:
        files = kernel_files(entry.folder)
        if not files:
            problems.append(f"{entry.folder}: no table of kernels: nothing was traced, or the trace is another tool's")
            continue
        try:
            kernels = read_kernels(files[0])
        except RecordError as error:
            problems.append(str(error))
        else:
            yield entry, kernels
