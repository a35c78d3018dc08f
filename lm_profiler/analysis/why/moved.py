"""The bytes that an operator must move at least: each input read once, the result written once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod

from lm_profiler.analysis.trace.kinds import operator_kind
from lm_profiler.analysis.trace.walk import Inputs
from lm_profiler.analysis.why.inputs import Lists, Operand, operands

_Rule = Callable[[Sequence[Operand], int], int]
"""Bytes from the operands and what reading all of them takes."""

_COMPARED = re.compile(r"(eq|ne|lt|le|gt|ge|isnan|isinf|isfinite|logical_\w+)_?")


def least_bytes(name: str, inputs: Inputs, lists: Lists) -> int | None:
    """Of one call of the operator ``name``; None is unknown.

    A trace holds no results: they follow from what the operator does. Where that does not tell, only what is read
    counts, so that the figure is a lower bound.

    Args:
        name: such as ``aten::mul``, or of a kernel that torch.compile made.
        inputs: what it was given.
        lists: what it is given in each list of tensors.
    """
    given = operands(inputs, lists)
    if not given or any(one.item is None for one in given):
        return None
    read = sum(one.bytes for one in given)
    if name.startswith("triton_"):
        return read  # its results are arguments too
    if name == "aten::index_select":
        return _selected(given, inputs)
    base = re.sub(r"^aten::(_foreach_)?", "", name)
    rule = _BY_NAME.get(base) or _BY_KIND.get(operator_kind(name))
    if base == name or rule is None:
        return None
    if rule is _pointwise and _COMPARED.fullmatch(base):
        given = [one._replace(item=1, dtype=None) for one in given]
    return rule(given, read)


def _pointwise(given: Sequence[Operand], read: int) -> int:
    """The result has the shape that all have together; in place, and of lists, that is the first one's."""
    rank = max(len(one.shape) for one in given)
    padded = [[1] * (rank - len(one.shape)) + list(one.shape) for one in given]
    elements = prod(max(sizes) for sizes in zip(*padded, strict=True)) if rank else given[0].elements
    # Of the result's type: tensors with dimensions go before those without, floats before integers.
    some = [one for one in given if one.shape] or given
    some = [one for one in some if one.dtype is not None] or some
    return read + elements * max(one.item or 0 for one in some)


def _only_written(given: Sequence[Operand], _: int) -> int:
    return given[0].bytes


def _only_read(_: Sequence[Operand], read: int) -> int:
    return read


def _moved(_: Sequence[Operand], read: int) -> int:
    return 2 * read


def _like_first(given: Sequence[Operand], read: int) -> int:
    return read + given[0].bytes


def _looked_up(given: Sequence[Operand], _: int) -> int:
    """Of a table only the rows that are asked for."""
    table, indices = given[:2]
    return 2 * indices.elements * table.shape[-1] * (table.item or 0) + indices.bytes


def _selected(given: Sequence[Operand], inputs: Inputs) -> int | None:
    """The same along any dimension, which is the operator's second argument."""
    if len(inputs.values) < 2 or len(given) < 2:
        return None
    (table, indices), dimension = given[:2], int(inputs.values[1])
    row = table.elements // max(table.shape[dimension], 1) if table.shape else 1
    return 2 * indices.elements * row * (table.item or 0) + indices.bytes


def _gathered(given: Sequence[Operand], _: int) -> int:
    return 2 * given[1].elements * (given[0].item or 0) + given[1].bytes


def _updated(states: int) -> _Rule:
    """Parameters, gradients and so many states are read; all but the gradients are written."""

    def rule(given: Sequence[Operand], _: int) -> int:
        lists = [one.bytes for one in given[: 2 + states]]
        return 2 * sum(lists) - lists[1]

    return rule


_BY_NAME: dict[str, _Rule] = {
    **dict.fromkeys(("fill_", "zero_", "uniform_", "normal_", "bernoulli_", "exponential_", "random_"), _only_written),
    **dict.fromkeys(("copy_", "_local_scalar_dense"), _only_read),  # where it is copied to is an argument
    **dict.fromkeys(("_fused_adam_", "_fused_adamw_"), _updated(states=2)),  # with amsgrad there is a third
    "_fused_adagrad_": _updated(states=1),
    "_fused_sgd_": _updated(states=0),  # with momentum there is one
    "native_dropout": lambda given, read: read + given[0].bytes + given[0].elements,
    "embedding": _looked_up,
    "gather": _gathered,
    "embedding_dense_backward": _only_read,
    "nll_loss_forward": lambda given, _: given[1].bytes,
    "nll_loss_backward": lambda given, _: given[1].bytes,
    **dict.fromkeys(("cat", "stack", "roll", "flip", "constant_pad_nd", "split_with_sizes_copy"), _moved),
    **dict.fromkeys(("triu", "tril", "cumsum", "cumprod", "sort"), _like_first),
}
_BY_KIND: dict[str, _Rule] = {
    "elementwise": _pointwise,
    "normalization": _like_first,
    "softmax": _like_first,
    "reduction": _only_read,
}
