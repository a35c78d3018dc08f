"""The sizes of a Transformer, as plain numbers: without torch, so that reading them costs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from lm_profiler.usage_error import UsageError, did_you_mean, expect

DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads")
OUR_ATTENTION = (
    "sdpa",
    "math",
)  # our own attention functions; `package.module:function` names any other


@dataclass(frozen=True)
class TransformerConfig:
    """The dimensions of a decoder-only Transformer; not the context length, which is the data's.

    Raises UsageError for dimensions that do not fit together.
    """

    d_model: int  # width of the residual stream (D)
    d_ff: int  # width inside the feed-forward layer (F)
    num_layers: int  # number of blocks
    num_heads: int  # number of attention heads (H), each d_model / num_heads wide
    vocab_size: int = 10_000  # number of token ids (V)
    rope_theta: float = 10_000.0  # base of RoPE's wavelengths
    # `sdpa`: PyTorch's fused attention; `math`: explicit scores, mask and softmax; or `package.module:function`
    attention: str = "sdpa"
    # keep only each block's input for the backward pass, and recompute the rest there: `checkpoint_every` 1
    activation_checkpointing: bool = False
    # blocks per checkpoint, which keeps only the first one's input; further numbers are nested in it
    checkpoint_every: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (*DIMENSIONS, "vocab_size", "rope_theta"):
            value = getattr(self, name)
            expect(value > 0, name, "a positive number", value)
        heads_fit = self.d_model % (2 * self.num_heads) == 0
        divisor = (
            f"a divisor of d_model / 2 ({self.d_model / 2:g}), since RoPE rotates pairs"
        )
        expect(heads_fit, "num_heads", divisor, self.num_heads)
        check_attention_name(self.attention)
        decreasing = (self.num_layers + 1, *self.checkpoint_every, 0)
        is_nested = all(outer > inner for outer, inner in pairwise(decreasing))
        expected = f"1 to num_layers ({self.num_layers}) blocks per checkpoint, each number below the one before"
        expect(is_nested, "checkpoint_every", expected, list(self.checkpoint_every))

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Blocks per checkpoint, the outermost first; empty without checkpoints."""
        if self.checkpoint_every:
            return self.checkpoint_every
        if self.activation_checkpointing:
            return (1,)
        return ()

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def dimensions(self) -> str:
        """The dimensions in the order of published tables, such as ``2560/10240/32/32``."""
        return f"{self.d_model}/{self.d_ff}/{self.num_layers}/{self.num_heads}"

    def num_parameters(self, embedding: bool = True) -> int:
        """Return the exact number of parameters, with or without those of the ``embedding``, which only looks up rows.

        A block holds four D·D attention matrices, three D·F SwiGLU matrices and two norm gains (D each).
        Around the blocks stand the token embedding (V·D), the untied LM head (V·D) and the final norm (D).
        There are no biases.
        """
        attention = 4 * self.d_model**2
        feed_forward = 3 * self.d_model * self.d_ff
        norm = self.d_model
        block = attention + feed_forward + 2 * norm
        vocabulary = (
            self.vocab_size * self.d_model
        )  # of the LM head, and of the embedding
        total = self.num_layers * block + norm + vocabulary
        if embedding:
            total += vocabulary
        return total


def check_attention_name(name: str) -> None:
    """Raise UsageError unless ``name`` is one of ours or has the form ``package.module:function``."""
    is_path = re.fullmatch(r"[\w.]+:[\w.]+", name) is not None
    expected = f"{', '.join(OUR_ATTENTION)} or package.module:function"
    expect(name in OUR_ATTENTION or is_path, "attention", expected, name)


_CS336_2025 = {
    "small": TransformerConfig(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "medium": TransformerConfig(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "large": TransformerConfig(d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
    "xl": TransformerConfig(d_model=1600, d_ff=6400, num_layers=48, num_heads=25),
    "2.7B": TransformerConfig(d_model=2560, d_ff=10240, num_layers=32, num_heads=32),
}
_CS336_2026 = {  # handout 26.1.1 of its systems assignment
    "small": _CS336_2025["small"],
    "medium": _CS336_2025["medium"],
    "large": _CS336_2025["large"],
    "xl": _CS336_2025["2.7B"],
    "10B": TransformerConfig(d_model=4608, d_ff=12288, num_layers=50, num_heads=36),
}
# Touvron et al. 2023 (Llama 2). These two of its sizes have as many key heads as query heads, as our model has.
_LLAMA_2 = {
    "7B": TransformerConfig(
        d_model=4096, d_ff=11008, num_layers=32, num_heads=32, vocab_size=32_000
    ),
    "13B": TransformerConfig(
        d_model=5120, d_ff=13824, num_layers=40, num_heads=40, vocab_size=32_000
    ),
}


def _with_source(
    source: str, sizes: Mapping[str, TransformerConfig]
) -> dict[str, TransformerConfig]:
    return {f"{source}/{name}": size for name, size in sizes.items()}


# all sizes by name: the plain names are those of 2025
PRESETS = dict(_CS336_2025)
PRESETS.update(_with_source("cs336-2025", _CS336_2025))
PRESETS.update(_with_source("cs336-2026", _CS336_2026))
PRESETS.update(_with_source("llama-2", _LLAMA_2))

# what a plain name means in another year
_OTHER_MEANINGS = {
    "xl": f"in cs336-2026 xl is {PRESETS['cs336-2026/xl'].dimensions}: --model.size=cs336-2026/xl",
    "2.7B": "in cs336-2026 it is called xl: --model.size=cs336-2026/xl",
}


def other_meanings(sizes: Iterable[str]) -> list[str]:
    """Return a line for each plain name among ``sizes`` that means another model, or none, in another year."""
    lines = []
    for name in dict.fromkeys(sizes):
        if name in _OTHER_MEANINGS:
            lines.append(
                f"size {name}: cs336-2025's, {PRESETS[name].dimensions}; {_OTHER_MEANINGS[name]}"
            )
    return lines


def size_lines(options: Mapping[str, Any], named: bool) -> list[str]:
    """Return lines on what the size in ``options`` means; ``named`` is whether the user gave it on the command line.

    If other options give dimensions, the size is only a name, and a line says so if the user gave it.
    """
    size = options.get("size", "")
    dimensions = [f"{name} {options[name]}" for name in DIMENSIONS if options.get(name)]
    if not dimensions:
        return other_meanings([size])
    if named and size in PRESETS:
        return [
            f"size {size}: only its name; other options give {', '.join(dimensions)}"
        ]
    return []


def check_size_name(size: object) -> None:
    """Raise UsageError unless ``size`` is the name of a preset."""
    if isinstance(size, str) and size in PRESETS:
        return
    plain_names = ", ".join(_CS336_2025)
    newest_name = list(PRESETS)[-1]
    expected = f"{plain_names}, or a size of another source such as {newest_name}"
    remedy = (
        did_you_mean(str(size), PRESETS)
        or f"; for a size of your own give {', '.join(DIMENSIONS)}"
    )
    raise UsageError(f"size: expected {expected}, given {str(size)[:100]!r}{remedy}")


def preset(size: str, **overrides: Any) -> TransformerConfig:
    """Return the named size with the given fields changed; a field given as None keeps the preset's value."""
    check_size_name(size)
    changes = {name: value for name, value in overrides.items() if value is not None}
    return replace(PRESETS[size], **changes)
