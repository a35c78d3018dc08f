"""Flex attention counts the pairs that its mask allows, by closed forms; without one the count is unknown."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from lm_profiler.measure.clocks.tape import BACKWARD, FORWARD
from lm_profiler.measure.clocks.timeline import Span, Timeline
from lm_profiler.measure.counts import registered
from lm_profiler.measure.counts.flex_attention import flops_of_mask
from lm_profiler.measure.counts.flops import StepFlops
from lm_profiler.measure.counts.uncountable import UncountableError
from lm_profiler.measure.fake.flex import imitate_flex_attention
from lm_profiler.measure.fake.world import FakeWorld

BATCH, HEADS, LENGTH, WIDTH, WINDOW = 2, 3, 300, 16, 40
DOCUMENT = torch.arange(LENGTH) // 70
QUERY = torch.empty(BATCH, HEADS, LENGTH, WIDTH)

MASKS: dict[str, tuple[Callable[..., Any], int]] = {
    "causal": (lambda b, h, q, k: q >= k, sum(i + 1 for i in range(LENGTH))),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < WINDOW), sum(min(i + 1, WINDOW) for i in range(LENGTH))),
    "documents": (lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k), sum(i % 70 + 1 for i in range(LENGTH))),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("sizes", [(None, None), (BATCH, HEADS)])
def test_pairs_of_a_mask_are_those_of_its_closed_form(name: str, block: int, sizes: Any) -> None:
    allows, pairs = MASKS[name]
    mask = create_block_mask(allows, *sizes, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=block)
    assert flops_of_mask(QUERY, QUERY, QUERY, mask.as_tuple()) == 4 * WIDTH * HEADS * BATCH * pairs


def test_masked_blocks_do_not_count() -> None:
    blocks = torch.ones(1, 1, 4, dtype=torch.int32)
    diagonal = torch.arange(4, dtype=torch.int32).view(1, 1, 4, 1).expand(1, 1, 4, 4)  # of which the first counts
    mask = BlockMask.from_kv_blocks(blocks, diagonal, BLOCK_SIZE=64, seq_lengths=(256, 256))
    square = torch.empty(1, 1, 256, WIDTH)
    assert flops_of_mask(square, square, square, mask.as_tuple()) == 4 * WIDTH * 4 * 64 * 64
    assert flops_of_mask(square, square, square, None) == 4 * WIDTH * 256 * 256
    with FakeTensorMode():
        documents = torch.empty(LENGTH)
    mask = create_block_mask(MASKS["causal"][0], None, None, LENGTH, LENGTH, device="cpu")
    fields = list(mask.as_tuple())
    fields[-1] = lambda b, h, q, k: documents[q] == documents[k]
    with pytest.raises(UncountableError, match="mask of flex_attention"):
        flops_of_mask(QUERY, QUERY, QUERY, tuple(fields))


@pytest.fixture
def imitated() -> Iterator[None]:
    original = torchs.flex_attention
    imitate_flex_attention()
    yield
    torchs.flex_attention = original
    registered.function_formulas.clear()


@pytest.mark.usefixtures("imitated")
@pytest.mark.parametrize("is_made_in_step", [False, True])
def test_both_passes_count_on_shapes_alone(is_made_in_step: bool) -> None:
    world = FakeWorld((9, 0))
    allows, pairs = MASKS["window"]
    mask = create_block_mask(allows, None, None, LENGTH, LENGTH, device="cpu")
    timeline = Timeline()
    steps = StepFlops(timeline, on_shapes=True)
    with world.inside():
        query, key, value = (torch.empty(BATCH, HEADS, LENGTH, WIDTH, requires_grad=True) for _ in range(3))
        before = world.live.held_bytes
        timeline.observers = (steps,)
        with Span(timeline, FORWARD):
            if is_made_in_step:
                mask = create_block_mask(allows, None, None, LENGTH, LENGTH, device="cpu")
                before = world.live.held_bytes
            result: Tensor = torchs.flex_attention(query, key, value, block_mask=mask)
        held = world.live.held_bytes - before
        with Span(timeline, BACKWARD):
            result.sum().backward()
    steps.stop()
    forward = 4 * WIDTH * HEADS * BATCH * pairs
    assert (steps.flops().forward, steps.flops().backward, steps.flops().uncounted) == (forward, 2 * forward, [])
    assert steps.flops().attention == 4 * WIDTH * HEADS * BATCH * LENGTH**2  # what conventions count: in full
    rows = BATCH * HEADS * LENGTH
    kept = 4 * rows * WIDTH + 4 * rows  # the result, and a sum of each row
    assert kept <= held <= kept + 2 * 512 + 4096
    assert query.grad is not None
