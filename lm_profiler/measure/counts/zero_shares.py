"""Finds how much of the factors of matrix products, and of the gradients of tables, is zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lm_profiler.measure.counts.storage_numbers import StorageNumbers
from lm_profiler.record.operator_calls import Operand, Product

# operators that are matrix products, with the positions of their two factors
_FACTORS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
}
_LEAST_ELEMENTS = 1 << 12  # smaller tensors are not searched for zeros
# the same for gradients, which may have only one element for each position
_LEAST_GRADIENT = 1 << 6
# operators of backward passes that may make elements of a gradient zero: of ReLU, of clamp, and of products
_MAY_MAKE_ZEROS = (
    "aten::hardshrink_backward",
    "aten::hardsigmoid_backward",
    "aten::hardswish_backward",
    "aten::hardtanh_backward",
    "aten::mul",
    "aten::sigmoid_backward",
    "aten::softshrink_backward",
    "aten::tanh_backward",
    "aten::threshold_backward",
    "aten::where",
)
_MOSTLY_ZERO = 0.5  # with this share of zeros, rows and columns are searched too


def product_of_call(name: str, args: Any, storages: StorageNumbers) -> Product | None:
    """Return the product of dense matrices that the operator ``name`` computes; None if it computes no such product."""
    positions = _FACTORS.get(name)
    if positions is None:
        return None
    left, right = (args[position] for position in positions)
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return None
    batch = left.shape[0] if left.dim() == 3 else 1
    return Product(
        batch,
        _operand(left, storages.number_of(left)),
        _operand(right, storages.number_of(right)),
    )


def _operand(factor: Tensor, storage: int) -> Operand:
    """Return the record of ``factor``, whose storage has the number ``storage``."""
    rows, columns = factor.shape[-2:]
    operand = Operand(storage, rows, columns)
    if factor.numel() < _LEAST_ELEMENTS or not factor.is_floating_point():
        return operand
    return _with_zeros(operand, factor)


def _with_zeros(operand: Operand, factor: Tensor) -> Operand:
    """Return ``operand`` with the shares of zeros in ``factor``, which has its values."""
    # A norm of order 0 counts the elements that are not zero; not in bfloat16, whose sums of ones end at 256.
    dtype = torch.promote_types(factor.dtype, torch.float32)
    nonzeros_of_rows = torch.linalg.vector_norm(factor, ord=0, dim=-1, dtype=dtype)
    zeros = 1.0 - float(nonzeros_of_rows.sum()) / factor.numel()
    if zeros < _MOSTLY_ZERO:
        return operand._replace(zeros=zeros)
    nonzeros_of_columns = torch.linalg.vector_norm(factor, ord=0, dim=-2, dtype=dtype)
    # the share of nonzero elements in the row, and in the column, with most of them
    fullest_row = float(nonzeros_of_rows.max()) / operand.columns
    fullest_column = float(nonzeros_of_columns.max()) / operand.rows
    return operand._replace(
        zeros=zeros,
        zero_rows=_share_of_zeros(nonzeros_of_rows),
        zero_columns=_share_of_zeros(nonzeros_of_columns),
        fullest_line=min(fullest_row, fullest_column),
    )


def zeros_made_by(name: str, args: Any, result: Tensor | None) -> tuple[float, float]:
    """Return the shares of zero elements and of zero rows that an operator of a backward pass adds to its gradient.

    Both are 0 for operators that do not multiply a gradient by other values, or choose from it.
    """
    if name not in _MAY_MAKE_ZEROS or result is None or not _is_searched(result):
        return 0.0, 0.0
    gradient = next((arg for arg in args if _is_searched(arg)), None)
    if gradient is None:
        return 0.0, 0.0
    elements = _share_of_zeros(result) - _share_of_zeros(gradient)
    rows = _share_of_zero_rows(result) - _share_of_zero_rows(gradient)
    return max(elements, 0.0), max(rows, 0.0)


def _is_searched(value: Any) -> bool:
    """Return whether zeros of ``value`` are counted: it is a tensor of real numbers, and not a small one."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dim() > 0
        and value.numel() >= _LEAST_GRADIENT
    )


def _share_of_zero_rows(values: Tensor) -> float:
    largest_of_rows = torch.linalg.vector_norm(values, ord=float("inf"), dim=-1)
    return _share_of_zeros(largest_of_rows)


def zero_rows_of_table(name: str, result: Tensor | None) -> float:
    """Return the share of zero rows in ``result`` if it is the gradient of an embedding table, else 0."""
    is_gradient_of_table = name == "aten::embedding_dense_backward"
    if not is_gradient_of_table or result is None:
        return 0.0
    if result.numel() < _LEAST_ELEMENTS:
        return 0.0
    return _share_of_zero_rows(result)


def _share_of_zeros(values: Tensor) -> float:
    """Return the share of ``values`` that are zero."""
    # not in bfloat16, whose sums of ones end at 256
    dtype = torch.promote_types(values.dtype, torch.float32)
    return float((values == 0).to(dtype).mean())
