"""FLOPs of the built-in model's options against a count by hand."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from on_shapes import count_work
from torch import Tensor, nn

from lm_profiler.models.config import TransformerConfig
from lm_profiler.models.transformer import Transformer

BATCH, CONTEXT = 2, 32
TOKENS = BATCH * CONTEXT
Batch = tuple[Tensor, Tensor]
GROUPED = TransformerConfig(
    d_model=32, d_ff=48, num_layers=3, num_heads=4, num_kv_heads=2, head_width=16, vocab_size=101, tied_embeddings=True
)
ATTENTION = GROUPED.num_layers * 4 * BATCH * CONTEXT**2 * 4 * 16  # scores and weighted sums of 4 query heads
BLOCK = 2 * 32 * 4 * 16 + 2 * 32 * 2 * 16 + 3 * 32 * 48  # queries and output, keys and values, SwiGLU
HEAD = 2 * TOKENS * 32 * 101
FORWARD = 2 * TOKENS * GROUPED.num_layers * BLOCK + ATTENTION + HEAD


def token_batch() -> Batch:
    tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.long)
    return tokens, tokens


def plain_step(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def chunked_step(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch)


@pytest.mark.parametrize("step, recomputed", [(plain_step, 0), (chunked_step, HEAD)])
def test_grouped_query_attention_with_tied_embeddings(step: Callable[..., Tensor], recomputed: int) -> None:
    """A chunked loss recomputes the head."""
    flops = count_work(Transformer(GROUPED), step, token_batch()).flops
    assert (flops.forward, flops.backward, flops.recomputation) == (FORWARD, 2 * FORWARD, recomputed)


def test_experts_count_those_that_compute_a_token() -> None:
    config = TransformerConfig(
        d_model=32, d_ff=48, num_layers=2, num_heads=4, vocab_size=101, num_experts=6, experts_per_token=2
    )
    attention = 4 * 32 * 32
    experts = 2 * 3 * 32 * 48
    router = 6 * 32
    forward = 2 * TOKENS * 2 * (attention + experts + router) + 2 * 4 * BATCH * CONTEXT**2 * 32 + HEAD
    flops = count_work(Transformer(config), plain_step, token_batch()).flops
    assert (flops.forward, flops.backward) == (forward, 2 * forward)
