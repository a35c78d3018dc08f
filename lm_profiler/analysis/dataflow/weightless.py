"""Finds costly functions whose operators use no weights of the model: losses, regularisers, augmentation, masks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from lm_profiler.record.operator_calls import CodeLine, StepCalls

_FORWARD = "forward"
# the largest share of a function's time in calls that read weights
_MOST_OF_WEIGHTS = 0.05
# the smallest share of the time of all operators that a function must have
_LEAST_SHARE = 0.15


class _Function(NamedTuple):
    file: str
    name: str


def calls_without_weights(step: StepCalls) -> tuple[list[int], CodeLine | None]:
    """Return the calls of the costliest function without weights (and of their backward passes), and its main line.

    The calls of a function include those of the functions that it calls. Nothing is returned if the function takes less
    than 15 % of the time of all operators.
    """
    seconds: defaultdict[_Function, float] = defaultdict(float)
    seconds_of_weights: defaultdict[_Function, float] = defaultdict(float)
    functions_by_call: dict[int, list[_Function]] = {}
    for number, call in enumerate(step.calls):
        if call.phase != _FORWARD:
            continue
        functions = [_Function(line.file, line.function) for line in call.lines]
        functions_by_call[number] = list(dict.fromkeys(functions))
        related_s = _seconds_with_backward(step, number)
        for function in functions_by_call[number]:
            seconds[function] += related_s
            if not step.trained.isdisjoint(call.reads):
                seconds_of_weights[function] += related_s

    calls_by_function: defaultdict[_Function, list[int]] = defaultdict(list)
    for number, functions in functions_by_call.items():
        for (
            function
        ) in functions:  # each call counts for the outermost function without weights
            if seconds_of_weights[function] <= _MOST_OF_WEIGHTS * seconds[function]:
                calls_by_function[function].append(number)
                break
    costliest = max(calls_by_function, key=seconds.__getitem__, default=None)
    least_s = _LEAST_SHARE * sum(step.phase_s.values())
    if costliest is None or seconds[costliest] < least_s:
        return [], None
    calls: list[int] = []
    for number in calls_by_function[costliest]:
        calls += step.with_backward(number)
    return calls, _main_line(step, costliest, calls_by_function[costliest])


def _main_line(
    step: StepCalls, function: _Function, numbers: Iterable[int]
) -> CodeLine:
    """Return the line of ``function`` that led to most of the seconds of its calls ``numbers``."""
    seconds: defaultdict[CodeLine, float] = defaultdict(float)
    for number in numbers:
        for line in step.calls[number].lines:
            if (line.file, line.function) == function:
                seconds[line] += _seconds_with_backward(step, number)
    return max(seconds, key=seconds.__getitem__)


def _seconds_with_backward(step: StepCalls, number: int) -> float:
    """Return the seconds of a call and of those of its backward pass."""
    return sum(step.calls[related].seconds for related in step.with_backward(number))
