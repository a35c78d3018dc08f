"""Compares two traces: which kinds, operators and kernels of a step were added or removed, or take another time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from lm_profiler.analysis.trace.any_trace import AnyTrace, part_notes
from lm_profiler.analysis.trace.kernel_sums import kernel_rows, kernel_table
from lm_profiler.record.kernels import KernelRow, KernelTable
from lm_profiler.record.trace_answer import (
    Change,
    TimeDifference,
    TraceComparison,
    TraceSide,
)

_LEAST_CHANGED_SHARE = 0.02  # a smaller difference counts as none

_IDLE, _OVERLAP = "idle", "at the same time"

_Key = TypeVar("_Key", bound=Hashable)


@dataclass
class _Sum:
    """Seconds and calls of one step."""

    seconds: float = 0.0
    calls: float = 0.0

    def add(self, row: KernelRow, steps: int) -> None:
        """Add a row of a table, whose figures are of ``steps`` steps."""
        self.seconds += row.total_s / steps
        self.calls += row.count / steps


@dataclass
class _Pair:
    """The sums of one kind, operator or kernel in A and in B."""

    a: _Sum = field(default_factory=_Sum)
    b: _Sum = field(default_factory=_Sum)

    def difference(self, name: str, module: str | None = None) -> TimeDifference:
        """Return both sums, and how B differs from A."""
        return TimeDifference(
            name=name,
            module=module,
            change=_change_word(self.a, self.b),
            a_s=self.a.seconds,
            b_s=self.b.seconds,
            a_calls=self.a.calls,
            b_calls=self.b.calls,
        )


class _TraceRows(NamedTuple):
    """The rows of the kernel table of a trace, whose figures are sums over ``steps`` steps."""

    rows: Sequence[KernelRow]
    steps: int


def compare_traces(trace_a: AnyTrace, trace_b: AnyTrace) -> TraceComparison:
    """Return the differences of one step, the largest first."""
    table_a = kernel_table(trace_a.work)
    table_b = kernel_table(trace_b.work)
    rows_a = _TraceRows(kernel_rows(trace_a.work), table_a.steps)
    rows_b = _TraceRows(kernel_rows(trace_b.work), table_b.steps)
    kinds = _sums_in_both(rows_a, rows_b, _kind_of)
    # With these two rows, the kinds add up to the step: what ran at the same time counts twice in the others.
    kinds[_IDLE] = _Pair(_Sum(_idle_s(table_a)), _Sum(_idle_s(table_b)))
    kinds[_OVERLAP] = _Pair(_Sum(-_overlap_s(table_a)), _Sum(-_overlap_s(table_b)))
    operator_of = _launcher_of if trace_a.work.on_device else _operator_of
    operators = _sums_in_both(rows_a, rows_b, operator_of)
    kernels = _sums_in_both(rows_a, rows_b, _name_of)
    return TraceComparison(
        a=_trace_side(trace_a, table_a),
        b=_trace_side(trace_b, table_b),
        kinds=_largest_first(pair.difference(kind) for kind, pair in kinds.items()),
        operators=_largest_first(
            pair.difference(name, module) for (name, module), pair in operators.items()
        ),
        kernels=_largest_first(pair.difference(name) for name, pair in kernels.items()),
        notes=_notes(trace_a, trace_b),
    )


def _sums_in_both(
    rows_a: _TraceRows, rows_b: _TraceRows, key_of: Callable[[KernelRow], _Key]
) -> dict[_Key, _Pair]:
    """Return the sums in A and in B over the rows with the same key, by this key."""
    pairs: defaultdict[_Key, _Pair] = defaultdict(_Pair)
    for row in rows_a.rows:
        pairs[key_of(row)].a.add(row, rows_a.steps)
    for row in rows_b.rows:
        pairs[key_of(row)].b.add(row, rows_b.steps)
    return pairs


def _kind_of(row: KernelRow) -> str:
    return row.kind.replace("_", " ")


def _launcher_of(row: KernelRow) -> tuple[str, str | None]:
    """Return the operator that launched a kernel, or the kernel itself if none did, and the module."""
    return row.operator or row.name, row.module


def _operator_of(row: KernelRow) -> tuple[str, str | None]:
    """Return the operator and the module of a row without a device."""
    return row.name, row.module


def _name_of(row: KernelRow) -> str:
    return row.name


def _change_word(in_a: _Sum, in_b: _Sum) -> Change:
    """Return how B differs from A: it took longer or shorter or about as long, or only B ("came") or A ("went") has it.

    A sum that is all zero means that the trace does not have it.
    """
    nothing = _Sum()
    if in_a == nothing:
        return "came"
    if in_b == nothing:
        return "went"
    # absolute values, because overlap is negative
    difference_s = abs(in_b.seconds) - abs(in_a.seconds)
    if abs(difference_s) <= _LEAST_CHANGED_SHARE * abs(in_a.seconds):
        return "same"
    return "slower" if difference_s > 0 else "faster"


def _idle_s(table: KernelTable) -> float:
    """Return the seconds of a mean step in which nothing ran."""
    return sum(phase.idle_s for phase in table.phases.values()) / table.steps


def _overlap_s(table: KernelTable) -> float:
    """Return by how many seconds the kernels of a mean step exceed the time in which any of them ran."""
    return sum(phase.overlap_s for phase in table.phases.values()) / table.steps


def _largest_first(differences: Iterable[TimeDifference]) -> list[TimeDifference]:
    """Return the differences that have any time, the largest first."""
    with_time = []
    for difference in differences:
        if difference.a_s or difference.b_s:
            with_time.append(difference)
    return sorted(with_time, key=_absolute_difference_s, reverse=True)


def _absolute_difference_s(difference: TimeDifference) -> float:
    return abs(difference.b_s - difference.a_s)


def _trace_side(trace: AnyTrace, table: KernelTable) -> TraceSide:
    """Return what the comparison reports about one of its traces."""
    return TraceSide(
        trace=str(trace.path),
        device=trace.device_name,
        steps=table.steps,
        step_s=table.window_s / table.steps,
    )


def _notes(trace_a: AnyTrace, trace_b: AnyTrace) -> list[str]:
    """Return why the two traces may not be comparable."""
    notes = part_notes([trace_a, trace_b])
    if trace_a.device_name != trace_b.device_name:
        device_a = trace_a.device_name or "unknown"
        device_b = trace_b.device_name or "unknown"
        notes.append(f"the devices differ: {device_a} and {device_b}")
    if trace_a.work.on_device != trace_b.work.on_device:
        notes.append(
            "one trace has kernels of a device, the other only operators of the host, so no rows can be compared"
        )
    if trace_a.step_source != trace_b.step_source:
        notes.append(
            "the steps of the two traces are ranges with different names: see --step"
        )
    return notes
