"""Finds a tensor to which a loop joins a piece at a time, so that each call copies all that was joined before."""

from __future__ import annotations

from collections import defaultdict

from lm_profiler.record.operator_calls import CodeLine, OperatorCall, StepCalls

_JOIN = "aten::cat"
_FEWEST_CALLS = 8  # of one line


def growing_copies(step: StepCalls) -> dict[int, float]:
    """Return the calls that join a piece to what the same line has joined, with the share of each that is a copy."""
    shares_by_line: defaultdict[CodeLine, dict[int, float]] = defaultdict(dict)
    for number, call in enumerate(step.calls):
        if call.name != _JOIN or not call.lines:
            continue
        for storage in call.reads:
            for writer in step.writers.get(storage, ()):
                earlier = step.calls[writer]
                if writer < number and _is_join_of_line(earlier, call.lines[-1]):
                    share = earlier.elements / max(call.elements, 1)
                    shares_by_line[call.lines[-1]][number] = share

    shares: dict[int, float] = {}
    for shares_of_line in shares_by_line.values():
        if len(shares_of_line) < _FEWEST_CALLS:
            continue
        for number, share in shares_of_line.items():
            for related in step.with_backward(number):
                shares[related] = share
    return shares


def _is_join_of_line(call: OperatorCall, line: CodeLine) -> bool:
    return call.name == _JOIN and bool(call.lines) and call.lines[-1] == line
