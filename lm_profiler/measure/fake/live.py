"""The bytes that tensors hold, counted as storages are made and freed: on the CPU, or as CUDA's allocator would."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from lm_profiler.measure.memory.causes import plain_tensors_of
from lm_profiler.measure.memory.peaks import Probe
from lm_profiler.measure.memory.storage_notes import NOWHERE, Site, StorageNotes
from lm_profiler.record.steps import Peaks
from lm_profiler.torch_names import DISPATCH_MODE, GRAPH_TASK, tree_leaves

_aten = torch.ops.aten
_CONVOLUTIONS = {_aten.convolution.default, _aten.convolution_backward.default}
_MATMULS = {
    getattr(_aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot")
}

_HOPPER = (9, 0)

# Bytes of the workspace that each thread and stream has for cuBLAS, before Hopper and from Hopper on
# (ATen/cuda/CublasHandlePool.cpp of torch 2.11). Not imitated: it still gives Blackwell the smaller one,
# CUBLAS_WORKSPACE_CONFIG may say otherwise, and cuBLASLt has a MiB.
_CUBLAS_BYTES = (8 << 20) + (128 << 10)
_CUBLAS_HOPPER_BYTES = 32 << 20


class Uncounted(Exception):
    """Raised if a step's tensors do not show the memory that it holds; the message says why."""


