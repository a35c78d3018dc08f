"""A decoder-only Transformer, and causal attention by name: our own two functions, or any other, which is checked.

Shapes: B batch, T context, D width of the model, H heads, E width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from importlib import import_module
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm_profiler.models.config import TransformerConfig
from lm_profiler.usage_error import UsageError, expect

# (queries, keys, values), each [B, H, T, E], to the attended values [B, H, T, E]
AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]

nvtx_parts = False  # whether ``math`` puts its scores, softmax and values into NVTX ranges


def sdpa(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, is_causal: bool = True) -> Tensor:
    """PyTorch's scaled_dot_product_attention, which picks a fused kernel where the device has one."""
    return F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=is_causal)


def math(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, is_causal: bool = True) -> Tensor:
    """Scores, mask and softmax written out, with the [B, H, T, T] scores in memory: the baseline to profile.

    softmax(Q Kᵀ / √E + causal mask) V, from Vaswani et al. 2017, equation 1.
    """
    context, width = q_BHTE.shape[-2:]
    with _part("attention scores"):
        # Queries are scaled and not scores: T·E numbers instead of T·T.
        scores_BHTT = einsum(q_BHTE * width**-0.5, k_BHTE, "b h q e, b h k e -> b h q k")
        if is_causal:
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


ATTENTION: dict[str, Callable[..., Tensor]] = {"sdpa": sdpa, "math": math}


def imported(subject: str, kind: str, name: str) -> Any:
    """Return what ``package.module:name`` names, or raise UsageError."""
    module, _, path = name.partition(":")
    try:
        return reduce(getattr, path.split("."), import_module(module))
    except Exception as error:  # a user's module may raise anything
        raise UsageError(f"{subject}: expected {kind} that can be imported, given {name} ({_told(error)})") from error


def attention_function(name: str, is_causal: bool = True) -> AttentionFunction:
    """Return our own function called ``name``, or the one that ``package.module:function`` names."""
    if name in ATTENTION:
        return ATTENTION[name] if is_causal else partial(ATTENTION[name], is_causal=False)
    function = imported("attention", "a function", name)
    expect(callable(function), "attention", "a function", name)
    try:
        by_name = "is_causal" in signature(function).parameters
    except (TypeError, ValueError):  # a function written in C
        by_name = False
    # An autograd.Function's `apply` takes any arguments, but none by name.
    return partial(function, is_causal=is_causal) if by_name else lambda q, k, v: function(q, k, v, is_causal)


# sequences, heads and tokens of the check: all different, so that a mix-up shows; tokens as kernels tile
_CHECKED = (2, 3, 256)

# the largest error of the check, as a share of the largest number: the dtype's rounding, many times over
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# the same for float32 on an accelerator, where Triton's `tl.dot` multiplies in TF32 unless told otherwise
_TF32_TOLERANCE = 5e-3


def check_attention(
    name: str, width: int, dtype: torch.dtype, device: torch.device, backward: bool, is_causal: bool = True
) -> None:
    """Compare a user's function with the definition in float64: its values and, with ``backward``, its gradients.

    Raises:
        UsageError: it fails, or its shape or its numbers are wrong; the message says where they are off.
    """
    if name in ATTENTION:
        return
    draw = torch.Generator().manual_seed(0)
    shape = (*_CHECKED, width)
    *qkv, upstream = (torch.randn(shape, generator=draw).to(dtype) for _ in range(4))
    exact = [x.double() for x in qkv]
    truth = _values(attention_function("math", is_causal), exact, upstream.double(), backward)
    attend = attention_function(name, is_causal)
    try:
        results = _values(attend, [x.to(device, copy=True) for x in qkv], upstream.to(device), backward)
    except UsageError:
        raise
    except Exception as error:
        given = f"q, k, v of shape {list(shape)} [B, H, T, d] (flatten(0, 1) makes them [B·H, T, d]), and is_causal"
        raise UsageError(f"attention: expected {name} to take {given}, given {_told(error)}") from error
    within = _TF32_TOLERANCE if dtype == torch.float32 and device.type != "cpu" else _TOLERANCE[dtype]
    if _differ(results["values"], sdpa(exact[0], exact[1], exact[2], not is_causal), within) is None:
        kind, sees = ("causal attention", "sees later ones") if is_causal else ("attention to all", "sees no later one")
        raise UsageError(f"attention: expected {kind}, given {name}, in which a token {sees}")
    for what, numbers in results.items():
        if (said := _differ(numbers, truth[what], within)) is not None:
            subject = f"{what} of {name} in {str(dtype).removeprefix('torch.')}"
            raise UsageError(f"attention: expected {subject} within {within:g} of the largest number, given\n{said}")


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


