"""Finds computations whose results are multiplied by the number zero, such as a loss whose weight is zero."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from lm_profiler.record.operator_calls import CodeLine, StepCalls

_FORWARD = "forward"
# A line computes only what is cancelled if at least this share of its time is spent on it.
_LEAST_CANCELLED_SHARE = 0.9


def cancelled_calls(step: StepCalls) -> list[int]:
    """Return the calls of forward that only reach the loss multiplied by zero, and the calls of their backward passes.

    A result that the program keeps, or that Python reads, is left out.
    """
    zero_products: set[int] = set()
    for number, call in enumerate(step.calls):
        if call.phase == _FORWARD and call.multiplies_by_zero:
            zero_products.add(number)
    if not zero_products:
        return []
    # the products with zero, and the calls whose results only these read
    cancelled = set(zero_products)
    # The readers of a result come after the call that makes it.
    for number in reversed(range(len(step.calls))):
        is_candidate = (
            step.calls[number].phase == _FORWARD and number not in zero_products
        )
        if is_candidate and _is_read_only_by(step, number, cancelled):
            cancelled.add(number)
    calls: list[int] = []
    for number in sorted(cancelled - zero_products):
        calls += step.with_backward(number)
    return calls


def line_of_cancelled(step: StepCalls, cancelled: Collection[int]) -> CodeLine | None:
    """Return the outermost line that leads to most of the ``cancelled`` calls, and to hardly any others."""
    seconds: defaultdict[CodeLine, float] = defaultdict(float)
    cancelled_s: defaultdict[CodeLine, float] = defaultdict(float)
    for number, call in enumerate(step.calls):
        if call.phase == _FORWARD:
            for line in dict.fromkeys(call.lines):
                seconds[line] += call.seconds
                if number in cancelled:
                    cancelled_s[line] += call.seconds
    costliest: CodeLine | None = None
    # of lines with the same time, the first one is the outermost
    for line, line_s in cancelled_s.items():
        is_only_for_it = line_s >= _LEAST_CANCELLED_SHARE * seconds[line]
        is_costlier = costliest is None or line_s > cancelled_s[costliest]
        if is_only_for_it and is_costlier:
            costliest = line
    return costliest


def _is_read_only_by(step: StepCalls, number: int, readers: set[int]) -> bool:
    """Return whether the results of call ``number`` are read, and only by ``readers`` or by backward passes.

    These are the backward passes of ``readers`` and of the call itself. Results that are still there after the step
    count as read by the program.
    """
    call = step.calls[number]
    if call.is_host_read or not step.trained.isdisjoint(call.writes):
        return False
    readers_and_call = readers | {number}
    has_reader = False
    is_saved_for_backward = False
    for reader in step.readers_of_result(number):
        if reader == number:
            continue
        # the call of forward to which the reader belongs, if it is a call of a backward pass
        forward = step.calls[reader].forward
        if reader not in readers and forward not in readers_and_call:
            return False
        has_reader = True
        if forward is not None:
            is_saved_for_backward = True
    # What autograd saves may outlive the step, too, but the program does not use it.
    is_kept = not step.kept.isdisjoint(call.writes) and not is_saved_for_backward
    return has_reader and not is_kept
