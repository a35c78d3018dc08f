"""Causal attention by name: our own two functions, and anybody's, with a check of its numbers.

Shapes: B batch, H heads, T context, E width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor

from lm_profiler.usage_error import UsageError, expect

# (queries, keys, values), each [B, H, T, E], to the attended values [B, H, T, E]
AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]

nvtx_parts = False  # whether ``math`` puts its scores, softmax and values into NVTX ranges


def sdpa(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor) -> Tensor:
    """PyTorch's scaled_dot_product_attention, which picks a fused kernel where the device has one."""
    return F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)


def math(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor) -> Tensor:
    """Scores, mask and softmax written out, with the [B, H, T, T] scores in memory: the baseline to profile.

    softmax(Q Kᵀ / √E + causal mask) V, from Vaswani et al. 2017, equation 1.
    """
    context, width = q_BHTE.shape[-2:]
    with _part("attention scores"):
        # Queries are scaled and not scores: T·E numbers instead of T·T.
        scores_BHTT = einsum(q_BHTE * width**-0.5, k_BHTE, "b h q e, b h k e -> b h q k")
        future_TT = torch.ones(context, context, dtype=torch.bool, device=q_BHTE.device).triu(1)
        scores_BHTT = scores_BHTT.masked_fill(future_TT, float("-inf"))
    with _part("attention softmax"):
        weights_BHTT = scores_BHTT.softmax(dim=-1)
    with _part("attention values"):
        # Where autocast computes the softmax in float32 it brings both factors to one dtype by itself.
        out_BHTE: Tensor = einsum(weights_BHTT, v_BHTE, "b h q k, b h k e -> b h q e")
    return out_BHTE


def _part(name: str) -> AbstractContextManager[Any]:
    # A compiler fuses the parts with each other, and would break its graph at a range.
    marked = nvtx_parts and not torch.compiler.is_compiling()
    return torch.cuda.nvtx.range(name) if marked else nullcontext()


ATTENTION: dict[str, AttentionFunction] = {"sdpa": sdpa, "math": math}


def attention_function(name: str) -> AttentionFunction:
    """Return our own function called ``name``, or the one that ``package.module:function`` names, asked to be causal.

    Raises:
        UsageError: it cannot be imported, or does not take (q, k, v, is_causal).
    """
    if name in ATTENTION:
        return ATTENTION[name]
    module, _, path = name.partition(":")
    try:
        function: Any = reduce(getattr, path.split("."), import_module(module))
    except Exception as error:  # a module of somebody else's may raise anything
        why = f"{type(error).__name__}: {_first_line(error)}"
        raise UsageError(f"attention: expected a function that can be imported, given {name} ({why})") from error
    expect(callable(function), "attention", "a function", name)
    try:
        takes = signature(function)
    except (TypeError, ValueError):  # one that is written in C
        return _positional(function)
    # An autograd.Function's `apply` takes anything, but nothing by its name.
    kinds = {of.kind for of in takes.parameters.values()}
    if "is_causal" not in takes.parameters and Parameter.VAR_POSITIONAL in kinds:
        return _positional(function)
    try:
        takes.bind(None, None, None, is_causal=True)
    except TypeError as error:
        told = f"given {name}{takes}: {error}"
        raise UsageError(f"attention: expected a function of (q, k, v, is_causal), {told}") from None
    return partial(function, is_causal=True)


def _positional(function: Callable[..., Tensor]) -> AttentionFunction:
    return lambda q, k, v: function(q, k, v, True)


# sequences, heads and tokens of the check: all unlike, so that none is taken for another; tokens as kernels tile
_CHECKED = (2, 3, 256)

# the largest error of the check, as a share of the largest number: the dtype's rounding, many times over
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# the same for float32 on an accelerator, where Triton's `tl.dot` multiplies in TF32 unless told otherwise
_TF32_TOLERANCE = 5e-3


def check_attention(name: str, width: int, dtype: torch.dtype, device: torch.device, backward: bool) -> None:
    """Compare somebody's function with the definition in float64: its values and, with ``backward``, its gradients.

    Raises:
        UsageError: it fails, or its shape or its numbers are wrong; the message says where they are off.
    """
    if name in ATTENTION:
        return
    draw = torch.Generator().manual_seed(0)
    shape = (*_CHECKED, width)
    *qkv, upstream = (torch.randn(shape, generator=draw).to(dtype) for _ in range(4))
    exact = [x.double() for x in qkv]
    truth = _values(math, exact, upstream.double(), backward)
    attend, subject = attention_function(name), f"{name} in {str(dtype).removeprefix('torch.')}"
    try:
        results = _values(attend, [x.to(device, copy=True) for x in qkv], upstream.to(device), backward)
    except UsageError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {_first_line(error)}"
        raise UsageError(
            f"attention: expected {name} to take q, k, v of shape {list(shape)} [B, H, T, d], given {why}"
        ) from error
    within = _TF32_TOLERANCE if dtype == torch.float32 and device.type != "cpu" else _TOLERANCE[dtype]
    sees_all = F.scaled_dot_product_attention(exact[0], exact[1], exact[2])
    if _error(results["values"], sees_all).max() <= within:
        raise UsageError(f"attention: expected causal attention, given {name}, in which a token sees later ones")
    for what, numbers in results.items():
        _check_numbers(f"{what} of {subject}", numbers, truth[what], within)


def _values(attend: AttentionFunction, qkv: list[Tensor], upstream: Tensor, backward: bool) -> dict[str, Tensor]:
    """Return the attended values and, with ``backward``, the gradients of q, k and v for ``upstream``."""
    with torch.set_grad_enabled(backward):
        given = [x.detach().requires_grad_(backward) for x in qkv]
        out: Any = attend(*given)
        is_alike = isinstance(out, Tensor) and (out.shape, out.dtype) == (qkv[0].shape, qkv[0].dtype)
        shown = f"{list(out.shape)} in {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        expect(is_alike, "attention", f"values of shape {list(qkv[0].shape)} [B, H, T, d] in {qkv[0].dtype}", shown)
        if not backward:
            return {"values": out}
        expect(out.requires_grad, "attention", "values with a gradient; `validate` times forward alone", "none")
        gradients: Sequence[Tensor | None] = torch.autograd.grad(out, given, upstream, allow_unused=True)
    named = zip(("gradient of q", "gradient of k", "gradient of v"), gradients, given, strict=True)
    return {"values": out.detach(), **{name: torch.zeros_like(x) if of is None else of for name, of, x in named}}


def _error(given: Tensor, truth: Tensor) -> Tensor:
    """Return how far each number is off, as a share of the largest true one; NaN is infinitely off."""
    return ((given.detach().cpu().double() - truth).abs() / truth.abs().max()).nan_to_num(nan=torch.inf)


def _check_numbers(what: str, given: Tensor, truth: Tensor, within: float) -> None:
    error = _error(given, truth)
    off = error > within
    if not off.any():
        return
    first = off.nonzero()[0].tolist()
    worst = [int(n) for n in torch.unravel_index(error.argmax(), error.shape)]
    raise UsageError(
        f"attention: expected {what} within {within:g} of the reference, given {int(off.sum()):,} of {off.numel():,} "
        f"numbers off, the first at [b, h, t, d] = {first}\n"
        f"largest error {error.max():.2g} at {worst}: {given[tuple(worst)].item():.4g} instead of "
        f"{truth[tuple(worst)].item():.4g}; errors are shares of the largest number"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
