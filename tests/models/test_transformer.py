"""Both attentions against the definition, in numpy float64. All of the model: test_against_transformers.py."""

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from raised import refusal
from stored_texts import assert_stored
from torch.nn.functional import scaled_dot_product_attention

from lm_profiler.models import transformer
from lm_profiler.models.config import PRESETS, TransformerConfig
from lm_profiler.models.transformer import (
    ATTENTION,
    Embedding,
    Linear,
    Transformer,
    attention_function,
    check_attention,
)
from lm_profiler.usage_error import UsageError

SHAPE = (2, 3, 7, 4)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def reference(q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each query one by one, over the keys up to its own position."""
    out = np.zeros_like(q)
    for b, h, t in np.ndindex(*q.shape[:3]):
        scores = np.array([q[b, h, t] @ k[b, h, s] for s in range(t + 1)]) / np.sqrt(q.shape[-1])
        weights = np.exp(scores) / np.exp(scores).sum()
        out[b, h, t] = sum(weight * v[b, h, s] for s, weight in enumerate(weights))
    return out


def random_qkv(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_agrees_with_the_definition(name: str, dtype: torch.dtype) -> None:
    qkv = [x.requires_grad_() for x in random_qkv(dtype)]
    out = ATTENTION[name](*qkv)
    assert out.dtype == dtype
    expected = reference(*(x.detach().double().numpy() for x in qkv))
    np.testing.assert_allclose(out.detach().double().numpy(), expected, atol=TOLERANCE[dtype])
    if dtype == torch.float64:
        copies = [x.detach().clone().requires_grad_() for x in qkv]
        gradients = [
            torch.autograd.grad(result.square().sum(), inputs)
            for result, inputs in ((out, qkv), (scaled_dot_product_attention(*copies, is_causal=True), copies))
        ]
        torch.testing.assert_close(*gradients)


TINY = TransformerConfig(d_model=12, d_ff=20, num_layers=2, num_heads=3, vocab_size=17)


def built_model(config: TransformerConfig = TINY, seed: int = 0, **overrides: Any) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(replace(config, **overrides))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # gains of one would hide a gain that is left out
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def random_tokens(context: int = 9, batch: int = 2, vocab_size: int = 17) -> torch.Tensor:
    return torch.randint(vocab_size, (batch, context), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "size,expected",
    [
        ("small", 128_625_408),
        ("medium", 423_183_360),
        ("large", 969_411_840),
        ("xl", 1_998_235_200),
        ("2.7B", 3_406_809_600),
        # all that follow as published with the weights: the sums of the shapes in the files of Meta, Qwen and OpenAI on
        # Hugging Face (of qwen3/0.6B, whose file has the tied head twice: what transformers counts)
        # torchtitan 0.3.0 builds Llama 3, 3.2 and Qwen3 with the same numbers, transformers 5.23 GPT-2 and Llama 2;
        # KerasHub publishes GPT-2 and Llama 2 7B (gpt2_presets.py, llama_presets.py: "params")
        ("llama-2/7B", 6_738_415_616),
        ("llama-2/13B", 13_015_864_320),
        ("llama3/8B", 8_030_261_248),
        ("llama3.2/1B", 1_235_814_400),
        ("llama3.2/3B", 3_212_749_824),
        ("qwen3/0.6B", 596_049_920),
        ("qwen3/1.7B", 1_720_574_976),
        ("qwen3/4B", 4_022_468_096),
        ("qwen3/8B", 8_190_735_360),
        ("qwen3/30B-A3B", 30_532_122_624),
        ("gpt2/small", 124_439_808),
        ("gpt2/medium", 354_823_168),
        ("gpt2/large", 774_030_080),
        ("gpt2/xl", 1_557_611_200),
        # by hand: 34 · (4 · 4096² + 3 · 4096 · 11008 + 2 · 4096) + 4096 + 2 · 151936 · 4096
        ("cs336-2026/leaderboard", 8_125_698_048),
    ],
)
def test_parameter_counts_are_exact(size: str, expected: int) -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS[size])
    assert sum(p.numel() for p in model.parameters()) == expected == PRESETS[size].num_parameters()
    embeddings = [part.weight for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    without = expected - sum(weight.numel() for weight in embeddings)
    assert without == PRESETS[size].num_parameters(embedding=False)


def test_a_function_of_the_users_gets_a_key_head_for_each_query_head(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        shapes.extend(tuple(tensor.shape) for tensor in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    monkeypatch.setattr(transformer, "mine", attend, raising=False)
    options: dict[str, Any] = {"d_model": 24, "num_heads": 6, "num_kv_heads": 2}
    mine, sdpa, math = (
        built_model(attention=attention, **options)(random_tokens())
        for attention in ("lm_profiler.models.transformer:mine", "sdpa", "math")
    )
    assert set(shapes) == {(2, 6, 9, 4)}
    torch.testing.assert_close(mine, sdpa)
    torch.testing.assert_close(math, sdpa)


def test_casting_the_weights_leaves_the_angles_exact() -> None:
    """At position 900 an angle rounded to bf16 would be off by up to two radians."""
    ids = random_tokens(context=900, batch=1)
    model = built_model().bfloat16()
    out = model(ids).detach().double()
    exact = model.double()(ids).detach()
    assert (out - exact)[0, -50:].abs().max() < 20 * torch.finfo(torch.bfloat16).eps


def gradients_and_saved(model: Transformer) -> tuple[list[torch.Tensor | None], int]:
    """The gradients of a step, and how many tensors its forward pass kept."""
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(random_tokens()).square().mean()
    loss.backward()
    return [p.grad for p in model.parameters()], len(saved)


@pytest.mark.parametrize("every", [(1,), (3,), (4, 2, 1)], ids=str)
def test_checkpointing_changes_no_gradient(every: tuple[int, ...]) -> None:
    expected, all_of_it = gradients_and_saved(built_model(num_layers=7).double())
    found, kept = gradients_and_saved(built_model(num_layers=7, checkpoint_every=every).double())
    torch.testing.assert_close(found, expected)
    assert kept < all_of_it / 2


def test_a_checkpoint_runs_each_block_once_more() -> None:
    def calls(**options: Any) -> list[int]:
        model, counts = built_model(num_layers=5, **options), [0] * 5
        for n, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda *_, n=n: counts.__setitem__(n, counts[n] + 1))
        model(random_tokens()).sum().backward()
        return counts

    assert calls() == [1] * 5
    assert calls(activation_checkpointing=True) == calls(checkpoint_every=(2,)) == [2] * 5
    # Behind a nested checkpoint a third time, but for the last one inside: torch stops once it has what is needed.
    assert max(calls(checkpoint_every=(4, 1))) == 3


@pytest.mark.parametrize("attention, every", [("sdpa", ()), ("math", (2, 1))], ids=str)
def test_it_compiles_as_one_graph(attention: str, every: tuple[int, ...]) -> None:
    model = built_model(attention=attention, checkpoint_every=every)
    expected = model(random_tokens())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(random_tokens()), expected)
    compiled(random_tokens()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_model_runs_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS["xl"])
        ids = torch.zeros(4, 512, dtype=torch.int64)
    logits = model(ids)
    assert logits.shape == (4, 512, 10_000)
    assert logits.device.type == "meta"
    # A buffer would be cast by a precision plugin, and broadcast at every step by DDP.
    assert list(model.buffers()) == []
    model = built_model(architecture="gpt2", num_positions=8)
    model(random_tokens(context=8))
    with pytest.raises(UsageError, match=r"^data.context_length: expected at most the 8 positions .*, given 9$"):
        model(random_tokens(context=9))


def test_weights_start_as_truncated_normals() -> None:
    torch.manual_seed(0)
    linear, embedding = Linear(400, 300), Embedding(300, 400)
    for weight, std in ((linear.weight, 400**-0.5), (embedding.weight, 1.0)):
        assert weight.abs().max() <= 3 * std
        assert weight.std().item() == pytest.approx(0.987 * std, rel=0.01)  # the cut takes 1.3 % off
        assert abs(weight.mean().item()) < 0.01 * std


def test_the_loss_of_a_fresh_model_is_that_of_a_uniform_guess() -> None:
    """The loss is little above that of the uniform guess, ln V."""
    config = TransformerConfig(d_model=64, d_ff=128, num_layers=3, num_heads=4, vocab_size=1000)
    ids = random_tokens(context=64, batch=4, vocab_size=1000)
    loss = torch.nn.functional.cross_entropy(Transformer(config)(ids).flatten(0, 1), ids.flatten())
    assert np.log(1000) < loss.item() < np.log(1000) + 1


THEIRS = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa


def good(q, k, v, is_causal): return sdpa(q, k, v, is_causal=is_causal)
def keyword(q, k, v, *, is_causal=False, tile=64): return good(q, k, v, is_causal)
def sees_all(q, k, v, is_causal): return sdpa(q, k, v)
def masked(q, k, v, is_causal): return sdpa(q, k, v, is_causal=True)
def unscaled(q, k, v, is_causal): return sdpa(q, k, v, is_causal=is_causal, scale=1.0)
def flat(q, k, v, is_causal): return good(q, k, v, is_causal).flatten(0, 1)
def three(q, k, v, is_causal): batch, tokens, width = q.shape
def two(q, k): return q
def detached(q, k, v, is_causal): return good(q, k, v, is_causal).detach()
def without_v(q, k, v, is_causal): return good(q, k, v.detach(), is_causal)
def none(q, k, v, is_causal): return good(q, k, v, is_causal) * float("nan")
def scales_in_place(q, k, v, is_causal):
    return sdpa(q.mul_(q.shape[-1] ** -0.5), k, v, is_causal=is_causal, scale=1.0)

def last_tile(q, k, v, is_causal):
    out = good(q, k, v, is_causal).clone()
    out[1, 2, 200:, 5] += 10
    return out

class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        ctx.save_for_backward(q, k, v)
        return good(q, k, v, is_causal)

    @staticmethod
    def backward(ctx, upstream):
        with torch.enable_grad():
            qkv = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return *torch.autograd.grad(good(*qkv, True), qkv, upstream), None

class Wrong(Flash):
    @staticmethod
    def backward(ctx, upstream):
        q, k, v, _ = Flash.backward(ctx, upstream)
        return q, k * 2, v, None

number = 3
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)


def check(name: str, dtype: torch.dtype = torch.float32, backward: bool = True, is_causal: bool = True) -> None:
    check_attention(f"theirs:{name}", 16, dtype, torch.device("cpu"), backward, is_causal)


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["good", "keyword", "Flash.apply"])
def test_a_correct_attention_function_passes_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    check(name, dtype)
    qkv = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    expected = scaled_dot_product_attention(*qkv, is_causal=True)
    torch.testing.assert_close(attention_function(f"theirs:{name}")(*qkv), expected)


def test_the_check_returns_what_the_first_call_takes_beyond_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [7.0]
    call_times_s = iter([4.0, 1.5])

    def tunes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        clock_s[0] += next(call_times_s)
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    monkeypatch.setitem(sys.modules, "tuned", SimpleNamespace(tunes=tunes))
    monkeypatch.setattr(transformer, "perf_counter", lambda: clock_s[0])
    for name, expected_s in (("tuned:tunes", 2.5), ("sdpa", None)):
        assert check_attention(name, 16, torch.float32, torch.device("cpu"), backward=True) == expected_s


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize("name", ["good", "sees_all", "keyword", *ATTENTION])
def test_without_a_mask_every_token_sees_all(name: str) -> None:
    named = name if name in ATTENTION else f"theirs:{name}"
    check_attention(named, 16, torch.float32, torch.device("cpu"), True, is_causal=False)
    qkv = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    torch.testing.assert_close(attention_function(named, False)(*qkv), scaled_dot_product_attention(*qkv))


@pytest.mark.usefixtures("theirs")
def test_wrong_attention_functions_are_refused() -> None:
    """The messages are stored without torch's and Python's own words, which differ between versions."""
    messages = {name: refusal(UsageError, partial(check, name)) for name in ("sees_all", "flat", "detached")}
    others = {
        "unscaled": "24576",
        "three": "ValueError: too many values",
        "two": "TypeError: two()",
        "without_v": "24576",
        "none": "at index (0, 0, 0, 0)",
        "Wrong.apply": "24576",
    }
    for name, own in others.items():
        message = refusal(UsageError, partial(check, name))
        assert len(message.splitlines()) <= 2
        messages[name], _, given = message.partition(", given")
        assert own in given
    assert_stored("models/refused: wrong", messages)
    message = refusal(UsageError, lambda: check("masked", is_causal=False))
    assert_stored("models/refused: mask", {"nobody asked for it": message})
    with pytest.raises(UsageError, match=r"given\n.* 56 / 24576 .* at index \(1, 2, "):  # where numbers are off
        check("last_tile")


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize("name", ["detached", "Wrong.apply", "scales_in_place"])
def test_without_a_backward_pass_inputs_may_change(name: str) -> None:
    check(name, backward=False)


@pytest.mark.usefixtures("theirs")
def test_missing_attention_functions_are_refused() -> None:
    messages = {}
    for name in ("theirs:nothing", "no.such:thing", "theirs:number"):
        messages[name] = re.sub(
            r"(?<=AttributeError: ).*(?=\))",
            "PYTHON'S OWN WORDS",
            refusal(UsageError, partial(attention_function, name)),
        )
    assert_stored("models/refused: no function", messages)


def test_the_parts_of_math_are_nvtx_ranges_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append(None))
    qkv = [torch.randn(1, 1, 4, 2) for _ in range(3)]
    expected = transformer.math(*qkv)
    assert not seen
    monkeypatch.setattr(transformer, "nvtx_parts", True)
    torch.testing.assert_close(transformer.math(*qkv), expected)
    assert seen == ["attention scores", None, "attention softmax", None, "attention values", None]
    torch.testing.assert_close(torch.compile(transformer.math, backend="eager", fullgraph=True)(*qkv), expected)
    assert len(seen) == 6
