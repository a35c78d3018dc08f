"""Finds attention that reads a causal mask: with ``is_causal=True`` it needs no mask, and skips later positions."""

from __future__ import annotations

import math

from lm_profiler.analysis.dataflow.repeats import constant_calls, constant_storages
from lm_profiler.record.operator_calls import StepCalls

_FORWARD = "forward"
_ATTENTION_ON_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"
# torch's kernel for the CPU divides keys into blocks of 512. A block of queries skips the blocks that are later.
_KEYS_OF_BLOCK_ON_CPU = 512
# The size of its blocks of queries, from the least number of positions for which it is used.
_QUERIES_OF_BLOCK_ON_CPU = ((768, 256), (192, 64), (0, 32))
# The same for queries and keys on other devices. Kernels differ; none has larger blocks.
_BLOCK_ON_DEVICE = 128
# The share of the time of attention on a CPU in which it reads the mask: 5 to 14 % for 784 to 2,048 positions.
_READING_SHARE_ON_CPU = 0.08


def calls_with_causal_masks(step: StepCalls) -> dict[int, float]:
    """Return the calls of attention that get a causal mask, and those that only make these masks.

    Attention that would skip nothing is left out: on the CPU, that with up to 512 positions.

    Returns:
        by the number of a call, or of a call of its backward pass, the share of its time that ``is_causal=True`` saves.
    """
    shares: dict[int, float] = {}
    independent_storages = _storages_independent_of_batch(step)
    for number, call in enumerate(step.calls):
        mask = call.causal_mask
        if mask is None or call.phase != _FORWARD:
            continue
        saved_share = _saved_share(call.name, mask.length)
        if saved_share > 0.0 and mask.storage in independent_storages:
            for related in step.with_backward(number):
                # other calls of the backward pass add up gradients
                if step.calls[related].name.startswith(call.name):
                    shares[related] = saved_share
    for number in _calls_read_only_by(step, set(shares)):
        shares[number] = 1.0
    return shares


def _storages_independent_of_batch(step: StepCalls) -> set[int]:
    """Return the storages whose content does not depend on the batch.

    A module had this content before the step, or it is constant, or one operator makes it from such storages: for
    example, torch converts a mask of booleans that a module keeps. Any other mask comes with the batch or is computed
    from it, so it may be causal by chance, as in a batch without padding.
    """
    unchanged_of_modules = step.of_modules - step.writers.keys()
    sources = constant_storages(step) | unchanged_of_modules
    independent = set(sources)
    for storage in step.writers:
        writer = step.only_writer_of(storage)
        if writer is not None and sources.issuperset(step.calls[writer].reads):
            independent.add(storage)
    return independent


def _saved_share(name: str, length: int) -> float:
    """Return the share of the time of the operator ``name`` that ``is_causal=True`` saves for ``length`` positions."""
    if name != _ATTENTION_ON_CPU:
        return 1.0 - _computed_share(length, _BLOCK_ON_DEVICE, _BLOCK_ON_DEVICE)
    queries = next(
        queries
        for least_length, queries in _QUERIES_OF_BLOCK_ON_CPU
        if length >= least_length
    )
    computed_share = _computed_share(length, queries, _KEYS_OF_BLOCK_ON_CPU)
    if computed_share == 1.0:
        return 0.0
    return 1.0 - (1.0 - _READING_SHARE_ON_CPU) * computed_share


def _computed_share(length: int, queries: int, keys: int) -> float:
    """Return the share of the scores of ``length`` positions that causal attention computes.

    It computes blocks of so many ``queries`` and ``keys``, without those in which all keys are later than the queries.
    """
    computed = 0
    for first_query in range(0, length, queries):
        next_query = min(first_query + queries, length)
        blocks_of_keys = math.ceil(next_query / keys)
        computed += (next_query - first_query) * min(blocks_of_keys * keys, length)
    return computed / length**2


def _calls_read_only_by(step: StepCalls, readers: set[int]) -> list[int]:
    """Return the constant calls whose results lead to calls of ``readers`` only."""
    found: list[int] = []
    all_readers = set(readers)
    # The readers of a result come after the call that makes it.
    for number in sorted(constant_calls(step), reverse=True):
        of_result = set(step.readers_of_result(number)) - {number}
        if of_result and of_result <= all_readers:
            all_readers.add(number)
            found.append(number)
    return found
