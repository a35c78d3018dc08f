"""Finds operators with needless elements: zeros in products, products in a costly order, tables of all pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lm_profiler.record.operator_calls import (
    Operand,
    OperatorCall,
    Product,
    StepCalls,
)

_FORWARD, _BACKWARD = "forward", "backward"

# shares from which on zeros are no chance: of the elements of a factor, and of the positions of a gradient
_MOSTLY_ZEROS = 0.95
# of each row, or of each column, that is not zero: that of a ReLU's result is larger in some of them
_FULLEST_LINE = 0.02
_MANY_ZERO_POSITIONS = 0.5
# of the elements of a product's result: what is computed from it, as long as it is as large
_AS_LARGE = 0.5
# of the multiplications in the order that was chosen: those of the other order
_CHEAPER_ORDER = 0.4


def products_with_zeros(step: StepCalls) -> dict[int, float]:
    """Return the products one factor of which holds zeros almost alone, with that share of them as zeros.

    Such as a diagonal matrix, or a one-hot one. Their backward passes are among them. Weights are left out: some are
    initialised with zeros.
    """
    shares: dict[int, float] = {}
    for number, call in enumerate(step.calls):
        if call.product is None or call.phase != _FORWARD:
            continue
        for operand in (call.product.left, call.product.right):
            are_mostly_zeros = _MOSTLY_ZEROS <= operand.zeros < 1.0
            are_everywhere = operand.fullest_line <= _FULLEST_LINE
            if (
                are_mostly_zeros
                and are_everywhere
                and operand.storage not in step.trained
            ):
                for related in step.with_backward(number):
                    shares[related] = operand.zeros
    return shares


def calls_at_ignored_positions(step: StepCalls) -> dict[int, float]:
    """Return the calls for positions whose gradient is zero, with their share of the positions.

    The loss does not depend on them: labels that it ignores, padding, outputs that nothing uses. They are products,
    and what is computed from their results as long as it is as large.
    """
    shares: dict[int, float] = {}
    for call in step.calls:
        if call.product is None or call.phase != _BACKWARD or call.forward is None:
            continue
        zero_share = _zero_positions(step, call, step.calls[call.forward])
        # A gradient penalty has a pass whose gradient is zero everywhere, because a ReLU has no second derivative.
        if not _MANY_ZERO_POSITIONS <= zero_share < 1.0:
            continue
        for number in _as_large_as(step, call.forward):
            for related in step.with_backward(number):
                shares[related] = max(zero_share, shares.get(related, 0.0))
    return shares


def _zero_positions(
    step: StepCalls, call: OperatorCall, forward_call: OperatorCall
) -> float:
    """Return the share of the positions at which the gradient of a product with a weight is zero.

    The gradient G of Y = X·W is multiplied by W for the gradient of X, and by X for that of W. Positions are the rows
    of G, which are also those of X.
    """
    assert call.product is not None
    weights = step.trained.intersection(forward_call.reads)
    if forward_call.product is None or not weights:
        return 0.0
    left, right = call.product.left, call.product.right
    # The other operand is the weight, or the product's other factor.
    gradient_is_left = left.storage not in forward_call.reads
    gradient_is_right = right.storage not in forward_call.reads
    if gradient_is_left:
        computes_weight_gradient = right.storage not in weights
        if computes_weight_gradient:
            return left.zero_columns  # dWᵀ = Gᵀ·X sums over the columns of Gᵀ
        return left.zero_rows  # dX = G·Wᵀ leaves the rows of G
    if gradient_is_right:
        computes_weight_gradient = left.storage not in weights
        if computes_weight_gradient:
            return right.zero_rows  # dW = Xᵀ·G sums over the rows of G
        return right.zero_columns  # dXᵀ = W·Gᵀ leaves the columns of Gᵀ
    return 0.0


def calls_on_broadcasts(step: StepCalls) -> dict[int, float]:
    """Return the calls that broadcast small tensors to a large one, and those that compute as much from it."""
    shares: dict[int, float] = {}
    for number, call in enumerate(step.calls):
        if not call.broadcasts or call.phase != _FORWARD:
            continue
        for large in _as_large_as(step, number):
            for related in step.with_backward(large):
                shares[related] = 1.0
    return shares


def _as_large_as(step: StepCalls, number: int) -> Iterator[int]:
    """Yield a call of forward, and those that compute something as large from its result."""
    least_elements = _AS_LARGE * step.calls[number].elements
    found = {number}
    unvisited = [number]
    while unvisited:
        current = unvisited.pop()
        yield current
        for storage in step.calls[current].writes:
            for reader in step.readers.get(storage, ()):
                call = step.calls[reader]
                is_later = reader > current and reader not in found
                is_small = call.elements < least_elements or call.product is not None
                if is_later and call.phase == _FORWARD and not is_small:
                    found.add(reader)
                    unvisited.append(reader)


def products_in_costly_order(step: StepCalls) -> dict[int, float]:
    """Return the products (A·B)·C where A·(B·C) takes far fewer multiplications, with the share that it saves."""
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
    """Return the only call that wrote ``operand``, if it is a product of forward whose result only ``before`` reads."""
    writers = step.writers.get(operand.storage, ())
    if len(writers) != 1:
        return None
    (writer,) = writers
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
    """Return the share of the multiplications of two products that the other order saves.

    ``result`` is that of the ``first`` one, as the ``second`` one reads it: as it is, or transposed.
    """
    assert first.product is not None
    assert second.product is not None
    dims = _dimensions(first.product, second.product, result)
    if dims is None:
        return 0.0
    a, b, c, d = dims
    in_this_order = a * b * c + a * c * d
    in_other_order = b * c * d + a * b * d
    return 1.0 - in_other_order / in_this_order


def _dimensions(
    first: Product, second: Product, result: Operand
) -> Sequence[int] | None:
    """Return the sizes a, b, c, d of (a × b · b × c) · c × d, as which two products can be written; None if none."""
    rows, inner, columns = first.left.rows, first.left.columns, first.right.columns
    if first.batch != second.batch:
        return None
    is_left = result is second.left
    # (A·B)·C has the same cost as its transpose, Cᵀ·(Bᵀ·Aᵀ).
    outer = second.right.columns if is_left else second.left.rows
    meeting = result.columns if is_left else result.rows
    kept = result.rows if is_left else result.columns
    if (kept, meeting) == (rows, columns):
        return rows, inner, columns, outer
    if (kept, meeting) == (columns, rows):
        return columns, inner, rows, outer
    return None
