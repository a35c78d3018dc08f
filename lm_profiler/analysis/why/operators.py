"""The least bytes that an operator moves and its FLOPs, from its name and its input tensors.

A trace holds no results: they follow from the operator's meaning. If that is unknown, only reads count,
so bytes are a lower bound. Each input counts once, and the result once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from lm_profiler.analysis.trace.kinds import operator_kind
from lm_profiler.analysis.trace.packed_trace import Inputs

# bytes of an element, by the type's name in a trace
_SIZES = {
    **dict.fromkeys(("double", "long", "long int", "long long", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int", "c10::complex<c10::Half>"), 4),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short", "short int"), 2),
    **dict.fromkeys(("bool", "unsigned char", "signed char"), 1),
    **dict.fromkeys((f"c10::Float8_{form}" for form in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")), 1),
    "c10::complex<double>": 16,
}
_DTYPES = {"double": "float64", "float": "float32", "c10::Half": "float16", "c10::BFloat16": "bfloat16"}
_NO_TENSORS = frozenset({"", "Scalar", "ScalarList", "GenericList"})

_BIASED = frozenset({"addmm", "baddbmm", "_addmm_activation"})
_PRODUCTS = frozenset({"mm", "bmm", "_scaled_mm", "_int_mm"}) | _BIASED


class Operand(NamedTuple):
    """A tensor, or a list of tensors, which has no single shape."""

    shape: Sequence[int]
    elements: int
    item: int | None  # bytes of an element; None is unknown
    dtype: str | None = None

    @property
    def bytes(self) -> int:
        """The bytes; 0 where unknown."""
        return self.elements * (self.item or 0)


class Lists(NamedTuple):
    """What a trace does not hold about tensors in a list: their type, and for more than 30 also their elements."""

    elements: int | None = None
    item: int | None = None


UNKNOWN_LISTS = Lists()


def operands(inputs: Inputs, lists: Lists = UNKNOWN_LISTS) -> list[Operand]:
    """Return the tensors among the arguments, in order; ``lists`` describes the lists that one call gets."""
    tensors, cut = [], is_cut(inputs)
    for dims, type_ in zip(inputs.dims, inputs.types, strict=False):
        if type_ == "TensorList":
            elements = lists.elements if cut else sum(prod(one) for one in dims)
            tensors.append(Operand((), elements or 0, None if elements is None else lists.item))
        elif (item := _SIZES.get(type_)) is not None:
            tensors.append(Operand(dims, prod(dims), item, _DTYPES.get(type_)))
        elif type_ not in _NO_TENSORS:
            tensors.append(Operand((), 0, None))
    return tensors


def is_cut(inputs: Inputs) -> bool:
    """Return whether the trace left out lists of tensors as too long: at least the first one is never empty."""
    lists = (dims for dims, type_ in zip(inputs.dims, inputs.types, strict=False) if type_ == "TensorList")
    return next(lists, None) == []


_Rule = Callable[[Sequence[Operand], int], int]  # bytes, from the operands and the bytes of reading all of them


def least_bytes(name: str, inputs: Inputs, lists: Lists) -> int | None:
    """Return the bytes that one call of ``name``, an operator or a compiled kernel, moves at least; None: unknown."""
    given = operands(inputs, lists)
    if not given or any(one.item is None for one in given):
        return None
    read = sum(one.bytes for one in given)
    if name.startswith("triton_"):
        return read  # its results are arguments too
    base = re.sub(r"^aten::(_foreach_)?", "", name)
    rule = _BY_NAME.get(base) or _BY_KIND.get(operator_kind(name))
    return None if base == name or rule is None else rule(given, read)


def _pointwise(given: Sequence[Operand], read: int) -> int:
    """Return the bytes with a result of the broadcast shape; in place, and for lists, that is the first operand's."""
    rank = max(len(one.shape) for one in given)
    padded = [[1] * (rank - len(one.shape)) + list(one.shape) for one in given]
    elements = prod(max(sizes) for sizes in zip(*padded, strict=True)) if rank else given[0].elements
    # Type promotion: tensors with dimensions go before scalars, floats before integers.
    some = [one for one in given if one.shape] or given
    some = [one for one in some if one.dtype is not None] or some
    return read + elements * max(one.item or 0 for one in some)


