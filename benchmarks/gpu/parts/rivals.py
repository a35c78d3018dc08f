"""One training step of our model, of Hugging Face's Llama with the same dimensions, and of code like nanoGPT's.

The same plain loop for all: forward and loss under bf16 autocast, backward, clipping, fused AdamW; float32 weights.
They take turns, because clocks and temperatures drift. Llama's layers are ours (RMSNorm, RoPE, SwiGLU, no biases).
nanoGPT's (LayerNorm, learned positions, one product for q, k and v, GELU) get a feed-forward layer half as wide again,
which makes the parameters of a block equal.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.place import Place
from lm_profiler.measure.clocks.stream import stream_of
from lm_profiler.models.config import TransformerConfig, preset
from lm_profiler.models.transformer import Transformer

BATCH, CONTEXT, STEPS, WARMUP = 4, 512, 10, 5
SIZE = "medium"
_OURS, _LLAMA, _GPT = "ours", "Llama of transformers", "like nanoGPT"


class GPTBlock(nn.Module):
    """karpathy/nanoGPT, model.py: a block without dropout and biases."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, wide = config.d_model, config.d_ff * 3 // 2
        self.heads = config.num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = (
            nn.Linear(width, times * width, bias=False) for times in (3, 1)
        )
        self.up, self.down = (
            nn.Linear(width, wide, bias=False),
            nn.Linear(wide, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        q, k, v = (
            part.view(batch, context, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        added: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return added


class GPT(nn.Module):
    """Token ids [B, T] to logits [B, T, V]."""

    def __init__(self, config: TransformerConfig, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(context, config.d_model)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.d_model, bias=False)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(
            torch.arange(ids.shape[1], device=ids.device)
        )
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def llama(config: TransformerConfig, context: int) -> nn.Module:
    """Of transformers, with the same layers and dimensions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    how: Any = {"attn_implementation": "sdpa"}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            max_position_embeddings=context,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            use_cache=False,
            **how,
        )
    )
    return Logits(model)


class Logits(nn.Module):
    """A model of transformers whose call gives the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids).logits
        return logits


class Step:
    """A training step of ``model`` on random tokens."""

    def __init__(self, model: nn.Module, device: torch.device, ids: Tensor) -> None:
        self.model, self.device, self.ids = model.to(device), device, ids
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, fused=fused or None
        )

    def __call__(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(self.ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), self.ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, steps: int) -> tuple[float, float]:
        """Of one, the mean of ``steps`` in a row; on the device's clock where there is one, and on the host's."""
        stream = stream_of(self.device)
        if stream is None:
            began_s = time.perf_counter()
            for _ in range(steps):
                self()
            host_s = (time.perf_counter() - began_s) / steps
            return host_s, host_s
        stream.wait()
        began_s = time.perf_counter()
        begin = stream.record()
        for _ in range(steps):
            self()
        end = stream.record()
        host_s = (time.perf_counter() - began_s) / steps
        stream.wait()
        return (stream.seconds(begin, end) or float("nan")) / steps, host_s


def run(place: Place, findings: Findings) -> None:
    tiny = {
        "d_model": 16,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": 50,
    }
    config = preset(SIZE, **(tiny if place.on_cpu else {}))
    batch, context, steps, warmup = (
        (2, 8, 2, 1) if place.on_cpu else (BATCH, CONTEXT, STEPS, WARMUP)
    )
    device = place.device
    torch.manual_seed(0)
    ids = torch.randint(config.vocab_size, (batch, context + 1), device=device)
    models: dict[str, nn.Module] = {}
    with device:  # drawing so many weights on the CPU would take most of the time
        models |= {
            _OURS: Transformer(config),
            _LLAMA: llama(config, context),
            _GPT: GPT(config, context),
        }
    contenders = {name: Step(model, device, ids) for name, model in models.items()}
    for step in contenders.values():
        step.seconds(warmup)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    host: dict[str, list[float]] = {name: [] for name in contenders}
    while len(seconds[_OURS]) < 3 or (
        not place.on_cpu and place.left_s > 5 and len(seconds[_OURS]) < 20
    ):
        for name, step in contenders.items():
            took_s, launched_s = step.seconds(steps)
            seconds[name].append(took_s)
            host[name].append(launched_s)
    tell(findings, models, seconds, host)


def tell(
    findings: Findings,
    models: dict[str, nn.Module],
    seconds: dict[str, list[float]],
    host: dict[str, list[float]],
) -> None:
    """``host`` as long as the step: it is launching that takes so long, whatever the kernels do."""
    rows = []
    for name, values in seconds.items():
        ratios = [
            own / other for own, other in zip(seconds[_OURS], values, strict=True)
        ]
        parameters = sum(parameter.numel() for parameter in models[name].parameters())
        spread = f"{min(ratios):.3f} ... {max(ratios):.3f}"
        step, launching = (
            f"{statistics.median(each) * 1e3:.3f}" for each in (values, host[name])
        )
        rows.append(
            [
                name,
                f"{parameters:,}",
                step,
                launching,
                f"{statistics.median(ratios):.3f}",
                spread,
            ]
        )
    rounds = len(seconds[_OURS])
    headings = (
        "",
        "parameters",
        "step (ms)",
        "host (ms)",
        "ours / this",
        "min ... max",
    )
    findings.table(
        f"A step of {SIZE}, {rounds} rounds of {STEPS} steps in turns", headings, rows
    )
    over = {
        name: statistics.median(
            a / b for a, b in zip(seconds[_OURS], values, strict=True)
        )
        for name, values in seconds.items()
    }
    findings.add(seconds=seconds, host_seconds=host, our_step_over=over)
