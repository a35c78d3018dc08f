"""The chunked loss against torch's own, which has all logits at once."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lm_profiler.models import losses
from lm_profiler.models.config import TransformerConfig
from lm_profiler.models.transformer import Transformer

CONFIG = TransformerConfig(d_model=12, d_ff=20, num_layers=2, num_heads=3, vocab_size=501)
BATCH, CONTEXT = 2, 50
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def build(dtype: torch.dtype, tied: bool) -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(**{**vars(CONFIG), "tied_embeddings": tied})
    return Transformer(config).to(dtype)


def token_ids(seed: int) -> Tensor:
    return torch.randint(501, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_loss_and_gradients_are_those_of_the_plain_one(dtype: torch.dtype, tied: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(losses, "CHUNK_TOKENS", 32)  # three chunks, and a shorter one
    targets_BT = token_ids(1)
    targets_BT[0, :5] = -100
    plain, chunked = build(dtype, tied), build(dtype, tied)
    truth = F.cross_entropy(plain(token_ids(0)).flatten(0, 1), targets_BT.flatten())
    loss = chunked(token_ids(0), targets_BT)
    torch.testing.assert_close(loss.double(), truth.double(), rtol=TOLERANCE[dtype], atol=0.0)
    truth.backward()
    loss.backward()
    for parameter, true_parameter in zip(chunked.parameters(), plain.parameters(), strict=True):
        largest = float(true_parameter.grad.abs().max())
        torch.testing.assert_close(
            parameter.grad, true_parameter.grad, rtol=0.0, atol=TOLERANCE[dtype] * largest, check_dtype=True
        )


def test_forward_keeps_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_TOKENS", 10)
    kept_elements: list[int] = []
    largest_elements: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            kept_elements.append(tensor.numel())
        return tensor

    model = build(torch.float32, tied=False)
    model.head.register_forward_hook(lambda module, args, output: largest_elements.append(output.numel()))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(token_ids(0), token_ids(1)).backward()
    assert max(largest_elements) == 10 * 501
    assert max(kept_elements) == BATCH * CONTEXT * CONFIG.d_ff  # of SwiGLU; all logits would be 100 · 501
    assert len(largest_elements) == 2 * BATCH * CONTEXT // 10  # each chunk twice
    with torch.no_grad():
        model(token_ids(0), token_ids(1))
    assert len(largest_elements) == 3 * BATCH * CONTEXT // 10  # now once
