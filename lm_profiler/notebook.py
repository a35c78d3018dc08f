"""What ``import lm_profiler`` offers: a run, a table, a comparison and a plan that show themselves in a notebook."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from lm_profiler.analysis.compare import comparison
from lm_profiler.cli.verbs.shared import runs_below
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import QUANTITIES
from lm_profiler.record.steps import StepTable
from lm_profiler.report.run.comparison_table import comparison_table
from lm_profiler.report.run.run_page import end_tables
from lm_profiler.report.tables.filters import entries_where
from lm_profiler.report.tables.formats import terminal
from lm_profiler.report.tables.layouts import LAYOUTS, laid_out
from lm_profiler.report.tables.rows import runs_table
from lm_profiler.report.tables.run_groups import repeats_together
from lm_profiler.report.tables.table import Table
from lm_profiler.report.tables.table_columns import columns_named
from lm_profiler.usage_error import UsageError, expect_one_of


@dataclass(frozen=True)
class Shown:
    """``data`` with its attributes, and the tables that show it, as text and in a notebook."""

    data: Any
    tables: Sequence[Table]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols, such as copying, that this class lacks
            raise AttributeError(name)
        return getattr(self.data, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in dir(self.data) if not name.startswith("_"))]

    def __repr__(self) -> str:
        return "\n".join(terminal(table, io.StringIO()) for table in self.tables).strip()

    def _repr_html_(self) -> str:
        # in the page's own colours, light or dark; wide tables scroll, where plain text would be wrapped
        return f'<pre style="white-space:pre;overflow-x:auto">{escape(repr(self))}</pre>'


@dataclass(frozen=True, repr=False)
class LoadedRun(Shown):
    """The record of a run; its figures, such as ``step_s``, are attributes as well, None where they are unknown."""

    folder: Path

    def __getattr__(self, name: str) -> Any:
        of = QUANTITIES.get(name)
        return super().__getattr__(name) if of is None else of.get(self.data)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *QUANTITIES]

    @cached_property
    def steps(self) -> StepTable:
        """The steps of all ranks and stages; ``steps["step_s"]`` is an array of numpy, ``steps.columns`` all of them.

        ``steps["forward_backward_s"]`` is the sum of both passes.

        The record's own ``steps``, the counts by stage, are ``data.steps``.
        """
        return Entry(self.folder, self.data).rows


def load(folder: str | Path) -> LoadedRun:
    """Return the run in ``folder``, or the latest run below it.

    Raises:
        UsageError: there is none, or none that can be read.
    """
    runs = runs_below([Path(folder)], "load")
    known = [(entry.record, entry.folder) for entry in runs.entries if entry.record is not None]
    if not known:
        raise UsageError(f"load: {[*runs.problems, f'{folder} holds no run that has begun'][0]}")
    record, where = max(reversed(known), key=lambda each: each[0].started)
    return LoadedRun(record, end_tables(record, where), where)


def table(
    *folders: str | Path, columns: Sequence[str] = (), layout: str | None = None, where: Sequence[str] = ()
) -> Shown:
    """Return the table that ``lm_profiler report`` has of the runs at or below ``folders``.

    Args:
        folders: Folders of runs or sweeps, or a folder above them.
        columns: Facts and figures by name.
        layout: A table as in published reports: blocks, wide, devices, modes or warmups.
        where: Conditions on facts, such as ``["verb=fit"]``.

    Raises:
        UsageError: there are no such runs, columns or layouts.
    """
    entries = runs_below(list(map(Path, folders)), "table").entries
    if where:
        entries = entries_where(entries, where)
    if layout is not None:
        expect_one_of(LAYOUTS, "layout", layout)
        if columns:
            raise UsageError("columns: expected one way to show the runs, given a layout too; leave one out")
        shown = laid_out(entries, layout)
    else:
        shown = runs_table(repeats_together(entries), columns_named(columns, entries) if columns else None)
    return Shown(shown, [shown])


def compare(a: str | Path, b: str | Path) -> Shown:
    """Return the comparison of the runs at or below ``b`` with those of ``a``: several on a side are repeats."""
    side_a, side_b = (runs_below([Path(side)], "compare").entries for side in (a, b))
    compared = comparison.compare(side_a, side_b)
    return Shown(compared, [comparison_table(compared)])


def plan(*options: str, device: str | None = None, memory: str | None = None) -> Shown:
    """Return the memory of a step of ``fit`` with these ``options``, as ``lm_profiler plan`` shows it.

    Raises:
        UsageError: the options are wrong.
        CannotPlan: the run cannot be rehearsed.
    """
    # torch and Lightning are imported only where a plan is made
    from lm_profiler.cli.verbs.plan import Options, planned

    tables = list[Table]()
    return Shown(planned(Options(device=device, memory=memory, options=options), tables.append), tables)
