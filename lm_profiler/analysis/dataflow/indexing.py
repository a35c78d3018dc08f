"""Finds rows that ``x[index]`` copies, which ``index_select`` copies faster."""

from __future__ import annotations

from lm_profiler.record.operator_calls import StepCalls

_FORWARD = "forward"
# adds gradients element by element, where ``index_select`` adds whole rows
_BACKWARD_CALLS = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# The share of the time that ``index_select`` saves on a CPU: 50 to 86 % of forward, 21 to 67 % of backward for rows of
# 16 elements and more (measured for 64 to 20,000 rows); nothing of backward for shorter rows.
_SAVED_IN_FORWARD = 0.7
_SAVED_IN_BACKWARD = 0.5
_SHORTEST_ROW = 16


def calls_of_indexing(step: StepCalls) -> dict[int, float]:
    """Return the calls of ``x[index]`` for which ``index_select`` has a faster kernel.

    Returns:
        by the number of a call, or of the call of its backward pass that adds the gradients, the share of its time that
        this saves.
    """
    shares: dict[int, float] = {}
    for number, call in enumerate(step.calls):
        is_indexing = call.indexed_row_elements > 0 and call.phase == _FORWARD
        if not is_indexing:
            continue
        shares[number] = _SAVED_IN_FORWARD
        if call.indexed_row_elements < _SHORTEST_ROW:
            continue
        for backward in step.backward_of.get(number, ()):
            if step.calls[backward].name in _BACKWARD_CALLS:
                shares[backward] = _SAVED_IN_BACKWARD
    return shares
