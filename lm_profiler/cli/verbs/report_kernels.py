"""``report --kernels``: where the device's time went in the traces of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lm_profiler.record.entry import Entry
from lm_profiler.record.kernels import KernelTable, kernel_files, read_kernels
from lm_profiler.record.run import RecordError
from lm_profiler.report.run.kernel_tables import kernel_rows, kernel_tables
from lm_profiler.report.tables.table import Heading, Table, TableCell


def readable_kernels(entries: Sequence[Entry]) -> tuple[list[tuple[Entry, KernelTable]], list[str]]:
    """Rank 0's table of each run that has one, and what is wrong with the others."""
    traced, problems = [], []
    for entry in entries:
        try:
            if files := kernel_files(entry.folder):
                traced.append((entry, read_kernels(files[0])))
            else:
                problems.append(
                    f"{entry.folder}: no table of kernels: nothing was traced, or the trace is another tool's"
                )
        except RecordError as error:
            problems.append(str(error))
    return traced, problems


def tables_of_each(traced: Sequence[tuple[Entry, KernelTable]], several: bool) -> list[Table]:
    """The kernels of each run for people, with what they ask of them, and of ``several`` runs its folder."""
    tables = []
    for entry, kernels in traced:
        first, *rest = kernel_tables(kernels)
        where = [str(entry.folder)] if several else []
        tables += [replace(first, above=[*where, *first.above]), *rest]
    return tables


def table_of_all(traced: Sequence[tuple[Entry, KernelTable]]) -> list[Table]:
    """The kernels of all runs in one table for programs, if there are any."""
    rows = [{"folder": str(entry.folder), **row} for entry, kernels in traced for row in kernel_rows(kernels)]
    headings = [Heading(name, name) for name in (rows[0] if rows else ())]
    body = [[TableCell(value) for value in row.values()] for row in rows]
    return [Table(headings, body)] if rows else []
