"""A decoder-only Transformer, and causal attention by name: one of two functions here, or any other, which is checked.

The letters after a tensor's name are its dimensions: B batch, T context, D width of the model, H heads, K heads of keys
and values, E width of a head, F width of the feed-forward layer, V vocabulary.
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

# takes queries, keys and values, each [B, H, T, E]; returns the attended values [B, H, T, E]
AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]

# whether ``math`` puts its scores, softmax and values into NVTX ranges
nvtx_parts = False


def sdpa(
    q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, is_causal: bool = True
) -> Tensor:
    """Compute PyTorch's scaled_dot_product_attention, which picks a fused kernel if the device has one.

    Keys and values may have fewer heads: each is shared by H / K query heads.
    """
    shares_heads = k_BHTE.shape[1] != q_BHTE.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTE, k_BHTE, v_BHTE, is_causal=is_causal, enable_gqa=shares_heads
    )


def math(
    q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, is_causal: bool = True
) -> Tensor:
    """Compute scores, mask and softmax one by one, with the [B, H, T, T] scores in memory: the baseline to profile.

    softmax(Q Kᵀ / √E + causal mask) V, from Vaswani et al. 2017, equation 1.
    """
    context, width = q_BHTE.shape[-2:]
    with _nvtx_range("attention scores"):
        # Queries are scaled instead of scores, because there are T·E of their numbers and not T·T.
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
        # If autocast has computed the softmax in float32, it casts both factors to one dtype here.
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
    """Import ``package.module:name`` and return it; raise UsageError if that fails."""
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
    """Return the attention function ``name``: one of ``ATTENTION``, or the user's ``package.module:function``.

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
    # by position, because the ``apply`` of an autograd.Function takes no arguments by name
    return lambda q, k, v: function(q, k, v, is_causal)


