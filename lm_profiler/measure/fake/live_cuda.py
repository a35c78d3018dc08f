"""The bytes that tensors hold on CUDA, as torch's allocator gives them out, with what its libraries take through it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lm_profiler.measure.fake.blocks import Blocks, MemoryBlock
from lm_profiler.measure.fake.live import LiveBytes
from lm_profiler.record.steps import Peaks
from lm_profiler.torch_names import GRAPH_TASK


class LiveCudaBytes(LiveBytes):
    """Blocks in the place of sizes; and a workspace of each thread that multiplies.

    Args:
        gpu: compute capability of the GPU.
    """

    def __init__(self, gpu: tuple[int, int]) -> None:
        super().__init__()
        self._cublas = _chosen(os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")) or _CUBLAS[gpu >= _HOPPER]
        self._blocks = Blocks()
        self._workspaces: set[tuple[bool, int]] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS:
            self._workspace(self._cublas)
            if func is torch.ops.aten.addmm.default and args[0].dim() == 1:  # a bias is added by cuBLASLt
                self._workspace(_CUBLAS_LT)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def begin(self) -> None:
        """Nothing was on the device until now: modules are made on the host."""
        self._held, self._blocks, self._now = {}, Blocks(), 0

    def peaks(self) -> Peaks:
        """What was given out at most, and what the allocator keeps of the device."""
        return self._peak, self._blocks.reserved, None

    @property
    def workspaces(self) -> int:
        return sum(size for _, size in self._workspaces)

    def give_back_unused(self) -> None:
        self._blocks.give_back_unused()

    def _workspace(self, size: int) -> None:
        """Of the caller's thread, or of autograd's own, on which all of backward is."""
        key = GRAPH_TASK.find()() != -1, size
        if key not in self._workspaces:
            self._workspaces.add(key)
            self._take(size)

    def _take(self, size: int) -> Callable[[], None]:
        blocks = self._blocks
        block = blocks.take(size)
        self._rise(blocks.given - self._now)
        return partial(self._give_back, blocks, block)

    def _give_back(self, blocks: Blocks, block: MemoryBlock) -> None:
        if blocks is self._blocks:
            blocks.give_back(block)
            self._rise(blocks.given - self._now)


def _chosen(config: str) -> int:
    """Bytes of all buffers of ``CUBLAS_WORKSPACE_CONFIG``, ``:KiB:count`` each; 0 where it names none."""
    return sum(int(kib) * int(count) << 10 for kib, count in re.findall(":([0-9]+):([0-9]+)", config))


_HOPPER = (9, 0)

_CUBLAS, _CUBLAS_LT = ((8 << 20) + (128 << 10), 32 << 20), 1 << 20
"""What torch gives cuBLAS, before Hopper and from it on, and cuBLASLt to work in, by thread and stream
(ATen/cuda/CublasHandlePool.cpp). Torch 2.11 gives Blackwell the smaller one still."""

_PRODUCTS = {
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot")
}
