"""Tells whether two values have the same content, without keeping the values or calling code of the program."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lm_profiler.torch_names import NO_FUNCTION_MODES, NO_MODES

# A larger tensor has no known content: reading 32 MiB takes some 30 ms.
_MOST_BYTES = 32 << 20
_MOST_ITEMS = 20_000  # in all containers of a value
_MOST_NESTED = 4  # containers within each other

_NUMBERS = (bool, float, complex, type(None))
_DTYPES = (torch.dtype, torch.device, np.dtype)


class Content(NamedTuple):
    """The content of a value: equal for equal values, and practically never for others."""

    digest: bytes
    elements: int  # the numbers and characters that it consists of


class _UnknownContent(Exception):
    """The value, or a part of it, cannot be read without calling code of the program."""


def content_of(value: Any) -> Content | None:
    """Return the content of ``value``; None if it is unknown.

    It is known for tensors and arrays in main memory, images of Pillow, texts, bytes and numbers, and for lists, tuples
    and dictionaries of them, up to a limit of bytes and items.
    """
    reader = _Reader()
    try:
        with NO_FUNCTION_MODES.find_or(nullcontext)():
            reader.add(value, depth=0)
    except _UnknownContent:
        return None
    return Content(reader.digest(), reader.elements)


class _Reader:
    """Reads a value, part by part, into one digest."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._bytes_left = _MOST_BYTES
        self._items_left = _MOST_ITEMS
        self.elements = 0

    def digest(self) -> bytes:
        return self._hash.digest()

    def add(self, value: Any, depth: int) -> None:
        """Add ``value``, which is within ``depth`` containers."""
        self._items_left -= 1
        if depth > _MOST_NESTED or self._items_left < 0:
            raise _UnknownContent
        kind = type(value)
        if kind in (Tensor, nn.Parameter):
            self._add_tensor(value)
        elif kind is np.ndarray:
            self._add_array(value)
        elif kind is str:
            # an unpaired surrogate is no error
            self._add_bytes(kind, value.encode(errors="surrogatepass"), len(value))
        elif kind in (bytes, bytearray):
            self._add_bytes(kind, value, len(value))
        elif kind is int:
            # there is no limit to the length of its hexadecimal digits
            self._add_bytes(kind, hex(value).encode(), 1)
        elif kind in _NUMBERS or kind in _DTYPES or issubclass(kind, np.generic):
            self._add_bytes(kind, repr(value).encode(), 1)
        elif issubclass(kind, tuple):
            self._add_items(kind, list(tuple.__iter__(value)), depth)
        elif kind is list:
            self._add_items(kind, list(value), depth)
        elif kind is dict:
            items: list[Any] = []
            for key, item in list(value.items()):
                items += (key, item)
            self._add_items(kind, items, depth)
        elif kind is slice:
            self._add_items(kind, [value.start, value.stop, value.step], depth)
        elif _is_image(kind):
            description = (value.mode, *value.size)
            self._add_bytes(description, value.tobytes(), value.size[0] * value.size[1])
        else:
            raise _UnknownContent

    def _add_items(self, kind: type, items: list[Any], depth: int) -> None:
        self._hash.update(f"{kind.__qualname__} {len(items)};".encode())
        for item in items:
            self.add(item, depth + 1)

    def _add_bytes(
        self, description: object, content: bytes | bytearray, elements: int
    ) -> None:
        """Add ``content``, and what makes it differ from other values with the same bytes."""
        self._take(len(content))
        self._hash.update(f"{description} {len(content)};".encode())
        self._hash.update(content)
        self.elements += elements

    def _take(self, size: int) -> None:
        """Count ``size`` bytes, before they are read."""
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise _UnknownContent

    def _add_array(self, array: np.ndarray[Any, Any]) -> None:
        if array.dtype.hasobject or array.nbytes > self._bytes_left:
            raise _UnknownContent
        description = (array.dtype.str, array.shape)
        self._add_bytes(description, array.tobytes(), array.size)

    def _add_tensor(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            # reading it would wait for the device
            raise _UnknownContent
        if tensor.layout is torch.strided:
            self._add_strided(tensor)
            return
        if tensor.layout is not torch.sparse_coo:
            raise _UnknownContent
        with NO_MODES.find_or(nullcontext)(), torch.no_grad():
            if not tensor.is_coalesced():
                raise _UnknownContent
            indices = tensor.indices()
            values = tensor.values()
        self._hash.update(f"sparse {tuple(tensor.shape)};".encode())
        self._add_strided(indices)
        self._add_strided(values)

    def _add_strided(self, tensor: Tensor) -> None:
        """Add the elements of ``tensor``, read without an operator of torch: a program's own mode would observe it."""
        item_bytes = tensor.element_size()
        if tensor.numel() * item_bytes > self._bytes_left:
            raise _UnknownContent
        elements = np.ndarray(
            shape=tuple(tensor.shape),
            dtype=f"V{item_bytes}",
            buffer=self._memory_of(tensor),
            strides=[item_bytes * stride for stride in tensor.stride()],
        )
        description = (
            tensor.dtype,
            tuple(tensor.shape),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        self._add_bytes(description, elements.tobytes(), tensor.numel())

    def _memory_of(self, tensor: Tensor) -> bytes:
        """Return the bytes from the first to the last element of ``tensor``."""
        if not tensor.numel():
            return b""
        try:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
        except (NotImplementedError, RuntimeError):
            # within ``torch.func.vmap`` or ``grad``, for example
            raise _UnknownContent from None
        last = 0  # the distance of the last element from the first
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            last += (length - 1) * stride
        begin = int(tensor.storage_offset()) * tensor.element_size()
        size = (last + 1) * tensor.element_size()
        is_readable = address and begin + size <= storage.nbytes()
        if size > _MOST_BYTES or not is_readable:
            raise _UnknownContent
        return ctypes.string_at(address + begin, size)


def _is_image(kind: type) -> bool:
    """Return whether ``kind`` is Pillow's class of images in memory.

    Images of other classes may be those of files, which are read when they are first used.
    """
    pillow = sys.modules.get("PIL.Image")
    return kind is getattr(pillow, "Image", None)
