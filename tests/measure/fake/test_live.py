"""Bytes of tensors as they come and go, real and fake."""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lm_profiler.measure.fake.live import CachingAllocator, LiveBytes, MemoryBlock

MIB = 1 << 20


def work() -> None:
    """Holds 1 MiB, at most 3."""
    a = torch.empty(MIB, dtype=torch.uint8)
    view = a.view(2, -1)[1:]
    del a
    b = view.clone()  # half a MiB
    c = torch.cat([b, b, b])
    del b, view, c


@pytest.mark.parametrize("fake", [False, True])
def test_storages_count_from_their_making_to_their_end(fake: bool) -> None:
    live = LiveBytes()
    if fake:
        with FakeTensorMode(), live:
            work()
    else:
        with live:
            work()
    assert live.held_bytes == 0
    assert live.peaks() == (3 * MIB, None, None)
    live.reset()
    assert live.peaks() == (0, None, None)


def test_earlier_storages_count_from_their_first_use() -> None:
    before, live = torch.empty(MIB, dtype=torch.uint8), LiveBytes()
    live.count_storages([before, before.view(2, -1)])
    assert live.held_bytes == MIB
    del before
    assert live.held_bytes == 0
    live = LiveBytes()
    with live:
        x = torch.ones(MIB // 4, requires_grad=True)
        y = x.exp()  # saves its result
        loss = y.sum()
        del y
        assert live.held_bytes == 2 * MIB + 4
        loss.backward()
        assert live.held_bytes == 2 * MIB + 4  # x, its gradient and the loss


KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    "requested, given, reserved",
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
def test_blocks_are_rounded_up(requested: int, given: int, reserved: int):
    blocks = CachingAllocator()
    blocks.allocate(requested)
    assert (blocks.used_bytes, blocks.reserved_bytes) == (given, reserved)


def test_neighbouring_free_blocks_merge() -> None:
    blocks = CachingAllocator()
    a, b, c = (blocks.allocate(5 * MIB) for _ in range(3))
    assert blocks.reserved_bytes == 20 * MIB
    for block in (a, c, b):
        blocks.free(block)
    assert blocks.used_bytes == 0
    assert blocks.allocate(20 * MIB).size == 20 * MIB
    assert blocks.reserved_bytes == 20 * MIB


def test_the_smallest_sufficient_block_is_taken() -> None:
    blocks = CachingAllocator()
    large, small = blocks.allocate(30 * MIB), blocks.allocate(12 * MIB)
    for block in (large, small):
        blocks.free(block)
    assert blocks.allocate(11 * MIB).size == 12 * MIB
    assert blocks.allocate(11 * MIB).size == 11 * MIB
    assert (blocks.used_bytes, blocks.reserved_bytes) == (23 * MIB, 42 * MIB)


def test_unused_segments_are_released() -> None:
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
