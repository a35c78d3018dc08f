"""Finds the tensors in a call of an operator, and those that the call changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lm_profiler.torch_names import OPERATOR_SCHEMA, SPARSE_INDICES, SPARSE_VALUES

# operators that write all elements of their first argument without reading them
_FILLS = {"aten::zero_", "aten::fill_", "aten::copy_", "aten::_foreach_zero_"}


def leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield ``values``, with lists replaced by their elements; arguments of operators nest no deeper."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def is_dense(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def dense_tensors(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if is_dense(value)]


def has_sparse(values: Iterable[Any]) -> bool:
    return any(isinstance(value, Tensor) and not is_dense(value) for value in values)


def with_parts_of_sparse(values: Iterable[Any]) -> list[Any]:
    """Return ``values``, with sparse tensors replaced by their parts.

    The parts are what distinguishes a sparse tensor from others with the same elements, and the dense tensors that hold
    its indices and its elements. Tensors in layouts that are neither dense nor sparse, such as nested ones, remain.
    """
    parts: list[Any] = []
    for value in values:
        held = _tensors_held_by(value)
        if held:
            parts += [value.layout, *value.shape, *held]
        else:
            parts.append(value)
    return parts


def _tensors_held_by(value: Any) -> list[Tensor]:
    """Return the dense tensors that hold the indices and elements of a sparse tensor; none for other values."""
    if not isinstance(value, Tensor):
        return []
    if value.layout is torch.sparse_coo:
        # without the underscore these methods refuse tensors whose indices may repeat
        return [SPARSE_INDICES.get(value)(), SPARSE_VALUES.get(value)()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return []


def sparse_matrices(values: Iterable[Any]) -> list[Tensor]:
    """Return the matrices among ``values`` that are sparse, in the layout COO."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [
        tensor
        for tensor in tensors
        if tensor.layout is torch.sparse_coo and tensor.dim() == 2
    ]


def base_name(operator: Any) -> str:
    """Return the name of ``operator`` without its overload, such as ``aten::mm``."""
    name: str = operator.name()
    return name.partition(".")[0]


def changed_arguments(operator: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments that a call changes, according to the schema of ``operator``.

    In place of a sparse tensor, the dense tensors that hold its indices and elements are yielded.
    """
    # an argument may be passed by its position or by its name
    changed_positions, changed_names = _changed_by_schema(operator)
    for position in changed_positions:
        if position < len(args):
            yield from dense_tensors(with_parts_of_sparse(leaves([args[position]])))
    for name in changed_names:
        if name in kwargs:
            yield from dense_tensors(with_parts_of_sparse(leaves([kwargs[name]])))


@cache
def _changed_by_schema(operator: Any) -> tuple[list[int], list[str]]:
    """Return the positions and the names of the arguments that ``operator`` changes."""
    positions = []
    names = []
    for position, argument in enumerate(OPERATOR_SCHEMA.get(operator).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            positions.append(position)
            names.append(argument.name)
    return positions, names


def overwritten_inputs(operator: Any, inputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the ``inputs`` whose whole storage a call overwrites without reading it."""
    name = base_name(operator)
    if name not in _FILLS:
        return
    filled = inputs if name == "aten::_foreach_zero_" else inputs[:1]
    for tensor in filled:
        if tensor.numel() == stored_elements(tensor):
            yield tensor


def stored_elements(tensor: Tensor) -> int:
    """Return how many elements the storage of ``tensor`` holds; ``expand`` makes tensors with more elements."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()
