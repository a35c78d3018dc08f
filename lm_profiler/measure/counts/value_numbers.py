"""Numbers the values that the calls of a step compute: equal numbers mean equal values.

This is the value numbering of compilers. No values are compared: two calls compute the same if they call the same
operator with arguments of equal numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lm_profiler.measure.counts.call_tensors import is_dense
from lm_profiler.measure.counts.storage_numbers import StorageNumbers

# types of arguments whose values are equal if Python's ``==`` says so
_PLAIN_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class ValueNumbers:
    """Gives a number to each content of a storage, and to each result that a call computes from numbered contents."""

    def __init__(self, storages: StorageNumbers) -> None:
        self._storages = storages
        # what is looked up for the first time gets a new number
        self._number_by_key = defaultdict[Any, int](self._new_number)
        # the number of a storage to the number of its present content
        self._contents = defaultdict[int, int](self._new_number)
        self._constants: set[int] = set()  # contents that are the same in each step
        self._count = 0

    def note_constant(self, storage: int) -> None:
        """Note that ``storage`` begins each step with the same content."""
        self._constants.add(self._contents[storage])

    def number_of(self, tensor: Tensor) -> int:
        """Return a number that identifies the present values of ``tensor``."""
        content = self._contents[self._storages.number_of(tensor)]
        return self._number_by_key[_key_of_tensor(tensor, content)]

    def forget(self, storages: Iterable[int]) -> None:
        """Note that code that is not recorded may have changed the content of ``storages``."""
        for storage in storages:
            self._contents[storage] = self._new_number()

    def add_call(
        self,
        operator: Any,
        arguments: Iterable[Any],
        written: Sequence[int],
        is_deterministic: bool,
    ) -> tuple[int | None, bool]:
        """Number what a call computes, and note the new content of the storages that it has ``written``.

        Returns:
            The number of the value, None if the value is unknown; and whether it is the same in each step.
        """
        number: int | None = None
        is_constant = False
        if is_deterministic:
            number, is_constant = self._computed_value(operator, arguments)
        value = self._new_number() if number is None else number
        for position, storage in enumerate(written):
            content = self._number_by_key[value, position]
            self._contents[storage] = content
            if is_constant:
                self._constants.add(content)
        return number, is_constant

    def _computed_value(
        self, operator: Any, arguments: Iterable[Any]
    ) -> tuple[int | None, bool]:
        """Return the number of what ``operator`` computes, and whether all ``arguments`` are the same in each step.

        The number is None if an argument cannot be compared.
        """
        key: list[Any] = [operator]
        is_constant = True
        for argument in arguments:
            if is_dense(argument):
                content = self._contents[self._storages.number_of(argument)]
                is_constant = is_constant and content in self._constants
                key.append(_key_of_tensor(argument, content))
            elif isinstance(argument, _PLAIN_TYPES):
                # with its type, because True equals 1 in Python
                key.append((type(argument), argument))
            else:
                return None, False
        return self._number_by_key[tuple(key)], is_constant

    def _new_number(self) -> int:
        self._count += 1
        return self._count


def _key_of_tensor(tensor: Tensor, content: int) -> tuple[Any, ...]:
    """Return what distinguishes the value of ``tensor``, a view of a storage with this ``content``."""
    return (
        content,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )
