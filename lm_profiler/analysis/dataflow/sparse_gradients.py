"""Finds tables of which a step uses few rows, while their gradient and the optimizer's step have all."""

from __future__ import annotations

from collections.abc import Iterator

from lm_profiler.record.operator_calls import StepCalls

_OPTIMIZER = "optimizer"
_MANY_ZERO_ROWS = 0.95
# of all parameters: with a smaller table the optimizer's time is mostly that of the rest
_LARGE_TABLE = 0.3
# operators that update all parameters at once
_JOINT_NAMES = ("aten::_foreach", "aten::_fused")


def calls_for_unused_rows(step: StepCalls) -> dict[int, float]:
    """Return the calls that make and use the gradients of such tables, with the share of each that zero rows take."""
    shares: dict[int, float] = {}
    for number, call in enumerate(step.calls):
        share_of_parameters = call.elements / max(step.trained_elements, call.elements)
        if call.zero_rows < _MANY_ZERO_ROWS or share_of_parameters < _LARGE_TABLE:
            continue
        shares[number] = call.zero_rows
        for user in _calls_of_optimizer(step, number):
            is_joint = step.calls[user].name.startswith(_JOINT_NAMES)
            share_of_table = share_of_parameters if is_joint else 1.0
            shares[user] = shares.get(user, 0.0) + call.zero_rows * share_of_table
    return shares


def _calls_of_optimizer(step: StepCalls, gradient: int) -> Iterator[int]:
    """Yield the optimizer's calls that work on a gradient, or on the states that follow from it."""
    storages = set(step.calls[gradient].writes)
    for number in range(gradient + 1, len(step.calls)):
        call = step.calls[number]
        is_of_table = not storages.isdisjoint((*call.reads, *call.writes))
        if call.phase == _OPTIMIZER and is_of_table:
            storages.update(call.writes)
            yield number
