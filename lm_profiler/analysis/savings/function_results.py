"""Finds functions of the program whose results could be kept, or made smaller."""

from __future__ import annotations

from collections.abc import Iterator

from lm_profiler.analysis.savings.step_costs import (
    BACKWARD_PER_FORWARD,
    MODEL_PHASES,
    StepCosts,
)
from lm_profiler.record.run_record import Finding, RepeatedResult


def find_same_results(costs: StepCosts) -> Iterator[Finding]:
    """Find functions that compute the same result again from the same arguments."""
    for repeated in costs.record.repeated_results:
        phase_s = costs.mean_s(repeated.phase)
        if costs.on_device and repeated.phase in MODEL_PHASES:
            # Python delays a device only while the device is idle.
            phase_s = min(phase_s, costs.term_s("gaps"))
        saves_s = min(repeated.seconds * costs.slowdown_in(repeated.phase), phase_s)
        most_s = saves_s
        # If all calls have the same result, it may be the same in all steps.
        is_always_same = repeated.repeats == repeated.calls - 1
        if is_always_same and not repeated.has_gradients:
            most_s = min(saves_s * repeated.calls / repeated.repeats, phase_s)
        backward_s = _backward_of(costs, repeated, saves_s)
        if backward_s > 0.0:
            most_s += min(
                max(backward_s, BACKWARD_PER_FORWARD * saves_s),
                costs.mean_s("backward"),
            )
        tolerance = costs.tolerance_of("same_result")
        yield costs.finding(
            "same_result",
            saves_s + backward_s,
            high_s=most_s * (1.0 + tolerance),
            phase=repeated.phase,
            owner=repeated.function,
            file=repeated.file,
            line=repeated.line,
            facts={
                "calls": float(repeated.calls),
                "repeats": float(repeated.repeats),
                "has_gradients": float(repeated.has_gradients),
            },
        )


def find_large_results(costs: StepCosts) -> Iterator[Finding]:
    """Find functions that make a batch and return more than its samples need."""
    for large in costs.record.large_results:
        saves_s = large.seconds * costs.slowdown_in("data")
        saves_s = min(saves_s, costs.mean_s("data")) * (1.0 - large.used_share)
        yield costs.finding(
            "large_result",
            saves_s,
            may=True,  # the rest may be needed, for example at the border of a rotated image
            phase="data",
            owner=large.function,
            file=large.file,
            line=large.line,
            what=f"{large.shape} values, of which a sample has {large.used_shape} in the end",
        )


def _backward_of(costs: StepCosts, repeated: RepeatedResult, seconds: float) -> float:
    """Return the seconds of backward that are due to the calls of ``repeated``, which take ``seconds``.

    It is their share of what autograd may have recorded.
    """
    if not repeated.has_gradients or repeated.phase in ("data", "backward"):
        return 0.0
    recorded_s = costs.mean_s("forward") + costs.mean_s("other")
    if recorded_s <= 0.0:
        return 0.0
    return min(seconds / recorded_s, 1.0) * costs.mean_s("backward")


def same_results_s(costs: StepCosts) -> float:
    """Return the seconds of forward and backward that ``find_same_results`` finds."""
    seconds = 0.0
    for finding in find_same_results(costs):
        if finding.phase in MODEL_PHASES:
            seconds += finding.saves_s
    return seconds
