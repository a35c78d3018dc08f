"""A decoder-only Transformer, with causal attention by name.

Shapes: B batch, T context, D width of the model, H heads, E width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm_profiler.models.attention import attention_function
from lm_profiler.models.config import TransformerConfig

NORM_EPS = 1e-5  # Epsilon of all norms: LLaMA's (Touvron et al. 2023, released code).


class Linear(nn.Linear):
    """A bias-free linear map; its weights start normal, of variance 1 / inputs, cut off at three deviations.

    It overrides `reset_parameters`, which sharded strategies call to fill weights built on the meta device.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        std = self.in_features**-0.5
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)


class Embedding(nn.Embedding):
    """A token embedding whose rows start as a unit normal, cut off at three deviations."""

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, a=-3.0, b=3.0)


def rope_tables(context: int, width: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, E/2] of the angles position · theta^(-2i/E) (Su et al. 2021, section 3.2.2).

    They lie on the device of `like`, in its dtype or in float32, whichever is finer.
    """
    # Computed in each forward pass instead of kept in a buffer: bf16-true would round a buffer, the context length may
    # change, and a table made in inference mode must not reach a training step. It costs a few small kernels and no
    # device sync.
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
    """Token ids [B, T] (int64) to logits [B, T, V]; T is whatever it is given."""

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
    """Return [B, T, D] behind ``blocks``; each ``every[0]`` of them are a checkpoint, ``every[1:]`` nest in it.

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
