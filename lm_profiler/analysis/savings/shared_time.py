"""Subtracts time that two findings mean from the more general one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lm_profiler.analysis.savings.step_costs import StepCosts
from lm_profiler.record.run_record import Finding, FindingName


class _General(NamedTuple):
    """The findings whose time may contain that of a more specific one in the same phase."""

    about_phase: Sequence[FindingName]  # about the phase, or a place in it
    # about the function that the specific finding names
    about_function: Sequence[FindingName]
    # They are dropped if a smaller share of their time is left.
    least_share_left: float


_GENERAL_OF_RESULTS = _General(
    about_phase=("input", "owner", "repeated", "side_work", "constant"),
    about_function=("python", "slow_call"),
    # the rest of an estimate from single operators would be its error
    least_share_left=0.5,
)
# by the specific finding, which names a function and its remedy
_GENERAL: Mapping[FindingName, _General] = {
    "slow_call": _General(
        about_phase=("input", "owner", "logging"),
        about_function=("python", "sleep"),
        least_share_left=0.0,
    ),
    "same_result": _GENERAL_OF_RESULTS,
    "large_result": _GENERAL_OF_RESULTS,
}


def without_shared_time(findings: Sequence[Finding], costs: StepCosts) -> list[Finding]:
    """Return ``findings`` with the time of specific ones subtracted from the general ones that contain it."""
    remaining = []
    for finding in findings:
        shared_s = 0.0
        least_share = 0.0
        for specific in findings:
            general = _GENERAL.get(specific.name)
            if general is not None and _may_contain(general, finding, specific):
                shared_s += specific.saves_s
                least_share = max(least_share, general.least_share_left)
        left_s = max(finding.saves_s - shared_s, 0.0)
        if shared_s == 0.0:
            remaining.append(finding)
        elif left_s >= least_share * finding.saves_s:
            remaining.append(_shortened(finding, shared_s, costs))
    return remaining


def _may_contain(general: _General, finding: Finding, specific: Finding) -> bool:
    """Return whether ``finding`` is one of ``general``, and its time may contain that of ``specific``."""
    if finding.phase != specific.phase:
        return False
    if finding.name in general.about_function:
        return (finding.file, finding.owner) == (specific.file, specific.owner)
    return finding.name in general.about_phase


def _shortened(finding: Finding, seconds: float, costs: StepCosts) -> Finding:
    """Return ``finding`` with a saving that is shorter by ``seconds``, and its interval shortened likewise."""
    saves_s = max(finding.saves_s - seconds, 0.0)
    changes = {"saves_s": saves_s, "share": saves_s / costs.whole_s}
    for end in ("low_s", "high_s"):
        end_s = getattr(finding, end)
        if end_s is not None:
            changes[end] = max(end_s - seconds, 0.0)
    return finding.model_copy(update=changes)
