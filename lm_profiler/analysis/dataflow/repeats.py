"""Finds calls that compute what the step has computed already, or what each step computes anew.

Calls are numbered by what they compute (value numbering: Cocke & Schwartz 1970, Programming Languages and Their
Compilers): by their operator and the values of its inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from lm_profiler.record.operator_calls import CodeLine, StepCalls

_FORWARD, _BACKWARD = "forward", "backward"


def repeated_calls(
    step: StepCalls, dead: Collection[int]
) -> dict[int, CodeLine | None]:
    """Return the calls that repeat an earlier one, each with the line that leads to it and not to the earlier one.

    An earlier call that is ``dead`` does not count: then the later one is the only one that is needed. The backward
    pass of a repeated call counts as repeated, too. Activation checkpointing, which repeats forward in backward to save
    memory, does not.
    """
    repeated: dict[int, CodeLine | None] = {}
    backward_pairs: list[tuple[int, int]] = []
    for first, number in _pairs_of_equal_value(step):
        if first in dead:
            continue
        if step.calls[number].phase == _BACKWARD:
            backward_pairs.append((first, number))
        elif not (_is_changed(step, first) or _is_changed(step, number)):
            repeated[number] = _line_of_repetition(step, first, number)
    for number in [*repeated]:
        for backward in step.backward_of.get(number, ()):
            repeated[backward] = repeated[number]
    for first, number in backward_pairs:
        is_checkpointing = step.calls[first].phase == _FORWARD
        is_known = first in repeated or number in repeated
        are_changed = _is_changed(step, first) or _is_changed(step, number)
        if not is_checkpointing and not is_known and not are_changed:
            repeated[number] = _line_of_repetition(step, first, number)
    return repeated


def _pairs_of_equal_value(step: StepCalls) -> Iterator[tuple[int, int]]:
    """Yield the first call that computes a value and each later one, by the later one's number."""
    first_calls: dict[int, int] = {}  # by value
    for number, call in enumerate(step.calls):
        if call.value is None or not call.reads or not call.writes:
            continue
        first = first_calls.setdefault(call.value, number)
        if first != number:
            yield first, number


def constant_calls(step: StepCalls) -> Iterator[int]:
    """Yield the calls that compute the same in each step, for results that nothing changes afterwards."""
    for number, call in enumerate(step.calls):
        if call.is_constant and call.writes and not _is_changed(step, number):
            yield number


def _is_changed(step: StepCalls, number: int) -> bool:
    """Return whether something else writes to what a call has made, so that the step needs it for itself."""
    writes = step.calls[number].writes
    return any(len(step.writers[storage]) > 1 for storage in writes)


def _line_of_repetition(step: StepCalls, first: int, number: int) -> CodeLine | None:
    """Return the outermost line that leads to a call and not to the ``first`` one; the innermost if there is none."""
    lines = step.lines_of(number)
    first_lines = step.lines_of(first)
    for line, first_line in zip(lines, first_lines, strict=False):
        if line != first_line:
            return line
    return lines[-1] if lines else None


def longest_line(
    step: StepCalls, repeated: dict[int, CodeLine | None]
) -> CodeLine | None:
    """Return the line of the ``repeated`` calls with most of their seconds."""
    seconds: defaultdict[CodeLine, float] = defaultdict(float)
    for number, line in repeated.items():
        if line is not None:
            seconds[line] += step.calls[number].seconds
    return max(seconds, key=seconds.__getitem__, default=None)
