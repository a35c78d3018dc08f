"""What an operator multiplies, by the shapes that it was given."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from lm_profiler.analysis.trace.walk import Inputs
from lm_profiler.analysis.why.inputs import operands

_BIASED = frozenset({"addmm", "baddbmm", "_addmm_activation"})
_PRODUCTS = frozenset({"mm", "bmm", "_scaled_mm", "_int_mm"}) | _BIASED


class Product(NamedTuple):
    """A product of ``batch`` pairs of matrices [m, k] and [k, n], or fused attention, which has no m, n and k.

    ``dtype`` is that of its factors, as torch names it; None is unknown.
    """

    flops: int
    dtype: str | None
    batch: int = 1
    m: int = 0
    n: int = 0
    k: int = 0


def product_of(name: str, inputs: Inputs) -> Product | None:
    """What the operator ``name`` multiplies; a multiply-add is two FLOPs. None is unknown.

    Causal attention counts half: fused kernels leave out the blocks that are masked.
    """
    given = operands(inputs)
    shapes, dtype = [one.shape for one in given], given[1].dtype if len(given) > 1 else None
    base = name.removeprefix("aten::").removesuffix("_")
    if "attention" in base:
        return _attention(base, shapes, dtype, inputs)
    factors = shapes[1:3] if base in _BIASED else shapes[:2]
    if base not in _PRODUCTS or [len(one) for one in factors] not in ([2, 2], [3, 3]):
        return None
    left, right = factors
    batch, (m, k), n = prod(left[:-2]), left[-2:], right[-1]
    return Product(2 * batch * m * n * k, dtype, batch, m, n, k)


def _attention(base: str, shapes: Sequence[Sequence[int]], dtype: str | None, inputs: Inputs) -> Product | None:
    """Of [B, H, T, D] each; operators that are not called ``scaled_dot_product`` are given [B, T, H, D]."""
    backward = "backward" in base
    given = shapes[1:4] if backward else shapes[:3]
    if [len(one) for one in given] != [4, 4, 4]:
        return None
    q, k, v = given
    time = 2 if base.startswith("_scaled_dot_product") else 1
    flops = 2 * prod(q[:3]) * k[time] * (q[3] + v[3]) * (2 if backward else 1)
    return Product(flops // 2 if "True" in inputs.values else flops, dtype)
