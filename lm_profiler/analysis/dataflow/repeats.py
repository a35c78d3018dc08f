"""Finds calls that repeat a computation of the same step, and calls that compute the same in every step.

Calls have equal value numbers (``OperatorCall.value``) if they apply the same operator to the same values. Compilers
use such numbers too (value numbering: Cocke & Schwartz 1970, Programming Languages and Their Compilers).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from lm_profiler.record.operator_calls import (
    UNRECORDED_UPDATE,
    CodeLine,
    StepCalls,
)

_FORWARD, _BACKWARD, _OPTIMIZER = "forward", "backward", "optimizer"


def repeated_calls(
    step: StepCalls, dead: Collection[int]
) -> dict[int, CodeLine | None]:
    """Return the calls that repeat an earlier call, and the calls of their backward passes.

    Activation checkpointing, which repeats forward in backward to save memory, does not count. Nor does a call whose
    earlier one is ``dead``, because then the later call is the one that is needed.

    Returns:
        by the number of the call, the line of the program that repeats the computation.
    """
    repeated: dict[int, CodeLine | None] = {}
    pairs = [pair for pair in _pairs_of_equal_value(step) if pair[0] not in dead]
    for first_call, later_call in pairs:
        is_in_backward = step.calls[later_call].phase == _BACKWARD
        if not is_in_backward and not _is_any_changed(step, first_call, later_call):
            repeated[later_call] = _line_of_repetition(step, first_call, later_call)
    repeated_in_forward = set(repeated)
    for first_call, later_call in pairs:
        if later_call in repeated_in_forward and _has_needless_backward(
            step, first_call, later_call, repeated_in_forward
        ):
            for backward in step.backward_of[later_call]:
                repeated[backward] = repeated[later_call]
    for first_call, later_call in pairs:
        is_in_backward = step.calls[later_call].phase == _BACKWARD
        if is_in_backward and _is_repeated_in_backward(
            step, first_call, later_call, repeated
        ):
            repeated[later_call] = _line_of_repetition(step, first_call, later_call)
    return repeated


def _has_needless_backward(
    step: StepCalls, first_call: int, later_call: int, repeated: Collection[int]
) -> bool:
    """Return whether one backward pass could replace those of two calls of forward that compute the same.

    It could if the gradients of both are only added up. If other code uses or drops gradients between the two passes,
    as it may do with several losses, each use needs its own gradients. Then one pass is enough only if all gradients
    until the next use are the same as before: if their calls of forward are all ``repeated``.
    """
    backward_of_first = step.backward_of.get(first_call)
    backward_of_later = step.backward_of.get(later_call)
    if not backward_of_first or not backward_of_later:
        return False
    last_use = None
    for number in range(backward_of_first[-1] + 1, backward_of_later[0]):
        if step.calls[number].name == UNRECORDED_UPDATE:
            last_use = number
    if last_use is None:
        return True
    for call in step.calls[last_use + 1 :]:
        is_next_use = call.phase == _OPTIMIZER or call.name == UNRECORDED_UPDATE
        if is_next_use:
            return True
        if call.phase != _BACKWARD or call.forward is None:
            continue
        is_of_forward = step.calls[call.forward].phase == _FORWARD
        if is_of_forward and call.forward not in repeated:
            return False
    return True


def _is_repeated_in_backward(
    step: StepCalls, first_call: int, later_call: int, repeated: Collection[int]
) -> bool:
    """Return whether ``later_call``, of backward, is needless because ``first_call`` computes the same.

    An example is a second backward pass. ``repeated`` are the needless calls that are known so far.
    """
    first, later = step.calls[first_call], step.calls[later_call]
    is_checkpointing = first.phase == _FORWARD
    if is_checkpointing:
        return False
    if first_call in repeated or later_call in repeated:
        # It counts already, or what it repeats is needless itself.
        return False
    if first.forward != later.forward and later.forward not in repeated:
        # The program needs both forward calls, so it cannot avoid that autograd prepares the same for both. An example
        # is a sparse matrix by which two layers multiply: autograd transposes it for each of them.
        return False
    return not _is_any_changed(step, first_call, later_call)


def repeats_layers_of_forward(step: StepCalls) -> bool:
    """Return whether forward applies a layer twice to the same values."""
    for first_call, later_call in _pairs_of_equal_value(step):
        first, later = step.calls[first_call], step.calls[later_call]
        if later.is_layer and first.phase == later.phase == _FORWARD:
            return True
    return False


def _pairs_of_equal_value(step: StepCalls) -> Iterator[tuple[int, int]]:
    """Yield the numbers of each pair of calls that compute the same: the first such call, and a later one."""
    first_calls: dict[int, int] = {}  # number of the call, by its value
    for number, call in enumerate(step.calls):
        if call.value is None or not call.reads or not call.writes:
            continue
        first_call = first_calls.setdefault(call.value, number)
        if first_call != number:
            yield first_call, number


def constant_calls(step: StepCalls) -> Iterator[int]:
    """Yield the numbers of calls that compute the same in each step, and whose results only such calls change later."""
    constants = constant_storages(step)
    for number, call in enumerate(step.calls):
        if call.writes and constants.issuperset(call.writes):
            yield number


def constant_storages(step: StepCalls) -> set[int]:
    """Return the storages that the step makes or overwrites, and that only constant calls write.

    Several calls may write one, such as ``triu_`` after ``zeros``, if each of them writes all of it: where a part
    begins and ends may differ from step to step, as in ``mask[i, :length] = 1``. A buffer that is changed in place
    differs in the next step.
    """
    constants: set[int] = set()
    for storage, writers in step.writers.items():
        maker = step.calls[writers[0]]
        is_made_in_step = storage in maker.overwrites
        later_calls = [step.calls[writer] for writer in writers[1:]]
        are_whole = all(call.first_elements == maker.elements for call in later_calls)
        are_constant = all(call.is_constant for call in (maker, *later_calls))
        if is_made_in_step and are_whole and are_constant:
            constants.add(storage)
    return constants


def _is_any_changed(step: StepCalls, first_call: int, later_call: int) -> bool:
    """Return whether another call changes the result of one of the two calls later."""
    return step.is_changed(first_call) or step.is_changed(later_call)


def _line_of_repetition(
    step: StepCalls, first_call: int, later_call: int
) -> CodeLine | None:
    """Return the outermost line that led to the ``later_call`` but not to the ``first_call``.

    If the same lines led to both, return the innermost line.
    """
    lines = step.lines_of(later_call)
    first_lines = step.lines_of(first_call)
    for line, first_line in zip(lines, first_lines, strict=False):
        if line != first_line:
            return line
    if len(lines) > len(first_lines):
        return lines[len(first_lines)]
    return lines[-1] if lines else None


def longest_line(
    step: StepCalls, repeated: dict[int, CodeLine | None]
) -> CodeLine | None:
    """Return the line to which most seconds of the ``repeated`` calls belong; None if no line is known."""
    seconds: defaultdict[CodeLine, float] = defaultdict(float)
    for number, line in repeated.items():
        if line is not None:
            seconds[line] += step.calls[number].seconds
    return max(seconds, key=seconds.__getitem__, default=None)
