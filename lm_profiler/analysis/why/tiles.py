"""Tile and wave quantization of a matrix product: how much of the device its shape leaves idle.

NVIDIA's Matrix Multiplication Background User's Guide (DU-09798): a product is cut into tiles; tiles at the edge are
computed whole, and the multiprocessors compute one wave of tiles after the other, the last one not full.
"""

from __future__ import annotations

import re
from math import ceil
from typing import NamedTuple

from lm_profiler.analysis.why.products import Product

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
    """What ``kernel`` loses on ``product``. Of the two ways to lay its tile, the better one: it is at least this."""
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
