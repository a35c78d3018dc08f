"""Finds lines of the program with a call of a library that is slow in a known way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from lm_profiler.analysis.savings.step_costs import MODEL_PHASES, StepCosts
from lm_profiler.record.run_record import Finding, FindingName, PythonTime

# findings about all the code that runs in their phase
_ABOUT_PHASE: tuple[FindingName, ...] = ("input", "owner", "logging")
# findings about one function
_ABOUT_FUNCTION: tuple[FindingName, ...] = ("python", "sleep")


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


def without_slow_calls(findings: Sequence[Finding], costs: StepCosts) -> list[Finding]:
    """Return ``findings`` with the time of slow calls subtracted from those about the code around them."""
    slow_calls = [finding for finding in findings if finding.name == "slow_call"]
    remaining = []
    for finding in findings:
        seconds = sum(
            slow_call.saves_s
            for slow_call in slow_calls
            if _is_around(finding, slow_call)
        )
        if seconds > 0.0:
            finding = _shortened(finding, seconds, costs)
        remaining.append(finding)
    return remaining


def _is_around(finding: Finding, slow_call: Finding) -> bool:
    """Return whether the time of ``finding`` contains that of ``slow_call``."""
    if finding.phase != slow_call.phase:
        return False
    if finding.name in _ABOUT_FUNCTION:
        return (finding.file, finding.owner) == (slow_call.file, slow_call.owner)
    return finding.name in _ABOUT_PHASE


def _shortened(finding: Finding, seconds: float, costs: StepCosts) -> Finding:
    """Return ``finding`` with a saving that is shorter by ``seconds``."""
    saves_s = max(finding.saves_s - seconds, 0.0)
    changes = {"saves_s": saves_s, "share": saves_s / costs.whole_s}
    for end in ("low_s", "high_s"):
        end_s = getattr(finding, end)
        if end_s is not None:
            changes[end] = max(end_s - seconds, 0.0)
    return finding.model_copy(update=changes)
