"""Finds what makes some steps longer than others: patterns, odd steps, garbage collection, compilation."""

from __future__ import annotations

from collections.abc import Iterator

from lm_profiler.analysis.savings.outside_phases import (
    find_costly_owners,
    find_costs_between_steps,
)
from lm_profiler.analysis.savings.step_costs import WORTH, StepCosts
from lm_profiler.analysis.steps.odd_step_causes import (
    EXPLAINED,
    GARBAGE,
    has_own_finding,
)
from lm_profiler.record.run_record import Finding, OddStep

# the phases that come once all batches of a step have added to the gradients
_PHASES_OF_COMPLETE_GRADIENTS = ("zero_grad", "clip", "optimizer")
_FEWEST_LASTING_STEPS = 3  # so many odd steps are not a coincidence


def find_pattern(costs: StepCosts) -> Iterator[Finding]:
    """Find a part that takes longer in every n-th step, unless another finding explains it."""
    steady = costs.record.steadiness
    if (
        steady is None
        or steady.pattern is None
        or not steady.pattern_s
        or steady.pattern_s < 0.0
    ):
        return
    pattern = steady.pattern
    if pattern.short_batch or _has_part_finding(costs, pattern.part):
        return
    if _is_of_accumulation(costs, pattern.part):
        return
    mean = costs.record.mean_counters
    if mean is not None:
        # garbage collection and compilation have findings of their own
        counted_s = (mean.gc_s or 0.0) + (mean.compile_s or 0.0)
        if counted_s >= EXPLAINED * steady.pattern_s:
            return
    code = None
    if pattern.part is not None:
        code = costs.main_line(pattern.part, steady.pattern_s)
    facts = {"every": float(pattern.every)}
    yield costs.finding(
        "pattern", steady.pattern_s, code=code, phase=pattern.part, facts=facts
    )


def _is_of_accumulation(costs: StepCosts, part: str | None) -> bool:
    """Return whether the other steps lack ``part`` because they only accumulate gradients."""
    if part not in _PHASES_OF_COMPLETE_GRADIENTS:
        return False
    summary = costs.record.host_time.get(part)
    return summary is not None and summary.min == 0.0


def find_odd_steps(costs: StepCosts) -> Iterator[Finding]:
    """Find steps that take far longer than the others, for a reason that has no other finding.

    Steps that another program delayed are left out.
    """
    steady = costs.record.steadiness
    slow = [odd for odd in costs.record.odd_steps if odd.ratio > 1.0]
    excess_s = sum(_excess_s(odd) for odd in slow)
    if steady is None or not steady.odd_s or excess_s <= 0.0:
        return
    unexplained: list[OddStep] = []
    for odd in slow:
        if not has_own_finding(odd.cause) and not _has_part_finding(costs, odd.part):
            unexplained.append(odd)
    if not unexplained:
        return
    unexplained_share = sum(_excess_s(odd) for odd in unexplained) / excess_s
    worst = max(unexplained, key=_excess_s)
    yield costs.finding(
        "odd_steps",
        steady.odd_s * unexplained_share,
        may=len(unexplained) < _FEWEST_LASTING_STEPS,  # a few may be a coincidence
        phase=worst.part,
        what=worst.cause,
        facts={
            "steps": float(len(unexplained)),
            "step": float(worst.step),
            "seconds": worst.step_s,
        },
    )


def _excess_s(odd: OddStep) -> float:
    """Return by how many seconds a step took longer than usual."""
    usual_s = odd.step_s / odd.ratio
    return odd.step_s - usual_s


def _has_part_finding(costs: StepCosts, part: str | None) -> bool:
    """Return whether another finding already covers the variation of ``part`` from step to step."""
    if part in ("data", "transfer"):
        return True
    if part != "other":
        return False
    findings = [*find_costly_owners(costs), *find_costs_between_steps(costs)]
    return any(finding.share >= WORTH for finding in findings)


def _was_collected_in_few_steps(costs: StepCosts, garbage_s: float) -> bool:
    """Return whether one or two slow steps have most of ``garbage_s``, the seconds of garbage collection per step.

    How often such collections come in a long training is then unknown.
    """
    collections = [
        odd for odd in costs.record.odd_steps if (odd.cause or "").startswith(GARBAGE)
    ]
    collected_s = sum(odd.cause_s or 0.0 for odd in collections)
    measured_s = garbage_s * costs.record.steps.get("measure", 0)
    is_most = collected_s > 0.5 * measured_s
    return is_most and len(collections) < _FEWEST_LASTING_STEPS


def find_garbage_and_compilation(costs: StepCosts) -> Iterator[Finding]:
    """Find the time of garbage collection and of compilation, by their counters."""
    mean = costs.record.mean_counters
    if mean is None:
        return
    if mean.gc_s:
        # Calls of gc.collect by the program are found with their lines.
        explicit_s = sum(
            row.seconds for row in costs.record.python_times if row.what == "gc.collect"
        )
        profiler_s = mean.gc_own_s or 0.0
        yield costs.finding(
            "garbage",
            max(mean.gc_s - profiler_s - explicit_s, 0.0),
            may=_was_collected_in_few_steps(costs, mean.gc_s),
        )
    if mean.compile_s:
        yield costs.finding("compilation", mean.compile_s, owner=mean.compiled)
