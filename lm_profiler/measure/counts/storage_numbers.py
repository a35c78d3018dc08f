"""Numbers the storages of tensors, so that calls of operators can name what they read and write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import Tensor


class StorageNumbers:
    """Numbers storages without keeping them alive.

    A new storage gets a new number, even if it has the identity of a freed one.
    """

    def __init__(self) -> None:
        # by the identity of a storage: a weak reference to it, and its number
        self._numbers: dict[int, tuple[ref[Any], int]] = {}
        self._count = 0

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of the storage of ``tensor``."""
        storage = tensor.untyped_storage()
        entry = self._numbers.get(id(storage))
        if entry is not None:
            reference, number = entry
            if reference() is storage:
                return number
        self._count += 1
        self._numbers[id(storage)] = (ref(storage), self._count)
        return self._count

    def of_all(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers of the storages of ``tensors``."""
        return {self.number_of(tensor) for tensor in tensors}

    def alive(self) -> set[int]:
        """Return the numbers of the storages that still exist."""
        return {
            number
            for reference, number in self._numbers.values()
            if reference() is not None
        }
