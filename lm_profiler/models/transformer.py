"""A decoder-only Transformer, and causal attention by name: our own two functions, or any other, which is checked.

Shapes: B batch, T context, D width of the model, H heads, K heads of keys and values, E width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from inspect import signature
from math import pi
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm_profiler.models.config import TransformerConfig
from lm_profiler.models.experts import Experts
from lm_profiler.models.float8 import Float8Linear
from lm_profiler.models.linear import Linear
from lm_profiler.models.losses import chunked_cross_entropy
from lm_profiler.usage_error import UsageError, expect

# (queries, keys, values), each [B, H, T, E], to the attended values [B, H, T, E]
AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]

# whether ``math`` puts its scores, softmax and values into NVTX ranges
nvtx_parts = False


def sdpa(
    q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, is_causal: bool = True
) -> Tensor:
    """PyTorch's scaled_dot_product_attention, which picks a fused kernel where the device has one.

    Keys and values may have fewer heads, each of which H / K query heads share.
    """
    shares_heads = k_BHTE.shape[1] != q_BHTE.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTE, k_BHTE, v_BHTE, is_causal=is_causal, enable_gqa=shares_heads
    )


def math(
    q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, is_causal: bool = True
) -> Tensor:
    """Scores, mask and softmax written out, with the [B, H, T, T] scores in memory: the baseline to profile.

    softmax(Q Kᵀ / √E + causal mask) V, from Vaswani et al. 2017, equation 1.
    """
    context, width = q_BHTE.shape[-2:]
    with _nvtx_range("attention scores"):
        # Queries are scaled and not scores: T·E numbers instead of T·T.
        scores_BHTT = einsum(
            q_BHTE * width**-0.5, k_BHTE, "b h q e, b h k e -> b h q k"
        )
        if is_causal:
            future_TT = torch.ones(
                context, context, dtype=torch.bool, device=q_BHTE.device
            ).triu(1)
            scores_BHTT = scores_BHTT.masked_fill(future_TT, float("-inf"))
    with _nvtx_range("attention softmax"):
        weights_BHTT = scores_BHTT.softmax(dim=-1)
    with _nvtx_range("attention values"):
        # Where autocast computes the softmax in float32 it brings both factors to one dtype by itself.
        values_BHTE: Tensor = einsum(
            weights_BHTT, v_BHTE, "b h q k, b h k e -> b h q e"
        )
    return values_BHTE


def _nvtx_range(name: str) -> AbstractContextManager[Any]:
    # A compiler fuses the parts with each other, and would break its graph at a range.
    if nvtx_parts and not torch.compiler.is_compiling():
        return torch.cuda.nvtx.range(name)
    return nullcontext()


ATTENTION: dict[str, Callable[..., Tensor]] = {"sdpa": sdpa, "math": math}


def imported(subject: str, kind: str, name: str) -> Any:
    """Return what ``package.module:name`` names, or raise UsageError."""
    module, _, path = name.partition(":")
    try:
        attribute_value = import_module(module)
        for attribute in path.split("."):
            attribute_value = getattr(attribute_value, attribute)
    except Exception as error:  # a user's module may raise anything
        message = f"{subject}: expected {kind} that can be imported, given {name} ({_error_text(error)})"
        raise UsageError(message) from error
    return attribute_value


def attention_function(
    name: str, is_causal: bool = True, options: Mapping[str, Any] | None = None
) -> AttentionFunction:
    """Return our own function called ``name``, or the one that ``package.module:function`` names.

    ``options`` are further arguments of the user's function, such as the sizes of its tiles.
    """
    if name in ATTENTION:
        expect(not options, "attention_options", f"none with {name}", options)
        function = ATTENTION[name]
        return function if is_causal else partial(function, is_causal=False)
    function = imported("attention", "a function", name)
    expect(callable(function), "attention", "a function", name)
    if options:
        function = partial(function, **options)
    if _takes_is_causal(function):
        return partial(function, is_causal=is_causal)
    # An autograd.Function's `apply` takes any arguments, but none by name.
    return lambda q, k, v: function(q, k, v, is_causal)


def _takes_is_causal(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` takes an argument with that name."""
    try:
        return "is_causal" in signature(function).parameters
    except (TypeError, ValueError):  # a function written in C
        return False