def _takes_is_causal(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` has a parameter ``is_causal``; False if its signature is unknown."""
    try:
        return "is_causal" in signature(function).parameters
    except (TypeError, ValueError):  # a function written in C
        return False


# Sequences, heads and tokens of the check. They differ, so that swapped dimensions are detected; the number of tokens
# is a multiple of the tiles of kernels.
_CHECKED_SIZES = (2, 3, 256)

# the largest error that the check allows, as a share of the largest number: many times the rounding of the dtype
_TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}

# the same for float32 on an accelerator, where Triton's `tl.dot` multiplies in TF32 by default
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
    """Compare a user's function with ``math`` in float64: its values and, with ``backward``, its gradients.

    Returns:
        By how many seconds the first call takes longer than the second; None for a function of ``ATTENTION``, which is
        not called.

    Raises:
        UsageError: the function fails, or its shape or its numbers are wrong; the message says where they differ.
    """
    if name in ATTENTION:
        return None
    generator = torch.Generator().manual_seed(0)
    shape = (*_CHECKED_SIZES, width)
    # queries, keys and values, and the gradient of the result
    *qkv, upstream = [
        torch.randn(shape, generator=generator).to(dtype) for _ in range(4)
    ]
    qkv_float64 = [tensor.double() for tensor in qkv]
    truths = _attention_results(
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
    q, k, v = qkv_float64
    values_of_opposite_mask = sdpa(q, k, v, not is_causal)
    if _difference_text(results["values"], values_of_opposite_mask, tolerance) is None:
        raise UsageError(_opposite_mask_text(name, is_causal))
    for subject, numbers in results.items():
        difference = _difference_text(numbers, truths[subject], tolerance)
        if difference is not None:
            dtype_name = str(dtype).removeprefix("torch.")
            expected = f"{subject} of {name} in {dtype_name} within {tolerance:g} of the largest number"
            raise UsageError(f"attention: expected {expected}, given\n{difference}")
    return first_call_s - second_call_s


def _opposite_mask_text(name: str, is_causal: bool) -> str:
    """Return the message about a function that is causal if it should not be, or the reverse."""
    if is_causal:
        return f"attention: expected causal attention, given {name}, in which tokens attend to later ones"
    expected = "attention without a causal mask"
    return f"attention: expected {expected}, given {name}, in which no token attends to a later one"


def _timed_results(
    function: AttentionFunction, qkv: list[Tensor], upstream: Tensor, backward: bool
) -> tuple[dict[str, Tensor], float]:
    """Return the results of ``function`` on the host, by name, and the seconds until they were there."""
    began_s = perf_counter()
    results_on_device = _attention_results(function, qkv, upstream, backward)
    results = {name: tensor.cpu() for name, tensor in results_on_device.items()}
    elapsed_s = perf_counter() - began_s
    return results, elapsed_s


def _attention_results(
    function: AttentionFunction, qkv: list[Tensor], upstream: Tensor, backward: bool
) -> dict[str, Tensor]:
    """Return the attended values and, with ``backward``, the gradients of q, k and v, by name.

    ``upstream`` is the gradient of the values.
    """
    with torch.set_grad_enabled(backward):
        inputs = [tensor.detach().requires_grad_(backward) for tensor in qkv]
        values = function(*inputs)
        _check_form(values, like=qkv[0])
        if not backward:
            return {"values": values}
        expect(
            values.requires_grad,
            "attention",
            "outputs with a gradient; `validate` times forward alone",
            "none",
        )
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            values, inputs, upstream, allow_unused=True
        )
    results = {"values": values.detach()}
    for letter, gradient, tensor in zip("qkv", gradients, inputs, strict=True):
        if gradient is None:  # the values do not depend on it
            gradient = torch.zeros_like(tensor)
        results[f"gradient of {letter}"] = gradient
    return results


def _check_form(values: Any, like: Tensor) -> None:
    """Raise UsageError unless ``values`` is a tensor with the shape and the dtype of ``like``."""
    expected = f"values of shape {list(like.shape)} [B, H, T, d] in {like.dtype}"
    if not isinstance(values, Tensor):
        class_name = type(values).__name__
        raise UsageError(f"attention: expected {expected}, given {class_name}")
    has_form = values.shape == like.shape and values.dtype == like.dtype
    form = f"{list(values.shape)} in {values.dtype}"
    expect(has_form, "attention", expected, form)


def _difference_text(numbers: Tensor, truth: Tensor, tolerance: float) -> str | None:
    """Return a text on the largest error, if one exceeds ``tolerance`` times the largest true number; else None."""
    largest = float(truth.abs().max())
    try:
        torch.testing.assert_close(
            numbers.detach().cpu().double(), truth, rtol=0.0, atol=tolerance * largest
        )
    except AssertionError as error:
        # the number of mismatched elements, and the greatest absolute difference
        lines = str(error).splitlines()
        return "; ".join(lines[2:4])
    return None


def _error_text(error: Exception) -> str:
    """Return the type of ``error`` and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


# -- the model ---------------------------------------------------------------------------------------------------------


class Embedding(nn.Embedding):
    """A token embedding, initialized from a normal distribution of variance 1, truncated at three deviations."""

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, a=-3.0, b=3.0)


class SmallEmbedding(nn.Embedding):
    """An embedding that shares its matrix with the LM head, or is added to such an embedding.

    It is initialized like a ``Linear``.
    """

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
    # The tables are computed in each forward pass, which costs a few small kernels, and not kept in a buffer: bf16-true
    # would round a buffer, the context length may change, and a table made in inference mode must not reach training.
    dtype = torch.promote_types(torch.float32, like.dtype)
    exponents = torch.arange(0, width, 2, device=like.device, dtype=dtype) / width
    positions = torch.arange(context, device=like.device, dtype=dtype)
    frequencies = theta**-exponents
    if stretch != 1.0:
        frequencies = stretched_frequencies(frequencies, stretch)
    angles = positions[:, None] * frequencies[None, :]
    return angles.cos(), angles.sin()


# The constants of ``apply_scaling`` in the code released with Llama 3.1: the positions of Llama 3's first training, and
# how often a wavelength fits into them from which on it is not stretched, and below which it is stretched in full.
_TRAINED_POSITIONS = 8192
_MOST_TURNS = 4.0
_LEAST_TURNS = 1.0


def stretched_frequencies(frequencies: Tensor, stretch: float) -> Tensor:
    """Return RoPE's ``frequencies`` with long wavelengths multiplied by ``stretch``, as in Llama 3.1 and 3.2.

    A frequency that turns often within the trained positions does not change. One that turns less than once is divided
    by ``stretch``. In between, the two are mixed.
    """
    turns = _TRAINED_POSITIONS * frequencies / (2 * pi)
    share_unchanged = (turns - _LEAST_TURNS) / (_MOST_TURNS - _LEAST_TURNS)
    share_unchanged = share_unchanged.clamp(0.0, 1.0)
    share_stretched = 1 - share_unchanged
    return frequencies * (share_unchanged + share_stretched / stretch)


def rotate(x_BHTE: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair (i, i + E/2) of every head by the angle of its position; GPT-NeoX pairs them like this."""
    # In the dtype of x, because tables in float32 would make heads of half precision float32.
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
        # ``sdpa`` accepts shared heads; for other functions keys and values are copied for each query head.
        self.copies = 1
        if config.attention != "sdpa":
            self.copies = config.num_heads // config.kv_heads
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
        """Return what the tokens attend to, [B, T, D]."""
        # One after the other, so that the queries before RoPE are freed before there are keys.
        q_BHTE = self._heads(self.query(x_BTD), self.query_norm, rope)
        k_BKTE = self._heads(self.key(x_BTD), self.key_norm, rope)
        v_BKTE = self._split(self.value(x_BTD))
        if self.copies > 1:
            k_BKTE = k_BKTE.repeat_interleave(self.copies, dim=1)
            v_BKTE = v_BKTE.repeat_interleave(self.copies, dim=1)
        # In one expression, because a name for the values before ``rearrange`` would keep their memory until the end.
        attended_BTD = rearrange(
            self.attend(q_BHTE, k_BKTE, v_BKTE), "b h t e -> b t (h e)"
        )
        output_BTD: Tensor = self.output(attended_BTD)
        return output_BTD

    def _heads(
        self, x_BTD: Tensor, norm: nn.Module | None, rope: Rope | None
    ) -> Tensor:
        """Return queries or keys by head, normalized and rotated, [B, H, T, E]."""
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
    """Return the feed-forward layer of the architecture."""
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
    """Maps token ids [B, T] (int64) to logits [B, T, V], or with targets to the loss.

    The context T may have any length, except for GPT-2.
    """

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
        # Without gradients nothing is saved for a backward pass, so checkpoints would be useless.
        checkpoints = config.checkpoints if torch.is_grad_enabled() else ()
        x_BTD = self.norm(apply_blocks([*self.blocks], x_BTD, rope, checkpoints))
        if targets_BT is not None:
            return chunked_cross_entropy(x_BTD, targets_BT, self._logits)
        return self._logits(x_BTD)

    def _logits(self, x_BTD: Tensor) -> Tensor:
        """Return the logits of hidden states, by the embedding itself if it is tied."""
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
    """Return the output [B, T, D] of ``blocks``.

    Every ``checkpoints[0]`` successive blocks form an activation checkpoint. Within it, every ``checkpoints[1]`` blocks
    form a smaller one, and so on. Without ``checkpoints``, the blocks save their activations.

    If k of n blocks form a checkpoint, memory holds n/k inputs and the activations of k blocks (Chen et al. 2016).
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
        # There is no dropout, so the state of the random generator need not be saved and restored in every block.
        x_BTD = checkpoint(
            section, x_BTD, rope, use_reentrant=False, preserve_rng_state=False
        )
    return x_BTD
