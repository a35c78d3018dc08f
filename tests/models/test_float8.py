"""The arithmetic around FP8 products, with products that a CPU can compute; no test here runs on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lm_profiler.models import float8
from lm_profiler.models.config import preset
from lm_profiler.models.float8 import Float8Linear, quantize
from lm_profiler.models.linear import Linear
from lm_profiler.usage_error import UsageError


def product_in_float32(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: Any) -> Tensor:
    """What an FP8 product computes: exact products of the stored numbers, by both scales."""
    assert left.is_contiguous()
    assert right.t().is_contiguous()
    return (left.float() @ right.float() * (left_scale * right_scale)).to(dtype)


@pytest.mark.parametrize("dtype, error", [(torch.float8_e4m3fn, 2**-4), (torch.float8_e5m2, 2**-3)], ids=str)
def test_a_tensor_fills_the_range_of_its_dtype(dtype: torch.dtype, error: float) -> None:
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 1e-3
    numbers, scale = quantize(tensor, dtype)
    assert numbers.float().abs().max() == torch.finfo(dtype).max
    restored = numbers.float() * scale
    torch.testing.assert_close(restored, tensor, rtol=error, atol=1e-3 * float(tensor.abs().max()))
    zeros, _ = quantize(torch.zeros(3), dtype)
    assert zeros.float().eq(0).all()


def test_outputs_and_gradients_are_near_those_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "multiply", product_in_float32)
    torch.manual_seed(0)
    exact = Linear(32, 48)
    linear = Float8Linear(32, 48)
    linear.load_state_dict(exact.state_dict())
    x = torch.randn(2, 16, 32)
    upstream = torch.randn(2, 16, 48)
    results = []
    for module in (exact, linear):
        inputs = x.clone().requires_grad_()
        output = module(inputs)
        output.float().backward(upstream)
        results.append((output.detach().float(), inputs.grad, module.weight.grad))
    for truth, found in zip(*results, strict=True):
        relative_error = float((found - truth).norm() / truth.norm())
        assert 1e-3 < relative_error < 0.1  # FP8 rounds by 1/16, and so does its noise


def test_widths_that_fp8_cannot_multiply_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^d_ff: expected a multiple of 16 with fp8, given 3080$"):
        preset("small", fp8=True, d_ff=3080)
    with pytest.raises(UsageError, match=r"^fp8: expected false for this architecture \(gpt2\), given True$"):
        preset("gpt2/small", fp8=True)
