"""The table of collectives: how long each takes at each size, and its bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lm_profiler.analysis.steps.statistics import median_interval
from lm_profiler.record.figure import Figure
from lm_profiler.report.tables.table import Table, TableCell, figure, headings_of

SIZE = Figure("size", "MB", "bytes of all ranks' parts together", "size_bytes")
MEDIAN = Figure("median [95 % interval]", "ms", "median of the repeats, each the slowest rank's", "median_s")
ALGORITHM = Figure("algbw", "GB/s of a link", "size over the median", "algbw_bytes_per_s")
BUS = Figure("busbw", "GB/s of a link", "algbw times what nccl-tests says a link carries", "busbw_bytes_per_s")
_REPEATS = Figure("repeats", "count", "how often it was timed", "repeats")
_FACTS = tuple(Figure(name, "text", "", name) for name in ("backend", "processes", "collective"))
_IN_PARTS = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class LinkFigures:
    """The figures of one collective of ``ranks`` processes at one size; ``unknown`` says why there are no ``seconds``.

    Bandwidths are those of nccl-tests (its doc/PERFORMANCE.md), in bytes/s.
    """

    backend: str
    ranks: int
    op: str
    size_bytes: int
    seconds: Sequence[float]  # of each repeat
    unknown: str | None = None

    @property
    def median(self) -> float | None:
        return median(self.seconds) if self.seconds else None

    @property
    def algorithm_bandwidth(self) -> float | None:
        return None if not self.median else self.size_bytes / self.median

    @property
    def bus_bandwidth(self) -> float | None:
        return None if self.algorithm_bandwidth is None else self.algorithm_bandwidth * bus_factor(self.op, self.ranks)


def bus_factor(op: str, ranks: int) -> float:
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in _IN_PARTS else 1.0


def link_table(rows: Sequence[LinkFigures]) -> Table:
    """Return a row for each of ``rows``; a reason replaces unknown times."""
    titles = headings_of((*_FACTS, SIZE, MEDIAN, ALGORITHM, BUS, _REPEATS))
    above = ["bandwidths are of the median, and as nccl-tests counts them: algbw = size / time, busbw is of one link"]
    return Table(titles, [_cells(row) for row in rows], above)


def _cells(row: LinkFigures) -> list[TableCell]:
    facts = [TableCell(value, str(value)) for value in (row.backend, row.ranks, row.op)]
    size, taken = figure(SIZE, row.size_bytes), figure(MEDIAN, row.median, *(median_interval(row.seconds) or ()))
    if row.unknown is not None:
        taken = TableCell(None, f"unknown: {row.unknown}", status="unknown", style="yellow")
    bandwidths = (figure(ALGORITHM, row.algorithm_bandwidth), figure(BUS, row.bus_bandwidth))
    repeats = len(row.seconds) or None
    return [*facts, size, taken, *bandwidths, TableCell(repeats, str(repeats or ""))]
