"""The tables of kernels: kinds by phase, the largest kernels, and answers to common questions about them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lm_profiler.record.kernels import KernelRow, KernelTable, Kind
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.text import shortened
from lm_profiler.report.tables.table import Heading, Table, TableCell, text_cell, text_table

_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_PASSES = ("forward", "backward")
# the parts of a kernel's name that do not help a reader
_NOISE = re.compile(r"void |\(anonymous namespace\)::|at::native::")
_SIGNIFICANT, _NAMED = 0.02, 5  # the least share of forward that is shown, and the most kernels that are named
_SOFTMAX_FLOPS = 5  # FLOPs of softmax for each score: compare, subtract, exponentiate, add and divide
_LARGEST = 15
_KERNEL_TEXTS = 5  # the columns of the table of kernels that are texts; the others are figures
_CALLER_WIDTH = 32  # characters of the calling operator on a terminal
IDLE = "idle"


def kernel_answers(
    table: KernelTable, forward_s: float | None = None, head_width: int | None = None
) -> list[tuple[str, str]]:
    """Return questions about the kernels and answers; ``forward_s`` is the forward pass as timed without a profiler."""
    # Names come from the table's rows, without the rows that were left out (``rest``).
    if not _phases_s(table, table.phases):
        return []  # nothing was traced
    answers = [*_forward(table, forward_s), *_largest_of_passes(table), *_beside_matmuls(table)]
    products = _shares(table, "matmul")
    if any("attention" in phase.kinds for phase in table.phases.values()):
        products += f"; with fused attention, which holds more of them, another {_shares(table, 'attention')}"
    answers.append(("matrix products", products))
    lines = ((phase, _attention(table, phase, head_width)) for phase in _PASSES)
    return answers + [(f"attention, {phase}", line) for phase, line in lines if line]


def _forward(table: KernelTable, timed_s: float | None) -> list[tuple[str, str]]:
    traced_s = _phases_s(table, ["forward"]) if "forward" in table.phases else 0.0
    if not traced_s:
        return []
    kind = "kernels" if table.source == "kernels" else "operators"
    busy = _ms_with_unit(table, table.phases["forward"].busy_s)
    line = f"{_ms_with_unit(table, traced_s)} traced, {kind} {busy} of it"
    if timed_s:
        timed = TIMES["step"].show(timed_s)
        line += f"; {timed} timed without a profiler, {traced_s / table.steps / timed_s:.2f} times as long traced"
    return [("forward in all", line)]


def _largest_of_passes(table: KernelTable) -> list[tuple[str, str]]:
    answers, names = [], list[str]()
    for part, phases in (*((phase, [phase]) for phase in _PASSES), ("the step", list(table.phases))):
        sums = _by_name(row for row in table.rows if row.phase in phases)
        whole_s = _phases_s(table, [phase for phase in phases if phase in table.phases])
        if sums and whole_s:
            name, (total_s, count) = max(sums.items(), key=lambda item: item[1][0])
            again = "again " if name in names else ""
            names.append(name)
            calls = count / table.steps
            each = f"{calls:g} call{'' if calls == 1 else 's'} of {total_s / max(count, 1) * 1e6:,.0f} µs"
            line = f"{again}{name}: {_ms_with_unit(table, total_s)}, {total_s / whole_s:.1%} of it, {each}"
            answers.append((f"largest in {part}", line))
    return answers


def _by_name(rows: Iterable[KernelRow]) -> dict[str, tuple[float, int]]:
    sums: dict[str, tuple[float, int]] = {}
    for row in rows:
        total_s, count = sums.get(row.name, (0.0, 0))
        sums[row.name] = total_s + row.total_s, count + row.count
    return sums


def _beside_matmuls(table: KernelTable) -> list[tuple[str, str]]:
    rows = (row for row in table.rows if row.phase == "forward" and row.kind not in ("matmul", "attention"))
    sums = sorted(_by_name(rows).items(), key=lambda item: -item[1][0])
    whole_s = _phases_s(table, ["forward"]) if sums else 0.0
    large = [
        f"{shortened(_NOISE.sub('', name))} {total_s / whole_s:.1%}"
        for name, (total_s, _) in sums[:_NAMED]
        if total_s > _SIGNIFICANT * whole_s
    ]
    return [("beside matrix products in forward", ", ".join(large))] if large else []


def _shares(table: KernelTable, kind: Kind) -> str:
    passes = [phase for phase in _PASSES if phase in table.phases and _phases_s(table, [phase])]
    parts = [(phase, [phase]) for phase in passes] + [("the step", list(table.phases))]
    return ", ".join(f"{kind_s(table, of, kind) / _phases_s(table, of):.1%} of {name}" for name, of in parts)


def _attention(table: KernelTable, phase: str, head_width: int | None) -> str | None:
    types = [(row.module, row.module_type) for row in table.rows if row.module and row.module_type]
    own = {module for module, type_ in types if _ATTENTION.search(type_)}
    below = tuple(f"{module}." for module in own)
    rows = [row for row in table.rows if row.phase == phase]
    inside = [row for row in rows if row.module in own]
    softmax_s, products_s = (_total(row for row in inside if row.kind == kind) for kind in ("softmax", "matmul"))
    fused_s, part = _total(row for row in rows if row.kind == "attention"), "products of scores and values"
    times = {
        "softmax and products fused": fused_s,
        "softmax": softmax_s,
        part if softmax_s or not fused_s else "its own matmuls": products_s,  # of nn.MultiheadAttention: projections
        "projections": _total(r for r in rows if r.module and r.module not in own and r.module.startswith(below)),
    }
    answers = [f"{name} {_ms_with_unit(table, seconds)}" for name, seconds in times.items() if seconds]
    if softmax_s and products_s:
        line = f"softmax takes {softmax_s / products_s:.2f} times as long as those products"
        if head_width and phase == "forward":  # either product takes 2 FLOPs for each score and number of a query
            line += f", for {_SOFTMAX_FLOPS / (4 * head_width):.3f} times their FLOPs"
        answers.append(line)
    return "; ".join(answers) or None


def kind_s(table: KernelTable, phases: Iterable[str], kind: Kind) -> float:
    of_phases = (table.phases[phase].kinds.get(kind) for phase in phases)
    return sum(time.total_s for time in of_phases if time is not None)


def _phases_s(table: KernelTable, phases: Iterable[str]) -> float:
    return sum(table.phases[phase].busy_s + table.phases[phase].idle_s for phase in phases)


def _total(rows: Iterable[KernelRow]) -> float:
    return sum(row.total_s for row in rows)


def _ms_with_unit(table: KernelTable, seconds: float) -> str:
    return TIMES["step"].show(seconds / table.steps)


def kernel_tables(table: KernelTable, forward_s: float | None = None, head_width: int | None = None) -> list[Table]:
    """Return tables of ms per step by phase and kind, and of the largest kernels, and the answers about them."""
    answers = [f"{question}: {answer}" for question, answer in kernel_answers(table, forward_s, head_width)]
    left_out = left_out_line(table, _LARGEST)
    largest = replace(kernels_table(table, _LARGEST, is_short=True), below=[left_out] if left_out else [])
    return [kinds_table(table), largest, Table(above=answers)]


def kind_rows(table: KernelTable) -> list[dict[str, str | int | float | None]]:
    """Return a row for each phase and kind, and for each phase's idle time, per step; ``share`` is of the step."""
    rows: list[dict[str, str | int | float | None]] = []
    for phase, times in table.phases.items():
        kinds = [(kind, time.count, time.total_s) for kind, time in times.kinds.items()]
        for kind, count, total_s in (*kinds, (IDLE, None, times.idle_s)):
            calls = None if count is None else count / table.steps
            share = total_s / table.window_s
            rows.append({"phase": phase, "kind": kind, "calls": calls, "time_s": total_s / table.steps, "share": share})
    return rows


