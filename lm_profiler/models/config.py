"""The sizes of a Transformer, as plain numbers. Does not import torch, so that reading them costs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from lm_profiler.usage_error import UsageError, did_you_mean, expect

DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads")
# options of the model that, beside its size, determine the number of its parameters
SHAPE_OPTIONS = (
    *DIMENSIONS,
    "num_kv_heads",
    "head_width",
    "vocab_size",
    "tied_embeddings",
    "num_experts",
    "experts_per_token",
)
# the lowest compute capability of GPUs with FP8 products: Ada, Hopper, Blackwell
FP8_CAPABILITY = (8, 9)
FP8_MULTIPLE = 16  # each dimension of an FP8 product must be a multiple of this number
# the attention functions of ``transformer``; `package.module:function` names any other
OUR_ATTENTION = ("sdpa", "math")


@dataclass(frozen=True)
class TransformerConfig:
    """The dimensions of a decoder-only Transformer, without the context length, which belongs to the data.

    Raises:
        UsageError: the dimensions do not fit together.
    """

    d_model: int  # width of the residual stream (D)
    d_ff: int  # width inside the feed-forward layer (F)
    num_layers: int  # number of blocks
    num_heads: int  # number of attention heads (H), each d_model / num_heads wide
    vocab_size: int = 10_000  # number of token ids (V)
    # heads of keys and values (K), each shared by num_heads / K query heads; None for as many as query heads
    num_kv_heads: int | None = None
    # width of a head (E); None for d_model / num_heads
    head_width: int | None = None
    # whether queries and keys are normalized, head by head, before RoPE
    qk_norm: bool = False
    # whether the token embedding is also the matrix of the LM head
    tied_embeddings: bool = False
    # feed-forward layers per block (X), among which a router chooses; 0 for one layer without a router
    num_experts: int = 0
    # the number of experts to which each token is sent
    experts_per_token: int = 2
    # `llama`: RMSNorm, RoPE, SwiGLU, no biases; `gpt2`: LayerNorm, learned positions, GELU, biases
    architecture: Literal["llama", "gpt2"] = "llama"
    # the longest context of `gpt2`, which has an embedding for each position
    num_positions: int = 1024
    norm_eps: float = 1e-5  # epsilon of all norms: LLaMA's (Touvron et al. 2023, released code), and GPT-2's
    rope_theta: float = 10_000.0  # base of RoPE's wavelengths
    # the factor of RoPE's long wavelengths, for contexts longer than those of the first training
    rope_stretch: float = 1.0
    fp8: bool = False  # whether the matrices of attention and SwiGLU multiply in FP8
    # `sdpa`: PyTorch's fused attention; `math`: explicit scores, mask and softmax; or `package.module:function`
    attention: str = "sdpa"
    # whether only each block's input is saved for backward, which recomputes the rest: the same as `checkpoint_every` 1
    activation_checkpointing: bool = False
    # blocks per checkpoint, of which only the first one's input is saved; further numbers are of checkpoints within it
    checkpoint_every: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (*DIMENSIONS, "vocab_size", "rope_theta", "rope_stretch"):
            value = getattr(self, name)
            expect(value > 0, name, "a positive number", value)
        self._check_heads()
        self._check_experts()
        self._check_fp8()
        check_attention_name(self.attention)
        decreasing = (self.num_layers + 1, *self.checkpoint_every, 0)
        is_nested = all(outer > inner for outer, inner in pairwise(decreasing))
        expected = f"1 to num_layers ({self.num_layers}) blocks per checkpoint, in decreasing order"
        expect(is_nested, "checkpoint_every", expected, list(self.checkpoint_every))

    def _check_heads(self) -> None:
        """Raise UsageError for heads of an impossible width, or key and value heads that cannot be shared."""
        if self.head_width is None:
            heads_fit = self.d_model % (2 * self.num_heads) == 0
            divisor = f"a divisor of d_model / 2 ({self.d_model / 2:g}), since RoPE rotates pairs"
            expect(heads_fit, "num_heads", divisor, self.num_heads)
        else:
            is_even = self.head_width > 0 and self.head_width % 2 == 0
            expect(
                is_even,
                "head_width",
                "an even positive number, since RoPE rotates pairs",
                self.head_width,
            )
        if self.num_kv_heads is not None:
            divides = self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0
            expect(
                divides,
                "num_kv_heads",
                f"a divisor of num_heads ({self.num_heads})",
                self.num_kv_heads,
            )

    def _check_experts(self) -> None:
        """Raise UsageError for an impossible number of experts, or of experts that process a token."""
        expect(
            self.num_experts >= 0, "num_experts", "0 (none) or more", self.num_experts
        )
        if self.num_experts == 0:
            return
        expect(
            self.architecture == "llama",
            "num_experts",
            f"0 for this architecture ({self.architecture})",
            self.num_experts,
        )
        can_choose = 1 <= self.experts_per_token <= self.num_experts
        expected = f"1 to num_experts ({self.num_experts})"
        expect(can_choose, "experts_per_token", expected, self.experts_per_token)

    def _check_fp8(self) -> None:
        """Raise UsageError if FP8 is requested for matrices of widths that its products cannot have."""
        if not self.fp8:
            return
        expect(
            self.architecture == "llama",
            "fp8",
            f"false for this architecture ({self.architecture})",
            self.fp8,
        )
        widths = {
            "d_model": self.d_model,
            "d_ff": self.d_ff,
            "num_heads x head_width": self.num_heads * self.head_dim,
            "num_kv_heads x head_width": self.kv_heads * self.head_dim,
        }
        for name, width in widths.items():
            expect(
                width % FP8_MULTIPLE == 0,
                name,
                f"a multiple of {FP8_MULTIPLE} with fp8",
                width,
            )

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
        return self.head_width or self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def dimensions(self) -> str:
        """The dimensions in the order of published tables, such as ``2560/10240/32/32``."""
        return f"{self.d_model}/{self.d_ff}/{self.num_layers}/{self.num_heads}"

    def num_parameters(self, embedding: bool = True) -> int:
        """Return the exact number of parameters, with or without those of the ``embedding``, which looks up rows.

        Besides the blocks there are the token embedding (V·D), the LM head (V·D unless it is tied) and the final norm.
        GPT-2 also has an embedding of positions.
        """
        parameters_of_block = self.matrix_parameters() + self._vector_parameters()
        total = self.num_layers * parameters_of_block + self._norm_parameters()
        vocabulary_matrix = self.vocab_size * self.d_model
        if not self.tied_embeddings:
            total += vocabulary_matrix
        if embedding:
            total += vocabulary_matrix
            if self.architecture == "gpt2":
                total += self.num_positions * self.d_model
        return total

    def matrix_parameters(self) -> int:
        """Return the number of parameters in the matrices of one block.

        They are those of attention (queries and output D·H·E, keys and values D·K·E) and of the feed-forward layer:
        three of D·F with SwiGLU, two with GELU. With experts there is one such layer per expert, and a router (X·D).
        """
        query_matrix = self.d_model * self.num_heads * self.head_dim
        key_matrix = self.d_model * self.kv_heads * self.head_dim
        attention = 2 * query_matrix + 2 * key_matrix
        feed_forward_matrix = self.d_model * self.d_ff
        if self.architecture == "gpt2":
            return attention + 2 * feed_forward_matrix
        if self.num_experts == 0:
            return attention + 3 * feed_forward_matrix
        router = self.num_experts * self.d_model
        return attention + router + self.expert_parameters()

    def expert_parameters(self) -> int:
        """Return the number of parameters in all experts of one block."""
        return self.num_experts * 3 * self.d_model * self.d_ff

    def _vector_parameters(self) -> int:
        """Return the number of parameters in the norms and biases of one block."""
        norms = 2 * self._norm_parameters()
        if self.qk_norm:
            norms += 2 * self.head_dim
        if self.architecture != "gpt2":
            return norms
        # biases of queries, of keys and values, and of the output
        heads_with_biases = self.num_heads + 2 * self.kv_heads
        attention_biases = heads_with_biases * self.head_dim + self.d_model
        feed_forward_biases = self.d_ff + self.d_model
        return norms + attention_biases + feed_forward_biases

    def _norm_parameters(self) -> int:
        """Return the number of parameters of one norm: gains, and biases in GPT-2."""
        return 2 * self.d_model if self.architecture == "gpt2" else self.d_model


def check_attention_name(name: str) -> None:
    """Raise UsageError unless ``name`` is in ``OUR_ATTENTION`` or has the form ``package.module:function``."""
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
    # of the leaderboard: batch 2 and context 32,768, on two B200s
    "leaderboard": TransformerConfig(
        d_model=4096, d_ff=11008, num_layers=34, num_heads=32, vocab_size=151_936
    ),
}
# Touvron et al. 2023 (Llama 2): the two of its sizes with as many key heads as query heads
_LLAMA_2 = {
    "7B": TransformerConfig(
        d_model=4096, d_ff=11008, num_layers=32, num_heads=32, vocab_size=32_000
    ),
    "13B": TransformerConfig(
        d_model=5120, d_ff=13824, num_layers=40, num_heads=40, vocab_size=32_000
    ),
}

# Grattafiori et al. 2024 (Llama 3), table 3, and the configurations released with its weights
_llama_3 = partial(
    TransformerConfig, num_kv_heads=8, vocab_size=128_256, rope_theta=500_000.0
)
_LLAMA_3 = {
    "8B": _llama_3(d_model=4096, d_ff=14_336, num_layers=32, num_heads=32),
}
_llama_3_2 = partial(_llama_3, tied_embeddings=True, rope_stretch=32.0)
_LLAMA_3_2 = {
    "1B": _llama_3_2(d_model=2048, d_ff=8192, num_layers=16, num_heads=32),
    "3B": _llama_3_2(d_model=3072, d_ff=8192, num_layers=28, num_heads=24),
}
# Yang et al. 2025 (Qwen3), table 1, and the configurations released with its weights
_qwen_3 = partial(
    TransformerConfig,
    num_kv_heads=8,
    head_width=128,
    qk_norm=True,
    vocab_size=151_936,
    rope_theta=1_000_000.0,
    norm_eps=1e-6,
)
_QWEN_3 = {
    "0.6B": _qwen_3(
        d_model=1024, d_ff=3072, num_layers=28, num_heads=16, tied_embeddings=True
    ),
    "1.7B": _qwen_3(
        d_model=2048, d_ff=6144, num_layers=28, num_heads=16, tied_embeddings=True
    ),
    "4B": _qwen_3(
        d_model=2560, d_ff=9728, num_layers=36, num_heads=32, tied_embeddings=True
    ),
    "8B": _qwen_3(d_model=4096, d_ff=12_288, num_layers=36, num_heads=32),
    "30B-A3B": _qwen_3(
        d_model=2048,
        d_ff=768,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        num_experts=128,
        experts_per_token=8,
    ),
}
# Radford et al. 2019 (GPT-2), table 2, and its released code
_gpt_2 = partial(
    TransformerConfig, architecture="gpt2", vocab_size=50_257, tied_embeddings=True
)
_GPT_2 = {
    "small": _gpt_2(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "medium": _gpt_2(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "large": _gpt_2(d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
    "xl": _gpt_2(d_model=1600, d_ff=6400, num_layers=48, num_heads=25),
}


def _with_source(
    source: str, sizes: Mapping[str, TransformerConfig]
) -> dict[str, TransformerConfig]:
    """Return ``sizes`` by names with their source, such as ``gpt2/small``."""
    sizes_by_name = {}
    for name, size in sizes.items():
        sizes_by_name[f"{source}/{name}"] = size
    return sizes_by_name


# all sizes by name; names without a source are those of cs336-2025
PRESETS = dict(_CS336_2025)
PRESETS.update(_with_source("cs336-2025", _CS336_2025))
PRESETS.update(_with_source("cs336-2026", _CS336_2026))
PRESETS.update(_with_source("llama-2", _LLAMA_2))
PRESETS.update(_with_source("llama3", _LLAMA_3))
PRESETS.update(_with_source("llama3.2", _LLAMA_3_2))
PRESETS.update(_with_source("qwen3", _QWEN_3))
PRESETS.update(_with_source("gpt2", _GPT_2))

# by a name without a source: what it means in cs336-2026
_MEANING_IN_CS336_2026 = {
    "xl": f"in cs336-2026, xl means {PRESETS['cs336-2026/xl'].dimensions}; select it with --model.size=cs336-2026/xl",
    "2.7B": "in cs336-2026 it is called xl; select it with --model.size=cs336-2026/xl",
}


def ambiguous_size_notes(sizes: Iterable[str]) -> list[str]:
    """Return a note for each name without a source among ``sizes`` that means another model, or none, in cs336-2026."""
    notes = []
    for name in dict.fromkeys(sizes):
        if name in _MEANING_IN_CS336_2026:
            notes.append(
                f"size {name}: cs336-2025's, {PRESETS[name].dimensions}; {_MEANING_IN_CS336_2026[name]}"
            )
    return notes


def size_notes(options: Mapping[str, Any], is_on_command_line: bool) -> list[str]:
    """Return notes for the user on a size in ``options`` that may be misunderstood.

    It may be a name that another source uses for other dimensions. Or other options set dimensions, so that the size is
    only a name; that is noted if the user set the size on the command line.
    """
    size = options.get("size", "")
    dimensions = [f"{name} {options[name]}" for name in DIMENSIONS if options.get(name)]
    if not dimensions:
        return ambiguous_size_notes([size])
    if is_on_command_line and size in PRESETS:
        return [
            f"size {size}: only the name is used, because other options set {', '.join(dimensions)}"
        ]
    return []


def check_size_name(size: object) -> None:
    """Raise UsageError unless ``size`` is the name of a preset."""
    if isinstance(size, str) and size in PRESETS:
        return
    # names without a source, such as "small"; other presets are named "source/size"
    plain_names = ", ".join(_CS336_2025)
    newest_name = list(PRESETS)[-1]
    expected = f"{plain_names}, or a size of another source such as {newest_name}"
    remedy = (
        did_you_mean(str(size), PRESETS)
        or f"; for another size set {', '.join(DIMENSIONS)}"
    )
    raise UsageError(f"size: expected {expected}, given {str(size)[:100]!r}{remedy}")


def preset(size: str, **overrides: Any) -> TransformerConfig:
    """Return the preset ``size`` with some fields changed; an override that is None keeps the preset's value."""
    check_size_name(size)
    changes = {}
    for name, value in overrides.items():
        if value is not None:
            changes[name] = value
    return replace(PRESETS[size], **changes)