def _looked_up(given: Sequence[Operand], _: int) -> int:
    """Return the bytes of an embedding, which reads only the rows that it looks up."""
    table, indices = given[0], given[-1]
    row = table.elements // max(table.shape[0], 1) if table.shape else 1
    return 2 * indices.elements * row * (table.item or 0) + indices.bytes


def _updated(states: int) -> _Rule:
    """Return a rule: parameters, gradients and ``states`` states are read; all except gradients are written."""

    def rule(given: Sequence[Operand], _: int) -> int:
        lists = [one.bytes for one in given[: 2 + states]]
        return 2 * sum(lists) - lists[1]

    return rule


_only_written: _Rule = lambda given, _: given[0].bytes  # noqa: E731
_only_read: _Rule = lambda _, read: read  # noqa: E731
_moved: _Rule = lambda _, read: 2 * read  # noqa: E731
_like_first: _Rule = lambda given, read: read + given[0].bytes  # noqa: E731

_BY_NAME: dict[str, _Rule] = {
    **dict.fromkeys(("fill_", "zero_", "uniform_", "normal_", "bernoulli_", "exponential_", "random_"), _only_written),
    **dict.fromkeys(("copy_", "_local_scalar_dense"), _only_read),  # the target is an argument
    **dict.fromkeys(("_fused_adam_", "_fused_adamw_"), _updated(states=2)),  # amsgrad has a third
    "_fused_adagrad_": _updated(states=1),
    "_fused_sgd_": _updated(states=0),  # momentum has one
    "native_dropout": lambda given, read: read + given[0].bytes + given[0].elements,
    **dict.fromkeys(("embedding", "index_select"), _looked_up),
    "gather": lambda given, _: 2 * given[1].elements * (given[0].item or 0) + given[1].bytes,
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


class Product(NamedTuple):
    """A product of ``batch`` pairs of matrices [m, k] and [k, n], or fused attention, which has no m, n and k."""

    flops: int
    dtype: str | None  # dtype of the factors, by torch's name; None is unknown
    batch: int = 1
    m: int = 0
    n: int = 0
    k: int = 0


def product_of(name: str, inputs: Inputs) -> Product | None:
    """Return what the operator ``name`` multiplies; a multiply-add is two FLOPs. None is unknown."""
    given = operands(inputs)
    shapes, dtype = [one.shape for one in given], given[1].dtype if len(given) > 1 else None
    base = name.removeprefix("aten::").removesuffix("_")
    if "attention" in base:
        return _attention(base, shapes, dtype, inputs)
    factors = shapes[1:3] if base in _BIASED else shapes[:2]
    if base not in _PRODUCTS or [len(one) for one in factors] not in ([2, 2], [3, 3]):
        return None
    left, right = factors
    batch, (m, k), n = prod(left[:-2]), left[-2:], right[-1]
    return Product(2 * batch * m * n * k, dtype, batch, m, n, k)


def _attention(base: str, shapes: Sequence[Sequence[int]], dtype: str | None, inputs: Inputs) -> Product | None:
    """Return the product of attention on [B, H, T, D]; operators not called ``scaled_dot_product`` get [B, T, H, D]."""
    backward = "backward" in base
    given = shapes[1:4] if backward else shapes[:3]
    if [len(one) for one in given] != [4, 4, 4]:
        return None
    q, k, v = given
    time = 2 if base.startswith("_scaled_dot_product") else 1
    flops = 2 * prod(q[:3]) * k[time] * (q[3] + v[3]) * (2 if backward else 1)
    # Causal attention counts half: fused kernels leave out the blocks that are masked.
    return Product(flops // 2 if "True" in inputs.values else flops, dtype)
