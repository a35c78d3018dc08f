"""The blocks and segments that torch's caching allocator on CUDA would take for a sequence of requests.

The rules are those of c10/cuda/CUDACachingAllocator.cpp of torch 2.11, on one stream and without any option of
``PYTORCH_ALLOC_CONF``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count

MIN_BLOCK = 512  # ``kMinBlockSize``, in bytes: sizes are rounded up to a multiple of it

_SMALL, _SMALL_SEGMENT = 1 << 20, 2 << 20
# ``kSmallSize``, ``kSmallBuffer``; ``kLargeBuffer``, ``kMinLargeAlloc``, ``kRoundLarge``; all in bytes
_LARGE_SEGMENT, _LEAST_OWN_SEGMENT, _ROUND_SEGMENT = 20 << 20, 10 << 20, 2 << 20


@dataclass(eq=False)
class MemoryBlock:
    """A contiguous piece of a segment, linked to its neighbours."""

    size: int
    small: bool
    number: int  # stands for the address: among free blocks of equal size the one with the lowest number is taken
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    free: bool = False


class Blocks:
    """The blocks of one device.

    Attributes:
        given: Bytes that are in use: what torch calls allocated.
        reserved: Bytes of all segments.
    """

    def __init__(self) -> None:
        self.given = self.reserved = 0
        self._free: dict[bool, list[tuple[int, int, MemoryBlock]]] = {True: [], False: []}
        self._numbers = count()

    def take(self, size: int) -> MemoryBlock:
        """Take the smallest free block that is large enough, or a new segment, and split off what is not needed."""
        size = _rounded_up(max(size, 1), MIN_BLOCK)
        small = size <= _SMALL
        # Small and large requests have pools of their own: a small one never splits a large block.
        free = self._free[small]
        at = bisect_left(free, (size, -1))
        block = free.pop(at)[2] if at < len(free) else self._segment(size, small)
        block.free = False
        left = block.size - size
        if left >= MIN_BLOCK if small else left > _SMALL:  # ``should_split``
            self._split(block, size)
        self.given += block.size
        return block

    def give_back(self, block: MemoryBlock) -> None:
        """Free ``block`` and merge it with its free neighbours."""
        self.given -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._free[block.small].remove((other.size, other.number, other))
                _join(block, other)
        self._put(block)

    def give_back_unused(self) -> None:
        """Return unused segments to the device, as ``torch.cuda.empty_cache`` does."""
        # A free block without neighbours is a whole segment: free neighbours were merged when they were freed.
        for small, free in self._free.items():
            self._free[small] = [each for each in free if each[2].before or each[2].after]
            self.reserved -= sum(block.size for _, _, block in free if not (block.before or block.after))

    def _segment(self, size: int, small: bool) -> MemoryBlock:
        least = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        whole = least if small or size < _LEAST_OWN_SEGMENT else _rounded_up(size, _ROUND_SEGMENT)
        self.reserved += whole
        # 40 bits leave room for offsets within a segment (1 TiB): `_split` adds them to this number.
        return MemoryBlock(whole, small, next(self._numbers) << 40)

    def _split(self, block: MemoryBlock, size: int) -> None:
        rest = MemoryBlock(block.size - size, block.small, block.number + size, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._put(rest)

    def _put(self, block: MemoryBlock) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.number, block))


def _join(block: MemoryBlock, other: MemoryBlock) -> None:
    """Merge ``other``, a neighbour, into ``block``."""
    block.size += other.size
    if other is block.before:
        block.number, block.before = other.number, other.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = other.after
        if block.after is not None:
            block.after.before = block


def _rounded_up(size: int, to: int) -> int:
    """Round ``size`` up to a multiple of ``to``."""
    return size + -size % to