def kernel_rows(table: KernelTable) -> list[dict[str, str | int | float | None]]:
    """Return the kernels or operators of one step, the largest first; ``mean_s`` is the time of a call."""
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


def kinds_table(table: KernelTable) -> Table:
    """Return the ms of one step by phase and kind, with their sums and their shares of the step."""
    found_kinds = {kind for phase in table.phases.values() for kind in phase.kinds}
    sums = {kind: kind_s(table, table.phases, kind) for kind in found_kinds}
    kinds = sorted(sums, key=lambda kind: (-sums[kind], kind))
    source, idle = "operators on the host", "no operator"
    if table.source == "kernels":
        source, idle = "kernels on the device", IDLE
    rows = []
    for name, phase in table.phases.items():
        times_s = [kind_s(table, [name], kind) for kind in kinds]
        whole_s = phase.busy_s + phase.idle_s
        rows.append([name, *_ms_or_nothing(table, [*times_s, phase.idle_s, whole_s])])
    totals_s = [sums[kind] for kind in kinds]
    totals_s.append(sum(phase.idle_s for phase in table.phases.values()))
    rows.append(["step", *_ms_or_nothing(table, [*totals_s, table.window_s])])
    rows.append(["share", *(f"{total_s / table.window_s:.1%}" for total_s in totals_s), ""])
    titles = ["phase", *(kind.replace("_", " ") for kind in kinds), idle, "busy + idle"]
    return text_table(titles, rows, title=f"{source}, milliseconds of one step (mean of {table.steps} traced)")


