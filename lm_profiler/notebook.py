"""The API of ``import lm_profiler``: runs, tables, comparisons and plans that a notebook displays."""

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
from lm_profiler.record.run_record import RunRecord
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
    """``data``, whose attributes this object has too, and the tables that show it as text and in a notebook."""

    data: Any
    tables: Sequence[Table]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # Python looks for special methods, for example to copy: those of ``data`` would be wrong here.
            raise AttributeError(name)
        return getattr(self.data, name)

    def __dir__(self) -> list[str]:
        names = list(super().__dir__())
        names += [name for name in dir(self.data) if not name.startswith("_")]
        return names

    def __repr__(self) -> str:
        texts = [terminal(table, io.StringIO()) for table in self.tables]
        return "\n".join(texts).strip()

    def _repr_html_(self) -> str:
        # Without colours of its own, for light and dark pages. Wide tables scroll and are not wrapped.
        return (
            f'<pre style="white-space:pre;overflow-x:auto">{escape(repr(self))}</pre>'
        )


@dataclass(frozen=True, repr=False)
class LoadedRun(Shown):
    """The record of a run. Its figures, such as ``step_s``, are attributes too; an unknown figure is None."""

    folder: Path

    def __getattr__(self, name: str) -> Any:
        if name in QUANTITIES:
            return QUANTITIES[name].get(self.data)
        return super().__getattr__(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *QUANTITIES]

    @cached_property
    def steps(self) -> StepTable:
        """The steps of all ranks and stages.

        ``steps["step_s"]`` is a NumPy array, ``steps["forward_backward_s"]`` the sum of both passes, and
        ``steps.columns`` has all columns. The record's own ``steps``, which are counts by stage, are ``data.steps``.
        """
        return Entry(self.folder, self.data).rows


def load(folder: str | Path) -> LoadedRun:
    """Return the run in ``folder``, or the latest run below it.

    Raises:
        UsageError: there is no run that can be read.
    """
    runs = runs_below([Path(folder)], "load")
    latest: tuple[RunRecord, Path] | None = None
    for entry in runs.entries:
        if entry.record is None:
            continue
        if latest is None or entry.record.started >= latest[0].started:
            latest = (entry.record, entry.folder)
    if latest is None:
        problems = [*runs.problems, f"{folder} has no run that has begun"]
        raise UsageError(f"load: {problems[0]}")
    record, run_folder = latest
    return LoadedRun(record, end_tables(record, run_folder), run_folder)


def table(
    *folders: str | Path,
    columns: Sequence[str] = (),
    layout: str | None = None,
    where: Sequence[str] = (),
) -> Shown:
    """Return the table that ``lm_profiler report`` prints for the runs at or below ``folders``.

    Args:
        folders: Folders of runs or sweeps, or a folder above them.
        columns: Names of properties, figures, or options such as ``data.batch_size``.
        layout: A table as in published reports: blocks, wide, devices, modes or warmups.
        where: Conditions on properties or options, such as ``["verb=fit"]``.

    Raises:
        UsageError: there are no such runs, columns or layouts.
    """
    entries = runs_below([Path(folder) for folder in folders], "table").entries
    if where:
        entries = entries_where(entries, where)
    if layout is not None:
        expect_one_of(LAYOUTS, "layout", layout)
        if columns:
            raise UsageError("columns: works only without a layout; leave one out")
        data = laid_out(entries, layout)
        return Shown(data, [data])
    shown_columns = columns_named(columns, entries) if columns else None
    data = runs_table(repeats_together(entries), shown_columns)
    return Shown(data, [data])


def compare(a: str | Path, b: str | Path) -> Shown:
    """Return the comparison of the runs at or below ``b`` with those of ``a``; several runs on a side are repeats."""
    runs_a = runs_below([Path(a)], "compare").entries
    runs_b = runs_below([Path(b)], "compare").entries
    result = comparison.compare(runs_a, runs_b)
    return Shown(result, [comparison_table(result)])


def plan(*options: str, device: str | None = None, memory: str | None = None) -> Shown:
    """Return the memory of a step of ``fit`` with these ``options``, as ``lm_profiler plan`` shows it.

    Raises:
        UsageError: the options are wrong.
        CannotPlan: the run cannot be rehearsed.
    """
    # imported here, because it imports torch and Lightning
    from lm_profiler.cli.verbs.plan import Options, planned

    tables: list[Table] = []
    plan_options = Options(device=device, memory=memory, options=options)
    record = planned(plan_options, show_table=tables.append)
    return Shown(record, tables)
