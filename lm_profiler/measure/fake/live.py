"""Counts the bytes that tensors hold, as storages are made and freed: on the CPU, or as CUDA's allocator would."""

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
# (ATen/cuda/CublasHandlePool.cpp of torch 2.11). Not imitated: that version still gives Blackwell the smaller one,
# CUBLAS_WORKSPACE_CONFIG may set other sizes, and cuBLASLt has a workspace of one MiB.
_CUBLAS_BYTES = (8 << 20) + (128 << 10)
_CUBLAS_HOPPER_BYTES = 32 << 20


class Uncounted(Exception):
    """Raised if a step's tensors do not show the memory that it holds; the message says why."""


class LiveBytes(Probe, DISPATCH_MODE.as_base()):  # type: ignore[misc]  # a class that is looked up at run time
    """Counts each storage from the operator that made it until it is freed: the memory probe of fake tensors.

    It does not see workspaces that an operator allocates and frees itself. Tensors that were made before this mode was
    entered count only if they are passed to ``count_storages``.

    Args:
        gpu: compute capability of a GPU, to count the blocks of its allocator and cuBLAS workspaces; None for the CPU.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # If this were True, torch would import its compiler, to exclude this mode from it.
        return False

    def __init__(self, gpu: tuple[int, int] | None = None) -> None:
        super().__init__()
        self._gpu = gpu
        # the identity of each storage that is counted now to a weak reference to it, and its block
        self._counted: dict[int, tuple[ref[Any], MemoryBlock]] = {}
        self._allocator = None if gpu is None else CachingAllocator()
        # bytes of the workspace of each thread, by whether it is the thread of backward
        self._workspaces: dict[bool, int] = {}
        self.held_bytes = 0
        self._peak_bytes = 0
        # bytes by identity of storages that were resized, as FSDP does to gather and free parameters
        self._gathered: dict[int, int] = {}
        self.most_gathered = 0  # the largest sum of ``_gathered`` at one time
        # receives every storage; None while no step is noted
        self.notes: StorageNotes | None = None
        # returns where an operator is called from; called only for notes
        self.site: Callable[[Any], Site] = _operator_alone
        self._site = NOWHERE  # the site of the operator that runs
        # An upper bound of the bytes held during a convolution: on the CPU it copies its inputs and its result into
        # padded layouts of its own.
        self.convolution_bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator ``func``, and count the storages that it makes. torch calls this for each operator."""
        if func is _aten.mkldnn_rnn_layer.default:
            raise NotImplementedError(
                "the memory that the CPU's LSTM kernel keeps for backward is unknown"
            )
        if any(hasattr(kind, "to_local") for kind in types):
            # DTensor runs the operator on its local tensors, and that arrives here again.
            return NotImplemented
        if self._gpu is not None and func in _MATMULS:
            is_hopper_or_later = self._gpu >= _HOPPER
            self._take_workspace(
                _CUBLAS_HOPPER_BYTES if is_hopper_or_later else _CUBLAS_BYTES
            )
        only_queries = getattr(func, "namespace", "") == "prim"
        if self.notes is not None and not only_queries:
            self._site = self.site(func)
        result = func(*args, **(kwargs or {}))
        self.count_storages(result)
        self._site = NOWHERE
        if func in _CONVOLUTIONS:
            self._note_convolution(args, result)
        return result

    def _note_convolution(self, args: Any, result: Any) -> None:
        """Note how many bytes a convolution may have held while it ran, with the CPU's copies in padded layouts."""
        tensors = [
            leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)
        ]
        copied_bytes = 2 * sum(tensor.nbytes for tensor in tensors)  # an upper bound
        bytes_while_running = self.held_bytes + copied_bytes
        self.convolution_bytes = max(self.convolution_bytes, bytes_while_running)

    def begin(self) -> None:
        """Start counting a run. A device starts empty, because modules are made on the host."""
        if self._allocator is not None:
            self._counted = {}
            self._allocator = CachingAllocator()
            self.held_bytes = 0

    def begin_notes(self) -> StorageNotes:
        """Note all storages from now on until the caller sets ``notes`` to None; return the notes."""
        sizes = {
            storage_id: block.size for storage_id, (_, block) in self._counted.items()
        }
        # what is held without a storage
        workspaces = self.held_bytes - sum(sizes.values())
        self.notes = StorageNotes(sizes, workspaces)
        self.most_gathered = sum(self._gathered.values())
        return self.notes

    def empty_cache(self) -> None:
        """Empty the allocator's cache, if it has one."""
        if self._allocator is not None:
            self._allocator.empty_cache()

    def count_storages(self, value: Any) -> None:
        """Count the storages of all tensors in ``value`` that are not counted yet."""
        for leaf in tree_leaves(value):
            if not isinstance(leaf, Tensor):
                continue
            # DTensor uses plain meta tensors to infer the shape of all shards together; they hold no memory.
            is_for_shapes = type(leaf) is Tensor and leaf.is_meta
            if not is_for_shapes:
                for piece in plain_tensors_of(leaf):
                    self._start_counting(piece.untyped_storage(), piece)

    def follow_resizes(self) -> None:
        """Count storages anew when their size changes: FSDP gathers and frees its parameters that way.

        This replaces a method of torch, so it is only for a separate process.
        """
        resize = torch.UntypedStorage.resize_

        def counting_resize(storage: torch.UntypedStorage, size: int) -> Any:
            """Resize a storage, and count it with its new size as memory of gathered weights."""
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
        # A weak reference, so that the counter does not keep the storage alive.
        reference = ref(storage, lambda _: self._stop_counting(storage_id))
        self._counted[storage_id] = (reference, block)
        if self.notes is not None:
            self.notes.note_made(storage_id, block.size, self._site, tensor)

    def _allocate(self, size: int) -> MemoryBlock:
        """Return a block of ``size`` bytes, rounded up if an allocator is imitated."""
        block = MemoryBlock(size)
        if self._allocator is not None:
            block = self._allocator.allocate(size)
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
            identity = -2 if is_backward else -1  # identities of storages are positive
            self.notes.note_made(identity, size, cause="workspaces")

    @property
    def workspaces(self) -> int | None:
        """Bytes of workspaces that libraries hold permanently; None on the CPU, which has none."""
        if self._gpu is None:
            return None
        return sum(self._workspaces.values())

    def reset(self) -> None:
        """Restart the peak at the bytes held now."""
        self._peak_bytes = self.held_bytes

    def peaks(self) -> Peaks:
        """Return the peak since the last reset, the bytes that a GPU's allocator has reserved, and None (resident)."""
        reserved_bytes: int | None = None
        if self._allocator is not None:
            reserved_bytes = self._allocator.reserved_bytes
        return self._peak_bytes, reserved_bytes, None

    def held(self) -> int | None:
        """Return the bytes that tensors hold; None on the CPU, whose allocator does not report them."""
        return None if self._gpu is None else self.held_bytes