# sequences, heads and tokens of the check: all different, so that a mix-up shows; tokens as kernels tile
_CHECKED_SIZES = (2, 3, 256)

# the largest error of the check, as a share of the largest number: the dtype's rounding, many times over
_TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}

# the same for float32 on an accelerator, where Triton's `tl.dot` multiplies in TF32 unless told otherwise
_TF32_TOLERANCE = 5e-3


def check_attention(
    name: str,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    backward: bool,
    is_causal: bool = True,
    options: Mapping[str, Any] | None = None,
) -> float | None:
    """Compare a user's function with the definition in float64: its values and, with ``backward``, its gradients.

    Returns the seconds that its first call takes beyond a second one; None for a function of ours, which is not called.

    Raises:
        UsageError: it fails, or its shape or its numbers are wrong; the message says where they are off.
    """
    if name in ATTENTION:
        return None
    generator = torch.Generator().manual_seed(0)
    shape = (*_CHECKED_SIZES, width)
    *qkv, upstream = [
        torch.randn(shape, generator=generator).to(dtype) for _ in range(4)
    ]
    qkv_float64 = [tensor.double() for tensor in qkv]
    truths = _results(
        attention_function("math", is_causal), qkv_float64, upstream.double(), backward
    )
    function = attention_function(name, is_causal, options)
    device_inputs = [tensor.to(device, copy=True) for tensor in qkv]
    device_upstream = upstream.to(device)
    try:
        results, first_call_s = _timed_results(
            function, device_inputs, device_upstream, backward
        )
        _, second_call_s = _timed_results(
            function, device_inputs, device_upstream, backward
        )
    except UsageError:
        raise
    except Exception as error:
        expected = f"q, k, v of shape {list(shape)} [B, H, T, d] (flatten(0, 1) makes them [B·H, T, d]), and is_causal"
        raise UsageError(
            f"attention: expected {name} to take {expected}, given {_error_text(error)}"
        ) from error

    tolerance = _TOLERANCE[dtype]
    if dtype == torch.float32 and device.type != "cpu":
        tolerance = _TF32_TOLERANCE
    opposite_mask = sdpa(qkv_float64[0], qkv_float64[1], qkv_float64[2], not is_causal)
    if _difference(results["values"], opposite_mask, tolerance) is None:
        if is_causal:
            raise UsageError(
                f"attention: expected causal attention, given {name}, in which tokens attend to later ones"
            )
        raise UsageError(
            f"attention: expected attention without a causal mask, given {name}, in which no token attends to a later "
            "one"
        )
    for subject, numbers in results.items():
        difference = _difference(numbers, truths[subject], tolerance)
        if difference is not None:
            dtype_name = str(dtype).removeprefix("torch.")
            expected = f"{subject} of {name} in {dtype_name} within {tolerance:g} of the largest number"
            raise UsageError(f"attention: expected {expected}, given\n{difference}")
    return first_call_s - second_call_s


def _timed_results(
    function: AttentionFunction, qkv: list[Tensor], upstream: Tensor, backward: bool
) -> tuple[dict[str, Tensor], float]:
    """Return the results on the host, and the seconds until they were there."""
    began_s = perf_counter()
    on_device = _results(function, qkv, upstream, backward)
    results = {name: tensor.cpu() for name, tensor in on_device.items()}
    return results, perf_counter() - began_s


