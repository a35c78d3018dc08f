"""Finds attention that stores its scores in memory, where softmax and other operators read and write them in turn.

Fused attention instead computes scores in blocks that stay in fast memory (Dao et al. 2022, FlashAttention,
arXiv:2205.14135).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping

from lm_profiler.analysis.dataflow.products import (
    LEAST_SHARE_OF_ELEMENTS,
    calls_as_large_as,
)
from lm_profiler.record.operator_calls import StepCalls

_FORWARD = "forward"
_SOFTMAX_OF_PROGRAM = "aten::_softmax"
# the softmax of ``scaled_dot_product_attention`` if it has no fused kernel, as on the CPU with dropout
_SOFTMAX_OF_TORCH = "aten::_safe_softmax"
_SOFTMAXES = (_SOFTMAX_OF_PROGRAM, _SOFTMAX_OF_TORCH)
# draws the mask of dropout on the CPU; other devices draw it in the operator ``native_dropout``
_MASK_ON_CPU = "aten::bernoulli_"

# the calls of forward on the scores of attention, without matrix products, by the number of their softmax
CallsOnScores = Mapping[int, Collection[int]]


def find_scores(step: StepCalls) -> CallsOnScores:
    """Return the calls of forward that work on the scores of attention.

    A softmax belongs to attention if it is between two matrix products without weights: queries with keys, and the
    scores with values.
    """
    scores: dict[int, set[int]] = {}
    for softmax, call in enumerate(step.calls):
        if call.name not in _SOFTMAXES or call.phase != _FORWARD:
            continue
        calls_to_softmax = _calls_since_product(step, softmax)
        if calls_to_softmax is None:
            continue
        # the softmax itself, and the calls on its result, such as dropout
        calls_from_softmax = list(calls_as_large_as(step, softmax))
        if _feeds_product(step, calls_from_softmax):
            scores[softmax] = {*calls_to_softmax, *calls_from_softmax}
    return scores


def calls_on_stored_scores(step: StepCalls, scores: CallsOnScores) -> list[int]:
    """Return the calls on the ``scores`` of attention that the program writes itself, and their backward passes.

    Attention with dropout on the CPU is left out, because torch has no fused kernel for it.
    """
    masks: set[int] = set()  # storages with masks of dropout that were drawn on the CPU
    for call in step.calls:
        if call.name == _MASK_ON_CPU:
            masks.update(call.writes)
    calls: list[int] = []
    for softmax, calls_on_scores in scores.items():
        is_of_program = step.calls[softmax].name == _SOFTMAX_OF_PROGRAM
        has_dropout_on_cpu = any(
            not masks.isdisjoint(step.calls[number].reads) for number in calls_on_scores
        )
        if is_of_program and not has_dropout_on_cpu:
            for number in calls_on_scores:
                calls += step.with_backward(number)
    return calls


def calls_of_attention(step: StepCalls, scores: CallsOnScores) -> set[int]:
    """Return the calls of forward on the ``scores`` of all attention, with the products before and after them."""
    calls: set[int] = set()
    storages: set[int] = set()
    for calls_on_scores in scores.values():
        calls.update(calls_on_scores)
        for number in calls_on_scores:
            storages.update(step.calls[number].reads, step.calls[number].writes)
    for number, call in enumerate(step.calls):
        is_product = call.phase == _FORWARD and call.product is not None
        if is_product and not storages.isdisjoint([*call.reads, *call.writes]):
            calls.add(number)
    return calls


def _calls_since_product(step: StepCalls, softmax: int) -> list[int] | None:
    """Return the calls between the product of queries and keys and the ``softmax``; None if there is no such product.

    They scale or mask the scores, or change their type.
    """
    least_elements = LEAST_SHARE_OF_ELEMENTS * step.calls[softmax].elements
    found: set[int] = set()
    has_product = False
    unvisited = [softmax]
    while unvisited:
        for maker in _makers_of_inputs(step, unvisited.pop()):
            call = step.calls[maker]
            if call.product is not None:
                has_product = has_product or _is_without_weights(step, maker)
            elif call.name in _SOFTMAXES:
                continue
            elif call.elements >= least_elements and maker not in found:
                found.add(maker)
                unvisited.append(maker)
    return sorted(found) if has_product else None


def _makers_of_inputs(step: StepCalls, number: int) -> Iterator[int]:
    """Yield the call of forward that last wrote each input of call ``number``.

    A call that changes its input also reads it, and so leads to the writers before it.
    """
    for storage in step.calls[number].reads:
        writers = step.writers.get(storage, ())
        index = bisect_left(writers, number) - 1
        if index >= 0 and step.calls[writers[index]].phase == _FORWARD:
            yield writers[index]


def _feeds_product(step: StepCalls, numbers: list[int]) -> bool:
    """Return whether a matrix product without weights reads a result of one of the calls ``numbers``."""
    for number in numbers:
        for reader in step.readers_of_result(number):
            call = step.calls[reader]
            is_product = call.phase == _FORWARD and call.product is not None
            if is_product and _is_without_weights(step, reader):
                return True
    return False


def _is_without_weights(step: StepCalls, number: int) -> bool:
    return step.trained.isdisjoint(step.calls[number].reads)
