"""Finds recurrent cells that a loop calls for one element of a sequence after another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from lm_profiler.analysis.dataflow.loops import (
    longest_chain,
    overhead_of_calling_s,
    share_of_overhead,
)
from lm_profiler.record.operator_calls import CodeLine, LayerCall, StepCalls

_FORWARD = "forward"
_FEWEST_ELEMENTS = 16  # of a sequence
_MOST_STATES = 2  # those of an LSTM: its output, and the inner state
# the operator that reads the inner state; those of the gates work in place
_ACTIVATION_OF_STATE = "aten::tanh"
# the share of the time of a layer's fused kernels that is saved if it gets whole sequences
_SAVED_BY_WHOLE_SEQUENCES = 0.8
# at least this share of a layer's calls must get the states of the call before unchanged
_LEAST_UNCHANGED_SHARE = 0.75


def calls_of_cells(step: StepCalls) -> dict[int, float]:
    """Return the calls of cells that a layer for whole sequences could replace (``nn.LSTM`` for ``nn.LSTMCell``).

    Its fused kernel saves the operators on the state. It computes the products with all inputs at once, which saves the
    overhead of calling them. The products with the states depend on each other and save nothing.

    Returns:
        by the number of a call, or of a call of its backward pass, the share of its time that this saves.
    """
    calls_by_line: defaultdict[CodeLine, list[int]] = defaultdict(list)
    for number, call in enumerate(step.calls):
        if call.has_sequence_kernel and call.phase == _FORWARD and call.lines:
            calls_by_line[call.lines[-1]].append(number)
    call_overhead_s = overhead_of_calling_s(step)
    shares: dict[int, float] = {}
    for numbers in calls_by_line.values():
        products = _products_by_weight(step, numbers)
        products_with_inputs = _products_with_inputs(step, products)
        # A layer cannot do this: inputs depend on earlier outputs, or the program reads or changes the states between
        # the calls.
        if products_with_inputs is None:
            continue
        if not _keeps_states(step, numbers, products_with_inputs):
            continue
        for number in numbers:
            call = step.calls[number]
            share = 1.0
            if number in products_with_inputs:
                share = share_of_overhead(call, call_overhead_s)
            elif call.product is not None:
                share = 0.0
            for related in step.with_backward(number):
                shares[related] = share
    return shares


class _Element(NamedTuple):
    """A call of a recurrent layer with one element of its sequences."""

    call: LayerCall
    numbers: list[int]  # the numbers of the layer's operator calls

    def writes(self, step: StepCalls) -> set[int]:
        storages: set[int] = set()
        for number in self.numbers:
            storages.update(step.calls[number].writes)
        return storages


def calls_of_recurrent_layers(step: StepCalls) -> dict[int, float]:
    """Return the calls of recurrent layers that a loop calls with one element of their sequences after another.

    With whole sequences, the layer has less code in Python to run, and computes the products with all inputs at once.

    Returns:
        by the number of a call, or of a call of its backward pass, the share of its time that this saves.
    """
    call_overhead_s = overhead_of_calling_s(step)
    shares: dict[int, float] = {}
    for elements in _elements_by_layer(step).values():
        if not _could_be_whole_sequences(step, elements):
            continue
        for element in elements:
            has_products = any(
                step.calls[number].product is not None for number in element.numbers
            )
            for number in element.numbers:
                call = step.calls[number]
                share = 1.0
                if not has_products:  # a fused kernel, whose products are not seen
                    share = _SAVED_BY_WHOLE_SEQUENCES
                elif call.product is not None and element.call.inputs in call.reads:
                    share = share_of_overhead(call, call_overhead_s)
                elif call.product is not None:  # with a state
                    share = 0.0
                for related in step.with_backward(number):
                    shares[related] = share
    return shares


def _elements_by_layer(step: StepCalls) -> Mapping[int, Sequence[_Element]]:
    """Return the elements that each recurrent layer gets in forward, in order."""
    elements: defaultdict[int, list[_Element]] = defaultdict(list)
    for number, call in enumerate(step.calls):
        layer_call = call.layer_call
        if layer_call is None or call.phase != _FORWARD:
            continue
        elements_so_far = elements[layer_call.layer]
        if elements_so_far and elements_so_far[-1].call == layer_call:
            elements_so_far[-1].numbers.append(number)
        else:
            elements_so_far.append(_Element(layer_call, [number]))
    return elements


def _could_be_whole_sequences(step: StepCalls, elements: Sequence[_Element]) -> bool:
    """Return whether a layer could get all ``elements`` at once.

    Most calls get the states of the call before as they are, and no input is computed from earlier results. A program
    that reads results in between may end its loop because of them.
    """
    if len(elements) < _FEWEST_ELEMENTS:
        return False
    unchanged_states = 0
    for earlier, later in pairwise(elements):
        if earlier.writes(step).issuperset(later.call.states):
            unchanged_states += 1
    if unchanged_states < _LEAST_UNCHANGED_SHARE * (len(elements) - 1):
        return False

    inputs_by_first_call: dict[int, int] = {}
    layer_calls: set[int] = set()
    for element in elements:
        inputs_by_first_call[element.numbers[0]] = element.call.inputs
        layer_calls.update(element.numbers)
    # the storages of the layer's results, and of what was computed from them
    results: set[int] = set()
    for number in range(elements[0].numbers[0], elements[-1].numbers[-1] + 1):
        call = step.calls[number]
        if inputs_by_first_call.get(number) in results:
            return False
        reads_results = not results.isdisjoint(call.reads)
        if call.is_host_read and reads_results:
            return False
        if number in layer_calls or reads_results:
            results.update(call.writes)
    return True


def _products_by_weight(
    step: StepCalls, numbers: Iterable[int]
) -> Mapping[int, Sequence[int]]:
    """Return the matrix products among the calls ``numbers``, by the storage of their weight."""
    products: defaultdict[int, list[int]] = defaultdict(list)
    for number in numbers:
        product = step.calls[number].product
        if product is not None:
            products[product.right.storage].append(number)
    return products


def _products_with_inputs(
    step: StepCalls, products_by_weight: Mapping[int, Sequence[int]]
) -> set[int] | None:
    """Return the products of a cell's weights with its inputs; None if inputs depend on the cell's earlier outputs.

    A cell has one weight for its inputs and one for its states. Products with the first do not depend on each other
    if all inputs are known before the loop.
    """
    products_with_inputs: set[int] = set()
    weights_of_inputs = weights_of_states = 0
    for products in products_by_weight.values():
        if len(products) < _FEWEST_ELEMENTS:
            return None
        chain = longest_chain(step, products)
        if chain == 1:
            weights_of_inputs += 1
            products_with_inputs.update(products)
        elif chain >= _FEWEST_ELEMENTS - 1:
            weights_of_states += 1
    if weights_of_inputs != weights_of_states:
        return None
    return products_with_inputs


def _keeps_states(
    step: StepCalls, numbers: Sequence[int], products_with_inputs: Container[int]
) -> bool:
    """Return whether the calls ``numbers`` of a cell pass its states on as they are, as a layer does.

    A program may change the states between two calls of its cell (dropout, a reset), read each inner state, or end the
    loop because of a result: a layer cannot do that.
    """
    between_calls = range(numbers[0], numbers[-1])
    may_end_early = any(step.calls[number].is_host_read for number in between_calls)
    has_changed_states = _has_changed_states(step, numbers, products_with_inputs)
    # A program may read the last inner state, which a layer returns.
    reads_inner_states = _count_read_inner_states(step, numbers) > 1
    return not (may_end_early or has_changed_states or reads_inner_states)


def _has_changed_states(
    step: StepCalls, numbers: Sequence[int], products_with_inputs: Container[int]
) -> bool:
    """Return whether other calls of forward write to a cell's states, or make states besides the first ones."""
    written: set[int] = set()  # storages that the cell writes
    for number in numbers:
        written.update(step.calls[number].writes)
    states_of_others: set[int] = set()  # what other calls write and the cell reads
    for number in numbers:
        if number in products_with_inputs:
            continue
        for storage in step.calls[number].reads:
            if storage not in written and storage in step.writers:
                states_of_others.add(storage)
    if len(states_of_others) > _MOST_STATES:
        return True
    for storage in written:
        other_writers = set(step.writers[storage]).difference(numbers)
        if _has_forward_call(step, other_writers):
            return True
    return False


def _count_read_inner_states(step: StepCalls, numbers: Sequence[int]) -> int:
    """Return how many inner states of a cell other calls of forward read."""
    inner_states: set[int] = set()
    for number in numbers:
        call = step.calls[number]
        if call.name == _ACTIVATION_OF_STATE:
            inner_states.update(call.reads)
    count = 0
    for storage in inner_states:
        other_readers = set(step.readers.get(storage, ())).difference(numbers)
        if _has_forward_call(step, other_readers):
            count += 1
    return count


def _has_forward_call(step: StepCalls, numbers: Iterable[int]) -> bool:
    return any(step.calls[number].phase == _FORWARD for number in numbers)
