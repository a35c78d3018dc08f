"""Imitates flex attention on fake tensors, which are CPU tensors: its kernel does not exist for the CPU.

It saves for backward what CUDA's kernel saves. It replaces code of torch, so it is only for a separate process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

from lm_profiler.measure.counts.flex_attention import flops_of_mask
from lm_profiler.measure.counts.registered import FunctionFormulas, function_formulas


def imitate_flex_attention() -> None:
    """Replace torch's ``flex_attention``. Call this before the program's modules are imported: they may import it."""
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
    """Computes nothing, but takes and saves as much memory as flex attention does."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, block_mask: Any
    ) -> tuple[Tensor, Tensor]:
        """Return uninitialized tensors for the result and for the log-sum-exp of each row of scores."""
        rows = query.shape[:-1]
        value_width = value.shape[-1]
        result = query.new_empty((*rows, value_width))
        log_sums = query.new_empty(rows, dtype=torch.float32)
        ctx.block_mask = block_mask
        ctx.save_for_backward(query, key, value, result, log_sums)
        ctx.mark_non_differentiable(log_sums)
        return result, log_sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """Return uninitialized tensors for the gradients of query, key and value, and None for the mask."""
        query, key, value, *_ = ctx.saved_tensors
        query_gradient = torch.empty_like(query)
        key_gradient = torch.empty_like(key)
        value_gradient = torch.empty_like(value)
        return query_gradient, key_gradient, value_gradient, None


def _forward_flops(query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> int:
    """Return the FLOPs of the pairs that the mask allows."""
    mask_tuple = None if block_mask is None else block_mask.as_tuple()
    return flops_of_mask(query, key, value, mask_tuple)


def _unmasked_flops(query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> int:
    return flops_of_mask(query, key, value, block_mask=None)


def _backward_flops(ctx: Any, gradient: Tensor, _: Any) -> int:
    query, key, value, *_ = ctx.saved_tensors
    return 2 * _forward_flops(query, key, value, ctx.block_mask)
