"""Finds loops that call an operator once per sample, head or class, where one call could compute all of them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from lm_profiler.record.operator_calls import CodeLine, OperatorCall, StepCalls

_FORWARD, _BACKWARD = "forward", "backward"
# A line is a loop if it calls one operator at least this often on equal sizes; as a product with one weight, half as
# often: a decoder has fewer elements than a batch has samples, and its weight's gradient is computed for each of them.
_FEWEST_CALLS = 16
_FEWEST_PRODUCTS_WITH_WEIGHT = 8
# the number of iterations that must be independent of each other
_FEWEST_INDEPENDENT = 8
# a loop with a smaller share of the time of all operators is not analysed
_LEAST_SHARE = 0.005
_LEAST_ELEMENTS = 1 << 10  # a call on fewer elements is only overhead
# add up the gradients of a weight that is used several times
_SUMS = ("aten::add", "aten::add_")
# A line is that of the loop if it leads to at least this share of the time of all looped calls, ...
_LEAST_SHARE_OF_LOOPS = 0.5
# ... and if at least this share of the time of all calls to which it leads is that of looped ones.
_LEAST_LOOPED_SHARE = 0.75
_FEW_ROWS = 4  # a product of so few rows spends its time on reading the weight

# line, operator, elements of the largest result and of the largest tensor, sizes of a product: calls with the same key
# do the same on tensors of equal sizes
_Key = tuple[CodeLine, str, int, int, tuple[int, ...]]


def calls_in_loops(step: StepCalls) -> dict[int, float]:
    """Return the calls of loops that could be replaced by one call on all inputs.

    This saves the call overhead; for a product of few rows it saves nearly all, because its weight is read only once.
    The gradients of a weight are then computed once, and need not be added up.

    Returns:
        by the number of a call, or of a call of its backward pass, the share of its time that this saves.
    """
    call_overhead_s = overhead_of_calling_s(step)
    total_s = sum(step.phase_s.values())
    shares: dict[int, float] = {}
    for numbers in _calls_by_key(step).values():
        seconds = sum(step.calls[number].seconds for number in numbers)
        fewest_calls = _FEWEST_CALLS
        if _have_one_weight(step, numbers):
            fewest_calls = _FEWEST_PRODUCTS_WITH_WEIGHT
        if len(numbers) < fewest_calls or seconds < _LEAST_SHARE * total_s:
            continue
        # Calls of one layer after another depend on each other; those of a loop over samples do not.
        independent = len(numbers) / longest_chain(step, numbers)
        if independent < _FEWEST_INDEPENDENT:
            continue
        saved_share = 1.0 - 1.0 / independent
        for number in numbers:
            for related in step.with_backward(number):
                overhead = share_of_overhead(step.calls[related], call_overhead_s)
                shares[related] = saved_share * overhead
        for number in _sums_of_weight_gradients(step, numbers):
            shares[number] = saved_share
    return shares


def _have_one_weight(step: StepCalls, numbers: Iterable[int]) -> bool:
    """Return whether the calls ``numbers`` are products with the same trained weight."""
    weights: set[int] = set()
    for number in numbers:
        product = step.calls[number].product
        if product is None:
            return False
        weights.add(product.right.storage)
    return len(weights) == 1 and weights.issubset(step.trained)


def _sums_of_weight_gradients(step: StepCalls, numbers: Sequence[int]) -> list[int]:
    """Return the calls of backward that add up the gradients of the weight of the products ``numbers``."""
    product = step.calls[numbers[0]].product
    if product is None or not _have_one_weight(step, numbers):
        return []
    weight_elements = product.right.rows * product.right.columns
    gradients: set[int] = set()
    for number in numbers:
        for backward in step.backward_of.get(number, ()):
            gradients.update(step.calls[backward].writes)
    sums: list[int] = []
    for number, call in enumerate(step.calls):
        is_sum = call.phase == _BACKWARD and call.name in _SUMS
        reads_gradient = not gradients.isdisjoint(call.reads)
        if is_sum and reads_gradient and call.elements == weight_elements:
            sums.append(number)
    return sums


def line_of_loops(step: StepCalls, looped: Collection[int]) -> CodeLine | None:
    """Return the innermost line that leads to most of the ``looped`` calls, and to hardly any others.

    The line of a helper, which other code calls, too, shows nothing; nor does the line of a whole iteration, if most of
    it depends on the iteration before. Without such a line, return the innermost one that leads to most of the calls.
    """
    looped_s = 0.0
    seconds: defaultdict[CodeLine, float] = defaultdict(float)
    looped_seconds: defaultdict[CodeLine, float] = defaultdict(float)
    depths: dict[CodeLine, int] = {}
    for number, call in enumerate(step.calls):
        is_looped = number in looped
        if is_looped:
            looped_s += call.seconds
        for depth, line in enumerate(dict.fromkeys(step.lines_of(number))):
            seconds[line] += call.seconds
            if is_looped:
                looped_seconds[line] += call.seconds
                depths[line] = max(depth, depths.get(line, 0))
    lines: list[CodeLine] = []
    for line, line_s in looped_seconds.items():
        has_most_of_loops = line_s >= _LEAST_SHARE_OF_LOOPS * looped_s
        has_few_other_calls = line_s >= _LEAST_LOOPED_SHARE * seconds[line]
        if has_most_of_loops and has_few_other_calls:
            lines.append(line)
    if not lines:
        return step.place_of(looped)
    return max(lines, key=depths.__getitem__)


def _calls_by_key(step: StepCalls) -> dict[_Key, list[int]]:
    """Return the calls of forward that were made by lines of the program, by line, operator and sizes."""
    calls_by_key: defaultdict[_Key, list[int]] = defaultdict(list)
    for number, call in enumerate(step.calls):
        if call.phase != _FORWARD or not call.lines or call.is_view:
            continue
        # the operators of a cell or a recurrent layer cannot be moved out of its loop
        if call.is_of_cell or call.is_of_recurrent_layer:
            continue
        product_sizes: tuple[int, ...] = ()
        if call.product is not None:
            left, right = call.product.left, call.product.right
            product_sizes = (call.product.batch, left.rows, left.columns, right.columns)
        line = call.lines[-1]
        key = (line, call.name, call.elements, call.size, product_sizes)
        calls_by_key[key].append(number)
    return calls_by_key


def overhead_of_calling_s(step: StepCalls) -> float:
    """Return the overhead of calling an operator in seconds: the median of the calls with hardly any elements.

    Without such calls it is the time of the shortest call.
    """
    small_calls_s: list[float] = []
    all_calls_s: list[float] = []
    for call in step.calls:
        is_operator = call.seconds > 0.0  # otherwise Python reads a tensor
        if call.phase == _FORWARD and is_operator:
            all_calls_s.append(call.seconds)
            if call.size < _LEAST_ELEMENTS:
                small_calls_s.append(call.seconds)
    if small_calls_s:
        return statistics.median(small_calls_s)
    return min(all_calls_s, default=0.0)


def share_of_overhead(call: OperatorCall, call_overhead_s: float) -> float:
    """Return the share of a call's time that is overhead, which one call for several inputs would have only once.

    For a product of few rows that is all of it: reading the weight takes its time, and counts as overhead.
    """
    if call.product is not None and call.product.left.rows <= _FEW_ROWS:
        return 1.0
    if call.seconds <= call_overhead_s:
        return 1.0
    return call_overhead_s / call.seconds


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
