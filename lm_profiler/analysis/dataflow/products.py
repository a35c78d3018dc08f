"""Finds operators that compute needless elements: products with zeros or in a costly order, tables of all pairs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lm_profiler.analysis.dataflow.loops import longest_chain
from lm_profiler.analysis.dataflow.zeros_by_value import ZerosByValue
from lm_profiler.record.operator_calls import (
    CodeLine,
    Operand,
    OperatorCall,
    Product,
    StepCalls,
)

_FORWARD, _BACKWARD = "forward", "backward"

# A factor is reported if at least this share of its elements is zero, ...
_LEAST_ZERO_SHARE = 0.95
# ... and at most this share of each row, or of each column, is not zero. The result of a ReLU has rows with more.
_MOST_NONZERO_IN_LINE = 0.02
# functions that make negative values zero
_RECTIFIERS = (
    "aten::relu",
    "aten::relu_",
    "aten::threshold",
    "aten::clamp_min",
    "aten::clamp_min_",
    "aten::hardtanh",
    "aten::hardtanh_",
)
# at most so many operators, such as pooling and dropout, are between a rectifier and the product
_MOST_OPERATORS_AFTER_RECTIFIER = 6
_REDUCTIONS = (
    "aten::sum",
    "aten::mean",
    "aten::norm",
    "aten::linalg_vector_norm",
)
# the least reported share of positions at which the gradient is zero
_LEAST_ZERO_POSITIONS = 0.5
# A call continues the work of an earlier one if it computes at least this share of that call's elements.
LEAST_SHARE_OF_ELEMENTS = 0.5
# The other order of a product of three matrices is cheaper if it needs at most this share of the multiplications.
_CHEAPER_ORDER = 0.4


def products_with_zeros(step: StepCalls) -> dict[int, float]:
    """Return matrix products with a factor that is nearly all zeros, such as a diagonal or a one-hot matrix.

    Weights do not count as such a factor, because some are initialised with zeros. Nor does the result of a ReLU, which
    has other zeros in each step.

    Returns:
        by the number of a product, or of a call of its backward pass, the share of zeros in the factor.
    """
    shares: dict[int, float] = {}
    for number, call in enumerate(step.calls):
        if call.product is None or call.phase != _FORWARD:
            continue
        for operand in (call.product.left, call.product.right):
            has_mostly_zeros = _LEAST_ZERO_SHARE <= operand.zeros < 1.0
            has_fuller_line = operand.fullest_line > _MOST_NONZERO_IN_LINE
            is_weight = operand.storage in step.trained
            is_sparse = has_mostly_zeros and not has_fuller_line and not is_weight
            if is_sparse and not _is_rectified(step, operand.storage, number):
                for related in step.with_backward(number):
                    shares[related] = operand.zeros
    return shares


def _is_rectified(step: StepCalls, storage: int, before: int) -> bool:
    """Return whether what ``storage`` holds at the call ``before`` was computed from the result of a ReLU.

    Layers between the two end the search.
    """
    storages = {storage}
    for _ in range(_MOST_OPERATORS_AFTER_RECTIFIER):
        sources: set[int] = set()
        for written in storages:
            for number in step.writers.get(written, ()):
                call = step.calls[number]
                if number >= before or call.product is not None:
                    continue
                if call.name in _RECTIFIERS:
                    return True
                sources.update(call.reads)
        storages = sources - step.trained
    return False


class IgnoredPositions(NamedTuple):
    """Calls at many positions whose gradient is zero: by their numbers, the share of these positions."""

    everywhere: dict[int, float]  # in lines that compute no position which is needed
    # In lines that other layers, with other weights, run for needed positions. An example is the last block of a
    # classifier that uses one token of the output: the blocks before it run the same lines, and need all tokens. If a
    # loop applies one layer again and again, for example to the elements of sequences, no layer is the last one.
    in_last_layers: dict[int, float]


def calls_at_ignored_positions(step: StepCalls) -> IgnoredPositions:
    """Return calls that compute many positions whose gradient is zero, so that the loss does not depend on them.

    Examples are ignored labels, padding, and unused outputs. The calls are products with a weight, and operators of
    about the same size that use their results.
    """
    products = _products_at_ignored_positions(step)
    return IgnoredPositions(
        everywhere=_calls_of_products(step, products.everywhere),
        in_last_layers=_calls_of_products(step, products.in_last_layers),
    )


def _products_at_ignored_positions(step: StepCalls) -> IgnoredPositions:
    """Return the products of forward with weights among the ``calls_at_ignored_positions``."""
    zero_shares = _zero_shares_of_products(step)
    # by line and sizes: the products whose positions are needed
    needed_products: defaultdict[_LineAndSizes, list[int]] = defaultdict(list)
    for product, zero_share in zero_shares.items():
        if zero_share < _LEAST_ZERO_POSITIONS:
            needed_products[_line_and_sizes(step, product)].append(product)
    ignored = IgnoredPositions(everywhere={}, in_last_layers={})
    for product, zero_share in zero_shares.items():
        # A share of 1 has another reason: in a gradient penalty, the second derivative of a ReLU is zero everywhere.
        has_ignored_positions = _LEAST_ZERO_POSITIONS <= zero_share < 1.0
        if not has_ignored_positions:
            continue
        needed = needed_products.get(_line_and_sizes(step, product), [])
        if not needed:
            ignored.everywhere[product] = zero_share
        elif _is_of_last_layer(step, product, needed):
            ignored.in_last_layers[product] = zero_share
    return ignored


def _is_of_last_layer(step: StepCalls, product: int, needed: Sequence[int]) -> bool:
    """Return whether ``product`` has another weight than the ``needed`` products, and depends on one of them.

    Layers that do not depend on each other, such as two heads of a model, are not layers one after another.
    """
    weights = step.trained.intersection(step.calls[product].reads)
    for other in needed:
        if not weights.isdisjoint(step.calls[other].reads):
            return False
    earlier = [other for other in needed if other < product]
    return bool(earlier) and longest_chain(step, [max(earlier), product]) == 2


def _calls_of_products(
    step: StepCalls, zero_shares: Mapping[int, float]
) -> dict[int, float]:
    """Return the products in ``zero_shares`` and the operators that use their results, with the products' shares."""
    shares: dict[int, float] = {}
    for product, zero_share in zero_shares.items():
        for number in calls_as_large_as(step, product):
            for related in step.with_backward(number):
                shares[related] = max(zero_share, shares.get(related, 0.0))
    return shares


