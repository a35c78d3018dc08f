"""What the hardware can do at best: dense FLOP/s per device and dtype, and bytes/s of its memory.

A device is looked up by the whole of the name that its driver reports, or not at all. A near miss ("NVIDIA H100 PCIe"
for "NVIDIA H100 80GB HBM3", a MIG slice for the whole GPU) would be a figure that is wrong by a factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lm_profiler.analysis.hardware.peak_table import ROWS

Dtype = Literal["float32", "tf32", "bfloat16", "float16"]

_FLOAT32: dict[str, Dtype] = {"highest": "float32", "high": "tf32", "medium": "tf32"}


@dataclass(frozen=True)
class Peak:
    """One figure to divide by, with where it is from."""

    flops_per_s: float
    source: str


@dataclass(frozen=True)
class Bandwidth:
    """Of a device's memory, reading and writing together, with where the figure is from."""

    bytes_per_s: float
    source: str


def bandwidth(device_name: str) -> Bandwidth | None:
    """Of the memory of the device that reports itself as `device_name`, as `peak` finds it; None where unknown."""
    row = _BY_NAME.get(_normalised(device_name))
    if row is None or row.memory is None:
        return None
    return Bandwidth(row.memory * 1e9, row.memory_source or row.source)


def peak(device_name: str, dtype: Dtype) -> Peak | None:
    """Dense peak for matrix products in `dtype` of the device that reports itself as `device_name`.

    Letter case, surrounding and repeated blanks, and the leading "NVIDIA" that older drivers leave out do not matter;
    every other character does. None for a device that is not in the table, and where nothing is published.
    """
    row = _BY_NAME.get(_normalised(device_name))
    teraflops: float | None = getattr(row, dtype, None)
    return None if row is None or teraflops is None else Peak(teraflops * 1e12, row.source)


def matmul_dtype(precision: str, float32_matmul_precision: str = "highest") -> Dtype | None:
    """The dtype in which a Lightning `precision` runs its matrix products; None where no peak is tabulated for it.

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


_BY_NAME = {_normalised(name): row for row in ROWS for name in row.names}
