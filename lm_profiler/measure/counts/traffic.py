"""Finds the bytes that a forward pass has to read from memory, and what it makes, operator by operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lm_profiler.torch_names import SCHEMA, storage_key, tree_leaves

# Operators that read as many rows or elements of their first tensor as indices say.
_LOOK_UPS = {"embedding", "_embedding_bag", "_embedding_bag_forward_only", "embedding_renorm_"}
_GATHERS = {"index", "index_select", "gather", "take", "_index_put_impl_"}
# operators that read a tensor's shape, and not its elements
_SHAPES_ALONE = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
}


class Regions:
    """Distinct pieces of storages. Partial overlaps count twice, but no storage counts for more than its size."""

    def __init__(self) -> None:
        self._pieces: dict[int, dict[tuple[int, int], int]] = {}
        self._whole: dict[int, int] = {}

    def add(self, tensor: Tensor, count: int | None = None) -> None:
        """Add ``count`` bytes of ``tensor``, or all of it."""
        storage = tensor.untyped_storage()
        size = tensor.numel() * tensor.element_size()
        size = size if count is None else min(count, size)
        key = storage_key(storage)
        pieces = self._pieces.setdefault(key, {})
        piece = int(tensor.storage_offset()), tensor.numel()
        pieces[piece] = max(pieces.get(piece, 0), size)
        self._whole[key] = storage.nbytes()

    def bytes_of(self) -> dict[int, int]:
        """Return the bytes of each storage, by its identity."""
        return {key: min(self._whole[key], sum(pieces.values())) for key, pieces in self._pieces.items()}


class ForwardTraffic:
    """Collects what forward passes read that they did not make (weights, inputs, buffers), and what they made.

    It sees each operator that runs. A weight counts once a pass, however often it is used; a table only with the rows
    that are looked up. Views read nothing.

    ``lost``: an error occurred, and nothing is known. ``made`` are the storages that the current or last pass made.
    Among them ``copies`` are weights and inputs in another dtype, as autocast makes them.
    """

    def __init__(self) -> None:
        self.lost = False
        self.made: set[int] = set()
        self.copies: set[int] = set()
        self._passes = self._read = 0
        self._reads = Regions()

    def begin(self) -> None:
        """Start a forward pass."""
        self._read += sum(self._reads.bytes_of().values())
        self._passes += 1
        self.made, self.copies, self._reads = set(), set(), Regions()

    def take(self) -> int | None:
        """Return the bytes read by all passes since the last call; None where a pass was not seen, or not in full."""
        self.begin()
        read = self._read if self._passes > 1 and not self.lost else None
        self._passes = self._read = 0
        return read

    def see(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note that ``operator`` ran and returned ``result``."""
        name = str(SCHEMA.of_or(operator, operator)).partition("(")[0].rpartition("::")[2].partition(".")[0]
        given, results = list(_tensors((args, kwargs))), list(_tensors(result))
        shared = {_identity(tensor) for tensor in given}
        # A view shares its input's storage, and so does an operator that writes in place; only the schema tells which.
        changes = getattr(SCHEMA.of_or(operator), "is_mutable", False)
        views = set() if changes else {_identity(tensor) for tensor in results} & shared
        from_outside = False
        for tensor in given:
            if _identity(tensor) not in self.made and _identity(tensor) not in views and name not in _SHAPES_ALONE:
                from_outside = True
                self._reads.add(tensor, self._rows(name, given, results) if tensor is given[0] else None)
        made = {_identity(tensor) for tensor in results} - shared
        self.made |= made
        self.copies -= made  # a new storage may stand where a copy did
        if name == "_to_copy" and from_outside:
            self.copies |= made

    @staticmethod
    def _rows(name: str, given: list[Tensor], results: list[Tensor]) -> int | None:
        """Return the bytes that a look-up reads of its table, the first of ``given``; None where it reads all of it."""
        table = given[0]
        if name in _LOOK_UPS and len(given) > 1:
            return given[1].numel() * table.shape[-1] * table.element_size()
        return results[0].numel() * table.element_size() if name in _GATHERS and results else None


def _tensors(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor) and x.layout is torch.strided)


def _identity(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())
