"""CachingAllocator as torch's allocator on CUDA gives them out: by hand, and against itself."""

from __future__ import annotations

import random

import pytest
import torch

from lm_profiler.measure.fake.live import CachingAllocator, MemoryBlock

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    "asked, given, reserved",
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (1600 * 6400 * 4, 40 * MIB, 40 * MIB),  # 39.06 MiB: less than one is left, which is not split off
        (40 * MIB + 1, 40 * MIB + 512, 42 * MIB),  # more is left, and is
    ],
)
def test_a_block_is_what_was_asked_for_rounded_up_and_what_is_left_if_it_is_not_worth_splitting_off(
    asked: int, given: int, reserved: int
) -> None:
    blocks = CachingAllocator()
    blocks.allocate(asked)
    assert (blocks.used_bytes, blocks.reserved_bytes) == (given, reserved)


def test_what_is_given_back_is_given_out_again_and_grows_together_with_what_is_free_beside_it() -> None:
    blocks = CachingAllocator()
    a, b, c = (blocks.allocate(5 * MIB) for _ in range(3))
    assert blocks.reserved_bytes == 20 * MIB
    for block in (a, c, b):
        blocks.free(block)
    assert blocks.used_bytes == 0
    assert blocks.allocate(20 * MIB).size == 20 * MIB
    assert blocks.reserved_bytes == 20 * MIB


def test_the_smallest_that_is_large_enough_is_taken_whole_if_little_would_be_left() -> None:
    blocks = CachingAllocator()
    large, small = blocks.allocate(30 * MIB), blocks.allocate(12 * MIB)
    for block in (large, small):
        blocks.free(block)
    assert blocks.allocate(11 * MIB).size == 12 * MIB
    assert blocks.allocate(11 * MIB).size == 11 * MIB
    assert (blocks.used_bytes, blocks.reserved_bytes) == (23 * MIB, 42 * MIB)


def test_segments_of_which_nothing_is_used_go_back() -> None:
    blocks = CachingAllocator()
    a, b, c = blocks.allocate(30 * MIB), blocks.allocate(5 * MIB), blocks.allocate(5 * MIB)
    blocks.free(a)
    blocks.free(c)
    blocks.empty_cache()
    assert (blocks.used_bytes, blocks.reserved_bytes) == (5 * MIB, 20 * MIB)
    assert blocks.allocate(15 * MIB).size == 15 * MIB
    blocks.free(b)
    assert blocks.reserved_bytes == 20 * MIB


@pytest.mark.gpu
def test_as_torch_has_it() -> None:
    """Sizes are drawn, and hardly two are alike: which of equal blocks torch takes, their addresses decide."""
    given, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    drawn, blocks, pool = random.Random(0), CachingAllocator(), torch.cuda.MemPool()
    held: list[tuple[MemoryBlock, torch.Tensor]] = []
    with torch.cuda.use_mem_pool(pool):
        for _ in range(500):
            if held and drawn.random() < 0.45:
                blocks.free(held.pop(drawn.randrange(len(held)))[0])
            else:
                size = int(2 ** drawn.uniform(8, 26))
                held.append((blocks.allocate(size), torch.empty(size, dtype=torch.uint8, device="cuda")))
            assert torch.cuda.memory_allocated() - given == pytest.approx(blocks.used_bytes, rel=0.01)
            assert torch.cuda.memory_reserved() - reserved == pytest.approx(blocks.reserved_bytes, rel=0.05)