def _results(
    function: AttentionFunction, qkv: list[Tensor], upstream: Tensor, backward: bool
) -> dict[str, Tensor]:
    """Return the attended values and, with ``backward``, the gradients of q, k and v for ``upstream``."""
    with torch.set_grad_enabled(backward):
        inputs = [tensor.detach().requires_grad_(backward) for tensor in qkv]
        values = function(*inputs)
        _check_form(values, like=qkv[0])
        if not backward:
            return {"values": values}
        expect(
            values.requires_grad,
            "attention",
            "values with a gradient; `validate` times forward alone",
            "none",
        )
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            values, inputs, upstream, allow_unused=True
        )
    results = {"values": values.detach()}
    for letter, gradient, tensor in zip("qkv", gradients, inputs, strict=True):
        results[f"gradient of {letter}"] = (
            torch.zeros_like(tensor) if gradient is None else gradient
        )
    return results


def _check_form(values: Any, like: Tensor) -> None:
    """Raise UsageError unless ``values`` is a tensor with the shape and the dtype of ``like``."""
    expected = f"values of shape {list(like.shape)} [B, H, T, d] in {like.dtype}"
    if not isinstance(values, Tensor):
        raise UsageError(
            f"attention: expected {expected}, given {type(values).__name__}"
        )
    is_alike = values.shape == like.shape and values.dtype == like.dtype
    expect(is_alike, "attention", expected, f"{list(values.shape)} in {values.dtype}")


def _difference(numbers: Tensor, truth: Tensor, tolerance: float) -> str | None:
    """Return where ``numbers`` are off by more than ``tolerance``, a share of the largest true one; None if none is."""
    largest = float(truth.abs().max())
    try:
        torch.testing.assert_close(
            numbers.detach().cpu().double(), truth, rtol=0.0, atol=tolerance * largest
        )
    except AssertionError as error:
        lines = str(error).splitlines()
        return "; ".join(lines[2:4])
    return None


def _error_text(error: Exception) -> str:
    """Return the type of ``error`` and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


# -- the model ---------------------------------------------------------------------------------------------------------


class Embedding(nn.Embedding):
    """A token embedding whose rows start as a unit normal, cut off at three deviations."""

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, a=-3.0, b=3.0)


class SmallEmbedding(nn.Embedding):
    """An embedding that is a matrix of the LM head too, or is added to one: its weights start like a ``Linear``'s."""

    def reset_parameters(self) -> None:
        std = self.embedding_dim**-0.5
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)


Rope = tuple[Tensor, Tensor]  # cosines and sines of RoPE, [T, E/2] each


def rope_tables(
    context: int, width: int, theta: float, like: Tensor, stretch: float = 1.0
) -> Rope:
    """Return cosines and sines [T, E/2] of the angles position · theta^(-2i/E) (Su et al. 2021, section 3.2.2).

    ``stretch`` lengthens the long wavelengths (``stretched_frequencies``).
    """
    # Computed in each forward pass instead of kept in a buffer: bf16-true would round a buffer, the context length may
    # change, and a table made in inference mode must not reach a training step. It costs a few small kernels.
    dtype = torch.promote_types(torch.float32, like.dtype)
    exponents = torch.arange(0, width, 2, device=like.device, dtype=dtype) / width
    positions = torch.arange(context, device=like.device, dtype=dtype)
    frequencies = theta**-exponents
    if stretch != 1.0:
        frequencies = stretched_frequencies(frequencies, stretch)
    angles = positions[:, None] * frequencies[None, :]
    return angles.cos(), angles.sin()


# positions of Llama 3's first training, and how often the shortest and the longest wavelength between which the stretch
# sets in fit into them (``apply_scaling`` in the code released with Llama 3.1)
_TRAINED_POSITIONS = 8192
_MOST_TURNS, _LEAST_TURNS = 4.0, 1.0


def stretched_frequencies(frequencies: Tensor, stretch: float) -> Tensor:
    """Return RoPE's ``frequencies`` with long wavelengths times ``stretch``, as in Llama 3.1 and 3.2.

    Those that turn often within the trained positions stay, those that turn less than once are stretched in full, and
    those in between by a share.
    """
    turns = _TRAINED_POSITIONS * frequencies / (2 * pi)
    share_kept = (turns - _LEAST_TURNS) / (_MOST_TURNS - _LEAST_TURNS)
    share_kept = share_kept.clamp(0.0, 1.0)
    return frequencies * (share_kept + (1 - share_kept) / stretch)


