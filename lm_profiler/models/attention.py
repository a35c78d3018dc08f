"""Causal self-attention by name. Shapes: B batch, H heads, T context, E width of a head."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor

from lm_profiler.models.config import AttentionName

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries, keys, values), each [B, H, T, E], to the attended values [B, H, T, E]."""


def sdpa(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor) -> Tensor:
    """PyTorch's scaled_dot_product_attention, which picks a fused kernel where the device has one."""
    return F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)


def math(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor) -> Tensor:
    """Scores, mask and softmax written out, with the [B, H, T, T] scores in memory: the baseline to profile.

    softmax(Q Kᵀ / √E + causal mask) V, from Vaswani et al. 2017, equation 1.
    """
    context, width = q_BHTE.shape[-2:]
    scores_BHTT = einsum(q_BHTE * width**-0.5, k_BHTE, "b h q e, b h k e -> b h q k")
    future_TT = torch.ones(context, context, dtype=torch.bool, device=q_BHTE.device).triu(1)
    weights_BHTT = scores_BHTT.masked_fill(future_TT, float("-inf")).softmax(dim=-1)
    # Where autocast computes the softmax in float32 it brings both factors to one dtype by itself.
    out_BHTE: Tensor = einsum(weights_BHTT, v_BHTE, "b h q k, b h k e -> b h q e")
    return out_BHTE


ATTENTION: dict[AttentionName, AttentionFunction] = {"sdpa": sdpa, "math": math}
