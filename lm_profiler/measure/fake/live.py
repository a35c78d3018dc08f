"""The bytes that tensors hold, counted as storages are made and freed: on the CPU, or as CUDA's allocator would."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from lm_profiler.measure.memory.causes import pieces
from lm_profiler.measure.memory.peaks import Probe
from lm_profiler.measure.memory.storage_notes import NOWHERE, Site, StorageNotes
from lm_profiler.record.steps import Peaks
from lm_profiler.torch_names import DISPATCH_MODE, GRAPH_TASK, tree_leaves

_aten = torch.ops.aten
_CONVOLUTIONS = {_aten.convolution.default, _aten.convolution_backward.default}
_MATMULS = {getattr(_aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot")}

_HOPPER = (9, 0)

# Bytes of the workspace that each thread and stream has for cuBLAS, before Hopper and from Hopper on
# (ATen/cuda/CublasHandlePool.cpp of torch 2.11). Not imitated: it still gives Blackwell the smaller one,
# CUBLAS_WORKSPACE_CONFIG may say otherwise, and cuBLASLt has a MiB.
_CUBLAS = ((8 << 20) + (128 << 10), 32 << 20)


class Uncounted(Exception):
    """Raised if a step's tensors do not show the memory that it holds; the message says why."""


class LiveBytes(Probe, DISPATCH_MODE.as_base()):  # type: ignore[misc]  # a class that is looked up at run time
    """Counts each storage from the operator that made it until it is freed, as the probe of tensors without memory.

    Workspaces that an operator allocates and frees inside itself are not seen; nor are tensors made before this mode
    was entered, unless they are handed to ``see``.

    Args:
        gpu: compute capability of a GPU, whose blocks and cuBLAS workspaces then count; None for the CPU.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # so that torch does not import its compiler to keep it away

    def __init__(self, gpu: tuple[int, int] | None = None) -> None:
        super().__init__()
        self._gpu = gpu
        self._held: dict[int, tuple[ref[Any], MemoryBlock]] = {}
        self._blocks = None if gpu is None else Blocks()
        self._workspaces: dict[bool, int] = {}  # bytes by thread: True is backward's
        self.now = self._peak = 0
        # bytes of storages whose size was changed, as FSDP does to gather and to free
        self._gathered: dict[int, int] = {}
        self.most_gathered = 0  # the most of these bytes at one time
        self.notes: StorageNotes | None = None  # hears of every storage while set
        # returns where an operator is called from; asked only for notes
        self.site: Callable[[Any], Site] = lambda func: Site(str(func))
        self._site = NOWHERE
        # Upper bound of bytes held during a convolution: on the CPU it copies its inputs and its result
        # into its own padded layouts.
        self.perhaps = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten.mkldnn_rnn_layer.default:
            raise NotImplementedError("what the CPU's kernel of an LSTM keeps for backward is unknown")
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor takes itself apart: the operators on its local tensors come here
        if self._gpu is not None and func in _MATMULS:
            self._workspace(_CUBLAS[self._gpu >= _HOPPER])
        if self.notes is not None and getattr(func, "namespace", "") != "prim":  # ``prim`` only queries tensors
            self._site = self.site(func)
        made = func(*args, **(kwargs or {}))
        self.see(made)
        self._site = NOWHERE
        if func in _CONVOLUTIONS:
            given = sum(leaf.nbytes for leaf in tree_leaves((args, made)) if isinstance(leaf, Tensor))
            self.perhaps = max(self.perhaps, self.now + 2 * given)
        return made

    def begin(self) -> None:
        """Start counting a run. A device starts empty, for modules are made on the host."""
        if self._blocks is not None:
            self._held, self._blocks, self.now = {}, Blocks(), 0

    def take_notes(self) -> StorageNotes:
        """Have a step noted from here on, until ``notes`` is None again; return the notes."""
        sizes = {key: block.size for key, (_, block) in self._held.items()}
        self.notes = StorageNotes(sizes, self.now - sum(sizes.values()))
        self.most_gathered = sum(self._gathered.values())
        return self.notes

    def give_back_unused(self) -> None:
        """Empty the allocator's cache; nothing to do where it has none."""
        if self._blocks is not None:
            self._blocks.give_back_unused()

    def see(self, value: Any) -> None:
        """Count the storages of all tensors in ``value`` that are not counted yet."""
        for leaf in tree_leaves(value):
            # A DTensor uses a plain meta tensor to infer the shape of all shards together.
            if isinstance(leaf, Tensor) and not (type(leaf) is Tensor and leaf.is_meta):
                for piece in pieces(leaf):
                    self._add(piece.untyped_storage(), piece)

    def follow_resizes(self) -> None:
        """Count storages again when their size changes: FSDP gathers and frees its parameters that way.

        Only for a separate process: it replaces a method of torch.
        """
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            made = resize(storage, size)
            if id(storage) in self._held:
                self._give_back(id(storage))
            self._gathered[id(storage)] = size
            self.most_gathered = max(self.most_gathered, sum(self._gathered.values()))
            self._site = Site("gathered weights")
            self._add(storage)
            self._site = NOWHERE
            return made

        setattr(torch.UntypedStorage, resize.__name__, resized)

    def _add(self, storage: torch.UntypedStorage, tensor: Tensor | None = None) -> None:
        key = id(storage)
        if key in self._held or not storage.nbytes():
            return
        block = self._take(storage.nbytes())
        # A weak reference: the counter must not keep alive what it counts.
        self._held[key] = ref(storage, lambda _: self._give_back(key)), block
        if self.notes is not None:
            self.notes.note_made(key, block.size, self._site, tensor)

    def _take(self, size: int) -> MemoryBlock:
        block = MemoryBlock(size) if self._blocks is None else self._blocks.take(size)
        self.now += block.size
        self._peak = max(self._peak, self.now)
        return block

    def _give_back(self, key: int) -> None:
        _, block = self._held.pop(key)
        self.now -= block.size
        if self._blocks is not None:
            self._blocks.give_back(block)
        if self.notes is not None:
            self.notes.note_freed(key)

    def _workspace(self, size: int) -> None:
        """Allocate a workspace for this thread, unless it has one."""
        # On a GPU backward runs in autograd's own thread; on these fake CPU tensors it runs in the caller's.
        thread = GRAPH_TASK.find()() != -1
        if thread not in self._workspaces:
            self._workspaces[thread] = size
            self._take(size)
            if self.notes is not None:
                self.notes.note_made(-1 - thread, size, cause="workspaces")

    @property
    def workspaces(self) -> int | None:
        """Bytes of workspaces that libraries hold for good; None if none come from the allocator."""
        return None if self._gpu is None else sum(self._workspaces.values())

    def reset(self) -> None:
        """Restart the peak at the bytes held now."""
        self._peak = self.now

    def peaks(self) -> Peaks:
        """Return the peak since the last reset, and what a GPU's allocator has reserved."""
        return self._peak, None if self._blocks is None else self._blocks.reserved, None

    def held(self) -> int | None:
        """Return the bytes that tensors hold; None on the CPU, whose allocator does not report them."""
        return None if self._gpu is None else self.now


