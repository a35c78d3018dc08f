"""Finds lines of the program with a call of a library that is slow in a known way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from lm_profiler.analysis.savings.step_costs import MODEL_PHASES, StepCosts
from lm_profiler.record.run_record import Finding, PythonTime


def find_slow_calls(costs: StepCosts) -> Iterator[Finding]:
    """Find lines with a call that is slow in a known way: one finding for each kind of call in each phase."""
    by_kind: defaultdict[tuple[str, str], list[PythonTime]] = defaultdict(list)
    for row in costs.record.slow_calls:
        by_kind[row.phase, row.what].append(row)
    for (phase, name), rows in by_kind.items():
        longest = max(rows, key=lambda row: row.seconds)
        yield costs.finding(
            "slow_call",
            _time_of_rows_s(costs, phase, rows),
            phase=phase,
            owner=longest.function,
            file=longest.file,
            line=longest.line,
            what=name,
        )


def _time_of_rows_s(costs: StepCosts, phase: str, rows: Sequence[PythonTime]) -> float:
    """Return the seconds per step of the recorded ``rows`` of a phase."""
    recorded_s = sum(row.seconds for row in rows)
    seconds = min(recorded_s * costs.slowdown_in(phase), costs.mean_s(phase))
    if costs.on_device and phase in MODEL_PHASES:
        # Python delays a device only while the device is idle.
        return min(seconds, costs.gap_s(phase))
    return seconds