def kernels_table(table: KernelTable, most_rows: int | None = None, is_short: bool = False) -> Table:
    """Return the largest kernels or operators; with ``is_short``, long names are cut for a terminal."""
    # The name comes first, because a table that is too wide comes in pieces that repeat the first column.
    name_title = "kernel" if table.source == "kernels" else "operator"
    titles = [name_title, "phase", "kind", "called by", "module", "calls", "ms", "µs a call", "share"]
    headings = [Heading(title, title, index >= _KERNEL_TEXTS) for index, title in enumerate(titles)]
    rows = [_kernel_row(table, row, is_short) for row in table.rows[:most_rows]]
    return Table(headings, rows)


def _kernel_row(table: KernelTable, row: KernelRow, is_short: bool) -> list[TableCell]:
    name = _NOISE.sub("", row.name)
    caller = _NOISE.sub("", row.operator or "")
    module = row.module or ""
    if is_short:
        name, caller, module = shortened(name), shortened(caller, _CALLER_WIDTH), shortened(module)
    calls = row.count / table.steps
    call_s = row.total_s / max(row.count, 1)
    share = row.total_s / table.window_s
    return [
        *(text_cell(text) for text in (name, row.phase, row.kind.replace("_", " "), caller, module)),
        TableCell(calls, f"{calls:g}"),
        TableCell(row.total_s / table.steps, _ms(table, row.total_s)),
        TableCell(call_s, f"{call_s * 1e6:,.1f}"),
        TableCell(share, f"{share:.1%}"),
    ]


def left_out_line(table: KernelTable, most_rows: int | None) -> str:
    """Return how many rows ``kernels_table`` leaves out, and their time; empty if it has all."""
    hidden = [] if most_rows is None else table.rows[most_rows:]
    count = len(hidden) + table.rest.rows
    if not count:
        return ""
    total_s = sum(row.total_s for row in hidden) + table.rest.total_s
    return f"{count} smaller rows are not shown, {_ms(table, total_s)} ms"


def _ms_or_nothing(table: KernelTable, times_s: Sequence[float]) -> list[str]:
    return [_ms(table, time_s) if time_s else "" for time_s in times_s]


def _ms(table: KernelTable, seconds: float) -> str:
    return TIMES["step"].show(seconds / table.steps, unit=False, digits=3)
