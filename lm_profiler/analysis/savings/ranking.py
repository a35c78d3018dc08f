"""Finds time that could be saved: one function per finding. Findings are ordered by the time that they likely save.

``Finding.saves_s`` is the most time that could be saved per step. It is a mean over all steps: a delay in every fifth
step, or between steps, costs each step its share. On a busy machine, other programs cannot distort counts, owners and
sleep. Figures that they can distort are left out, or reported with "may".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from lm_profiler.analysis.remedies.catalogue import likely_share
from lm_profiler.analysis.savings.batches import (
    find_late_batches,
    find_padding,
    find_slow_transfers,
)
from lm_profiler.analysis.savings.computation import (
    find_communication,
    find_diagnostics,
    find_high_precision,
    find_recomputation,
    find_slow_ranks,
    find_syncs,
    find_unfused_operators,
)
from lm_profiler.analysis.savings.function_results import (
    find_large_results,
    find_same_results,
)
from lm_profiler.analysis.savings.needless_work import (
    find_needless_operators,
    find_needless_work,
    find_unfrozen_modules,
)
from lm_profiler.analysis.savings.optimizer import (
    find_costly_optimizer_code,
    find_optimizer_products,
    find_slow_optimizer,
    find_small_batch,
)
from lm_profiler.analysis.savings.outside_phases import (
    find_costly_owners,
    find_costs_between_steps,
)
from lm_profiler.analysis.savings.python_code import (
    find_busy_threads,
    find_sleeping_phases,
    find_slow_python,
)
from lm_profiler.analysis.savings.shared_time import without_shared_time
from lm_profiler.analysis.savings.slow_calls import find_slow_calls
from lm_profiler.analysis.savings.step_costs import WORTH, Finder, StepCosts
from lm_profiler.analysis.savings.uneven_steps import (
    find_garbage_and_compilation,
    find_odd_steps,
    find_pattern,
)
from lm_profiler.record.run_record import Finding, NeedlessReason, RunRecord

# Findings that are not certain ("may"), so that one has to try their remedy, are ranked by this share of their saving:
# a certain finding of equal size comes first.
_UNCERTAIN_FACTOR = 0.75
# The same on a busy machine, where other programs lengthen the times from which the finding follows.
_BUSY_UNCERTAIN_FACTOR = 0.5
# findings whose remedy is one argument, and the share of the step that they must save if they are certain
_SWITCHES = ("optimizer",)
_WORTH_OF_SWITCH = 0.03
_DATA_FLOW_REASONS = get_args(NeedlessReason)

FINDERS: Sequence[Finder] = (
    find_slow_ranks,
    find_late_batches,
    find_slow_transfers,
    find_costs_between_steps,
    find_costly_owners,
    find_slow_python,
    find_slow_calls,
    find_busy_threads,
    find_sleeping_phases,
    find_pattern,
    find_odd_steps,
    find_garbage_and_compilation,
    find_diagnostics,
    find_syncs,
    find_small_batch,
    find_slow_optimizer,
    find_optimizer_products,
    find_unfused_operators,
    find_high_precision,
    find_recomputation,
    find_padding,
    find_needless_work,
    find_unfrozen_modules,
    find_needless_operators,
    find_costly_optimizer_code,
    find_communication,
    find_same_results,
    find_large_results,
)


def findings_of(record: RunRecord) -> list[Finding]:
    """Return the findings worth reporting, ordered by likely saving."""
    costs = StepCosts(record)
    if costs.whole_s <= 0.0:
        return []
    findings: list[Finding] = []
    for find in FINDERS:
        findings += list(find(costs))
    findings = _with_logging_as_one(findings, costs)
    # Time that two findings share is subtracted from one of them, so what is worth reporting is known only then.
    findings = without_shared_time(findings, costs)
    findings = [finding for finding in findings if _is_worth_reporting(finding)]
    findings.sort(key=lambda finding: _likely_saving_s(finding, costs), reverse=True)
    return [_with_upper_limit(finding, costs) for finding in findings]


def _likely_saving_s(finding: Finding, costs: StepCosts) -> float:
    """Return the seconds per step that a finding likely saves; less if it is not certain."""
    seconds = finding.saves_s * likely_share(finding)
    if not finding.may:
        return seconds
    # The data flow of a step is the same on a busy machine.
    is_of_data_flow = finding.name in _DATA_FLOW_REASONS
    if costs.contended and not is_of_data_flow:
        return seconds * _BUSY_UNCERTAIN_FACTOR
    return seconds * _UNCERTAIN_FACTOR


def _is_worth_reporting(finding: Finding) -> bool:
    """Return whether a finding saves enough; less is enough if a switch, such as ``fused=True``, is certain to help."""
    least_share = WORTH
    if finding.name in _SWITCHES and not finding.may:
        least_share = _WORTH_OF_SWITCH
    return finding.share >= least_share


def _with_logging_as_one(
    findings: Sequence[Finding], costs: StepCosts
) -> list[Finding]:
    """Return ``findings`` with all those about logging merged: in the program's own code, and in the loggers."""
    all_logging = [finding for finding in findings if finding.name == "logging"]
    if len(all_logging) < 2:
        return list(findings)
    longest = max(all_logging, key=lambda finding: finding.saves_s)
    saves_s = 0.0
    high_s = 0.0
    for finding in all_logging:
        saves_s += finding.saves_s
        high_s += finding.high_s or finding.saves_s
    share = min(saves_s / costs.whole_s, 1.0)
    changes = {"saves_s": saves_s, "share": share, "high_s": high_s}
    others = [finding for finding in findings if finding.name != "logging"]
    return [*others, longest.model_copy(update=changes)]


def _with_upper_limit(finding: Finding, costs: StepCosts) -> Finding:
    """Return ``finding`` with an upper limit of its saving; the mean alone would be too low in half of all runs."""
    tolerance = costs.tolerance_of(finding.name)
    high_s = finding.saves_s * (1.0 + tolerance)
    if finding.high_s is not None:
        high_s = max(high_s, finding.high_s)
    # A finding that is most of the step is limited by the rest of the step, which is needed in any case.
    remaining_s = costs.whole_s - max(finding.saves_s, finding.high_s or 0.0)
    least_remaining_s = max(remaining_s, 0.0) * (1.0 - tolerance)
    high_s = min(high_s, costs.whole_s - least_remaining_s)
    high_s = max(high_s, finding.saves_s)
    return finding.model_copy(update={"high_s": high_s})
