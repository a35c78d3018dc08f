"""Finds loops that call an operator once per sample, head or class, where one call could compute all of them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from lm_profiler.record.operator_calls import CodeLine, OperatorCall, StepCalls

_FORWARD = "forward"
# A line is a loop if it calls one operator at least this often on equal sizes.
_FEWEST_CALLS = 16
# the number of iterations that must be independent of each other
_FEWEST_INDEPENDENT = 8
# a loop with a smaller share of the time of all operators is not analysed
_LEAST_SHARE = 0.005
_SMALL_SIZE = 1 << 10  # a call on fewer elements is only overhead
_FEW_ROWS = 4  # a product of so few rows spends its time on reading the weight

# line, operator, elements of the largest result and of the largest tensor, sizes of a product: calls with the same key
# do the same on tensors of equal sizes
_Key = tuple[CodeLine, str, int, int, tuple[int, ...]]


def calls_in_loops(step: StepCalls) -> dict[int, float]:
    """Return the calls of loops that could be replaced by one call on all inputs.

    This saves the call overhead; for a product of few rows it saves nearly all, because its weight is read only once.

    Returns:
        by the number of a call, or of a call of its backward pass, the share of its time that this saves.
    """
    calling_s = seconds_of_calling(step)
    total_s = sum(step.phase_s.values())
    shares: dict[int, float] = {}
    for numbers in _calls_by_key(step).values():
        seconds = sum(step.calls[number].seconds for number in numbers)
        if len(numbers) < _FEWEST_CALLS or seconds < _LEAST_SHARE * total_s:
            continue
        # Calls of one layer after another depend on each other; those of a loop over samples do not.
        independent = len(numbers) / longest_chain(step, numbers)
        if independent < _FEWEST_INDEPENDENT:
            continue
        for number in numbers:
            for related in step.with_backward(number):
                overhead = share_of_calling(step.calls[related], calling_s)
                shares[related] = (1.0 - 1.0 / independent) * overhead
    return shares


def _calls_by_key(step: StepCalls) -> dict[_Key, list[int]]:
    """Return the calls of forward that were made by lines of the program, by line, operator and sizes."""
    calls_by_key: defaultdict[_Key, list[int]] = defaultdict(list)
    for number, call in enumerate(step.calls):
        # a cell's own operators cannot be moved out of its loop
        if call.phase != _FORWARD or not call.lines or call.is_of_cell or call.is_view:
            continue
        product_sizes: tuple[int, ...] = ()
        if call.product is not None:
            left, right = call.product.left, call.product.right
            product_sizes = (call.product.batch, left.rows, left.columns, right.columns)
        line = call.lines[-1]
        key = (line, call.name, call.elements, call.size, product_sizes)
        calls_by_key[key].append(number)
    return calls_by_key


def seconds_of_calling(step: StepCalls) -> float:
    """Return the overhead of calling an operator in seconds: the median of the calls with hardly any elements."""
    seconds = [
        call.seconds
        for call in step.calls
        if call.phase == _FORWARD and call.size < _SMALL_SIZE and not call.is_view
    ]
    return statistics.median(seconds) if seconds else 0.0


def share_of_calling(call: OperatorCall, calling_s: float) -> float:
    """Return the share of a call's time that is overhead."""
    if call.product is not None and call.product.left.rows <= _FEW_ROWS:
        return 1.0
    if call.seconds <= calling_s:
        return 1.0
    return calling_s / call.seconds


def longest_chain(step: StepCalls, numbers: Sequence[int]) -> int:
    """Return the length of the longest chain of calls among ``numbers`` in which each depends on the one before it."""
    counted_calls = set(numbers)
    longest = 1
    # for each storage, the length of the chain to what it holds
    chain_to: defaultdict[int, int] = defaultdict(int)
    for number in range(numbers[0], numbers[-1] + 1):
        call = step.calls[number]
        length = max((chain_to[storage] for storage in call.reads), default=0)
        if number in counted_calls:
            length += 1
            longest = max(longest, length)
        for storage in call.writes:
            if storage in call.overwrites:
                chain_to[storage] = length
            else:
                chain_to[storage] = max(chain_to[storage], length)
    return longest
