"""Sums the bits of tensors, which shows changes that torch does not count, such as those through ``Tensor.data``."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def checksum_of(tensor: Tensor) -> int | None:
    """Return the sum of all bits of the storage of ``tensor``; None if it cannot be read.

    It is as fast as memory if the bytes fill whole integers of 64 bits; smaller ones take up to 50 times as long.
    """
    if not _is_readable(tensor):
        return None
    storage = tensor.untyped_storage()
    fills_integers = storage.nbytes() % torch.int64.itemsize == 0
    dtype = torch.int64 if fills_integers else torch.int8
    elements = torch.empty(0, dtype=dtype, device=tensor.device)
    elements.set_(storage)
    return int(elements.sum())


def weights_checksum(module: nn.Module) -> tuple[int | None, ...] | None:
    """Return the checksum of each storage with weights of ``module``; None if one of them cannot be read."""
    checksums: dict[int, int | None] = {}  # by the address of the storage
    for parameter in module.parameters():
        if not _is_readable(parameter):
            return None
        address = parameter.untyped_storage().data_ptr()
        if address not in checksums:
            checksums[address] = checksum_of(parameter)
    return tuple(checksums.values())


def _is_readable(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has its elements in its own storage.

    A subclass of Tensor may have them elsewhere, and tensors within ``torch.func.vmap`` or ``grad`` have no storage.
    """
    is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
    if not is_plain or tensor.layout is not torch.strided:
        return False
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True
