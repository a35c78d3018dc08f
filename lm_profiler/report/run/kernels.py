"""Where the device's time goes, for the terminal: kinds by phase, then the largest kernels."""

from __future__ import annotations

import re

from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.text import shortened
from lm_profiler.report.run.kernel_answers import kernel_answers, kind_s
from lm_profiler.report.tables.table import Table, text_table

IDLE = "idle"

_NOISE = re.compile(r"void |\(anonymous namespace\)::|at::native::")
"""Parts of a kernel's name that tell a reader nothing."""

_LARGEST = 15


def kernel_tables(table: KernelTable) -> list[Table]:
    """Milliseconds a step by phase and kind; the largest kernels of all; and what people ask of them."""
    answers = [f"{question}: {answer}" for question, answer in kernel_answers(table)]
    return [_by_kind(table), _largest(table), Table(above=answers)]


def kind_rows(table: KernelTable) -> list[dict[str, str | int | float | None]]:
    """A row for each phase and kind, and for each phase's idle time, of one step; ``share`` is of the step."""
    rows: list[dict[str, str | int | float | None]] = []
    for phase, times in table.phases.items():
        kinds = [(kind, time.count, time.total_s) for kind, time in times.kinds.items()]
        for kind, count, total_s in (*kinds, (IDLE, None, times.idle_s)):
            calls = None if count is None else count / table.steps
            share = total_s / table.window_s
            rows.append({"phase": phase, "kind": kind, "calls": calls, "time_s": total_s / table.steps, "share": share})
    return rows


def kernel_rows(table: KernelTable) -> list[dict[str, str | int | float | None]]:
    """The largest kernels (or operators) first, of one step; ``share`` is of the step, ``mean_s`` of a call."""
    return [
        {
            **row.model_dump(exclude={"count", "total_s"}),
            "calls": row.count / table.steps,
            "time_s": row.total_s / table.steps,
            "mean_s": row.total_s / max(row.count, 1),
            "share": row.total_s / table.window_s,
        }
        for row in table.rows
    ]


def _by_kind(table: KernelTable) -> Table:
    """A row a phase, a column a kind that occurs, the largest first; the last row is the step."""
    sums = {kind: kind_s(table, table.phases, kind) for phase in table.phases.values() for kind in phase.kinds}
    kinds = sorted(sums, key=lambda kind: -sums[kind])
    totals = [*(sums[kind] for kind in kinds), sum(phase.idle_s for phase in table.phases.values())]
    what, idle = "kernels on the device", IDLE
    if table.source != "kernels":
        what, idle = "operators on the host", "no operator"
    rows = []
    for name, phase in table.phases.items():
        times = [kind_s(table, [name], kind) for kind in kinds]
        rows.append([name, *_cells(table, *times, phase.idle_s, phase.busy_s + phase.idle_s)])
    rows.append(["step", *_cells(table, *totals, table.window_s)])
    rows.append(["share", *(f"{total_s / table.window_s:.1%}" for total_s in totals), ""])
    titles = ["phase", *(kind.replace("_", " ") for kind in kinds), idle, "busy + idle"]
    return text_table(titles, rows, title=f"{what}, milliseconds of one step (mean of {table.steps} traced)")


def _largest(table: KernelTable) -> Table:
    """The largest rows; behind the name, as that is what the pieces of a wide table are told apart by."""
    name = "kernel" if table.source == "kernels" else "operator"
    rows = [
        [
            shortened(_NOISE.sub("", row.name)),
            row.phase,
            row.kind.replace("_", " "),
            shortened(_NOISE.sub("", row.operator or ""), 32),
            shortened(row.module or ""),
            f"{row.count / table.steps:g}",
            _ms(table, row.total_s),
            f"{row.total_s / max(row.count, 1) * 1e6:,.1f}",
            f"{row.total_s / table.window_s:.1%}",
        ]
        for row in table.rows[:_LARGEST]
    ]
    hidden, below = table.rows[_LARGEST:], []
    if left := len(hidden) + table.rest.rows:
        total_s = sum(row.total_s for row in hidden) + table.rest.total_s
        below = [f"{left} smaller rows are not shown, {_ms(table, total_s)} ms"]
    titles = [name, "phase", "kind", "called by", "module", "calls", "ms", "µs a call", "share"]
    return text_table(titles, rows, left=5, below=below)


def _cells(table: KernelTable, *seconds: float) -> list[str]:
    return [_ms(table, value) if value else "" for value in seconds]


def _ms(table: KernelTable, seconds: float) -> str:
    return TIMES["step"].show(seconds / table.steps, unit=False, digits=3)
