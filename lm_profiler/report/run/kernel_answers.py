"""What people ask of a trace, answered from its table of kernels: a question and a line each, of one step."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lm_profiler.record.kernels import KernelRow, KernelTable, Kind
from lm_profiler.record.quantities import TIMES

_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_PASSES = ("forward", "backward")


def kernel_answers(table: KernelTable) -> list[tuple[str, str]]:
    """Which kernel takes most of a pass, the matrix products' share, and softmax against them inside attention.

    Names come from the table's rows alone: of what was left out (``rest``) they know nothing.
    """
    if not _phases_s(table, table.phases):
        return []  # nothing was traced
    answers = [*_largest(table), ("matrix products", _matmul(table))]
    return answers + [(f"attention, {phase}", line) for phase in _PASSES if (line := _attention(table, phase))]


def _largest(table: KernelTable) -> list[tuple[str, str]]:
    """The name that takes most of each pass, whoever calls it."""
    answers, names = [], list[str]()
    for phase in _PASSES:
        sums: dict[str, tuple[float, int]] = {}
        for row in table.rows:
            if row.phase == phase:
                total_s, count = sums.get(row.name, (0.0, 0))
                sums[row.name] = total_s + row.total_s, count + row.count
        if sums and _phases_s(table, [phase]):
            name, (total_s, count) = max(sums.items(), key=lambda item: item[1][0])
            again = "again " if name in names else ""
            names.append(name)
            share = total_s / _phases_s(table, [phase])
            calls = count / table.steps
            each = f"{calls:g} call{'' if calls == 1 else 's'} of {total_s / max(count, 1) * 1e6:,.0f} µs"
            answers.append((f"largest in {phase}", f"{again}{name}: {_ms(table, total_s)}, {share:.1%} of it, {each}"))
    return answers


def _matmul(table: KernelTable) -> str:
    line = _shares(table, "matmul")
    if any("attention" in phase.kinds for phase in table.phases.values()):
        line += f"; with fused attention, which holds more of them, another {_shares(table, 'attention')}"
    return line


def _shares(table: KernelTable, kind: Kind) -> str:
    passes = [phase for phase in _PASSES if phase in table.phases and _phases_s(table, [phase])]
    parts = [(phase, [phase]) for phase in passes] + [("the step", list(table.phases))]
    return ", ".join(f"{kind_s(table, of, kind) / _phases_s(table, of):.1%} of {name}" for name, of in parts)


def _attention(table: KernelTable, phase: str) -> str | None:
    """None where no module of the phase is called attention and no kernel of it is."""
    types = [(row.module, row.module_type) for row in table.rows if row.module and row.module_type]
    own = {module for module, type_ in types if _ATTENTION.search(type_)}
    below = tuple(f"{module}." for module in own)
    rows = [row for row in table.rows if row.phase == phase]
    inside = [row for row in rows if row.module in own]
    softmax_s, products_s = (_total(row for row in inside if row.kind == kind) for kind in ("softmax", "matmul"))
    times = {
        "softmax and products fused": _total(row for row in rows if row.kind == "attention"),
        "softmax": softmax_s,
        "products of scores and values": products_s,
        "projections": _total(r for r in rows if r.module and r.module not in own and r.module.startswith(below)),
    }
    answers = [f"{name} {_ms(table, seconds)}" for name, seconds in times.items() if seconds]
    if softmax_s and products_s:
        answers.append(f"softmax takes {softmax_s / products_s:.2f} times as long as those products")
    return "; ".join(answers) or None


def kind_s(table: KernelTable, phases: Iterable[str], kind: Kind) -> float:
    """What ran of ``kind`` in ``phases``, over all steps."""
    of_phases = (table.phases[phase].kinds.get(kind) for phase in phases)
    return sum(time.total_s for time in of_phases if time is not None)


def _phases_s(table: KernelTable, phases: Iterable[str]) -> float:
    return sum(table.phases[phase].busy_s + table.phases[phase].idle_s for phase in phases)


def _total(rows: Iterable[KernelRow]) -> float:
    return sum(row.total_s for row in rows)


def _ms(table: KernelTable, seconds: float) -> str:
    """Of one step."""
    return TIMES["step"].show(seconds / table.steps)
