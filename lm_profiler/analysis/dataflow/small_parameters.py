"""Finds many small parameters that each step stacks to one tensor, which could be one parameter."""

from __future__ import annotations

from lm_profiler.record.operator_calls import StepCalls

_FORWARD, _OPTIMIZER = "forward", "optimizer"
_STACK = "aten::stack"
_FEWEST_PARAMETERS = 100
_MOST_ELEMENTS = 1 << 10  # of a small parameter


def calls_on_small_parameters(step: StepCalls) -> dict[int, float]:
    """Return the calls that stack many small parameters, those of their backward passes, and those of the optimizer.

    Returns:
        by the number of the call, the share of its time that one parameter would save: in the optimizer, the share of
        the parameters that are stacked.
    """
    shares: dict[int, float] = {}
    stacked: set[int] = set()
    for number, call in enumerate(step.calls):
        if call.name != _STACK or call.phase != _FORWARD:
            continue
        parameters = step.trained.intersection(call.reads)
        if len(parameters) < _FEWEST_PARAMETERS:
            continue
        if call.elements > _MOST_ELEMENTS * len(parameters):
            continue
        stacked |= parameters
        for related in step.with_backward(number):
            shares[related] = 1.0
    if not stacked:
        return {}
    stacked_share = len(stacked) / len(step.trained)
    for number, call in enumerate(step.calls):
        if call.phase == _OPTIMIZER:
            shares[number] = stacked_share
    return shares
