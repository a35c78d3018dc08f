"""Sums the bits of tensors, which shows changes that torch does not count, such as those through ``Tensor.data``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from lm_profiler.torch_names import NO_FUNCTION_MODES, NO_MODES


def checksum_of(tensor: Tensor) -> int | None:
    """Return the sum of all bits of the storage of ``tensor``; None if it cannot be read now.

    It is as fast as memory if the bytes fill whole integers of 64 bits; smaller ones take up to 50 times as long.
    """
    with _without_modes():
        return int(_sum_of_bits(tensor)) if _is_readable(tensor) else None


def weights_checksum(module: nn.Module) -> tuple[int, ...] | None:
    """Return the checksum of each storage with weights or buffers of ``module``; None if one cannot be read now.

    The checksums of a device are fetched together, so the host waits for each device once.
    """
    all_tensors = [*module.parameters(), *module.buffers()]
    tensors: dict[int, Tensor] = {}  # one of each storage, by the storage's address
    sums_by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    with _without_modes():
        for tensor in all_tensors:
            if not _is_readable(tensor):
                return None
            tensors.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        for tensor in tensors.values():
            sums_by_device[tensor.device].append(_sum_of_bits(tensor))
        checksums: list[int] = []
        for sums in sums_by_device.values():
            checksums += torch.stack(sums).tolist()
    return tuple(checksums)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of the integers, shape (), that the bytes of the storage of ``tensor`` make."""
    storage = tensor.untyped_storage()
    fills_integers = storage.nbytes() % torch.int64.itemsize == 0
    dtype = torch.int64 if fills_integers else torch.int8
    elements = torch.empty(0, dtype=dtype, device=tensor.device)
    elements.set_(storage)
    return elements.sum(dtype=torch.int64)


@contextmanager
def _without_modes() -> Iterator[None]:
    """In this context no mode, of the program or of ours, observes what is read or computed."""
    with NO_FUNCTION_MODES.find_or(nullcontext)(), NO_MODES.find_or(nullcontext)():
        yield


def _is_readable(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has its elements in its own storage, and they can be fetched now.

    A subclass of Tensor may have them elsewhere, and tensors within ``torch.func.vmap`` or ``grad`` have no storage.
    While the device records a graph, nothing can be fetched from it.
    """
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
    if not is_plain or tensor.layout is not torch.strided:
        return False
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True