def _differ(given: Tensor, truth: Tensor, within: float) -> str | None:
    """Return where numbers are off by more than ``within`` as a share of the largest true one; None if none is."""
    try:
        torch.testing.assert_close(
            given.detach().cpu().double(), truth, rtol=0.0, atol=within * float(truth.abs().max())
        )
    except AssertionError as error:
        return "; ".join(line for line in str(error).splitlines()[2:4])
    return None


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


# -- the model ---------------------------------------------------------------------------------------------------------

NORM_EPS = 1e-5  # Epsilon of all norms: LLaMA's (Touvron et al. 2023, released code).


class Linear(nn.Linear):
    """A bias-free linear map; its weights start normal, of variance 1 / inputs, cut off at three deviations."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:  # sharded strategies call it to fill weights built on the meta device
        std = self.in_features**-0.5
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)


class Embedding(nn.Embedding):
    """A token embedding whose rows start as a unit normal, cut off at three deviations."""

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, a=-3.0, b=3.0)


def rope_tables(context: int, width: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, E/2] of the angles position · theta^(-2i/E) (Su et al. 2021, section 3.2.2)."""
    # Computed in each forward pass instead of kept in a buffer: bf16-true would round a buffer, the context length may
    # change, and a table made in inference mode must not reach a training step. It costs a few small kernels.
    dtype = torch.promote_types(torch.float32, like.dtype)
    exponents = torch.arange(0, width, 2, device=like.device, dtype=dtype) / width
    positions = torch.arange(context, device=like.device, dtype=dtype)
    angles = positions[:, None] * theta ** -exponents[None, :]
    return angles.cos(), angles.sin()


def rotate(x_BHTE: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + E/2) of every head by its position's angle; the pairing is that of GPT-NeoX."""
    # In the dtype of x: float32 tables would make half-precision heads float32.
    cos, sin = (table.to(x_BHTE.dtype) for table in rope)
    first, second = x_BHTE.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class SelfAttention(nn.Module):
    """Causal multi-head self-attention with RoPE, [B, T, D] to [B, T, D]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attend = attention_function(config.attention)
        self.query = Linear(config.d_model, config.d_model)
        self.key = Linear(config.d_model, config.d_model)
        self.value = Linear(config.d_model, config.d_model)
        self.output = Linear(config.d_model, config.d_model)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q_BHTE = rotate(self._split(self.query(x_BTD)), rope)
        k_BHTE = rotate(self._split(self.key(x_BTD)), rope)
        v_BHTE = self._split(self.value(x_BTD))
        out: Tensor = self.output(rearrange(self.attend(q_BHTE, k_BHTE, v_BHTE), "b h t e -> b t (h e)"))
        return out

    def _split(self, x_BTD: Tensor) -> Tensor:
        return rearrange(x_BTD, "b t (h e) -> b h t e", h=self.num_heads)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), [B, T, D] to [B, T, D] (Shazeer 2020, equation 6)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate = Linear(config.d_model, config.d_ff)
        self.up = Linear(config.d_model, config.d_ff)
        self.down = Linear(config.d_ff, config.d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out


class Block(nn.Module):
    """Attention, then feed-forward, each behind a norm and added to the residual stream [B, T, D]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=NORM_EPS)
        self.attention = SelfAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.d_model, eps=NORM_EPS)
        self.feed_forward = SwiGLU(config)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope)
        out: Tensor = x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))
        return out


class Transformer(nn.Module):
    """Token ids [B, T] (int64) to logits [B, T, V]; T is any length."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=NORM_EPS)
        self.head = Linear(config.d_model, config.vocab_size)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        config = self.config
        x_BTD = self.embedding(tokens_BT)
        rope = rope_tables(tokens_BT.shape[1], config.head_dim, config.rope_theta, like=x_BTD)
        # Without gradients nothing is kept for a backward pass, so there is nothing to save.
        checkpoints = config.checkpoints if torch.is_grad_enabled() else ()
        x_BTD = through([*self.blocks], x_BTD, rope, checkpoints)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


def through(blocks: Sequence[nn.Module], x_BTD: Tensor, rope: tuple[Tensor, Tensor], every: Sequence[int]) -> Tensor:
    """Return [B, T, D] after ``blocks``; each ``every[0]`` of them are a checkpoint, ``every[1:]`` nest in it.

    With checkpoints of k of n blocks, n/k inputs and what k blocks save are held at once (Chen et al. 2016).
    """
    if not every:
        for block in blocks:
            x_BTD = block(x_BTD, rope)
        return x_BTD
    for first in range(0, len(blocks), every[0]):
        some = blocks[first : first + every[0]]
        # There is no dropout, so the RNG's state, which would be read in every block, need not be restored.
        x_BTD = checkpoint(
            partial(through, some, every=every[1:]), x_BTD, rope, use_reentrant=False, preserve_rng_state=False
        )
    return x_BTD
