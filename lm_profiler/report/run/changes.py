"""The table of what changes in a record when it is concluded anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_profiler.analysis.conclude import Change
from lm_profiler.record.quantities import counted
from lm_profiler.report.tables.table import Heading, Table, TableCell

_SHOWN = 40

_HEADINGS = (Heading("field", "changed"), Heading("before", "the record"), Heading("now", "by this version"))


def changes_table(folder: Path, changes: Sequence[Change]) -> Table:
    """Return a row for each field that differs; one line where none does."""
    if not changes:
        return Table(above=[f"{folder}: this version says the same"])
    rows = [[TableCell(of.field, of.field), _cell(of.before), _cell(of.now)] for of in changes[:_SHOWN]]
    more = len(changes) - _SHOWN
    below = [f"and {counted(more, 'more field')}"] if more > 0 else []
    return Table(_HEADINGS, rows, above=[f"{folder}: by this version's rules"], below=below)


def _cell(value: Any) -> TableCell:
    text = f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)
    return TableCell(value, text if len(text) <= 60 else f"{text[:59]}…")