def _operator_alone(func: Any) -> Site:
    return Site(str(func))


# -- CUDA's caching allocator ------------------------------------------------------------------------------------------

# The rules of c10/cuda/CUDACachingAllocator.cpp of torch 2.11, on one stream and without options of
# ``PYTORCH_ALLOC_CONF``. It reserves up to 1.36 times the bytes that are in use, if activations are recomputed.

MIN_BLOCK = 512  # ``kMinBlockSize``, in bytes: sizes are rounded up to a multiple of it
_SMALL_SIZE = 1 << 20  # ``kSmallSize``: the largest request of the pool of small blocks
_SMALL_SEGMENT = 2 << 20  # ``kSmallBuffer``
_LARGE_SEGMENT = 20 << 20  # ``kLargeBuffer``
# ``kMinLargeAlloc``: a request of this size has a segment of its own
_LEAST_OWN_SEGMENT = 10 << 20
_ROUND_SEGMENT = 2 << 20  # ``kRoundLarge``


class MemoryBlock(NamedTuple):
    """A block of a segment. Blocks are ordered by size, and blocks of equal size by address."""

    size: int
    address: int = 0
    is_small: bool = False  # whether it is in the pool for small requests


class CachingAllocator:
    """The free blocks and the segments of one device."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.reserved_bytes = 0  # the bytes of all segments
        # The free blocks in order, by ``is_small``: small and large requests have separate pools, so that a small
        # request never splits a large block.
        self._free_blocks: dict[bool, list[MemoryBlock]] = {True: [], False: []}
        # free blocks by the address at which they begin, and by the address at which they end
        self._free_by_begin: dict[int, MemoryBlock] = {}
        self._free_by_end: dict[int, MemoryBlock] = {}
        self._segments: dict[int, int] = {}  # address to bytes
        self._segment_numbers = count()

    def allocate(self, size: int) -> MemoryBlock:
        """Take the smallest free block that is large enough, or a new segment, and split off the rest."""
        size = _rounded_up(max(size, 1), MIN_BLOCK)
        is_small = size <= _SMALL_SIZE
        free_blocks = self._free_blocks[is_small]
        # ordered by size
        index = bisect_left(free_blocks, (size,))
        if index < len(free_blocks):
            block = free_blocks[index]
            self._remove_free(block)
        else:
            block = self._new_segment(size, is_small)
        rest_bytes = block.size - size
        should_split = rest_bytes >= MIN_BLOCK if is_small else rest_bytes > _SMALL_SIZE
        if should_split:
            rest = MemoryBlock(rest_bytes, block.address + size, is_small)
            self._add_free(rest)
            block = block._replace(size=size)
        self.used_bytes += block.size
        return block

    def free(self, block: MemoryBlock) -> None:
        """Free ``block``, and merge it with adjacent free blocks."""
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
        # one TiB apart, so that segments are never adjacent
        address = next(self._segment_numbers) << 40
        self._segments[address] = segment_bytes
        return MemoryBlock(segment_bytes, address, is_small)

    def _add_free(self, block: MemoryBlock) -> None:
        """Add a free block to the list of its pool, and to the two tables by which it is merged with others."""
        insort(self._free_blocks[block.is_small], block)
        self._free_by_begin[block.address] = block
        self._free_by_end[block.address + block.size] = block

    def _remove_free(self, block: MemoryBlock) -> None:
        """Remove a block from where ``_add_free`` has added it: it is used again, or merged."""
        free_blocks = self._free_blocks[block.is_small]
        del free_blocks[bisect_left(free_blocks, block)]
        del self._free_by_begin[block.address]
        del self._free_by_end[block.address + block.size]


def _rounded_up(size: int, multiple: int) -> int:
    return size + -size % multiple
