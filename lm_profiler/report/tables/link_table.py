"""The table of collectives: the time and the bandwidths of each at each size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lm_profiler.analysis.steps.statistics import median_interval
from lm_profiler.record.figure import Figure
from lm_profiler.report.tables.table import Table, TableCell, figure_cell, headings_of

SIZE = Figure(
    "size", "MB", "size of the tensor: the parts of all ranks together", "size_bytes"
)
MEDIAN = Figure(
    "median [95 % interval]",
    "ms",
    "median over the repeats of the time on the slowest rank",
    "median_s",
)
ALGORITHM = Figure(
    "algbw",
    "GB/s of a link",
    "algorithm bandwidth, as in nccl-tests: size / median time",
    "algbw_bytes_per_s",
)
BUS = Figure(
    "busbw",
    "GB/s of a link",
    "bus bandwidth, as in nccl-tests: algbw x the factor of the collective, such as 2(n-1)/n for all-reduce",
    "busbw_bytes_per_s",
)
_REPEATS = Figure("repeats", "count", "how often the collective was timed", "repeats")
_FACTS = (
    Figure("backend", "text", "", "backend"),
    Figure("processes", "text", "", "processes"),
    Figure("collective", "text", "", "collective"),
)


@dataclass(frozen=True)
class LinkFigures:
    """The figures of one collective of ``ranks`` processes at one size; ``unknown`` is the reason if it was not timed.

    Bandwidths are those of nccl-tests (its doc/PERFORMANCE.md), in bytes/s.
    """

    backend: str
    ranks: int
    op: str
    size_bytes: int
    seconds: Sequence[float]  # the seconds of each repeat, on the slowest rank
    unknown: str | None = None

    @property
    def median(self) -> float | None:
        return median(self.seconds) if self.seconds else None

    @property
    def algorithm_bandwidth(self) -> float | None:
        if not self.median:
            return None
        return self.size_bytes / self.median

    @property
    def bus_bandwidth(self) -> float | None:
        if self.algorithm_bandwidth is None:
            return None
        return self.algorithm_bandwidth * bus_factor(self.op, self.ranks)


def bus_factor(op: str, ranks: int) -> float:
    """Return the bytes that each link of a ring carries, divided by the size (doc/PERFORMANCE.md of nccl-tests)."""
    part_moved = (ranks - 1) / ranks
    if op == "all_reduce":
        return 2 * part_moved
    if op in ("all_gather", "reduce_scatter"):
        return part_moved
    return 1.0


def link_table(rows: Sequence[LinkFigures]) -> Table:
    """Return a table with a row for each of ``rows``; the reason stands in place of a time that is unknown."""
    headings = headings_of((*_FACTS, SIZE, MEDIAN, ALGORITHM, BUS, _REPEATS))
    lines_above = [
        (
            "bandwidths are computed from the median, as in nccl-tests: algbw = size / time; busbw is the bandwidth "
            "of one link"
        )
    ]
    return Table(headings, [_cells_of_collective(row) for row in rows], lines_above)


def _cells_of_collective(row: LinkFigures) -> list[TableCell]:
    """Return the cells of a collective; if its time is unknown, its cell has the reason."""
    median_cell = figure_cell(MEDIAN, row.median, median_interval(row.seconds))
    if row.unknown is not None:
        median_cell = TableCell(
            None, f"unknown: {row.unknown}", status="unknown", style="yellow"
        )
    repeats_cell = TableCell()
    if row.seconds:
        repeats_cell = TableCell(len(row.seconds), str(len(row.seconds)))
    return [
        TableCell(row.backend, row.backend),
        TableCell(row.ranks, str(row.ranks)),
        TableCell(row.op, row.op),
        figure_cell(SIZE, row.size_bytes),
        median_cell,
        figure_cell(ALGORITHM, row.algorithm_bandwidth),
        figure_cell(BUS, row.bus_bandwidth),
        repeats_cell,
    ]
