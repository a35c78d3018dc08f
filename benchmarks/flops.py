"""FLOPs of steps, counted by lm_profiler, beside hand counts and published formulas.

    python -m benchmarks.flops

Prints Markdown: the workload, our count, the truth and its source; exits with 1 if one differs. Large models run on
tensors without data. Takes half a minute on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from lm_profiler.callbacks.instruments.sent_step import shape_of
from lm_profiler.callbacks.model_sizes import parameters_in_products
from lm_profiler.measure.copies.module_copies import ModuleCopy
from lm_profiler.measure.counts.flex_attention import flops_of_mask
from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.models.config import preset
from lm_profiler.models.transformer import Transformer

BY_HAND = "by hand"


@dataclass(frozen=True)
class Row:
    workload: str
    flops: int
    truth: int
    source: str


def counted(step: Callable[[], Any]) -> int:
    """Return the FLOPs of ``step``, recomputation included."""
    counter = FlopCounter()
    with counter:
        step()
    flops = counter.flops()
    assert not flops.uncounted, flops.uncounted
    return flops.all


def counted_on_shapes(model: nn.Module, context: int) -> int:
    """Return the FLOPs of forward and backward of ``model``, which has no data, on one sequence."""
    cpu = torch.device("cpu")
    counter = FlopCounter(on_shapes=True)
    with FakeTensorMode():
        copy = ModuleCopy(partial(shape_of, device=cpu), cpu)(model)
        ids = torch.zeros(1, context, dtype=torch.long)
        with counter:
            copy(ids).sum().backward()
    return counter.flops().all


def model_rows() -> Iterator[Row]:
    """Yield sizes of published models, forward and backward, against the formula of PaLM and torchtitan."""
    contexts = {
        "gpt2/small": 1024,
        "llama-2/7B": 4096,
        "llama3/8B": 8192,
        "qwen3/0.6B": 4096,
    }
    for size, context in contexts.items():
        config = preset(size)

        with torch.device("meta"):
            model = Transformer(config)
        in_products = 0
        for part in model.modules():
            if isinstance(part, nn.Linear):
                in_products += part.weight.numel()
        if config.tied_embeddings:  # the head is the embedding
            in_products += config.vocab_size * config.d_model
        width_of_heads = config.num_heads * config.head_dim
        attention = 12 * config.num_layers * width_of_heads * context
        truth = (6 * in_products + attention) * context
        source = "6·N of matrices + 12·L·H·Q·T (Chowdhery et al. 2022, appendix B; torchtitan)"
        yield Row(
            f"{size}, context {context}",
            counted_on_shapes(model, context),
            truth,
            source,
        )


# FLOPs a token, context 4,096, that ``get_nparams_and_flops`` of torchtitan 0.3.0 returned for its own models, built
# without data (run on 29 November 2026). gpt-oss is published too: torchtitan#4300, column Reference.
TORCHTITAN_OF_OUR_SIZES = {
    "llama3.2/1B": 9_025_499_136,
    "llama3.2/3B": 23_504_357_376,
    "llama3/8B": 51_471_998_976,
    "qwen3/0.6B": 6_394_871_808,
    "qwen3/1.7B": 13_142_022_144,
    "qwen3/4B": 31_382_565_888,
    "qwen3/8B": 52_658_190_336,
    "qwen3/30B-A3B": 27_914_883_072,
}
_LLAMA = {"vocab_size": 128_256, "num_key_value_heads": 8}
_QWEN = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
_QWEN_3_5 = {
    "vocab_size": 248_320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# name: transformers' model, its sizes beside the defaults, width of a head's keys and values, torchtitan's FLOPs
TORCHTITAN_OF_TRANSFORMERS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "Llama 3 70B": (
        "Llama",
        {
            **_LLAMA,
            "hidden_size": 8192,
            "intermediate_size": 28_672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
        256,
        449_230_454_784,
    ),
    "Llama 3 405B": (
        "Llama",
        {
            **_LLAMA,
            "hidden_size": 16_384,
            "intermediate_size": 53_248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
        },
        256,
        2_523_980_857_344,
    ),
    "Qwen3 14B": (
        "Qwen3",
        {
            **_QWEN,
            "hidden_size": 5120,
            "intermediate_size": 17_408,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
        },
        256,
        94_008_698_880,
    ),
    "Qwen3 32B": (
        "Qwen3",
        {
            **_QWEN,
            "hidden_size": 5120,
            "intermediate_size": 25_600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
        },
        256,
        217_675_069_440,
    ),
    "Qwen3 235B-A22B": (
        "Qwen3Moe",
        {
            **_QWEN,
            "num_key_value_heads": 4,
            "hidden_size": 4096,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        256,
        167_260_001_280,
    ),
    "gpt-oss 20B": (
        "GptOss",
        {"num_hidden_layers": 24, "num_local_experts": 32},
        128,
        26_481_681_792,
    ),
    "gpt-oss 120B": (
        "GptOss",
        {"num_hidden_layers": 36, "num_local_experts": 128},
        128,
        38_044_854_144,
    ),
    "DeepSeek-V3 16B": (
        "DeepseekV3",
        {
            "vocab_size": 102_400,
            "hidden_size": 2048,
            "intermediate_size": 10_944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
        },
        320,
        18_105_996_288,
    ),
    "DeepSeek-V3 671B": ("DeepseekV3", {}, 320, 281_158_232_064),
    "Kimi K2.5": (
        "DeepseekV3",
        {
            "vocab_size": 163_840,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "n_routed_experts": 384,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        320,
        220_824_741_888,
    ),
    "Qwen3.5 4B": (
        "Qwen3_5",
        {
            **_QWEN_3_5,
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 32,
        },
        512,
        26_845_120_512,
    ),
    "Qwen3.5 27B": (
        "Qwen3_5",
        {
            **_QWEN_3_5,
            "hidden_size": 5120,
            "intermediate_size": 17_408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
        },
        512,
        158_579_438_592,
    ),
    "Qwen3.5 397B-A17B": (
        "Qwen3_5Moe",
        {
            **_QWEN_3_5,
            "hidden_size": 4096,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 64,
            "num_experts": 512,
            "num_experts_per_tok": 10,
        },
        512,
        104_031_330_816,
    ),
    "Muse Glimmer 30B": ("MuseGlimmer", {}, 256, 169_528_679_424),
}
# A small DeepSeek-V3 that predicts a second token; torchtitan#4300 publishes its FLOPs, column Reference
TWO_TOKENS_SIZES = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
}
TORCHTITAN_OF_TWO_TOKENS = 948_461_568
TORCHTITAN_CONTEXT = 4096


def torchtitan_rows() -> Iterator[Row]:
    """Yield models with our count of the parameters that a token meets, against torchtitan's FLOPs a token."""
    for size, truth in TORCHTITAN_OF_OUR_SIZES.items():
        config = preset(size)
        with torch.device("meta"):
            model: nn.Module = Transformer(config)
        all_heads = config.num_layers * config.num_heads
        width = 2 * config.head_dim
        yield _torchtitan_row(size, model, all_heads * width, truth)

    try:
        import transformers
    except ImportError:
        return
    for name, (kind, sizes, width, truth) in TORCHTITAN_OF_TRANSFORMERS.items():
        if not has_config(transformers, kind):
            continue
        model, their_config = _of_transformers(transformers, kind, sizes)
        kinds_of_layers = getattr(their_config, "layer_types", None) or []
        layers = their_config.num_hidden_layers - kinds_of_layers.count(
            "linear_attention"
        )
        all_heads = layers * their_config.num_attention_heads
        yield _torchtitan_row(name, model, all_heads * width, truth)

    model, their_config = _of_transformers(transformers, "DeepseekV3", TWO_TOKENS_SIZES)
    _add_second_token(model, their_config)
    all_heads = their_config.num_hidden_layers * their_config.num_attention_heads
    yield _torchtitan_row(
        "DeepSeek-V3 of two tokens",
        model,
        all_heads * 320,
        TORCHTITAN_OF_TWO_TOKENS,
    )


