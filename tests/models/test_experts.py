"""A mixture of experts against a loop over tokens in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lm_profiler.models.config import TransformerConfig
from lm_profiler.models.experts import Experts, can_group

CONFIG = TransformerConfig(
    d_model=16, d_ff=24, num_layers=1, num_heads=2, vocab_size=7, num_experts=5, experts_per_token=3
)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def built_experts(dtype: torch.dtype, config: TransformerConfig = CONFIG) -> Experts:
    torch.manual_seed(0)
    return Experts(config).to(dtype)


def inputs(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 9, 16, generator=generator, dtype=torch.float64).to(dtype)


def token_by_token(experts: Experts, x_BTD: Tensor) -> Tensor:
    """Every token through every one of its experts, by itself."""
    outputs = []
    for token in x_BTD.flatten(0, 1):
        scores = experts.router.weight @ token
        by_score = sorted(range(len(scores)), key=lambda expert: -float(scores[expert].detach()))
        chosen = by_score[: experts.experts_per_token]
        weights = scores[chosen].exp() / scores[chosen].exp().sum()
        output = torch.zeros_like(token)
        for weight, expert in zip(weights, chosen, strict=True):
            gated = F.silu(token @ experts.gate.weight[expert]) * (token @ experts.up.weight[expert])
            output = output + weight * (gated @ experts.down.weight[expert])
        outputs.append(output)
    return torch.stack(outputs).view_as(x_BTD)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_experts_compute_what_a_loop_over_tokens_does(dtype: torch.dtype) -> None:
    experts = built_experts(dtype)
    x_BTD = inputs(dtype).requires_grad_()
    output = experts(x_BTD)
    gradients = torch.autograd.grad(output.square().sum(), [x_BTD, *experts.parameters()])

    true_experts = built_experts(dtype).double()
    true_x_BTD = inputs(dtype).double().requires_grad_()
    truth = token_by_token(true_experts, true_x_BTD)
    true_gradients = torch.autograd.grad(truth.square().sum(), [true_x_BTD, *true_experts.parameters()])

    for numbers, true_numbers in zip((output, *gradients), (truth, *true_gradients), strict=True):
        assert numbers.dtype == dtype
        largest = float(true_numbers.detach().abs().max())
        torch.testing.assert_close(numbers.double(), true_numbers, rtol=0.0, atol=TOLERANCE[dtype] * largest)


def test_the_load_counts_the_tokens_of_training_only() -> None:
    experts = built_experts(torch.float32)
    experts(inputs(torch.float32))
    experts(inputs(torch.float32))
    scores = inputs(torch.float32).flatten(0, 1) @ experts.router.weight.T
    expected = torch.bincount(scores.topk(3).indices.flatten(), minlength=5)
    experts.eval()(inputs(torch.float32))
    assert experts.load_X.tolist() == (2 * expected).tolist()
    assert "load_X" not in experts.state_dict()
    experts = built_experts(torch.float32)
    torch.nn.init.zeros_(experts.router.weight)  # equal scores: the same experts are chosen for all tokens
    experts(inputs(torch.float32)).sum().backward()
    busy = experts.load_X > 0
    assert busy.sum() == 3
    assert experts.gate.weight.grad[~busy].eq(0).all()  # of an expert without tokens
    assert experts.gate.weight.grad[busy].ne(0).any()


def test_autocast_multiplies_in_bfloat16() -> None:
    expected = built_experts(torch.float32)(inputs(torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = built_experts(torch.float32)(inputs(torch.float32))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.0, atol=3e-2 * float(expected.detach().abs().max()))


def test_grouped_mm_is_not_given_what_it_refuses() -> None:
    assert can_group(torch.empty(2, 8, 16, dtype=torch.bfloat16))
    assert not can_group(torch.empty(2, 8, 16, dtype=torch.float64))
    assert not can_group(torch.empty(2, 8, 12, dtype=torch.bfloat16))  # rows of 24 bytes