class LiveBytes(Probe, DISPATCH_MODE.as_base()):  # type: ignore[misc]  # a class that is looked up at run time
    """Counts each storage from the operator that made it until it is freed, as the probe of tensors without memory.

    Workspaces that an operator allocates and frees inside itself are not seen; nor are tensors made before this mode
    was entered, unless they are handed to ``count_storages``.

    Args:
        gpu: compute capability of a GPU, whose blocks and cuBLAS workspaces then count; None for the CPU.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # so that torch does not import its compiler to keep it away

    def __init__(self, gpu: tuple[int, int] | None = None) -> None:
        super().__init__()
        self._gpu = gpu
        # each storage that is counted now, as a weak reference, and its block; by the storage's identity
        self._counted: dict[int, tuple[ref[Any], MemoryBlock]] = {}
        self._allocator = None if gpu is None else CachingAllocator()
        self._workspaces: dict[bool, int] = {}  # bytes by thread: True is backward's
        self.held_bytes = 0
        self._peak_bytes = 0
        # bytes of storages whose size was changed, as FSDP does to gather and to free
        self._gathered: dict[int, int] = {}
        self.most_gathered = 0  # the most of ``_gathered`` at one time, in bytes
        self.notes: StorageNotes | None = None  # gets every storage while set
        # returns where an operator is called from; called only for notes
        self.site: Callable[[Any], Site] = _operator_alone
        self._site = NOWHERE
        # Upper bound of bytes held during a convolution: on the CPU it copies its inputs and its result
        # into its own padded layouts.
        self.convolution_bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _aten.mkldnn_rnn_layer.default:
            raise NotImplementedError(
                "the memory that the CPU's LSTM kernel keeps for backward is unknown"
            )
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor takes itself apart: the operators on its local tensors come here
        if self._gpu is not None and func in _MATMULS:
            has_large_workspace = self._gpu >= _HOPPER
            self._take_workspace(
                _CUBLAS_HOPPER_BYTES if has_large_workspace else _CUBLAS_BYTES
            )
        only_queries = getattr(func, "namespace", "") == "prim"
        if self.notes is not None and not only_queries:
            self._site = self.site(func)
        result = func(*args, **(kwargs or {}))
        self.count_storages(result)
        self._site = NOWHERE
        if func in _CONVOLUTIONS:
            tensors = [
                leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)
            ]
            copied_bytes = 2 * sum(tensor.nbytes for tensor in tensors)
            self.convolution_bytes = max(
                self.convolution_bytes, self.held_bytes + copied_bytes
            )
        return result

    def begin(self) -> None:
        """Start counting a run. A device starts empty, for modules are made on the host."""
        if self._allocator is not None:
            self._counted = {}
            self._allocator = CachingAllocator()
            self.held_bytes = 0

    def begin_notes(self) -> StorageNotes:
        """Have a step noted from here on, until ``notes`` is None again; return the notes."""
        sizes = {
            storage_id: block.size for storage_id, (_, block) in self._counted.items()
        }
        self.notes = StorageNotes(
            sizes, workspaces=self.held_bytes - sum(sizes.values())
        )
        self.most_gathered = sum(self._gathered.values())
        return self.notes

    def empty_cache(self) -> None:
        """Empty the allocator's cache; nothing to do if it has none."""
        if self._allocator is not None:
            self._allocator.empty_cache()

    def count_storages(self, value: Any) -> None:
        """Count the storages of all tensors in ``value`` that are not counted yet."""
        for leaf in tree_leaves(value):
            if not isinstance(leaf, Tensor):
                continue
            # A DTensor uses a plain meta tensor to infer the shape of all shards together.
            infers_a_shape = type(leaf) is Tensor and leaf.is_meta
            if not infers_a_shape:
                for piece in plain_tensors_of(leaf):
                    self._start_counting(piece.untyped_storage(), piece)

    def follow_resizes(self) -> None:
        """Count storages again when their size changes: FSDP gathers and frees its parameters that way.

        Only for a separate process: it replaces a method of torch.
        """
        resize = torch.UntypedStorage.resize_

        def counting_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            storage_id = id(storage)
            if storage_id in self._counted:
                self._stop_counting(storage_id)
            self._gathered[storage_id] = size
            self.most_gathered = max(self.most_gathered, sum(self._gathered.values()))
            self._site = Site("gathered weights")
            self._start_counting(storage)
            self._site = NOWHERE
            return result

        setattr(torch.UntypedStorage, resize.__name__, counting_resize)

    def _start_counting(
        self, storage: torch.UntypedStorage, tensor: Tensor | None = None
    ) -> None:
        """Count a storage until it is freed or resized, unless it is empty or counted already."""
        storage_id = id(storage)
        if storage_id in self._counted or not storage.nbytes():
            return
        block = self._allocate(storage.nbytes())
        # A weak reference: the counter must not keep alive what it counts.
        self._counted[storage_id] = (
            ref(storage, lambda _: self._stop_counting(storage_id)),
            block,
        )
        if self.notes is not None:
            self.notes.note_made(storage_id, block.size, self._site, tensor)

    def _allocate(self, size: int) -> MemoryBlock:
        """Return a block of ``size`` bytes, or of as many as the imitated allocator rounds them up to."""
        block = (
            MemoryBlock(size)
            if self._allocator is None
            else self._allocator.allocate(size)
        )
        self.held_bytes += block.size
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)
        return block

    def _stop_counting(self, storage_id: int) -> None:
        """Stop counting a storage that is freed or resized."""
        _, block = self._counted.pop(storage_id)
        self.held_bytes -= block.size
        if self._allocator is not None:
            self._allocator.free(block)
        if self.notes is not None:
            self.notes.note_freed(storage_id)

    def _take_workspace(self, size: int) -> None:
        """Allocate a workspace for this thread, unless it has one."""
        # On a GPU backward runs in autograd's own thread; on these fake CPU tensors it runs in the caller's.
        is_backward = GRAPH_TASK.find()() != -1
        if is_backward in self._workspaces:
            return
        self._workspaces[is_backward] = size
        self._allocate(size)
        if self.notes is not None:
            identity = -2 if is_backward else -1  # no storage has a negative one
            self.notes.note_made(identity, size, cause="workspaces")

    @property
    def workspaces(self) -> int | None:
        """Bytes of workspaces that libraries hold for good; None if none come from the allocator."""
        if self._gpu is None:
            return None
        return sum(self._workspaces.values())

    def reset(self) -> None:
        """Restart the peak at the bytes held now."""
        self._peak_bytes = self.held_bytes

    def peaks(self) -> Peaks:
        """Return the peak since the last reset, and what a GPU's allocator has reserved."""
        reserved_bytes = (
            None if self._allocator is None else self._allocator.reserved_bytes
        )
        return self._peak_bytes, reserved_bytes, None

    def held(self) -> int | None:
        """Return the bytes that tensors hold; None on the CPU, whose allocator does not report them."""
        return None if self._gpu is None else self.held_bytes


def _operator_alone(func: Any) -> Site:
    return Site(str(func))


# -- CUDA's caching allocator ------------------------------------------------------------------------------------------

# The rules of c10/cuda/CUDACachingAllocator.cpp of torch 2.11, on one stream and without any option of
# ``PYTORCH_ALLOC_CONF``. What it reserves is up to 1.36 times what it gives out, where activations are recomputed.