# the innermost line of a product, and its sizes: rows, columns, and columns of the result
_LineAndSizes = tuple[CodeLine | None, int, int, int]


def _line_and_sizes(step: StepCalls, number: int) -> _LineAndSizes:
    """Return the line and the sizes of the product ``number``; equal layers, such as a model's blocks, share them."""
    product = step.calls[number].product
    assert product is not None
    lines = step.lines_of(number)
    line = lines[-1] if lines else None
    return line, product.left.rows, product.left.columns, product.right.columns


def _zero_shares_of_products(step: StepCalls) -> dict[int, float]:
    """Return the share of positions at which the gradient is zero, by the number of a product of forward with a weight.

    Products whose gradient was not recorded are missing. A position whose gradient is zero only because of its values
    does not count.
    """
    zero_shares: dict[int, float] = {}
    by_value = ZerosByValue(step)
    for call in step.calls:
        if call.product is None or call.phase != _BACKWARD or call.forward is None:
            continue
        forward_call = step.calls[call.forward]
        zeros = _zero_positions(step, call, forward_call)
        if zeros is None:
            continue
        zero_share = zeros.share
        if zero_share >= _LEAST_ZERO_POSITIONS:
            assert forward_call.product is not None
            positions = forward_call.product.left.rows
            if by_value.explain(zeros.gradient, positions, zero_share):
                zero_share = 0.0
        share_so_far = zero_shares.get(call.forward, 0.0)
        zero_shares[call.forward] = max(zero_share, share_so_far)
    return zero_shares


class _ZeroPositions(NamedTuple):
    """The positions at which the gradient of a product is zero."""

    share: float
    gradient: int  # its storage


def _zero_positions(
    step: StepCalls, call: OperatorCall, forward_call: OperatorCall
) -> _ZeroPositions | None:
    """Return the positions at which the gradient of a product is zero; None if the product has no weight.

    ``call`` is a product of its backward pass. For Y = X·W, with the gradient G of Y, backward computes two products:
    G with W for the gradient of X, and X with G for the gradient of W. Positions are the rows of X, Y and G.
    """
    assert call.product is not None
    weights = step.trained.intersection(forward_call.reads)
    if forward_call.product is None or not weights:
        return None
    left, right = call.product.left, call.product.right
    # One operand is a factor of the forward product, X or W. The other one is the gradient.
    gradient_is_left = left.storage not in forward_call.reads
    gradient_is_right = right.storage not in forward_call.reads
    if gradient_is_left:
        gradient, factor = left, right
    elif gradient_is_right:
        gradient, factor = right, left
    else:
        return None
    # The products are dX = G·Wᵀ and dW = Xᵀ·G, or transposed: dXᵀ = W·Gᵀ and dWᵀ = Gᵀ·X.
    computes_weight_gradient = factor.storage not in weights
    is_transposed = gradient_is_left == computes_weight_gradient
    share = gradient.zero_columns if is_transposed else gradient.zero_rows
    return _ZeroPositions(share, gradient.storage)


