"""Tells whether two values have the same content, without keeping the values or calling code of the program."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lm_profiler.measure.boundary import comes_from_outside
from lm_profiler.torch_names import NO_FUNCTION_MODES, NO_MODES

# A larger tensor has no known content: reading 32 MiB takes some 30 ms.
_MOST_BYTES = 32 << 20
_MOST_ITEMS = 20_000  # in all containers of a value
_MOST_NESTED = 4  # containers within each other

_TENSORS = (Tensor, nn.Parameter)
# classes of which the text is the content
_NUMBERS = (bool, float, complex, type(None), torch.dtype, torch.device)
# NumPy's own numbers, texts and dates; records are left out, because they may contain objects
_NUMPY_SCALARS = {*np.sctypeDict.values()} - {np.object_, np.void}


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
        with without_function_modes():
            reader.add(value, depth=0)
    except _UnknownContent:
        return None
    except Exception as error:  # from an image that is closed, for example
        if comes_from_outside(error):
            raise
        return None
    return Content(reader.digest(), reader.elements)


def without_function_modes() -> AbstractContextManager[None]:
    """Return a context in which the program's own function modes do not observe what is read of a tensor."""
    context: AbstractContextManager[None] = NO_FUNCTION_MODES.find_or(nullcontext)()
    return context


def is_one_of(kind: type, kinds: Iterable[type]) -> bool:
    """Return whether ``kind`` is in ``kinds``; ``in`` may call code of a program that has a metaclass."""
    return any(kind is other for other in kinds)


def image_class() -> type | None:
    """Return Pillow's class of images in memory; None if Pillow is not in use.

    Images of classes that inherit from it may be those of files, which are read when they are first used.
    """
    return getattr(sys.modules.get("PIL.Image"), "Image", None)


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
        if is_one_of(kind, _TENSORS):
            self._add_tensor(value)
        elif kind is np.ndarray:
            self._add_array(value)
        elif kind is str:
            self._check_size(len(value))
            # an unpaired surrogate is no error
            self._add_bytes(kind, value.encode(errors="surrogatepass"), len(value))
        elif kind is bytes:
            self._add_bytes(kind, value, len(value))
        elif kind is bytearray:
            self._check_size(len(value))
            # a copy: while the hash reads it, other threads could not change its length
            self._add_bytes(kind, bytes(value), len(value))
        elif kind is int:
            # there is no limit to the length of its hexadecimal digits
            self._add_bytes(kind, hex(value).encode(), 1)
        elif is_one_of(kind, _NUMBERS):
            self._add_bytes(kind, repr(value).encode(), 1)
        elif issubclass(kind, tuple) and not kind.__dictoffset__:
            # the class of a tuple with names, too, but none whose objects have attributes
            self._check_length(tuple.__len__(value))
            self._add_items(kind, list(tuple.__iter__(value)), depth)
        elif kind is list:
            self._check_length(len(value))
            self._add_items(kind, list(value), depth)
        elif kind is dict:
            self._check_length(2 * len(value))
            items: list[Any] = []
            for key, item in list(value.items()):
                items += (key, item)
            self._add_items(kind, items, depth)
        elif kind is slice:
            self._add_items(kind, [value.start, value.stop, value.step], depth)
        elif kind is image_class():
            self._add_image(value)
        elif is_one_of(kind, _NUMPY_SCALARS):
            self._add_array(np.asarray(value))
        else:
            raise _UnknownContent

    def _check_length(self, length: int) -> None:
        """Refuse a container of more items than may be read, before they are copied."""
        if length > self._items_left:
            raise _UnknownContent

    def _check_size(self, size: int) -> None:
        """Refuse a value of more bytes than may be read, before they are copied."""
        if size > self._bytes_left:
            raise _UnknownContent

    def _add_items(self, kind: type, items: list[Any], depth: int) -> None:
        self._hash.update(f"{kind.__qualname__} {len(items)};".encode())
        for item in items:
            self.add(item, depth + 1)

    def _add_bytes(self, description: object, content: bytes, elements: int) -> None:
        """Add ``content``, and what makes it differ from other values with the same bytes."""
        self._check_size(len(content))
        self._bytes_left -= len(content)
        self._hash.update(f"{description} {len(content)};".encode())
        self._hash.update(content)
        self.elements += elements

    def _add_image(self, image: Any) -> None:
        width, height = image.size
        self._check_size(width * height * len(image.getbands()))
        if image.mode in ("P", "PA"):
            # its numbers stand for colours
            raise _UnknownContent
        description = (image.mode, width, height)
        self._add_bytes(description, image.tobytes(), width * height)

    def _add_array(self, array: np.ndarray[Any, Any]) -> None:
        if array.dtype.hasobject:
            raise _UnknownContent
        self._check_size(array.nbytes)
        description = (array.dtype.str, array.shape)
        self._add_bytes(description, array.tobytes(), array.size)

    def _add_tensor(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            # reading it would wait for the device
            raise _UnknownContent
        if tensor.is_quantized or tensor.is_nested:
            # its bytes do not tell its numbers, or its shape
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
        self._check_size(tensor.numel() * item_bytes)
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
