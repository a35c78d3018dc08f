"""The sizes of a Transformer, as plain numbers: without torch, so that reading them costs nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from lm_profiler.usage_error import UsageError, expect, expect_one_of

AttentionName = Literal["sdpa", "math"]


@dataclass(frozen=True)
class TransformerConfig:
    """The dimensions of a decoder-only Transformer; not the context length, which is the data's.

    Raises:
        UsageError: a dimension is not positive, the heads do not divide the width into even parts, or the
            attention's name is unknown.
    """

    d_model: int
    """Width of the residual stream (D)."""
    d_ff: int
    """Width inside the feed-forward layer (F)."""
    num_layers: int
    """Number of blocks."""
    num_heads: int
    """Number of attention heads (H), each d_model / num_heads wide."""
    vocab_size: int = 10_000
    """Number of token ids (V)."""
    rope_theta: float = 10_000.0
    """Base of RoPE's wavelengths."""
    attention: AttentionName = "sdpa"
    """`sdpa`: PyTorch's fused attention; `math`: explicit scores, mask and softmax."""
    activation_checkpointing: bool = False
    """Keep only each block's input for the backward pass, and compute the rest again there."""

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "rope_theta"):
            expect(getattr(self, name) > 0, name, "a positive number", getattr(self, name))
        if self.d_model % self.num_heads:
            # Name the nearest head counts that work, because guessing them is tedious.
            fitting = [h for h in range(1, self.d_model // 2 + 1) if self.d_model % (2 * h) == 0]
            nearest = sorted(sorted(fitting, key=lambda h: abs(h - self.num_heads))[:2])
            remedy = f"; take {' or '.join(map(str, nearest))} heads" if nearest else "; change d_model"
            raise UsageError(
                f"num_heads: expected a divisor of d_model ({self.d_model}), given {self.num_heads}{remedy}"
            )
        if self.head_dim % 2:
            raise UsageError(
                f"num_heads: expected an even width per head, because RoPE turns pairs, "
                f"given {self.d_model} / {self.num_heads} = {self.head_dim}; change num_heads or d_model"
            )
        expect_one_of(get_args(AttentionName), "attention", self.attention)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads

    def num_parameters(self, embedding: bool = True) -> int:
        """Return the exact number of parameters, without building anything.

        A block holds four D·D attention matrices, three D·F SwiGLU matrices and two norm gains (D each).
        Around the blocks stand the token embedding (V·D), the untied LM head (V·D) and the final norm (D).
        There are no biases.

        Args:
            embedding: Count the token embedding, whose rows are looked up and not multiplied.
        """
        block = 4 * self.d_model**2 + 3 * self.d_model * self.d_ff + 2 * self.d_model
        table = self.vocab_size * self.d_model
        return self.num_layers * block + table * (2 if embedding else 1) + self.d_model


PRESETS: dict[str, TransformerConfig] = {
    "small": TransformerConfig(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "medium": TransformerConfig(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "large": TransformerConfig(d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
    "xl": TransformerConfig(d_model=1600, d_ff=6400, num_layers=48, num_heads=25),
    "2.7B": TransformerConfig(d_model=2560, d_ff=10240, num_layers=32, num_heads=32),
}


def preset(size: str, **overrides: Any) -> TransformerConfig:
    """Return the named size with the given fields changed; a field given as None keeps the preset's value.

    Raises:
        UsageError: there is no such size, or the fields do not fit together.
    """
    expect_one_of(PRESETS, "size", size)
    return replace(PRESETS[size], **{name: value for name, value in overrides.items() if value is not None})