def calls_on_broadcasts(step: StepCalls) -> dict[int, float]:
    """Return calls that broadcast small tensors to a far larger one, and operators of about its size that use it.

    Small tensors with different numbers of dimensions may be broadcast by mistake. With equal numbers, as by
    ``x[:, None]``, the program wants the large tensor. Its calls then count only if forward reduces it, as in the
    distances of all pairs, for which there are cheaper ways.

    Returns:
        For each of these calls, and for the calls of its backward pass, the share that may be needless: 1.0.
    """
    shares: dict[int, float] = {}
    for number, call in enumerate(step.calls):
        if not call.broadcasts or call.phase != _FORWARD:
            continue
        large_calls = [*calls_as_large_as(step, number)]
        if call.broadcasts_missing_dimensions or _are_reduced(step, large_calls):
            for large in large_calls:
                for related in step.with_backward(large):
                    shares[related] = 1.0
    return shares


def _are_reduced(step: StepCalls, numbers: Iterable[int]) -> bool:
    """Return whether forward reduces the result of one of the calls, such as to a sum."""
    for number in numbers:
        for reader in step.readers_of_result(number):
            call = step.calls[reader]
            if call.phase == _FORWARD and call.name in _REDUCTIONS:
                return True
    return False


def calls_as_large_as(step: StepCalls, number: int) -> Iterator[int]:
    """Yield a call of forward, and the later calls that compute something of about its size from its result.

    Matrix products end the chain.
    """
    least_elements = LEAST_SHARE_OF_ELEMENTS * step.calls[number].elements
    found = {number}
    unvisited = [number]
    while unvisited:
        current = unvisited.pop()
        yield current
        for reader in step.readers_of_result(current):
            call = step.calls[reader]
            is_new = reader > current and reader not in found
            is_large = call.elements >= least_elements
            continues_chain = call.phase == _FORWARD and call.product is None
            if is_new and is_large and continues_chain:
                found.add(reader)
                unvisited.append(reader)


def products_in_costly_order(step: StepCalls) -> dict[int, float]:
    """Return the two products of each (A·B)·C for which A·(B·C) takes far fewer multiplications.

    Returns:
        by the number of a product, or of a call of its backward pass, the share of multiplications that would be saved.
    """
    shares: dict[int, float] = {}
    for number, call in enumerate(step.calls):
        if call.product is None or call.phase != _FORWARD:
            continue
        for operand in (call.product.left, call.product.right):
            first = _product_that_made(step, operand, before=number)
            if first is None:
                continue
            saved_share = _saved_by_other_order(step.calls[first], call, operand)
            if saved_share < 1.0 - _CHEAPER_ORDER:
                continue
            for product in (first, number):
                for related in step.with_backward(product):
                    shares[related] = saved_share
    return shares


def _product_that_made(step: StepCalls, operand: Operand, before: int) -> int | None:
    """Return the number of the product that computed ``operand``; None if there is no such product.

    It must be the only call that writes this storage, and in forward the call ``before`` must be the only one that
    reads it.
    """
    writer = step.only_writer_of(operand.storage)
    if writer is None:
        return None
    forward_readers = [
        reader
        for reader in step.readers.get(operand.storage, ())
        if step.calls[reader].phase == _FORWARD
    ]
    is_product = step.calls[writer].product is not None
    if writer >= before or not is_product or forward_readers != [before]:
        return None
    return writer


def _saved_by_other_order(
    first: OperatorCall, second: OperatorCall, result: Operand
) -> float:
    """Return the share of the multiplications of two products that the other order of the three factors saves.

    ``result`` is the result of the ``first`` product as the ``second`` one reads it, possibly transposed.
    """
    assert first.product is not None
    assert second.product is not None
    dimensions = _dimensions(first.product, second.product, result)
    if dimensions is None:
        return 0.0
    a, b, c, d = dimensions  # of the factors A (a × b), B (b × c) and C (c × d)
    in_this_order = a * b * c + a * c * d  # (A·B), then (A·B)·C
    in_other_order = b * c * d + a * b * d  # (B·C), then A·(B·C)
    return 1.0 - in_other_order / in_this_order


def _dimensions(
    first: Product, second: Product, result: Operand
) -> Sequence[int] | None:
    """Return a, b, c, d if the two products are (A·B)·C of A (a × b), B (b × c), C (c × d); None if they are not.

    ``result`` is A·B as the ``second`` product reads it: as its left or right factor, possibly transposed. The product
    C·(A·B) counts as (A·B)·C, because its transpose has this form and the same cost.
    """
    if first.batch != second.batch:
        return None
    rows, inner, columns = first.left.rows, first.left.columns, first.right.columns
    result_is_left = result is second.left
    # the second product sums over one dimension of ``result``, and keeps the other one
    if result_is_left:
        kept_size, summed_size = result.rows, result.columns
        outer = second.right.columns
    else:
        kept_size, summed_size = result.columns, result.rows
        outer = second.left.rows
    if (kept_size, summed_size) == (rows, columns):
        return rows, inner, columns, outer
    if (kept_size, summed_size) == (columns, rows):
        return columns, inner, rows, outer
    return None
