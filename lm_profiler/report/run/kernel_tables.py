"""Tables of kernels by kind and phase, the largest kernels and modules, and answers to common questions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lm_profiler.record.figure import count_text
from lm_profiler.record.kernels import KernelRow, KernelTable, Kind
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.text import shortened
from lm_profiler.report.tables.table import (
    Table,
    TableCell,
    text_cell,
    text_table,
    titled_headings,
)

_ATTENTION_NAME = re.compile(r"attention|attn", re.IGNORECASE)
_PASSES = ("forward", "backward")
# Parts of a kernel's C++ name that say nothing about what it computes.
_NAME_NOISE = re.compile(r"void |\(anonymous namespace\)::|at::native::")
# a kernel that is not a matmul is named if it has this share of forward
_LEAST_SHARE = 0.02
_MOST_NAMES = 5  # the most such kernels that are named
_SOFTMAX_FLOPS = 5  # FLOPs of softmax for each score: compare, subtract, exponentiate, add and divide
_LARGEST = 15
_LARGEST_MODULES = 10
# the first columns of the table of kernels are texts, the others are figures
_KERNEL_TEXTS = 5
_CALLER_WIDTH = 32  # the most characters of the calling operator on a terminal
IDLE = "idle"


def kernel_answers(
    table: KernelTable, forward_s: float | None = None, head_width: int | None = None
) -> list[tuple[str, str]]:
    """Return pairs of a question about the kernels and its answer.

    ``forward_s`` is the time of the forward pass in steps that were not traced. ``head_width`` is the width of an
    attention head. Names come from the table's rows: the small ones, which ``rest`` sums up, have no names.
    """
    nothing_was_traced = table.phases_s() == 0.0
    if nothing_was_traced:
        return []
    answers = _forward_answer(table, forward_s)
    answers += _largest_of_each_pass(table)
    answers += _largest_without_matmuls(table)
    products = _shares_text(table, "matmul")
    has_fused_attention = any(
        "attention" in phase.kinds for phase in table.phases.values()
    )
    if has_fused_attention:
        products += f"; fused attention, which contains further products, takes {_shares_text(table, 'attention')}"
    answers.append(("matrix products", products))
    for phase in _PASSES:
        attention = _attention_answer(table, phase, head_width)
        if attention:
            answers.append((f"attention, {phase}", attention))
    return answers


def _forward_answer(table: KernelTable, timed_s: float | None) -> list[tuple[str, str]]:
    """Return the time of the forward pass with and without a profiler; nothing if forward was not traced."""
    if "forward" not in table.phases:
        return []
    traced_s = table.phases_s(["forward"])
    if not traced_s:
        return []
    kind = "kernels" if table.source == "kernels" else "operators"
    busy = _ms_with_unit(table, table.phases["forward"].busy_s)
    answer = f"{_ms_with_unit(table, traced_s)} traced, of which {kind} take {busy}"
    if timed_s:
        timed = TIMES["step"].show(timed_s)
        times_as_long = traced_s / table.steps / timed_s
        answer += f"; {timed} without a profiler, so tracing makes the pass {times_as_long:.2f} times as long"
    return [("forward in total", answer)]


def _largest_of_each_pass(table: KernelTable) -> list[tuple[str, str]]:
    """Return an answer for each pass and for the step: its largest kernel."""
    phases_of_part = {phase: [phase] for phase in _PASSES if phase in table.phases}
    phases_of_part["the step"] = list(table.phases)
    answers = []
    names: list[str] = []
    for part, phases in phases_of_part.items():
        kernels = table.by_name(phases)
        part_s = table.phases_s(phases)
        if not kernels or not part_s:
            continue
        kernel = kernels[0]
        was_named_before = kernel.name in names
        name = f"again {kernel.name}" if was_named_before else kernel.name
        names.append(kernel.name)
        calls = kernel.calls / table.steps
        noun = "call" if calls == 1 else "calls"
        call_us = kernel.total_s / max(kernel.calls, 1) * 1e6
        share = kernel.total_s / part_s
        time = f"{_ms_with_unit(table, kernel.total_s)}, {share:.1%} of {part}"
        answer = f"{name}: {time}, {calls:g} {noun} of {call_us:,.0f} µs"
        answers.append((f"largest in {part}", answer))
    return answers


def _largest_without_matmuls(table: KernelTable) -> list[tuple[str, str]]:
    """Return an answer with the largest kernels of forward that are neither matmuls nor fused attention."""
    kernels = table.by_name(["forward"], kinds_left_out=("matmul", "attention"))
    forward_s = table.phases_s(["forward"])
    texts = []
    for kernel in kernels[:_MOST_NAMES]:
        if kernel.total_s > _LEAST_SHARE * forward_s:
            short_name = shortened(_NAME_NOISE.sub("", kernel.name))
            texts.append(f"{short_name} {kernel.total_s / forward_s:.1%}")
    if not texts:
        return []
    return [("largest in forward, except matrix products", ", ".join(texts))]


def _shares_text(table: KernelTable, kind: Kind) -> str:
    """Return the share of the kernels of ``kind`` in each pass and in the step, as text."""
    phases_of_part = {}
    for phase in _PASSES:
        if table.phases_s([phase]):
            phases_of_part[phase] = [phase]
    phases_of_part["the step"] = list(table.phases)
    texts = []
    for part, phases in phases_of_part.items():
        share = table.kind_s(kind, phases) / table.phases_s(phases)
        texts.append(f"{share:.1%} of {part}")
    return ", ".join(texts)


def _attention_answer(
    table: KernelTable, phase: str, head_width: int | None
) -> str | None:
    """Return the times of the parts of attention in a pass, as text; None if nothing in the pass is attention.

    Modules are recognized as attention by the name of their class. Matmuls that such a module calls itself are the
    products of scores and values; matmuls of the modules inside it are projections.
    """
    attention_modules = set()
    for row in table.rows:
        if row.module and row.module_type and _ATTENTION_NAME.search(row.module_type):
            attention_modules.add(row.module)
    below_attention = tuple(f"{module}." for module in attention_modules)
    rows = [row for row in table.rows if row.phase == phase]
    own_rows = [row for row in rows if row.module in attention_modules]
    softmax_s = _total_s(row for row in own_rows if row.kind == "softmax")
    products_s = _total_s(row for row in own_rows if row.kind == "matmul")
    # Kernels of this kind are attention in any module.
    fused_s = _total_s(row for row in rows if row.kind == "attention")
    projection_rows = []
    for row in rows:
        is_own = row.module in attention_modules
        if row.module and row.module.startswith(below_attention) and not is_own:
            projection_rows.append(row)

    products_name = "products of scores and values"
    has_only_fused_kernels = fused_s > 0.0 and softmax_s == 0.0
    if has_only_fused_kernels:
        # The fused kernel contains the products, so these matmuls are projections, as of nn.MultiheadAttention.
        products_name = "its own matmuls"
    times_s = {
        "softmax and products fused": fused_s,
        "softmax": softmax_s,
        products_name: products_s,
        "projections": _total_s(projection_rows),
    }
    answers = []
    for name, seconds in times_s.items():
        if seconds:
            answers.append(f"{name} {_ms_with_unit(table, seconds)}")
    if softmax_s and products_s:
        head_width_of_pass = head_width if phase == "forward" else None
        answers.append(_softmax_text(softmax_s / products_s, head_width_of_pass))
    if not answers:
        return None
    return "; ".join(answers)


def _softmax_text(time_ratio: float, head_width: int | None) -> str:
    """Return how softmax compares with the products of attention: in time, and in FLOPs if ``head_width`` is known."""
    text = f"softmax takes {time_ratio:.2f} times as long as these matrix products"
    if not head_width:
        return text
    # Each of the two products takes 2 FLOPs per score and element of a head.
    flops_ratio = _SOFTMAX_FLOPS / (4 * head_width)
    return f"{text}, but has only {flops_ratio:.3f} times their FLOPs"


def _total_s(rows: Iterable[KernelRow]) -> float:
    return sum(row.total_s for row in rows)


def _ms_with_unit(table: KernelTable, seconds: float) -> str:
    return TIMES["step"].show(seconds / table.steps)


def kernel_tables(
    table: KernelTable, forward_s: float | None = None, head_width: int | None = None
) -> list[Table]:
    """Return tables of kinds by phase, of the largest kernels and of modules, and the answers to common questions."""
    answers = []
    for question, answer in kernel_answers(table, forward_s, head_width):
        answers.append(f"{question}: {answer}")
    largest = kernels_table(table, _LARGEST, cuts_names=True)
    rest = left_out_line(table, _LARGEST)
    if rest:
        largest = replace(largest, below=[rest])
    return [
        kinds_table(table),
        largest,
        *modules_tables(table),
        Table(above=answers),
    ]


def modules_tables(kernels: KernelTable) -> list[Table]:
    """Return a table of the largest modules; none if the trace names no module."""
    sums_s: defaultdict[str, float] = defaultdict(float)
    for row in kernels.rows:
        sums_s[row.module or "outside of modules"] += row.total_s
    if len(sums_s) == 1 and "outside of modules" in sums_s:
        return []
    largest = sorted(sums_s, key=lambda module: sums_s[module], reverse=True)
    rows = []
    for module in largest[:_LARGEST_MODULES]:
        share = sums_s[module] / kernels.window_s
        rows.append([module, _ms(kernels, sums_s[module]), f"{share:.1%}"])
    hidden = largest[_LARGEST_MODULES:]
    lines_below = []
    if hidden:
        hidden_s = sum(sums_s[module] for module in hidden)
        lines_below.append(
            f"{count_text(len(hidden), 'further module')}, {_ms(kernels, hidden_s)} ms"
        )
    return [
        text_table(
            ["module", "ms", "share"],
            rows,
            title="modules, each without the modules inside it",
            below=lines_below,
        )
    ]


def kind_rows(table: KernelTable) -> list[dict[str, str | int | float | None]]:
    """Return rows for programs: one for each phase and kind, and one for the idle time of each phase, per step."""
    rows: list[dict[str, str | int | float | None]] = []
    for phase, times in table.phases.items():
        for kind, time in times.kinds.items():
            calls = time.count / table.steps
            rows.append(_kind_row(table, phase, kind, time.total_s, calls))
        idle_row = _kind_row(table, phase, IDLE, total_s=times.idle_s, calls=None)
        rows.append(idle_row)
    return rows


def _kind_row(
    table: KernelTable, phase: str, kind: str, total_s: float, calls: float | None
) -> dict[str, str | int | float | None]:
    """Return the row of a kind of kernels in a phase of a mean step; ``share`` is the share of the step."""
    return {
        "phase": phase,
        "kind": kind,
        "calls": calls,
        "time_s": total_s / table.steps,
        "share": total_s / table.window_s,
    }


def kernel_rows(table: KernelTable) -> list[dict[str, str | int | float | None]]:
    """Return rows for programs: the kernels or operators of a mean step, the largest first; ``mean_s`` is per call."""
    rows = []
    for kernel in table.rows:
        row = kernel.model_dump(exclude={"count", "total_s"})
        row["calls"] = kernel.count / table.steps
        row["time_s"] = kernel.total_s / table.steps
        row["mean_s"] = kernel.total_s / max(kernel.count, 1)
        row["share"] = kernel.total_s / table.window_s
        rows.append(row)
    return rows


def kinds_table(table: KernelTable) -> Table:
    """Return the ms of one step by phase and kind, with their sums and their shares of the step."""
    sums: dict[Kind, float] = {}
    for phase in table.phases.values():
        for kind in phase.kinds:
            sums[kind] = table.kind_s(kind)
    kinds = sorted(sums, key=lambda kind: (-sums[kind], kind))
    source = "operators on the host"
    idle = "no operator"
    if table.source == "kernels":
        source = "kernels on the device"
        idle = IDLE
    rows = []
    for name, phase in table.phases.items():
        times_s = [table.kind_s(kind, [name]) for kind in kinds]
        times_s.append(phase.idle_s)
        times_s.append(phase.busy_s + phase.idle_s)
        rows.append([name, *_ms_or_nothing(table, times_s)])
    totals_s = [sums[kind] for kind in kinds]
    totals_s.append(sum(phase.idle_s for phase in table.phases.values()))
    rows.append(["step", *_ms_or_nothing(table, [*totals_s, table.window_s])])
    shares = [f"{total_s / table.window_s:.1%}" for total_s in totals_s]
    rows.append(["share", *shares, ""])
    kind_titles = [kind.replace("_", " ") for kind in kinds]
    titles = ["phase", *kind_titles, idle, "busy + idle"]
    title = f"{source}, milliseconds of one step (mean of {table.steps} traced steps)"
    return text_table(titles, rows, title=title)


def kernels_table(
    table: KernelTable, most_rows: int | None = None, cuts_names: bool = False
) -> Table:
    """Return the largest kernels or operators; with ``cuts_names``, long names are cut for a terminal."""
    # The name is the first column, because a table that is too wide is cut into pieces that repeat the first column.
    name_title = "kernel" if table.source == "kernels" else "operator"
    titles = [
        name_title,
        "phase",
        "kind",
        "called by",
        "module",
        "calls",
        "ms",
        "µs a call",
        "share",
    ]
    headings = titled_headings(titles, figures=titles[_KERNEL_TEXTS:])
    rows = [_kernel_row(table, row, cuts_names) for row in table.rows[:most_rows]]
    return Table(headings, rows)


def _kernel_row(
    table: KernelTable, row: KernelRow, cuts_names: bool
) -> list[TableCell]:
    """Return the cells of a kernel in a mean step; long names are cut if ``cuts_names``."""
    name = _NAME_NOISE.sub("", row.name)
    caller = _NAME_NOISE.sub("", row.operator or "")
    module = row.module or ""
    if cuts_names:
        name = shortened(name)
        caller = shortened(caller, _CALLER_WIDTH)
        module = shortened(module)
    calls = row.count / table.steps
    call_s = row.total_s / max(row.count, 1)
    share = row.total_s / table.window_s
    kind = row.kind.replace("_", " ")
    text_cells = [text_cell(text) for text in (name, row.phase, kind, caller, module)]
    return [
        *text_cells,
        TableCell(calls, f"{calls:g}"),
        TableCell(row.total_s / table.steps, _ms(table, row.total_s)),
        TableCell(call_s, f"{call_s * 1e6:,.1f}"),
        TableCell(share, f"{share:.1%}"),
    ]


def left_out_line(table: KernelTable, most_rows: int | None) -> str:
    """Return how many rows ``kernels_table`` leaves out, and their time; empty if it shows all rows."""
    hidden = [] if most_rows is None else table.rows[most_rows:]
    count = len(hidden) + table.rest.rows
    if not count:
        return ""
    total_s = sum(row.total_s for row in hidden) + table.rest.total_s
    return f"{count} smaller rows are not shown (together {_ms(table, total_s)} ms)"


def _ms_or_nothing(table: KernelTable, times_s: Sequence[float]) -> list[str]:
    return [_ms(table, time_s) if time_s else "" for time_s in times_s]


def _ms(table: KernelTable, seconds: float) -> str:
    return TIMES["step"].show(seconds / table.steps, unit=False, digits=3)