# -- CUDA's caching allocator ------------------------------------------------------------------------------------------

# The rules of c10/cuda/CUDACachingAllocator.cpp of torch 2.11, on one stream and without any option of
# ``PYTORCH_ALLOC_CONF``. What it reserves is up to 1.36 times what it gives out, where activations are recomputed.

MIN_BLOCK = 512  # ``kMinBlockSize``, in bytes: sizes are rounded up to a multiple of it
_SMALL, _SMALL_SEGMENT = 1 << 20, 2 << 20  # ``kSmallSize``, ``kSmallBuffer``
# ``kLargeBuffer``, ``kMinLargeAlloc``, ``kRoundLarge``
_LARGE_SEGMENT, _LEAST_OWN_SEGMENT, _ROUND_SEGMENT = 20 << 20, 10 << 20, 2 << 20


class MemoryBlock(NamedTuple):
    size: int
    address: int = 0  # among free blocks of equal size the one with the lowest address is taken
    small: bool = False


class Blocks:
    """The blocks of one device: ``given`` are the bytes in use, ``reserved`` those of all segments."""

    def __init__(self) -> None:
        self.given = self.reserved = 0
        # the free blocks, the smallest first. Small and large requests have separate pools: a small one never
        # splits a large block.
        self._free: dict[bool, list[MemoryBlock]] = {True: [], False: []}
        self._begins: dict[int, MemoryBlock] = {}  # the free blocks by the address at which they begin,
        self._ends: dict[int, MemoryBlock] = {}  # and by the address at which they end
        self._segments: dict[int, int] = {}  # bytes by address
        self._numbers = count()

    def take(self, size: int) -> MemoryBlock:
        """Take the smallest free block that is large enough, or a new segment, and split off the rest."""
        size = _rounded_up(max(size, 1), MIN_BLOCK)
        small = size <= _SMALL
        free = self._free[small]
        at = bisect_left(free, (size,))
        block = self._without(free[at]) if at < len(free) else self._segment(size, small)
        left = block.size - size
        if left >= MIN_BLOCK if small else left > _SMALL:  # ``should_split``
            self._put(MemoryBlock(left, block.address + size, small))
            block = block._replace(size=size)
        self.given += block.size
        return block

    def give_back(self, block: MemoryBlock) -> None:
        self.given -= block.size
        if (before := self._ends.get(block.address)) is not None:
            self._without(before)
            block = block._replace(address=before.address, size=before.size + block.size)
        if (after := self._begins.get(block.address + block.size)) is not None:
            self._without(after)
            block = block._replace(size=block.size + after.size)
        self._put(block)

    def give_back_unused(self) -> None:
        """Return unused segments to the device, as ``torch.cuda.empty_cache`` does."""
        for block in list(self._begins.values()):
            if self._segments.get(block.address) == block.size:
                self._without(block)
                self.reserved -= self._segments.pop(block.address)

    def _segment(self, size: int, small: bool) -> MemoryBlock:
        least = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        whole = least if small or size < _LEAST_OWN_SEGMENT else _rounded_up(size, _ROUND_SEGMENT)
        self.reserved += whole
        address = next(self._numbers) << 40  # leaves room for a TiB: segments never touch
        self._segments[address] = whole
        return MemoryBlock(whole, address, small)

    def _put(self, block: MemoryBlock) -> None:
        insort(self._free[block.small], block)
        self._begins[block.address] = self._ends[block.address + block.size] = block

    def _without(self, block: MemoryBlock) -> MemoryBlock:
        free = self._free[block.small]
        del free[bisect_left(free, block)], self._begins[block.address], self._ends[block.address + block.size]
        return block


def _rounded_up(size: int, to: int) -> int:
    return size + -size % to
