"""The tensors that an operator was given, as a trace tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from lm_profiler.analysis.trace.walk import Inputs

_SIZES = {
    **dict.fromkeys(("double", "long", "long int", "long long", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int", "c10::complex<c10::Half>"), 4),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short", "short int"), 2),
    **dict.fromkeys(("bool", "unsigned char", "signed char"), 1),
    **dict.fromkeys((f"c10::Float8_{form}" for form in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")), 1),
    "c10::complex<double>": 16,
}
"""Bytes of an element, by the type's name in a trace."""

_DTYPES = {"double": "float64", "float": "float32", "c10::Half": "float16", "c10::BFloat16": "bfloat16"}

_NO_TENSORS = frozenset({"", "Scalar", "ScalarList", "GenericList"})


class Operand(NamedTuple):
    """A tensor, or a list of them, which has no one shape. ``item`` is the bytes of an element; None is unknown.

    ``stored`` elements are less than ``elements`` where a tensor was expanded.
    """

    shape: Sequence[int]
    elements: int
    stored: int
    item: int | None
    dtype: str | None = None

    @property
    def bytes(self) -> int:
        """What is stored; 0 where that is unknown."""
        return self.stored * (self.item or 0)


class Lists(NamedTuple):
    """What a trace does not tell of tensors in a list: their type, and of more than 30 also their shapes.

    None is unknown.
    """

    elements: int | None = None
    item: int | None = None


UNKNOWN_LISTS = Lists()


def operands(inputs: Inputs, lists: Lists = UNKNOWN_LISTS) -> list[Operand]:
    """The tensors among the arguments, in their order; ``lists`` is what one call is given in each list."""
    tensors, cut = [], is_cut(inputs)
    strides = inputs.strides or [()] * len(inputs.dims)
    for dims, type_, steps in zip(inputs.dims, inputs.types, strides, strict=False):
        if type_ == "TensorList":
            elements = lists.elements if cut else sum(prod(one) for one in dims)
            tensors.append(Operand((), elements or 0, elements or 0, None if elements is None else lists.item))
        elif (item := _SIZES.get(type_)) is not None:
            tensors.append(Operand(dims, prod(dims), _stored(dims, steps), item, _DTYPES.get(type_)))
        elif type_ not in _NO_TENSORS:
            tensors.append(Operand((), 0, 0, None))
    return tensors


def is_cut(inputs: Inputs) -> bool:
    """Whether its lists of tensors were too long for the trace: the first one at least is never empty."""
    lists = (dims for dims, type_ in zip(inputs.dims, inputs.types, strict=False) if type_ == "TensorList")
    return next(lists, None) == []


def _stored(dims: Sequence[int], steps: Sequence[Any]) -> int:
    if len(steps) != len(dims):
        return prod(dims)
    return prod(count for count, step in zip(dims, steps, strict=True) if step)
