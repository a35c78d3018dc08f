"""Finds layers without an activation: convolutions and matrix products, with what decides whether two can be merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lm_profiler.measure.counts.call_tensors import is_dense
from lm_profiler.record.operator_calls import LinearMap

_CONVOLUTION = "aten::convolution"
_SUMS = ("aten::add", "aten::add_")
_STACK = "aten::stack"
# matrix products of an input and a weight, with the position of the input among the arguments
_INPUT_OF_PRODUCT = {"aten::mm": 0, "aten::addmm": 1}


def linear_map_of_call(
    name: str, args: Any, result: Any, number_of: Callable[[Tensor], int]
) -> LinearMap | None:
    """Return the convolution or matrix product that the operator ``name`` computes.

    None for other operators, and for transposed or dilated convolutions, which are not merged with others.
    ``number_of`` returns a number that identifies the values of a tensor.
    """
    if name in _INPUT_OF_PRODUCT:
        inputs = args[_INPUT_OF_PRODUCT[name]]
        if not is_dense(inputs):  # it has no storage of its own
            return None
        return LinearMap(
            inputs=number_of(inputs),
            result_shape=tuple(result.shape),
            settings=(),
            kernel=(),
            padding=(),
        )
    if name != _CONVOLUTION:
        return None
    inputs, weight, _, stride, padding, dilation, is_transposed, _, groups = args
    if is_transposed or any(step != 1 for step in dilation) or not is_dense(inputs):
        return None
    return LinearMap(
        inputs=number_of(inputs),
        result_shape=tuple(result.shape),
        settings=(*stride, groups),
        kernel=tuple(weight.shape[2:]),
        padding=tuple(padding),
    )


def tensors_added_elementwise(
    name: str, inputs: Sequence[Tensor], result: Any
) -> list[Tensor]:
    """Return the ``inputs`` that a call adds or stacks element by element: element i of each with element i of others.

    A transposed tensor is left out, because its elements are added to elements of other indices.
    """
    if name in _SUMS:
        shape, strides = result.shape, result.stride()
    elif name == _STACK:
        shape, strides = inputs[0].shape, inputs[0].stride()
    else:
        return []
    return [
        tensor
        for tensor in inputs
        if tensor.shape == shape and tensor.stride() == strides
    ]