MIN_BLOCK = 512  # ``kMinBlockSize``, in bytes: sizes are rounded up to a multiple of it
_SMALL_SIZE = 1 << 20  # ``kSmallSize``: the largest request of the pool of small blocks
_SMALL_SEGMENT = 2 << 20  # ``kSmallBuffer``
_LARGE_SEGMENT = 20 << 20  # ``kLargeBuffer``
# ``kMinLargeAlloc``: a request of this size has a segment of its own
_LEAST_OWN_SEGMENT = 10 << 20
_ROUND_SEGMENT = 2 << 20  # ``kRoundLarge``


class MemoryBlock(NamedTuple):
    size: int
    # among free blocks of equal size the one with the lowest address is taken
    address: int = 0
    is_small: bool = False


class CachingAllocator:
    """The blocks of one device, those in use and those that are free."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.reserved_bytes = 0  # of all segments
        # the free blocks, the smallest first, by whether they serve small requests: small and large ones have
        # separate pools, so that a small one never splits a large block
        self._free_blocks: dict[bool, list[MemoryBlock]] = {True: [], False: []}
        # by the address at which they begin
        self._free_by_begin: dict[int, MemoryBlock] = {}
        # by the address at which they end
        self._free_by_end: dict[int, MemoryBlock] = {}
        self._segments: dict[int, int] = {}  # bytes by address
        self._segment_numbers = count()

    def allocate(self, size: int) -> MemoryBlock:
        """Take the smallest free block that is large enough, or a new segment, and split off the rest."""
        size = _rounded_up(max(size, 1), MIN_BLOCK)
        is_small = size <= _SMALL_SIZE
        free_blocks = self._free_blocks[is_small]
        # of the smallest block that is large enough
        index = bisect_left(free_blocks, (size,))
        if index < len(free_blocks):
            block = free_blocks[index]
            self._remove_free(block)
        else:
            block = self._new_segment(size, is_small)
        rest_bytes = block.size - size
        should_split = rest_bytes >= MIN_BLOCK if is_small else rest_bytes > _SMALL_SIZE
        if should_split:
            self._add_free(
                MemoryBlock(
                    size=rest_bytes, address=block.address + size, is_small=is_small
                )
            )
            block = block._replace(size=size)
        self.used_bytes += block.size
        return block

    def free(self, block: MemoryBlock) -> None:
        """Free ``block``, merged with the free blocks beside it."""
        self.used_bytes -= block.size
        lower = self._free_by_end.get(block.address)
        if lower is not None:
            self._remove_free(lower)
            block = block._replace(address=lower.address, size=lower.size + block.size)
        upper = self._free_by_begin.get(block.address + block.size)
        if upper is not None:
            self._remove_free(upper)
            block = block._replace(size=block.size + upper.size)
        self._add_free(block)

    def empty_cache(self) -> None:
        """Return unused segments to the device, as ``torch.cuda.empty_cache`` does."""
        for block in list(self._free_by_begin.values()):
            is_whole_segment = self._segments.get(block.address) == block.size
            if is_whole_segment:
                self._remove_free(block)
                self.reserved_bytes -= self._segments.pop(block.address)

    def _new_segment(self, size: int, is_small: bool) -> MemoryBlock:
        """Reserve a segment for a request of ``size`` bytes, and return it as one block."""
        if is_small:
            segment_bytes = _SMALL_SEGMENT
        elif size < _LEAST_OWN_SEGMENT:
            segment_bytes = _LARGE_SEGMENT
        else:
            segment_bytes = _rounded_up(size, _ROUND_SEGMENT)
        self.reserved_bytes += segment_bytes
        # leaves space for a TiB: segments never touch
        address = next(self._segment_numbers) << 40
        self._segments[address] = segment_bytes
        return MemoryBlock(segment_bytes, address, is_small)

    def _add_free(self, block: MemoryBlock) -> None:
        insort(self._free_blocks[block.is_small], block)
        self._free_by_begin[block.address] = block
        self._free_by_end[block.address + block.size] = block

    def _remove_free(self, block: MemoryBlock) -> None:
        free_blocks = self._free_blocks[block.is_small]
        del free_blocks[bisect_left(free_blocks, block)]
        del self._free_by_begin[block.address]
        del self._free_by_end[block.address + block.size]


def _rounded_up(size: int, multiple: int) -> int:
    return size + -size % multiple