def has_config(transformers: Any, kind: str) -> bool:
    """Return whether this version of transformers knows models of ``kind``."""
    names = (f"{kind}TextConfig", f"{kind}Config")
    return any(hasattr(transformers, name) for name in names)


def _of_transformers(
    transformers: Any, kind: str, sizes: dict[str, Any]
) -> tuple[nn.Module, Any]:
    """Return the language model of ``kind`` without data, and its config."""
    has_text_config = hasattr(transformers, f"{kind}TextConfig")
    config_name = f"{kind}TextConfig" if has_text_config else f"{kind}Config"
    config = getattr(transformers, config_name)(**sizes)
    language_model = getattr(transformers, f"{kind}ForCausalLM", None)
    with torch.device("meta"):
        if language_model is not None:
            return language_model(config), config
        model = getattr(transformers, f"{kind}TextModel")(config)
        model.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    return model, config


def _add_second_token(model: Any, config: Any) -> None:
    """Add the layers that predict a second token: one more block, a matrix before it and three norms."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    width = config.hidden_size
    last = config.num_hidden_layers - 1
    with torch.device("meta"):
        model.second_token = nn.ModuleList(
            [
                modeling_deepseek_v3.DeepseekV3DecoderLayer(config, last),
                nn.Linear(2 * width, width, bias=False),
                nn.RMSNorm(width),
                nn.RMSNorm(width),
                nn.RMSNorm(width),
            ]
        )


def _torchtitan_row(
    name: str, model: nn.Module, width_of_all_heads: int, truth: int
) -> Row:
    in_products = parameters_in_products(model)
    assert in_products is not None
    flops = 6 * in_products + 6 * width_of_all_heads * TORCHTITAN_CONTEXT
    return Row(
        f"{name}: a token by torchtitan's convention",
        flops,
        truth,
        "torchtitan 0.3.0, get_nparams_and_flops, context 4,096 (windows in full)",
    )


def attention_rows() -> Iterator[Row]:
    batch, heads, length, width, window = 2, 4, 512, 32, 128
    query = torch.rand(batch, heads, length, width)
    dense = 4 * batch * heads * length * length * width
    causal = counted(
        lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True)
    )
    yield Row(
        "causal attention, forward", causal, dense, f"{BY_HAND}: 4·B·H·T²·E, in full"
    )

    def allows(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < window)

    mask = create_block_mask(allows, None, None, length, length, device="cpu")
    pairs = sum(min(i + 1, window) for i in range(length))
    flops = flops_of_mask(query, query, query, mask.as_tuple())
    truth = 4 * width * heads * batch * pairs
    yield Row(
        f"flex_attention, window {window}",
        flops,
        truth,
        f"{BY_HAND}: 4·E·H·B·Σ min(i+1, W)",
    )

    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.rand(2, 16, 64)
    with torch.inference_mode():
        flops = counted(lambda: layer(x))
    truth = 2 * (8 * 16 * 64**2 + 4 * 16**2 * 64 + 4 * 16 * 64 * 128)
    yield Row(
        "encoder layer in validation",
        flops,
        truth,
        f"{BY_HAND}: 8·T·E² + 4·T²·E + 4·T·E·F",
    )


def other_rows() -> Iterator[Row]:
    rows, width, rank = 32, 64, 4
    product = 2 * rows * width * width
    x = torch.rand(rows, width)
    base = nn.Linear(width, width, bias=False).requires_grad_(False)
    narrow_layer = nn.Linear(width, rank, bias=False)
    wide_layer = nn.Linear(rank, width, bias=False)
    lora = counted(lambda: (base(x) + wide_layer(narrow_layer(x))).sum().backward())
    narrow_product = 2 * rows * width * rank
    truth = product + 2 * narrow_product + 3 * narrow_product
    yield Row(
        "LoRA of rank 4",
        lora,
        truth,
        f"{BY_HAND}: the base has no gradient, its input neither",
    )

    layers = nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
    )
    x = x.requires_grad_()
    flops = counted(lambda: checkpoint(layers, x, use_reentrant=False).sum().backward())
    yield Row(
        "two checkpointed layers",
        flops,
        8 * product,
        f"{BY_HAND}: 2 forward, 4 backward, 2 again",
    )

    image = torch.rand(2, 8, 16, 16)
    flops = counted(
        lambda: nn.Conv2d(8, 16, 3, groups=2, padding=1)(image).sum().backward()
    )
    positions = 2 * 2 * 16 * 16
    truth = 2 * positions * 16 * 4 * 9
    yield Row(
        "grouped convolution",
        flops,
        truth,
        f"{BY_HAND}: forward, and the weight's gradient",
    )

    experts = torch.rand(4, width, width).bfloat16()
    ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    flops = counted(
        lambda: torch._grouped_mm(x.detach().bfloat16(), experts, offs=ends)
    )
    yield Row(
        "routed experts, forward",
        flops,
        product,
        f"{BY_HAND}: each row meets one expert",
    )

    weight = nn.Parameter(torch.rand(16, width))
    weight.grad = torch.rand(16, width)
    optimizer = torch.optim.Muon([weight])
    flops = counted(optimizer.step)
    iteration = 4 * 16 * 16 * width + 2 * 16**3
    yield Row(
        "Muon's step",
        flops,
        5 * iteration,
        f"{BY_HAND}: five times X·Xᵀ, its square, a product with X",
    )


def markdown(rows: list[Row]) -> str:
    lines = ["| workload | ours | truth | source |", "|:--|--:|--:|:--|"]
    for row in rows:
        lines.append(
            f"| {row.workload} | {row.flops:,} | {row.truth:,} | {row.source} |"
        )
    return "\n".join(lines)


def main() -> int:
    rows = [*model_rows(), *torchtitan_rows(), *attention_rows(), *other_rows()]
    print(markdown(rows))
    differing = [row.workload for row in rows if row.flops != row.truth]
    if differing:
        print(f"not the same: {', '.join(differing)}", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
