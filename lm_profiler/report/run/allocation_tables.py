"""Tables of a memory timeline: the largest allocations at the peak, and what is saved for backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lm_profiler.record.memory_timeline import HELD, SOURCES, Allocation, MemoryTimeline
from lm_profiler.record.quantities import CAUSES, bytes_text
from lm_profiler.record.run import MOMENTS
from lm_profiler.report.tables.table import Heading, Table, TableCell

_HEADINGS = [
    *(Heading("bytes", "bytes", True), Heading("count", "count", True), Heading("cause", "cause")),
    *(Heading("shape", "shape"), Heading("dtype", "dtype"), Heading("made_by", "made by")),
]


def allocation_tables(timeline: MemoryTimeline) -> Iterator[Table]:
    """Yield tables of the largest allocations at the peak, of what is saved for backward, and of three moments."""
    peak = f"peak {bytes_text(timeline.peak)} ({SOURCES[timeline.source]}); the largest allocations alive there:"
    yield _table(timeline.largest, [peak], [])
    if timeline.saved:
        residual, below = timeline.residual, list[str]()
        if residual is not None:
            kind = f"{_shape(residual)}, {residual.dtype}"
            below = [f"a residual tensor ({kind}): {bytes_text(residual.bytes)}, {residual.count:,} of them"]
        yield _table(timeline.saved, ["", f"saved for backward {bytes_text(timeline.saved_bytes)}, most of it:"], below)
    if moments := timeline.moments():
        headings = [Heading("moment", "moment"), *(Heading(name, title, True) for name, title in CAUSES.items())]
        rows = [
            [
                TableCell(name, MOMENTS[name]),
                *(TableCell(count, bytes_text(count)) for _, count in held),
            ]
            for name, held in moments.items()
        ]
        yield Table(headings, rows, above=["", "memory held at three moments:"])


def _table(rows: Sequence[Allocation], above: list[str], below: list[str]) -> Table:
    return Table(_HEADINGS, [_cells(of) for of in rows], above=above, below=below)


def _cells(of: Allocation) -> list[TableCell]:
    texts = (HELD.get(of.cause, of.cause), "" if of.shape is None else _shape(of), of.dtype or "", made_by(of))
    figures = (TableCell(of.bytes, bytes_text(of.bytes)), TableCell(of.count, f"{of.count:,}"))
    return [*figures, *(TableCell(text, text) for text in texts)]


def _shape(of: Allocation) -> str:
    return " × ".join(map(str, of.shape or ())) or "scalar"


def made_by(of: Allocation) -> str:
    """Return the tensor's name, or the operator with the module and the line that called it."""
    operator = (of.name or "").removeprefix("aten.").removesuffix(".default")
    return ", ".join(filter(None, (operator, of.module, of.line))) or "unknown"
