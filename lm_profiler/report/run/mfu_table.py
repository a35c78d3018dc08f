"""The table of a run's MFU by the conventions of several projects."""

from __future__ import annotations

from lm_profiler.analysis.hardware.conventions import DISPATCHED, conventions
from lm_profiler.record.figure import AT_LEAST
from lm_profiler.record.quantities import MFU
from lm_profiler.record.run_record import RunRecord
from lm_profiler.report.tables.table import Heading, Table, TableCell

_HEADINGS = (
    Heading("convention", "convention"),
    Heading("flops_per_token", "FLOPs/token", figures=True),
    Heading("mfu", "MFU (%)", figures=True),
    Heading("formula", "formula"),
    Heading("source", "source"),
)
_EXPLANATIONS = [
    f"{DISPATCHED}: the MFU that lm_profiler prints everywhere else",
    "N parameters, L layers of width h, H heads of width Q, vocabulary V, context T; forward and backward of a token",
]


def mfu_table(record: RunRecord) -> Table | None:
    """Return the MFU of a run by each convention; None if its FLOPs or its tokens are unknown."""
    rows = []
    use = record.utilisation
    is_incomplete = use is not None and bool(use.flops.uncounted)
    for convention in conventions(record):
        is_lower_bound = is_incomplete and convention.name == DISPATCHED
        flops = TableCell(convention.flops_per_token, "unknown")
        if convention.flops_per_token is not None:
            flops_text = f"{convention.flops_per_token:,.0f}"
            flops = _bounded_cell(
                convention.flops_per_token, flops_text, is_lower_bound
            )
        formula = convention.formula
        if convention.missing:
            formula += f" (unknown here: {convention.missing})"
        mfu = TableCell(None, MFU.show(None, unit=False))
        if convention.mfu is not None:
            mfu_text = MFU.show(convention.mfu, unit=False)
            mfu = _bounded_cell(convention.mfu, mfu_text, is_lower_bound)
        rows.append(
            [
                TableCell(convention.name, convention.name),
                flops,
                mfu,
                TableCell(formula, formula),
                TableCell(convention.source, convention.source),
            ]
        )
    if not rows:
        return None
    return Table(_HEADINGS, rows, title=record.name, below=_EXPLANATIONS)


def _bounded_cell(value: float, text: str, is_lower_bound: bool) -> TableCell:
    """Return the cell of a figure, marked if work is missing from it."""
    if is_lower_bound:
        return TableCell(value, f"{AT_LEAST} {text}", bound=AT_LEAST)
    return TableCell(value, text)
