"""What an operator multiplies, by the shapes that it was given, and how much of the device that shape leaves idle.

Tile and wave quantization: NVIDIA's Matrix Multiplication Background User's Guide (DU-09798). A product is cut into
tiles; tiles at the edge are computed whole, and the multiprocessors compute one wave of tiles after the other, the last
one not full.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil, prod
from typing import NamedTuple

from lm_profiler.analysis.trace.walk import Inputs
from lm_profiler.analysis.why.moved import operands

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
    """Return what the operator ``name`` multiplies; a multiply-add is two FLOPs. None is unknown.

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
    """Return the FLOPs of attention over tensors [B, H, T, D]; operators that are not called ``scaled_dot_product`` are
    given [B, T, H, D]."""
    backward = "backward" in base
    given = shapes[1:4] if backward else shapes[:3]
    if [len(one) for one in given] != [4, 4, 4]:
        return None
    q, k, v = given
    time = 2 if base.startswith("_scaled_dot_product") else 1
    flops = 2 * prod(q[:3]) * k[time] * (q[3] + v[3]) * (2 if backward else 1)
    return Product(flops // 2 if "True" in inputs.values else flops, dtype)


_TILES = (
    re.compile(r"tilesize(\d+)x(\d+)x\d+"),
    re.compile(r"_MT(\d+)x(\d+)x\d+"),  # rocBLAS
    re.compile(r"^nvjet_\w+?_(\d+)x(\d+)_"),
    re.compile(r"_(\d+)x(\d+)(?:x\d+_\d+x\d+x\d+|_\d+x\d+_)"),  # CUTLASS 3 and 2
    re.compile(r"gemm_(?:\w*?_)?(\d+)x(\d+)_"),
)
_OTHERWISE_CUT = re.compile(r"split_?k|stream_?k", re.IGNORECASE)  # along k as well


class Quantization(NamedTuple):
    """Shares of the multiply-adds that lie outside of the result, and of the last wave's room that nothing fills."""

    tile: tuple[int, int]
    tiles: int
    waves: float
    tile_loss: float
    wave_loss: float


def tile_of(kernel: str) -> tuple[int, int] | None:
    """The tile in the name of ``kernel``; None where it has none, or cuts the product otherwise as well."""
    if _OTHERWISE_CUT.search(kernel):
        return None
    match = next((hit for pattern in _TILES if (hit := pattern.search(kernel))), None)
    return None if match is None else (int(match[1]), int(match[2]))


def quantization(kernel: str, product: Product, multiprocessors: int) -> Quantization | None:
    """Return what ``kernel`` loses on ``product``. Of the two ways to lay its tile, the better one: it is at least
    this."""
    tile = tile_of(kernel)
    if tile is None or not product.m or not multiprocessors:
        return None
    rows, columns = min((tile, tile[::-1]), key=lambda lie: ceil(product.m / lie[0]) * ceil(product.n / lie[1]))
    tiles = product.batch * ceil(product.m / rows) * ceil(product.n / columns)
    room = product.batch and tiles * rows * columns
    waves = tiles / multiprocessors
    return Quantization(
        tile=(rows, columns),
        tiles=tiles,
        waves=waves,
        tile_loss=1.0 - product.batch * product.m * product.n / room if room else 0.0,
        wave_loss=1.0 - waves / ceil(waves) if tiles else 0.0,
    )
