"""A linear layer whose matrix products are computed in FP8 (8-bit floats); its weights keep their own precision.

Each factor has one scale, with which its largest number becomes the largest of its dtype: e4m3 for activations and
weights; e5m2, which has a wider range, for gradients (Micikevicius et al. 2022).
Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_profiler.models.linear import Linear

_LEAST_SCALE = 1e-12  # so that a tensor of zeros is not divided by 0


def quantize(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``tensor`` in an FP8 ``dtype``, and the scale (float32) by which its numbers have to be multiplied."""
    largest_of_dtype = torch.finfo(dtype).max
    largest = tensor.abs().amax().float()
    scale = (largest / largest_of_dtype).clamp(min=_LEAST_SCALE)
    # clamped, because rounding may exceed the range of the dtype
    scaled = (tensor / scale).clamp(-largest_of_dtype, largest_of_dtype)
    return scaled.to(dtype), scale


def multiply(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``left`` @ ``right`` in ``dtype``; ``left`` must be stored by rows, and ``right`` by columns."""
    recipe = F.ScalingType.TensorWise
    return F.scaled_mm(
        left, right, left_scale, recipe, right_scale, recipe, output_dtype=dtype
    )


def by_columns(matrix: Tensor) -> Tensor:
    """Return a copy of ``matrix`` that is stored by columns."""
    return matrix.t().contiguous().t()


class Float8Product(torch.autograd.Function):
    """Computes x @ weightᵀ of x [N, I] and weight [O, I], and both gradients, in FP8."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        """Return [N, O]; save the factors for backward in FP8."""
        x8_NI, x_scale = quantize(x_NI, torch.float8_e4m3fn)
        weight8_OI, weight_scale = quantize(weight_OI, torch.float8_e4m3fn)
        ctx.save_for_backward(x8_NI, x_scale, weight8_OI, weight_scale)
        ctx.weight_dtype = weight_OI.dtype
        return multiply(x8_NI, x_scale, weight8_OI.t(), weight_scale, x_NI.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the input and of the weight."""
        [gradient_NO] = gradients
        x8_NI, x_scale, weight8_OI, weight_scale = ctx.saved_tensors
        gradient8_NO, gradient_scale = quantize(gradient_NO, torch.float8_e5m2)
        x_gradient_NI = multiply(
            gradient8_NO,
            gradient_scale,
            by_columns(weight8_OI),
            weight_scale,
            dtype=gradient_NO.dtype,
        )
        gradient8_ON = gradient8_NO.t().contiguous()
        weight_gradient_OI = multiply(
            gradient8_ON,
            gradient_scale,
            by_columns(x8_NI),
            x_scale,
            dtype=gradient_NO.dtype,
        )
        return x_gradient_NI, weight_gradient_OI.to(ctx.weight_dtype)


class Float8Linear(Linear):
    """A ``Linear`` whose products are in FP8; its results are bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., outputs] for ``x`` [..., inputs]."""
        rows_NI = x.flatten(0, -2).to(torch.bfloat16)
        outputs_NO: Tensor = Float8Product.apply(rows_NI, self.weight)  # type: ignore[no-untyped-call]
        leading_shape = x.shape[:-1]
        return outputs_NO.view(*leading_shape, -1)
