"""What torch's allocator on CUDA gives out for what is asked of it: blocks, parts of segments that it keeps for itself.

As c10/cuda/CUDACachingAllocator.cpp has it, on one stream, with its own settings: none of ``PYTORCH_ALLOC_CONF``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count

MIN_BLOCK = 512
"""``kMinBlockSize``: sizes are rounded up to a multiple of it."""

_SMALL, _SMALL_SEGMENT = 1 << 20, 2 << 20
_LARGE_SEGMENT, _FROM_HERE_ALONE, _ROUND_SEGMENT = 20 << 20, 10 << 20, 2 << 20
"""``kSmallSize``, ``kSmallBuffer``; ``kLargeBuffer``, ``kMinLargeAlloc``, ``kRoundLarge``."""


@dataclass(eq=False)
class MemoryBlock:
    """Bytes of a segment, beside which others lie."""

    size: int
    small: bool
    number: int
    """Of blocks that are as large the first is taken: addresses are taken to rise."""
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    free: bool = False


class Blocks:
    """All of one device.

    Attributes:
        given: Bytes that are given out: what torch calls allocated.
        reserved: Bytes of all segments.
    """

    def __init__(self) -> None:
        self.given = self.reserved = 0
        self._free: dict[bool, list[tuple[int, int, MemoryBlock]]] = {True: [], False: []}
        self._numbers = count()

    def take(self, size: int) -> MemoryBlock:
        """The smallest free block that is large enough, or a new segment; what is left of it stays free."""
        size = _up(max(size, 1), MIN_BLOCK)
        small = size <= _SMALL
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
        """It is free, as one with what is free beside it."""
        self.given -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._free[block.small].remove((other.size, other.number, other))
                _join(block, other)
        self._put(block)

    def give_back_unused(self) -> None:
        """Segments of which nothing is given out go back to the device, as with ``torch.cuda.empty_cache``."""
        for small, free in self._free.items():
            self._free[small] = [each for each in free if each[2].before or each[2].after]
            self.reserved -= sum(block.size for _, _, block in free if not (block.before or block.after))

    def _segment(self, size: int, small: bool) -> MemoryBlock:
        least = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        whole = least if small or size < _FROM_HERE_ALONE else _up(size, _ROUND_SEGMENT)
        self.reserved += whole
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
    """``block`` takes the place of both."""
    block.size += other.size
    if other is block.before:
        block.number, block.before = other.number, other.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = other.after
        if block.after is not None:
            block.after.before = block


def _up(size: int, to: int) -> int:
    return size + -size % to
