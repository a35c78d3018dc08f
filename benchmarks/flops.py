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


def gpt_oss_rows() -> Iterator[Row]:
    """Yield gpt-oss as transformers builds it: torchtitan's convention, with our count of its parameters."""
    try:
        from transformers import GptOssConfig, GptOssForCausalLM
    except ImportError:
        return
    published = {"20B": (24, 32, 26_481_681_792), "120B": (36, 128, 38_044_854_144)}
    context = 4096
    for size, (layers, experts, truth) in published.items():
        config = GptOssConfig(num_hidden_layers=layers, num_local_experts=experts)
        with torch.device("meta"):
            model = GptOssForCausalLM(config)
        in_products = parameters_in_products(model)
        assert in_products is not None
        width_of_heads = config.num_attention_heads * config.head_dim
        attention = 12 * layers * width_of_heads * context
        yield Row(
            f"gpt-oss {size}, context {context}: a token by torchtitan's convention",
            6 * in_products + attention,
            truth,
            "published: torchtitan#4300, column Reference (windows in full)",
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
    rows = [*model_rows(), *gpt_oss_rows(), *attention_rows(), *other_rows()]
    print(markdown(rows))
    differing = [row.workload for row in rows if row.flops != row.truth]
    if differing:
        print(f"not the same: {', '.join(differing)}", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
