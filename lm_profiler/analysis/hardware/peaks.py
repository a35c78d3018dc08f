"""What the hardware can do at best: dense FLOP/s per device and dtype, bytes/s of its memory.

A device is found by the whole of the name that its driver reports, or not at all. A near miss ("NVIDIA H100
PCIe" for "NVIDIA H100 80GB HBM3", a MIG slice for the whole GPU) would be a figure that is wrong by a factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, get_args

from lm_profiler.analysis.hardware.peak_table import ROWS, Row

Dtype = Literal["float32", "tf32", "bfloat16", "float16", "fp8"]

_TERA, _GIGA = 1e12, 1e9
_FLOAT32: Mapping[str, Dtype] = {"highest": "float32", "high": "tf32", "medium": "tf32"}


@dataclass(frozen=True)
class DevicePeaks:
    """Published peaks of one product: FLOP/s without sparsity, by dtype, and memory bytes/s; None is
    unknown.
    """

    name: str
    flops_per_s: Mapping[Dtype, float]
    bytes_per_s: float | None
    source: str


@dataclass(frozen=True)
class Peak:
    """One figure to divide by, with where it is from."""

    flops_per_s: float
    dtype: Dtype
    source: str


def device_peaks(device_name: str) -> DevicePeaks | None:
    """Peaks of the device that reports itself as `device_name` (torch.cuda.get_device_name); None for any
    other.

    Letter case, surrounding and repeated blanks, and the leading "NVIDIA" that older drivers leave out do not
    matter; every other character does.
    """
    return _table().get(_normalised(device_name))


def peak(device_name: str, dtype: str) -> Peak | None:
    """Dense peak of a device for matrix products in `dtype`, or None where nothing is published.

    Raises:
        ValueError: for a dtype that the table does not know.
    """
    for known in get_args(Dtype):
        if dtype == known:
            found = device_peaks(device_name)
            flops_per_s = found.flops_per_s.get(known) if found else None
            return Peak(flops_per_s, known, found.source) if found and flops_per_s is not None else None
    raise ValueError(f"dtype must be one of {', '.join(get_args(Dtype))}, got {dtype!r}")


def matmul_dtype(precision: str, float32_matmul_precision: str = "highest") -> Dtype | None:
    """The dtype in which a Lightning `precision` runs its matrix products; None where no peak is tabulated
    for it.

    `float32_matmul_precision` is torch.get_float32_matmul_precision(); "high" and "medium" let float32 products run in
    TF32 where the device has it. "unknown" has no dtype.
    """
    kind = str(precision).split("-")[0]
    if kind == "32":
        return _FLOAT32.get(float32_matmul_precision)
    if kind == "bf16":
        return "bfloat16"
    return "float16" if kind == "16" else None


def _normalised(name: str) -> str:
    return " ".join(name.split()).casefold().removeprefix("nvidia ")


@lru_cache(maxsize=1)
def _table() -> Mapping[str, DevicePeaks]:
    return MappingProxyType({_normalised(name): _peaks(name, row) for row in ROWS for name in row.names})


def _peaks(name: str, row: Row) -> DevicePeaks:
    tera: dict[Dtype, float | None] = {
        "float32": row.float32,
        "tf32": row.tf32 if row.has_tf32 else row.float32,
        "bfloat16": row.bfloat16,
        "float16": row.float16,
        "fp8": row.fp8,
    }
    flops_per_s: dict[Dtype, float] = {dtype: value * _TERA for dtype, value in tera.items() if value is not None}
    bytes_per_s = row.gb_per_s * _GIGA if row.gb_per_s is not None else None
    return DevicePeaks(name, MappingProxyType(flops_per_s), bytes_per_s, row.source)
