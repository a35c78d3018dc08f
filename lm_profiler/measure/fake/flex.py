"""Imitates flex attention on fake tensors: its kernel has no form for the CPU, whose tensors these are.

What it keeps for backward is what CUDA's kernel keeps. Only for a separate process: this replaces code of torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

from lm_profiler.measure.counts.flex_attention import flops_of_mask
from lm_profiler.measure.counts.registered import FunctionFormulas, function_formulas


def imitate_flex_attention() -> None:
    """Replace torch's ``flex_attention``; call it before modules of the program are imported, which may keep it."""
    function_formulas[_FlexAttention] = FunctionFormulas(
        _forward_flops, _backward_flops, unmasked=_unmasked_flops
    )
    torchs.flex_attention = _flex_attention


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Replace ``flex_attention``: return tensors of the shapes of its results, and save for backward what it saves."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    apply: Any = _FlexAttention.apply
    result, log_sums = apply(query, key, value, block_mask)
    if return_aux is not None:
        return result, torchs.AuxOutput(lse=log_sums, max_scores=None)
    if return_lse:
        return result, log_sums
    return result


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, block_mask: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the result and its log-sum-exp, without computing them."""
        result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.block_mask = block_mask
        ctx.save_for_backward(query, key, value, result, log_sums)
        ctx.mark_non_differentiable(log_sums)
        return result, log_sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        gradients = [torch.empty_like(factor) for factor in (query, key, value)]
        return (*gradients, None)


def _forward_flops(query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> int:
    described = None if block_mask is None else block_mask.as_tuple()
    return flops_of_mask(query, key, value, described)


def _unmasked_flops(query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> int:
    return flops_of_mask(query, key, value, block_mask=None)


def _backward_flops(ctx: Any, gradient: Tensor, _: Any) -> int:
    query, key, value, *_ = ctx.saved_tensors
    return 2 * _forward_flops(query, key, value, ctx.block_mask)
