"""Finds embedding tables of which a step uses few rows, although the gradient and the optimizer process all rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from lm_profiler.record.operator_calls import StepCalls

_OPTIMIZER = "optimizer"
_LEAST_UNUSED_SHARE = 0.95  # share of a table's rows that the step does not use
# share of all parameters: for a smaller table, the optimizer spends most of its time on the other parameters
_LEAST_SHARE_OF_PARAMETERS = 0.3
# beginnings of the names of operators that update all parameters at once
_JOINT_NAMES = ("aten::_foreach", "aten::_fused")


def calls_for_unused_rows(step: StepCalls) -> dict[int, float]:
    """Return the calls that compute the gradient of a large table with few used rows, and its optimizer's calls.

    Returns:
        by the number of the call, the share of its work that is spent on rows that the step does not use.
    """
    unused_shares: defaultdict[int, float] = defaultdict(float)
    for number, call in enumerate(step.calls):
        unused_share = call.zero_rows  # the gradient of an unused row is zero
        share_of_parameters = call.elements / max(step.trained_elements, call.elements)
        is_large = share_of_parameters >= _LEAST_SHARE_OF_PARAMETERS
        if unused_share < _LEAST_UNUSED_SHARE or not is_large:
            continue
        unused_shares[number] = unused_share
        for update in _optimizer_calls_on(step, number):
            updates_all_parameters = step.calls[update].name.startswith(_JOINT_NAMES)
            table_share = share_of_parameters if updates_all_parameters else 1.0
            # added, because one call may update several such tables
            unused_shares[update] += unused_share * table_share
    return dict(unused_shares)


def _optimizer_calls_on(step: StepCalls, gradient_call: int) -> Iterator[int]:
    """Yield the numbers of the optimizer's calls that read or write a gradient, or what was computed from it.

    That includes the optimizer's moments. ``gradient_call`` is the number of the call that computes the gradient.
    """
    # the storages of the gradient, and of what was computed from it so far
    storages = set(step.calls[gradient_call].writes)
    for number in range(gradient_call + 1, len(step.calls)):
        call = step.calls[number]
        uses_gradient = not storages.isdisjoint((*call.reads, *call.writes))
        if call.phase == _OPTIMIZER and uses_gradient:
            storages.update(call.writes)
            yield number
