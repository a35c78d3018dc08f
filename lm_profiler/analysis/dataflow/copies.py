"""Finds copies into another layout or type, and layers that are applied to copies of the same rows."""

from __future__ import annotations

from collections.abc import Iterator

from lm_profiler.record.operator_calls import StepCalls

_FORWARD = "forward"
_COPIES = ("aten::clone", "aten::copy_", "aten::_to_copy")
_JOIN = "aten::cat"
# operators that copy whole rows, some of them several times
_ROW_COPIES = ("aten::index", "aten::index_select", "aten::gather", "aten::repeat")
# The share of distinct rows among those that a layer receives; with more, a change is hardly worth it.
_MOST_DISTINCT_SHARE = 0.5


def copying_calls(step: StepCalls) -> Iterator[int]:
    """Yield the calls of forward that only copy a tensor, and the calls of their backward passes.

    A copy to which other calls write later is needed, and left out, as are those of torch's recurrent layers.
    """
    for number, call in enumerate(step.calls):
        is_copy = call.phase == _FORWARD and call.name in _COPIES
        if is_copy and not call.is_of_recurrent_layer and not step.is_changed(number):
            yield from step.with_backward(number)


def layers_on_copied_rows(step: StepCalls) -> dict[int, float]:
    """Return products with a weight whose other factor has many copies of the same rows.

    A layer computes the same for equal rows, so it could be applied before they are copied. An example is a graph
    network that copies the rows of nodes to their edges, and then applies a layer.

    Returns:
        by the number of a product, or of a call of its backward pass, the share of the rows that are copies.
    """
    shares: dict[int, float] = {}
    distinct = _distinct_elements(step)
    for number, call in enumerate(step.calls):
        product = call.product
        if product is None or call.phase != _FORWARD:
            continue
        if step.trained.isdisjoint(call.reads):
            continue
        for factor in (product.left, product.right):
            if factor.storage in step.trained:
                continue
            maker = step.only_writer_of(factor.storage)
            if maker is None or maker >= number:
                continue
            elements = step.calls[maker].elements
            # A layer that is applied to some of the rows may get no copies, as an expert does in a mixture of experts.
            gets_all_rows = factor.rows * factor.columns * product.batch >= elements
            if elements == 0 or not gets_all_rows:
                continue
            distinct_share = distinct[maker] / elements
            if distinct_share <= _MOST_DISTINCT_SHARE:
                for related in step.with_backward(number):
                    shares[related] = 1.0 - distinct_share
    return shares


def _distinct_elements(step: StepCalls) -> list[int]:
    """Return for each call the largest possible number of elements of its result that are not copies of each other."""
    distinct: list[int] = []
    for number, call in enumerate(step.calls):
        elements = call.elements
        if call.name in _ROW_COPIES:
            elements = min(call.elements, call.first_elements)
        elif call.name == _JOIN:
            joined = 0
            for storage in call.reads:
                writer = step.only_writer_of(storage)
                if writer is None or writer >= number:
                    joined = call.elements
                    break
                joined += distinct[writer]
            elements = min(joined, call.elements)
        distinct.append(elements)
    return distinct
