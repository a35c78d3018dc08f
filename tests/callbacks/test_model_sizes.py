"""Parameters by which a token is multiplied: against published counts, on models without data."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lm_profiler.callbacks.model_sizes import parameters_in_products
from lm_profiler.models.config import PRESETS
from lm_profiler.models.transformer import Transformer


@pytest.mark.parametrize(
    "size, truth",
    [
        ("llama3/8B", 8_030_261_248 - 128_256 * 4096),  # the embedding only looks up
        ("qwen3/0.6B", 596_049_920),  # tied: the embedding is the head's matrix too
        ("gpt2/small", 124_439_808 - 1024 * 768),  # positions only look up
        # 3,353,032,704 active parameters are published, embedding included
        ("qwen3/30B-A3B", 3_353_032_704 - 151_936 * 2048),
    ],
)
def test_published_sizes(size: str, truth: int) -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS[size])
    assert parameters_in_products(model) == truth


class Mixture(nn.Module):
    """Experts as in older releases of transformers: a list of layers, and a router beside them."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=11, **config)
        self.embedding = nn.Embedding(11, 4)
        self.gate = nn.Linear(4, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.head = nn.Linear(4, 11, bias=False)


def test_only_the_experts_of_a_token_count() -> None:
    model = Mixture(num_local_experts=3, num_experts_per_tok=2)
    assert parameters_in_products(model) == 4 * 3 + 2 * 16 + 44
    assert parameters_in_products(Mixture()) is None  # the number of experts per token is unknown
    model.head.weight = model.embedding.weight  # which is then a matrix of the head
    assert parameters_in_products(model) == 4 * 3 + 2 * 16 + 44
