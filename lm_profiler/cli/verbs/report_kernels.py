"""``report --kernels``: where the device's time went in the traces of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lm_profiler.record.collection import Entry
from lm_profiler.record.kernels import KernelTable, kernel_files, read_kernels
from lm_profiler.record.run import RecordError
from lm_profiler.report.run.kernel_answers import kernel_answers
from lm_profiler.report.run.kernels import kernel_rows, print_kernels
from lm_profiler.report.tables.formats import plain
from lm_profiler.report.tables.table import Cell, Heading, Table


def print_each(entries: Sequence[Entry]) -> list[str]:
    """Print the kernels of each run, and what people ask of them; returns what was wrong with some."""
    problems: list[str] = []
    for entry, kernels in _readable(entries, problems):
        if len(entries) > 1:
            print(plain(str(entry.folder)))
        print_kernels(kernels)
        for question, answer in kernel_answers(kernels):
            print(plain(f"{question}: {answer}"))
    return problems


def kernel_table(entries: Sequence[Entry]) -> tuple[Table | None, list[str]]:
    """The kernels of all runs for programs, and what was wrong with some; None where there are none."""
    problems: list[str] = []
    rows = [
        {"folder": str(entry.folder), **row}
        for entry, kernels in _readable(entries, problems)
        for row in kernel_rows(kernels)
    ]
    if not rows:
        return None, problems
    return Table([Heading(name, name) for name in rows[0]], [[Cell(v) for v in row.values()] for row in rows]), problems


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
