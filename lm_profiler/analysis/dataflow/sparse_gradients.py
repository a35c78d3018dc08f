"""Finds embedding tables of which a step uses few rows, although the gradient and the optimizer process all rows."""

from __future__ import annotations

from collections.abc import Iterator

from lm_profiler.record.operator_calls import StepCalls

_OPTIMIZER = "optimizer"
_MANY_ZERO_ROWS = 0.95  # share of a table's rows that the step does not use
# share of all parameters: for a smaller table, the optimizer spends most of its time on the other parameters
_LARGE_TABLE = 0.3
# beginnings of the names of operators that update all parameters at once
_JOINT_NAMES = ("aten::_foreach", "aten::_fused")


def calls_for_unused_rows(step: StepCalls) -> dict[int, float]:
    """Return the calls that compute the gradient of such a table, and the optimizer's calls that use it.

    Returns:
        by the number of the call, the share of its work that is spent on rows that the step does not use.
    """
    shares: dict[int, float] = {}
    for number, call in enumerate(step.calls):
        share_of_parameters = call.elements / max(step.trained_elements, call.elements)
        if call.zero_rows < _MANY_ZERO_ROWS or share_of_parameters < _LARGE_TABLE:
            continue
        shares[number] = call.zero_rows
        for update in _calls_of_optimizer(step, number):
            updates_all = step.calls[update].name.startswith(_JOINT_NAMES)
            share_of_table = share_of_parameters if updates_all else 1.0
            # one call may update several such tables
            shares[update] = shares.get(update, 0.0) + call.zero_rows * share_of_table
    return shares


def _calls_of_optimizer(step: StepCalls, gradient: int) -> Iterator[int]:
    """Yield the optimizer's calls that read or write a gradient, or tensors computed from it, such as moments.

    ``gradient`` is the number of the call that computes it.
    """
    storages = set(step.calls[gradient].writes)
    for number in range(gradient + 1, len(step.calls)):
        call = step.calls[number]
        is_of_table = not storages.isdisjoint((*call.reads, *call.writes))
        if call.phase == _OPTIMIZER and is_of_table:
            storages.update(call.writes)
            yield number
