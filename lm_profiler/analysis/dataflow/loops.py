"""Finds loops that call an operator once per sample, head or class, where one call could compute all of them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from lm_profiler.analysis.dataflow.liveness import Dataflow
from lm_profiler.record.operator_calls import CodeLine, OperatorCall, StepCalls

_FORWARD = "forward"
_FEWEST_CALLS = 16  # of one operator on equal sizes, from one line
_FEWEST_INDEPENDENT = 8  # of them that do not depend on each other
_LEAST_SHARE = (
    0.005  # of the time of all operators: the others are not worth the search
)
_SMALL_SIZE = 1 << 10  # elements: a call on fewer takes what calling takes
_FEW_ROWS = 4  # of a product that reads its weight for hardly any work

# calls with the same key do the same on tensors of equal sizes
_Key = tuple[CodeLine, str, int, int, tuple[int, ...]]


def calls_in_loops(step: StepCalls) -> dict[int, float]:
    """Return the calls that one call on all their inputs could replace, with the share of each that this saves.

    That is what calling an operator takes; for a product of few rows, all of it, because its weight is read once.
    """
    sources = Dataflow(step).sources
    calling_s = _seconds_of_calling(step)
    total_s = sum(step.phase_s.values())
    shares: dict[int, float] = {}
    for numbers in _calls_by_key(step).values():
        seconds = sum(step.calls[number].seconds for number in numbers)
        if len(numbers) < _FEWEST_CALLS or seconds < _LEAST_SHARE * total_s:
            continue
        # Calls of one layer after another depend on each other; those of a loop over samples do not.
        independent = len(numbers) / _longest_chain(sources, numbers)
        if independent < _FEWEST_INDEPENDENT:
            continue
        for number in numbers:
            for related in step.with_backward(number):
                overhead = _share_of_calling(step.calls[related], calling_s)
                shares[related] = (1.0 - 1.0 / independent) * overhead
    return shares


def _calls_by_key(step: StepCalls) -> dict[_Key, list[int]]:
    """Return the calls of forward that lines of the program lead to, by line, operator and sizes."""
    calls_by_key: defaultdict[_Key, list[int]] = defaultdict(list)
    for number, call in enumerate(step.calls):
        if call.phase != _FORWARD or not call.lines:
            continue
        product_sizes: tuple[int, ...] = ()
        if call.product is not None:
            left, right = call.product.left, call.product.right
            product_sizes = (call.product.batch, left.rows, left.columns, right.columns)
        line = call.lines[-1]
        key = (line, call.name, call.elements, call.size, product_sizes)
        calls_by_key[key].append(number)
    return calls_by_key


def _seconds_of_calling(step: StepCalls) -> float:
    """Return the seconds that calling an operator takes: the median of the calls with hardly any elements."""
    seconds = [
        call.seconds
        for call in step.calls
        if call.phase == _FORWARD and call.size < _SMALL_SIZE
    ]
    return statistics.median(seconds) if seconds else 0.0


def _share_of_calling(call: OperatorCall, calling_s: float) -> float:
    """Return the share of a call's time that calling it takes."""
    if call.product is not None and call.product.left.rows <= _FEW_ROWS:
        return 1.0
    if call.seconds <= calling_s:
        return 1.0
    return calling_s / call.seconds


def _longest_chain(sources: Sequence[set[int]], numbers: Sequence[int]) -> int:
    """Return the length of the longest chain of the calls ``numbers``, each of which depends on the one before it."""
    is_wanted = set(numbers)
    chain_lengths: list[int] = []  # of the chain that ends at each call of the step
    for number in range(numbers[-1] + 1):
        length = max((chain_lengths[source] for source in sources[number]), default=0)
        if number in is_wanted:
            length += 1
        chain_lengths.append(length)
    return max(chain_lengths)
