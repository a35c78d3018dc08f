"""Finds loops that grow a tensor by concatenating piece after piece, so that each call copies all earlier pieces."""

from __future__ import annotations

from collections import defaultdict

from lm_profiler.record.operator_calls import CodeLine, OperatorCall, StepCalls

_CONCATENATION = "aten::cat"
_FEWEST_CALLS = 8  # a line with fewer calls is no loop


def growing_copies(step: StepCalls) -> dict[int, float]:
    """Return calls that append to a tensor that the same line made before, and the calls of their backward passes.

    Returns:
        by the number of the call, the share of its work that copies earlier pieces again.
    """
    copied_shares_by_line: defaultdict[CodeLine, dict[int, float]] = defaultdict(dict)
    for number, call in enumerate(step.calls):
        if call.name != _CONCATENATION or not call.lines:
            continue
        line = call.lines[-1]
        earlier = _earlier_concatenation(step, number, line)
        if earlier is not None:
            copied_share = earlier.elements / max(call.elements, 1)
            copied_shares_by_line[line][number] = copied_share

    shares: dict[int, float] = {}
    for copied_shares in copied_shares_by_line.values():
        if len(copied_shares) < _FEWEST_CALLS:
            continue
        for number, copied_share in copied_shares.items():
            for related in step.with_backward(number):
                shares[related] = copied_share
    return shares


def _earlier_concatenation(
    step: StepCalls, number: int, line: CodeLine
) -> OperatorCall | None:
    """Return the last earlier concatenation in ``line`` whose result call ``number`` reads; None if there is none."""
    found = None
    for storage in step.calls[number].reads:
        for writer in step.writers.get(storage, ()):
            earlier = step.calls[writer]
            is_of_line = bool(earlier.lines) and earlier.lines[-1] == line
            if writer < number and earlier.name == _CONCATENATION and is_of_line:
                found = earlier
    return found
