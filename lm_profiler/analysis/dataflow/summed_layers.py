"""Finds layers of the same input whose results are only added: the sum of their weights gives the same at once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from lm_profiler.record.operator_calls import LinearMap, StepCalls

_FORWARD = "forward"
_SUMS = ("aten::add", "aten::add_")
_STACK = "aten::stack"
_REDUCTIONS = ("aten::mean", "aten::sum")


def calls_of_summed_layers(step: StepCalls) -> dict[int, float]:
    """Return the calls of convolutions and linear layers of which one could replace several.

    They get the same input, and their results are only added, or stacked and then averaged. One layer whose kernel is
    as large as all of them together, with the sum of their weights, gives the same result. Its time is that of the
    layer with the largest kernel. Adding the weights takes about as long as adding the results.

    Returns:
        by the number of a call, or of a call of its backward pass, the share of its time that one layer saves.
    """
    shares: dict[int, float] = {}
    for siblings in _siblings(step):
        for layers in _added_layers(step, siblings):
            saved_share = _saved_share(step, layers)
            if saved_share <= 0.0:
                continue
            for number in layers:
                for related in step.with_backward(number):
                    shares[related] = saved_share
    return shares


def _siblings(step: StepCalls) -> Iterator[list[int]]:
    """Yield the calls of forward that apply layers of one kind to the same input, with results of the same shape."""
    siblings: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, call in enumerate(step.calls):
        layer = call.linear_map
        if layer is not None and call.phase == _FORWARD:
            key = (call.name, layer.inputs, layer.result_shape, layer.settings)
            siblings[key].append(number)
    for numbers in siblings.values():
        if len(numbers) > 1:
            yield numbers


def _added_layers(step: StepCalls, siblings: Sequence[int]) -> Iterator[list[int]]:
    """Yield those of the ``siblings`` whose results end in the same sum."""
    layers_by_sum: defaultdict[int, list[int]] = defaultdict(list)
    for number in siblings:
        final_sum = _final_sum(step, number)
        if final_sum is not None:
            layers_by_sum[final_sum].append(number)
    for layers in layers_by_sum.values():
        if len(layers) > 1:
            yield layers


def _final_sum(step: StepCalls, number: int) -> int | None:
    """Return the call that makes the final sum of which the result of call ``number`` is a summand; None without one.

    A sum may itself be added to other tensors. The final one is not: several calls or other operators read it.
    """
    final_sum = None
    next_sum = _sum_with_others(step, number)
    while next_sum is not None:
        final_sum = next_sum
        next_sum = _sum_with_others(step, final_sum)
    return final_sum


def _sum_with_others(step: StepCalls, number: int) -> int | None:
    """Return the call that adds the result of call ``number`` to other tensors, if no other call reads the result.

    The sum or mean of stacked tensors is a sum, too. A result that is added transposed has no sum.
    """
    reader = _only_reader(step, number)
    if reader is None:
        return None
    call = step.calls[number]
    is_added = step.calls[reader].added.issuperset(call.writes)
    if not is_added:
        return None
    sum_number: int | None = reader
    names_of_sums = _SUMS
    if step.calls[reader].name == _STACK:
        sum_number = _only_reader(step, reader)
        names_of_sums = _REDUCTIONS
    if sum_number is None:
        return None
    sum_call = step.calls[sum_number]
    if sum_call.name not in names_of_sums or sum_call.elements != call.elements:
        return None
    return sum_number


def _only_reader(step: StepCalls, number: int) -> int | None:
    """Return the only call of forward that reads the result of call ``number``; None without one or with several.

    Calls that read a storage after another call has written to it read something else.
    """
    call = step.calls[number]
    if len(call.writes) != 1 or not step.kept.isdisjoint(call.writes):
        return None
    (storage,) = call.writes
    next_writers = [writer for writer in step.writers[storage] if writer > number]
    last_reader = min(next_writers, default=len(step.calls))
    readers = {
        reader
        for reader in step.readers.get(storage, ())
        if number < reader <= last_reader and step.calls[reader].phase == _FORWARD
    }
    return readers.pop() if len(readers) == 1 else None


def _saved_share(step: StepCalls, layers: Sequence[int]) -> float:
    """Return the share of the time of ``layers`` that one layer saves; negative if its kernel would be too large."""
    maps: list[LinearMap] = []
    seconds: list[float] = []
    for number in layers:
        layer = step.calls[number].linear_map
        assert layer is not None
        maps.append(layer)
        seconds.append(step.seconds_with_backward(number))
    sizes = [math.prod(layer.kernel) for layer in maps]
    largest = max(range(len(maps)), key=sizes.__getitem__)
    merged_s = seconds[largest] * _merged_size(maps) / sizes[largest]
    return 1.0 - merged_s / sum(seconds)


def _merged_size(maps: Sequence[LinearMap]) -> int:
    """Return the elements of the smallest kernel that contains the kernels of ``maps``, each at its place.

    A kernel begins at as many elements before a position as its padding has.
    """
    size = 1
    for dimension in range(len(maps[0].kernel)):
        before = max(layer.padding[dimension] for layer in maps)
        after = max(
            layer.kernel[dimension] - layer.padding[dimension] for layer in maps
        )
        size *= before + after
    return size
