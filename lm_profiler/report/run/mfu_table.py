"""The table of the conventions by which an MFU is counted."""

from __future__ import annotations

from lm_profiler.analysis.hardware.conventions import DISPATCHED, conventions
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
    f"{DISPATCHED}: what lm_profiler prints as MFU everywhere else",
    "N parameters, L layers of width h, H heads of width Q, vocabulary V, context T; forward and backward of a token",
]


def mfu_table(record: RunRecord) -> Table | None:
    """Return the MFU of a run by each convention; None if its FLOPs or its tokens are unknown."""
    rows = []
    for convention in conventions(record):
        flops = TableCell(convention.flops_per_token, "unknown")
        if convention.flops_per_token is not None:
            flops_text = f"{convention.flops_per_token:,.0f}"
            flops = TableCell(convention.flops_per_token, flops_text)
        formula = convention.formula
        if convention.missing:
            formula += f" (unknown here: {convention.missing})"
        mfu_text = MFU.show(convention.mfu, unit=False)
        rows.append(
            [
                TableCell(convention.name, convention.name),
                flops,
                TableCell(convention.mfu, mfu_text),
                TableCell(formula, formula),
                TableCell(convention.source, convention.source),
            ]
        )
    if not rows:
        return None
    return Table(_HEADINGS, rows, title=record.name, below=_EXPLANATIONS)
