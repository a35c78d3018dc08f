"""Computes the least bytes that an operator moves, and its FLOPs, from its name and its inputs.

A trace has no shapes of results. They are derived from what the operator does; if that is unknown, only the bytes that
it reads count. Each input and the result count once.
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
    "double": 8,
    "long": 8,
    "long int": 8,
    "long long": 8,
    "c10::complex<float>": 8,
    "float": 4,
    "int": 4,
    "c10::complex<c10::Half>": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "short": 2,
    "short int": 2,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2fnuz": 1,
    "c10::Float8_e8m0fnu": 1,
    "c10::complex<double>": 16,
}
_DTYPES = {
    "double": "float64",
    "float": "float32",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
}
_NO_TENSORS = frozenset({"", "Scalar", "ScalarList", "GenericList"})

_BIASED = frozenset({"addmm", "baddbmm", "_addmm_activation"})
_PRODUCTS = frozenset({"mm", "bmm", "_scaled_mm", "_int_mm"}) | _BIASED


class Operand(NamedTuple):
    """A tensor argument, or a list of tensors, which has no shape."""

    shape: Sequence[int]
    elements: int
    item_bytes: int | None  # bytes of an element; None means unknown
    dtype: str | None = None

    @property
    def bytes(self) -> int:
        """The bytes; 0 if unknown."""
        return self.elements * (self.item_bytes or 0)


_UNKNOWN_OPERAND = Operand(shape=(), elements=0, item_bytes=None)


class TensorListFacts(NamedTuple):
    """Facts about a list of tensors that a trace does not show: their type and, for more than 30 tensors, their
    elements."""

    elements: int | None = None
    item_bytes: int | None = None


UNKNOWN_LISTS = TensorListFacts()


def operands(inputs: Inputs, lists: TensorListFacts = UNKNOWN_LISTS) -> list[Operand]:
    """Return the tensors among the arguments, in order; ``lists`` describes the lists of tensors among them."""
    tensors = []
    lists_are_cut = is_cut(inputs)
    for dims, type_name in zip(inputs.dims, inputs.types, strict=False):
        item_bytes = _SIZES.get(
            type_name
        )  # None for a list and for types that are no tensors
        if type_name == "TensorList":
            elements = lists.elements
            if not lists_are_cut:
                elements = sum(prod(shape) for shape in dims)
            operand = _UNKNOWN_OPERAND
            if elements is not None:
                operand = Operand((), elements, item_bytes=lists.item_bytes)
            tensors.append(operand)
        elif item_bytes is not None:
            dtype = _DTYPES.get(type_name)
            tensors.append(Operand(dims, prod(dims), item_bytes, dtype))
        elif type_name not in _NO_TENSORS:
            tensors.append(_UNKNOWN_OPERAND)
    return tensors


def is_cut(inputs: Inputs) -> bool:
    """Return whether the trace omits lists of tensors because they are too long: the first list is empty then."""
    for dims, type_name in zip(inputs.dims, inputs.types, strict=False):
        if type_name == "TensorList":
            return bool(dims == [])
    return False


# returns the bytes that an operator moves; takes its operands, and the bytes of reading all of them
_Rule = Callable[[Sequence[Operand], int], int]


def least_bytes(name: str, inputs: Inputs, lists: TensorListFacts) -> int | None:
    """Return the least bytes that one call of ``name``, an operator or a compiled kernel, moves; None if unknown."""
    tensors = operands(inputs, lists)
    if not tensors or any(tensor.item_bytes is None for tensor in tensors):
        return None
    read_bytes = sum(tensor.bytes for tensor in tensors)
    if name.startswith("triton_"):
        return read_bytes  # results are among the arguments of a compiled kernel
    base_name = re.sub(r"^aten::(_foreach_)?", "", name)
    is_of_torch = base_name != name
    rule = _BY_NAME.get(base_name) or _BY_KIND.get(operator_kind(name))
    if not is_of_torch or rule is None:
        return None
    return rule(tensors, read_bytes)


def _bytes_of_pointwise(tensors: Sequence[Operand], read_bytes: int) -> int:
    """Return the bytes of an elementwise operator, whose result has the shape to which its operands are broadcast.

    For lists, it is that of the first operand.
    """
    result_elements = tensors[0].elements
    dimensions = max(len(tensor.shape) for tensor in tensors)
    if dimensions > 0:
        result_shape = [1] * dimensions
        for tensor in tensors:
            # shapes are aligned at their last dimension
            offset = dimensions - len(tensor.shape)
            for dimension, size in enumerate(tensor.shape, offset):
                result_shape[dimension] = max(result_shape[dimension], size)
        result_elements = prod(result_shape)
    # Type promotion: tensors with dimensions take precedence over scalars, and floats over integers.
    with_dimensions = [tensor for tensor in tensors if tensor.shape] or tensors
    # only floats have a dtype here
    floats = [tensor for tensor in with_dimensions if tensor.dtype is not None]
    deciding_tensors = floats or with_dimensions
    result_item_bytes = max(tensor.item_bytes or 0 for tensor in deciding_tensors)
    return read_bytes + result_elements * result_item_bytes


def _bytes_of_lookup(tensors: Sequence[Operand], _: int) -> int:
    """Return the bytes of an embedding, which reads only the rows that it looks up, and writes a copy of them."""
    table, indices = tensors[0], tensors[-1]
    row_elements = 1
    if table.shape:
        row_elements = table.elements // max(table.shape[0], 1)
    rows_bytes = indices.elements * row_elements * (table.item_bytes or 0)
    return 2 * rows_bytes + indices.bytes


def _bytes_of_update(states: int) -> _Rule:
    """Return the rule of an optimizer with ``states`` states per parameter.

    Its first operands are the lists of parameters, of gradients, and of each state. All of them are read, and all
    except the gradients are written.
    """

    def rule(tensors: Sequence[Operand], _: int) -> int:
        """Return the bytes that an update reads and writes."""
        bytes_by_list = [tensor.bytes for tensor in tensors[: 2 + states]]
        gradients_bytes = bytes_by_list[1]
        read_bytes = sum(bytes_by_list)
        written_bytes = read_bytes - gradients_bytes
        return read_bytes + written_bytes

    return rule


# The next functions are rules. Their names state which bytes count; an operator that only reads, for example, writes
# nothing, or a result that is far smaller.


def _bytes_of_first(tensors: Sequence[Operand], _: int) -> int:
    return tensors[0].bytes


def _bytes_read(_: Sequence[Operand], read_bytes: int) -> int:
    return read_bytes


def _bytes_read_and_written(_: Sequence[Operand], read_bytes: int) -> int:
    return 2 * read_bytes


def _bytes_with_result_like_first(tensors: Sequence[Operand], read_bytes: int) -> int:
    return read_bytes + tensors[0].bytes


def _bytes_of_dropout(tensors: Sequence[Operand], read_bytes: int) -> int:
    """Return the bytes of a dropout, which also writes a mask with one byte per element."""
    return read_bytes + tensors[0].bytes + tensors[0].elements


def _bytes_of_gather(tensors: Sequence[Operand], _: int) -> int:
    """Return the bytes of a gather, which reads one element per index, and writes a copy of it."""
    source, indices = tensors[0], tensors[1]
    elements_bytes = indices.elements * (source.item_bytes or 0)
    return 2 * elements_bytes + indices.bytes


def _bytes_of_second(tensors: Sequence[Operand], _: int) -> int:
    return tensors[1].bytes


_BY_NAME: dict[str, _Rule] = {
    "fill_": _bytes_of_first,
    "zero_": _bytes_of_first,
    "uniform_": _bytes_of_first,
    "normal_": _bytes_of_first,
    "bernoulli_": _bytes_of_first,
    "exponential_": _bytes_of_first,
    "random_": _bytes_of_first,
    "copy_": _bytes_read,  # the target is an argument
    "_local_scalar_dense": _bytes_read,
    "_fused_adam_": _bytes_of_update(states=2),  # amsgrad has a third
    "_fused_adamw_": _bytes_of_update(states=2),
    "_fused_adagrad_": _bytes_of_update(states=1),
    "_fused_sgd_": _bytes_of_update(states=0),  # momentum has one
    "native_dropout": _bytes_of_dropout,
    "embedding": _bytes_of_lookup,
    "index_select": _bytes_of_lookup,
    "gather": _bytes_of_gather,
    "embedding_dense_backward": _bytes_read,
    "nll_loss_forward": _bytes_of_second,
    "nll_loss_backward": _bytes_of_second,
    "cat": _bytes_read_and_written,
    "stack": _bytes_read_and_written,
    "roll": _bytes_read_and_written,
    "flip": _bytes_read_and_written,
    "constant_pad_nd": _bytes_read_and_written,
    "split_with_sizes_copy": _bytes_read_and_written,
    "triu": _bytes_with_result_like_first,
    "tril": _bytes_with_result_like_first,
    "cumsum": _bytes_with_result_like_first,
    "cumprod": _bytes_with_result_like_first,
    "sort": _bytes_with_result_like_first,
}
_BY_KIND: dict[str, _Rule] = {
    "elementwise": _bytes_of_pointwise,
    "normalization": _bytes_with_result_like_first,
    "softmax": _bytes_with_result_like_first,
    "reduction": _bytes_read,
}


class Product(NamedTuple):
    """A product of ``batch`` pairs of matrices [m, k] and [k, n], or fused attention, which has no m, n and k."""

    flops: int
    dtype: str | None  # dtype of the factors, by torch's name; None means unknown
    batch: int = 1
    m: int = 0
    n: int = 0
    k: int = 0


def product_of(name: str, inputs: Inputs) -> Product | None:
    """Return the matrix product that the operator ``name`` computes; a multiply-add is two FLOPs. None if unknown."""
    tensors = operands(inputs)
    shapes = [tensor.shape for tensor in tensors]
    # The second tensor is a factor in any case, because at most one tensor, a bias or a gradient, precedes the factors.
    dtype = tensors[1].dtype if len(tensors) > 1 else None
    base_name = name.removeprefix("aten::").removesuffix("_")
    if "attention" in base_name:
        return _attention_product(base_name, shapes, dtype, inputs)
    # a bias comes before the factors
    factors = shapes[1:3] if base_name in _BIASED else shapes[:2]
    dimensions = [len(shape) for shape in factors]
    if base_name not in _PRODUCTS or dimensions not in ([2, 2], [3, 3]):
        return None
    factor_a, factor_b = factors
    batch = prod(factor_a[:-2])
    m, k = factor_a[-2:]
    n = factor_b[-1]
    flops = 2 * batch * m * n * k
    return Product(flops, dtype, batch=batch, m=m, n=n, k=k)


# The position of the argument for a causal mask in each operator of fused attention, by torch's schemas. It is the flag
# `is_causal`, or an integer `custom_mask_type` (`_efficient_attention_*`).
_CAUSAL_ARGUMENTS = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_cudnn_attention_backward": 14,
    "_scaled_dot_product_fused_attention_overrideable": 5,
    "_scaled_dot_product_fused_attention_overrideable_backward": 13,
    "_flash_attention_forward": 8,
    "_flash_attention_backward": 11,
    "_efficient_attention_forward": 9,
    "_efficient_attention_backward": 14,
    "_cudnn_attention_forward": 10,
    "_cudnn_attention_backward": 14,
}
# `is_causal`, or the mask types that are causal: 1 aligns the mask to the top left corner, 2 to the bottom right one
_CAUSAL_VALUES = ("True", "1", "2")


def _attention_product(
    base_name: str, shapes: Sequence[Sequence[int]], dtype: str | None, inputs: Inputs
) -> Product | None:
    """Return the FLOPs of fused attention.

    Inputs of operators called ``scaled_dot_product`` are [batch, head, time, dimension]; of others, [batch, time, head,
    dimension].
    """
    is_backward = "backward" in base_name
    # the first input of a backward operator is the gradient of attention's output
    factors = shapes[1:4] if is_backward else shapes[:3]
    if [len(shape) for shape in factors] != [4, 4, 4]:
        return None
    q, k, v = factors
    time_dimension = 2 if base_name.startswith("_scaled_dot_product") else 1
    # for each query and each key: a product of width q[3] for the score, one of width v[3] for the weighted value
    flops = 2 * prod(q[:3]) * k[time_dimension] * (q[3] + v[3])
    if is_backward:
        flops *= 2  # without the scores that a kernel computes again
    if _is_causal(base_name, inputs.values):
        flops //= 2  # fused kernels leave out the blocks that are masked
    return Product(flops, dtype)


def _is_causal(base_name: str, values: Sequence[str]) -> bool:
    """Return whether a call of fused attention has a causal mask; an unknown operator counts as having none."""
    position = _CAUSAL_ARGUMENTS.get(base_name)
    if position is None or position >= len(values):
        return False
    return values[position] in _CAUSAL_VALUES
