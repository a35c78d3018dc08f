"""The bytes that tensors would hold on CUDA in the blocks of torch's allocator, and cuBLAS's workspaces."""

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
    """Counts whole blocks instead of sizes, and a workspace for each thread that runs matmuls.

    Args:
        gpu: compute capability of the GPU.
    """

    def __init__(self, gpu: tuple[int, int]) -> None:
        super().__init__()
        self._cublas = _configured_bytes(os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")) or _CUBLAS[gpu >= _HOPPER]
        self._blocks = Blocks()
        self._workspaces: set[tuple[bool, int]] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _MATMULS:
            self._workspace(self._cublas)
            if func is torch.ops.aten.addmm.default and args[0].dim() == 1:  # cuBLASLt adds a bias
                self._workspace(_CUBLAS_LT)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def begin(self) -> None:
        """Start with an empty device: modules are made on the host."""
        self._held, self._blocks, self._now = {}, Blocks(), 0

    def peaks(self) -> Peaks:
        """Return the peak of allocated bytes and the reserved bytes."""
        return self._peak, self._blocks.reserved, None

    @property
    def workspaces(self) -> int:
        """Bytes of all workspaces of cuBLAS and cuBLASLt."""
        return sum(size for _, size in self._workspaces)

    def give_back_unused(self) -> None:
        """Empty the allocator's cache."""
        self._blocks.give_back_unused()

    def _workspace(self, size: int) -> None:
        """Allocate a workspace for this thread, unless it has one of this size."""
        # On a GPU backward runs in autograd's own thread; on these fake CPU tensors it runs in the caller's.
        key = GRAPH_TASK.find()() != -1, size
        if key not in self._workspaces:
            self._workspaces.add(key)
            self._take(size)
            if self.notes is not None:
                self.notes.made(-len(self._workspaces), size, cause="workspaces")

    def _take(self, size: int) -> Callable[[], None]:
        blocks = self._blocks
        block = blocks.take(size)
        self._rise(blocks.given - self._now)
        return partial(self._give_back, blocks, block)

    def _give_back(self, blocks: Blocks, block: MemoryBlock) -> None:
        if blocks is self._blocks:  # not a tensor from before `begin`
            blocks.give_back(block)
            self._rise(blocks.given - self._now)


def _configured_bytes(config: str) -> int:
    """Return the bytes of all buffers in ``CUBLAS_WORKSPACE_CONFIG``, ``:KiB:count`` each; 0 where it names none."""
    return sum(int(kib) * int(count) << 10 for kib, count in re.findall(":([0-9]+):([0-9]+)", config))


_HOPPER = (9, 0)

# Bytes of the workspace that each thread and stream has for cuBLAS, before Hopper and from Hopper on, and for cuBLASLt
# (ATen/cuda/CublasHandlePool.cpp). Not imitated: torch 2.11 still gives Blackwell the smaller one.
_CUBLAS, _CUBLAS_LT = ((8 << 20) + (128 << 10), 32 << 20), 1 << 20

_MATMULS = {
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot")
}
