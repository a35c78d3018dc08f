"""Where the device's time goes, for the terminal: kinds by phase, then the largest kernels."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from lm_profiler.record.kernels import KernelTable, Kind
from lm_profiler.record.quantities import TIMES
from lm_profiler.report.tables.console import PlainConsole, print_table

IDLE = "idle"

_TITLES = {"host_copies": "host copies"}
_NOISE = ("void ", "(anonymous namespace)::", "at::native::")
"""Parts of a kernel's name that tell a reader nothing."""

_LARGEST = 15
_FIGURES_WIDTH = 68  # of the largest kernels' table without the names


def print_kernels(table: KernelTable, console: Console | None = None) -> None:
    """Print milliseconds a step by phase and kind, and the largest kernels of all."""
    console = console or PlainConsole()
    if not console.is_terminal:  # a file has no width to keep to
        console.width = 160
    what = "kernels on the device" if table.source == "kernels" else "operators on the host"
    line = f"{what}, milliseconds of one step (mean of {table.steps} traced)"
    console.print(line, highlight=False, markup=False, soft_wrap=True, style="bold")
    print_table(console, _by_kind(table))
    print_table(console, _largest(table, max(console.width - _FIGURES_WIDTH, 3 * 10)))
    hidden = table.rows[_LARGEST:]
    if rows := len(hidden) + table.rest.rows:
        total_s = sum(row.total_s for row in hidden) + table.rest.total_s
        line = f"{rows} smaller rows are not shown, {_ms(table, total_s)} ms"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def kind_rows(table: KernelTable) -> list[dict[str, str | int | float | None]]:
    """A row for each phase and kind, and for each phase's idle time, of one step; ``share`` is of the step."""
    rows: list[dict[str, str | int | float | None]] = []
    for phase, found in table.phases.items():
        kinds = [(kind, time.count, time.total_s) for kind, time in found.kinds.items()]
        for kind, count, total_s in (*kinds, (IDLE, None, found.idle_s)):
            calls = None if count is None else count / table.steps
            share = total_s / table.window_s
            rows.append({"phase": phase, "kind": kind, "calls": calls, "time_s": total_s / table.steps, "share": share})
    return rows


def kernel_rows(table: KernelTable) -> list[dict[str, str | int | float | None]]:
    """The largest kernels (or operators) first, of one step; ``share`` is of the step, ``mean_s`` of a call."""
    return [
        {
            "phase": row.phase,
            "kind": row.kind,
            "name": row.name,
            "operator": row.operator,
            "module": row.module,
            "module_type": row.module_type,
            "calls": row.count / table.steps,
            "time_s": row.total_s / table.steps,
            "mean_s": row.total_s / max(row.count, 1),
            "share": row.total_s / table.window_s,
        }
        for row in table.rows
    ]


def _by_kind(table: KernelTable) -> Table:
    """A row a phase, a column a kind that occurs, the largest first; the last row is the step."""
    sums: dict[Kind, float] = {}
    for phase in table.phases.values():
        for kind, time in phase.kinds.items():
            sums[kind] = sums.get(kind, 0.0) + time.total_s
    kinds = sorted(sums, key=lambda kind: -sums[kind])
    idle_s = sum(phase.idle_s for phase in table.phases.values())
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("phase", no_wrap=True)
    idle = IDLE if table.source == "kernels" else "no operator"
    for title in (*(_TITLES.get(kind, kind) for kind in kinds), idle, "busy + idle"):
        shown.add_column(title, justify="right", no_wrap=True)
    for name, phase in table.phases.items():
        times = [phase.kinds[kind].total_s if kind in phase.kinds else 0.0 for kind in kinds]
        shown.add_row(name, *_cells(table, *times, phase.idle_s, phase.busy_s + phase.idle_s))
    shown.add_row("step", *_cells(table, *(sums[kind] for kind in kinds), idle_s, table.window_s), style="bold")
    shares = (f"{seconds / table.window_s:.1%}" for seconds in (*(sums[kind] for kind in kinds), idle_s))
    shown.add_row("share", *shares, "")
    return shown


def _largest(table: KernelTable, names_width: int) -> Table:
    """The largest rows; names, callers and modules together are ``names_width`` wide."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("phase", "kind"):
        shown.add_column(title, no_wrap=True)
    for title in ("calls", "ms", "µs a call", "share"):
        shown.add_column(title, justify="right", no_wrap=True)
    name = "kernel" if table.source == "kernels" else "operator"
    for title, share in ((name, 0.4), ("called by", 0.25), ("module", 0.35)):
        shown.add_column(title, no_wrap=True, overflow="ellipsis", max_width=int(share * names_width))
    for row in table.rows[:_LARGEST]:
        shown.add_row(
            row.phase,
            _TITLES.get(row.kind, row.kind),
            f"{row.count / table.steps:g}",
            _ms(table, row.total_s),
            f"{row.total_s / max(row.count, 1) * 1e6:,.1f}",
            f"{row.total_s / table.window_s:.1%}",
            _plain(row.name),
            _plain(row.operator or ""),
            row.module or "",
        )
    return shown


def _cells(table: KernelTable, *seconds: float) -> list[str]:
    return [_ms(table, value) if value else "" for value in seconds]


def _ms(table: KernelTable, seconds: float) -> str:
    return TIMES["step"].show(seconds / table.steps, unit=False, digits=3)


def _plain(name: str) -> str:
    for noise in _NOISE:
        name = name.replace(noise, "")
    return name