def rotate(x_BHTE: Tensor, rope: Rope) -> Tensor:
    """Turn each pair (i, i + E/2) of every head by its position's angle; the pairing is that of GPT-NeoX."""
    # In the dtype of x: float32 tables would make half-precision heads float32.
    cosines, sines = rope
    cosines = cosines.to(x_BHTE.dtype)
    sines = sines.to(x_BHTE.dtype)
    x, y = x_BHTE.chunk(2, dim=-1)
    rotated_x = x * cosines - y * sines
    rotated_y = y * cosines + x * sines
    return torch.cat((rotated_x, rotated_y), dim=-1)


class SelfAttention(nn.Module):
    """Causal multi-head self-attention, with RoPE if there is one, [B, T, D] to [B, T, D].

    With fewer heads of keys and values than of queries it is grouped-query attention (Ainslie et al. 2023).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        has_biases = config.architecture == "gpt2"
        query_width = config.num_heads * config.head_dim
        key_width = config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.attend = attention_function(config.attention)
        # Our `sdpa` takes shared heads as they are; other functions get a copy for each query head.
        self.copies = (
            1 if config.attention == "sdpa" else config.num_heads // config.kv_heads
        )
        linear_class = Float8Linear if config.fp8 else Linear
        self.query = linear_class(config.d_model, query_width, bias=has_biases)
        self.key = linear_class(config.d_model, key_width, bias=has_biases)
        self.value = linear_class(config.d_model, key_width, bias=has_biases)
        self.output = linear_class(query_width, config.d_model, bias=has_biases)
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if config.qk_norm:
            self.query_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.key_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(self, x_BTD: Tensor, rope: Rope | None) -> Tensor:
        # One after the other: queries before RoPE are free again before there are keys.
        q_BHTE = self._heads(self.query(x_BTD), self.query_norm, rope)
        k_BKTE = self._heads(self.key(x_BTD), self.key_norm, rope)
        v_BKTE = self._split(self.value(x_BTD))
        if self.copies > 1:
            k_BKTE = k_BKTE.repeat_interleave(self.copies, dim=1)
            v_BKTE = v_BKTE.repeat_interleave(self.copies, dim=1)
        # No name for the values before they are rearranged: it would keep their memory until the end.
        attended_BTD = rearrange(
            self.attend(q_BHTE, k_BKTE, v_BKTE), "b h t e -> b t (h e)"
        )
        output_BTD: Tensor = self.output(attended_BTD)
        return output_BTD

    def _heads(
        self, x_BTD: Tensor, norm: nn.Module | None, rope: Rope | None
    ) -> Tensor:
        """Return queries or keys by head, normalized and turned, [B, H, T, E]."""
        x_BHTE = self._split(x_BTD)
        if norm is not None:
            x_BHTE = norm(x_BHTE)
        if rope is not None:
            x_BHTE = rotate(x_BHTE, rope)
        return x_BHTE

    def _split(self, x_BTD: Tensor) -> Tensor:
        return rearrange(x_BTD, "b t (h e) -> b h t e", e=self.head_dim)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), [B, T, D] to [B, T, D] (Shazeer 2020, equation 6)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        linear_class = Float8Linear if config.fp8 else Linear
        self.gate = linear_class(config.d_model, config.d_ff)
        self.up = linear_class(config.d_model, config.d_ff)
        self.down = linear_class(config.d_ff, config.d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gated_BTF = F.silu(self.gate(x_BTD)) * self.up(x_BTD)
        output_BTD: Tensor = self.down(gated_BTF)
        return output_BTD


class GELULayers(nn.Module):
    """down(gelu(up(x))) with biases, [B, T, D] to [B, T, D], as in GPT-2's released code."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.up = Linear(config.d_model, config.d_ff, bias=True)
        self.down = Linear(config.d_ff, config.d_model, bias=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        activated_BTF = F.gelu(self.up(x_BTD), approximate="tanh")
        output_BTD: Tensor = self.down(activated_BTF)
        return output_BTD


def make_norm(config: TransformerConfig) -> nn.Module:
    if config.architecture == "gpt2":
        return nn.LayerNorm(config.d_model, eps=config.norm_eps)
    return nn.RMSNorm(config.d_model, eps=config.norm_eps)


def make_feed_forward(config: TransformerConfig) -> nn.Module:
    if config.architecture == "gpt2":
        return GELULayers(config)
    if config.num_experts > 0:
        return Experts(config)
    return SwiGLU(config)


class Block(nn.Module):
    """Attention, then feed-forward, each behind a norm and added to the residual stream [B, T, D]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = SelfAttention(config)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = make_feed_forward(config)

    def forward(self, x_BTD: Tensor, rope: Rope | None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope)
        output_BTD: Tensor = x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))
        return output_BTD


class Transformer(nn.Module):
    """Token ids [B, T] (int64) to logits [B, T, V], or with targets to the loss; T is any length but for GPT-2."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        embedding_class = SmallEmbedding if config.tied_embeddings else Embedding
        self.embedding = embedding_class(config.vocab_size, config.d_model)
        if config.architecture == "gpt2":
            self.position_embedding = SmallEmbedding(
                config.num_positions, config.d_model
            )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = make_norm(config)
        if not config.tied_embeddings:
            self.head = Linear(config.d_model, config.vocab_size)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return the logits; or, for ``targets_BT``, their mean cross-entropy, without all logits in memory."""
        config = self.config
        context = tokens_BT.shape[1]
        x_BTD = self.embedding(tokens_BT)
        rope = None
        if config.architecture == "gpt2":
            check_context(config, context)
            x_BTD = x_BTD + self.position_embedding.weight[:context]
        else:
            rope = rope_tables(
                context,
                config.head_dim,
                config.rope_theta,
                like=x_BTD,
                stretch=config.rope_stretch,
            )
        # Without gradients nothing is kept for a backward pass, so there is nothing to save.
        checkpoints = config.checkpoints if torch.is_grad_enabled() else ()
        x_BTD = self.norm(apply_blocks([*self.blocks], x_BTD, rope, checkpoints))
        if targets_BT is not None:
            return chunked_cross_entropy(x_BTD, targets_BT, self._logits)
        return self._logits(x_BTD)

    def _logits(self, x_BTD: Tensor) -> Tensor:
        if self.config.tied_embeddings:
            return F.linear(x_BTD, self.embedding.weight)
        logits_BTV: Tensor = self.head(x_BTD)
        return logits_BTV


def check_context(config: TransformerConfig, context: int) -> None:
    """Raise UsageError for a context with more positions than the model has embeddings for."""
    if config.architecture == "gpt2":
        has_positions = context <= config.num_positions
        expected = f"at most the {config.num_positions} positions that this model (gpt2) has embeddings for"
        expect(has_positions, "data.context_length", expected, context)


def apply_blocks(
    blocks: Sequence[nn.Module],
    x_BTD: Tensor,
    rope: Rope | None,
    checkpoints: Sequence[int],
) -> Tensor:
    """Return [B, T, D] after ``blocks``.

    Each ``checkpoints[0]`` successive blocks form an activation checkpoint. Within it, each ``checkpoints[1]`` blocks
    form a smaller one, and so on. Without ``checkpoints``, the blocks save their activations.

    With checkpoints of k of n blocks, n/k inputs and what k blocks save are held at once (Chen et al. 2016).
    """
    if not checkpoints:
        for block in blocks:
            x_BTD = block(x_BTD, rope)
        return x_BTD
    block_count, *nested = checkpoints
    for index in range(0, len(blocks), block_count):
        section = partial(
            apply_blocks, blocks[index : index + block_count], checkpoints=nested
        )
        # There is no dropout, so the RNG's state, which would be read in every block, need not be restored.
        x_BTD = checkpoint(
            section, x_BTD, rope, use_reentrant=False, preserve_rng_state=False
        )
    return x_BTD
