"""Both attentions against the definition, written out in numpy float64."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lm_profiler.models.attention import ATTENTION
from lm_profiler.models.config import AttentionName

SHAPE = (2, 3, 7, 4)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def reference(q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each query one by one, over the keys up to its own position."""
    out = np.zeros_like(q)
    for b, h, t in np.ndindex(*q.shape[:3]):
        scores = np.array([q[b, h, t] @ k[b, h, s] for s in range(t + 1)]) / np.sqrt(q.shape[-1])
        weights = np.exp(scores) / np.exp(scores).sum()
        out[b, h, t] = sum(weight * v[b, h, s] for s, weight in enumerate(weights))
    return out


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_agrees_with_the_definition(name: AttentionName, dtype: torch.dtype) -> None:
    qkv = inputs(dtype)
    out = ATTENTION[name](*qkv)
    assert out.dtype == dtype
    expected = reference(*(x.double().numpy() for x in qkv))
    np.testing.assert_allclose(out.double().numpy(), expected, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_works_under_autocast(name: AttentionName) -> None:
    qkv = inputs(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ATTENTION[name](*qkv)
    np.testing.assert_allclose(out.double().numpy(), reference(*(x.double().numpy() for x in qkv)), atol=2e-2)


def test_under_autocast_math_keeps_one_array_of_scores_for_backward() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(torch.float32))
    batch, heads, context, _ = SHAPE
    kept: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.numel() == batch * heads * context**2:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with saving, torch.autocast("cpu", dtype=torch.bfloat16):
        out = ATTENTION["math"](q, k, v)
    assert (out.dtype, len(kept)) == (torch.bfloat16, 1)


def test_the_two_have_the_same_gradients() -> None:
    gradients = {}
    for name, attend in ATTENTION.items():
        qkv = [x.requires_grad_() for x in inputs()]
        attend(*qkv).square().sum().backward()
        gradients[name] = [x.grad for x in qkv]
    torch.testing.assert_close(gradients["sdpa"], gradients["math"])


def test_every_name_that_a_config_accepts_has_a_function() -> None:
    assert set(ATTENTION) == set(get_args(AttentionName))
