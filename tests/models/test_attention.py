"""An attention function of somebody else's: found by name, and compared with the definition before it is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lm_profiler.models import attention
from lm_profiler.models.attention import attention_function, check_attention
from lm_profiler.usage_error import UsageError

THEIRS = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

def good(q, k, v, is_causal): return sdpa(q, k, v, is_causal=is_causal)
def keyword(q, k, v, *, is_causal=False, tile=64): return good(q, k, v, is_causal)
def sees_all(q, k, v, is_causal): return sdpa(q, k, v)
def unscaled(q, k, v, is_causal): return sdpa(q, k, v, is_causal=is_causal, scale=1.0)
def flat(q, k, v, is_causal): return good(q, k, v, is_causal).flatten(0, 1)
def three(q, k, v, is_causal): batch, tokens, width = q.shape
def masked(q, k, v, mask): return q
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


@pytest.fixture(autouse=True)
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)


def check(name: str, dtype: torch.dtype = torch.float32, backward: bool = True) -> None:
    check_attention(f"theirs:{name}", 16, dtype, torch.device("cpu"), backward)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["good", "keyword", "Flash.apply"])
def test_a_right_function_passes_in_every_dtype_and_is_causal(name: str, dtype: torch.dtype) -> None:
    check(name, dtype)
    qkv = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    expected = scaled_dot_product_attention(*qkv, is_causal=True)
    torch.testing.assert_close(attention_function(f"theirs:{name}")(*qkv), expected)


def test_ones_own_may_change_its_inputs_where_nothing_is_differentiated() -> None:
    check("scales_in_place", backward=False)


@pytest.mark.parametrize(
    "name,told",
    [
        ("sees_all", r"^attention: expected causal attention, given theirs:sees_all"),
        ("unscaled", r"expected values of theirs:unscaled in float32 within 0\.0001 of the reference"),
        ("flat", r"values of shape \[2, 3, 256, 16\] .*given '\[6, 256, 16\]"),
        ("three", r"q, k, v of shape \[2, 3, 256, 16\] \[B, H, T, d\], given ValueError: too many values"),
        ("detached", r"expected values with a gradient"),
        ("without_v", r"expected gradient of v of theirs:without_v"),
        ("none", r"given 24,576 of 24,576 numbers off, the first at \[b, h, t, d\] = \[0, 0, 0, 0\]"),
        ("Wrong.apply", r"expected gradient of k of theirs:Wrong\.apply"),
    ],
)
def test_a_wrong_one_is_told(name: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as refused:
        check(name)
    assert len(str(refused.value).splitlines()) <= 2


def test_where_numbers_are_off_is_told_with_the_largest_error() -> None:
    with pytest.raises(UsageError, match=r"given 56 of 24,576 numbers off, .* \[1, 2, 200, 5\]\nlargest .* at \[1, "):
        check("last_tile")


@pytest.mark.parametrize("name", ["detached", "Wrong.apply"])
def test_without_a_backward_pass_gradients_are_not_asked_for(name: str) -> None:
    check(name, backward=False)


@pytest.mark.parametrize(
    "name,told",
    [
        ("theirs:masked", r"of \(q, k, v, is_causal\), given theirs:masked\(q, k, v, mask\): "),
        ("theirs:nothing", r"that can be imported, given theirs:nothing \(AttributeError: "),
        ("no.such:thing", r"\(ModuleNotFoundError: No module named 'no'\)"),
        ("theirs:number", r"expected a function, given 'theirs:number'"),
    ],
)
def test_what_is_no_such_function_is_refused(name: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        attention_function(name)


def test_the_parts_of_math_are_nvtx_ranges_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append(None))
    qkv = [torch.randn(1, 1, 4, 2) for _ in range(3)]
    expected = attention.math(*qkv)
    assert not seen
    monkeypatch.setattr(attention, "nvtx_parts", True)
    torch.testing.assert_close(attention.math(*qkv), expected)
    assert seen == ["attention scores", None, "attention softmax", None, "attention values", None]
    torch.testing.assert_close(torch.compile(attention.math, backend="eager", fullgraph=True)(*qkv), expected)
    assert len(seen) == 6
