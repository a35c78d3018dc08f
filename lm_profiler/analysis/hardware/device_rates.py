"""What the hardware can do at best, and how much of it a step uses.

A device is looked up by the whole of the name that its driver reports, or not at all. A near miss ("NVIDIA H100 PCIe"
for "NVIDIA H100 80GB HBM3", a MIG slice for the whole GPU) would be a figure that is wrong by a factor. Where no
datasheet says anything, what the machine was measured to do stands in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

from lm_profiler.analysis.hardware.peak_table import ROWS
from lm_profiler.record.run import FlopRate, Rates

Dtype = Literal["float32", "tf32", "bfloat16", "float16"]

_FLOAT32: dict[str, Dtype] = {"highest": "float32", "high": "tf32", "medium": "tf32"}


@dataclass(frozen=True)
class Peak:
    """One figure to divide by, with where it is from."""

    flops_per_s: float
    source: str


@dataclass(frozen=True)
class Bandwidth:
    """The rate of a device's memory, reading and writing together, with the source of the figure."""

    bytes_per_s: float
    source: str


def bandwidth(device_name: str) -> Bandwidth | None:
    """Return the bandwidth of the device that reports itself as `device_name`, as `peak` finds it; None where
    unknown."""
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


_DTYPES: dict[str, Dtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
MEASURED_PRODUCT = "a large matrix product, measured after the run"
GIVEN = "given with --peak_tflops"
MEASURED_COPY = "a large copy, measured after the run"


def rates_of(
    device_name: str,
    measured: Mapping[str, float | None],
    copied_bytes_per_s: float | None,
    float32_as: Dtype | None = "float32",
    given: Mapping[str, float] | None = None,
) -> Rates:
    """Return the rates of the device that reports itself as ``device_name``.

    Args:
        device_name: as ``peak`` takes it.
        measured: the machine's own FLOP/s for each dtype that is asked for, by torch's names; None is unknown.
        copied_bytes_per_s: its own bytes/s in a large copy.
        float32_as: in what float32 products run; None is unknown.
        given: FLOP/s that the user says, before all others.
    """
    flops = []
    for dtype, own in measured.items():
        tabulated = float32_as if dtype == "float32" else _DTYPES.get(dtype)
        sheet = None if tabulated is None else peak(device_name, tabulated)
        if given is not None and dtype in given:
            flops.append(FlopRate(dtype=dtype, flops_per_s=given[dtype], source=GIVEN))
        elif sheet is not None:
            flops.append(FlopRate(dtype=dtype, flops_per_s=sheet.flops_per_s, source=sheet.source))
        elif own is not None:
            flops.append(FlopRate(dtype=dtype, flops_per_s=own, source=MEASURED_PRODUCT))
    memory = bandwidth(device_name)
    copy_source = None if copied_bytes_per_s is None else MEASURED_COPY
    return Rates(
        flops=flops,
        bytes_per_s=copied_bytes_per_s if memory is None else memory.bytes_per_s,
        bytes_source=copy_source if memory is None else memory.source,
        copied_bytes_per_s=copied_bytes_per_s,
    )


_ROUNDED = 1.02  # sheets round their figures: the clock that follows may lie this far above the highest


def sheet_clock_hz(peak_flops_per_s: float, multiprocessors: int, max_clock_hz: float) -> float | None:
    """Return the clock at which a device of so many multiprocessors has its datasheet's dense peak; None where no clock
    fits.

    A multiprocessor's matrix units do a power of two of FLOPs a clock (NVIDIA from Volta on: 1024 in fp16 there, 2048
    on GA100, 4096 on GH100, half and less on consumer chips; AMD's CDNA alike), so that the peak tells the clock up to
    a factor of two. It is the one in the upper half of what the card can do: an H100 SXM's 989.4 TFLOP/s in bf16 are
    of 1830 MHz, though it may run at 1980.
    """
    if not (peak_flops_per_s > 0 and multiprocessors > 0 and max_clock_hz > 0):
        return None
    highest = max_clock_hz * _ROUNDED
    per_clock: float = 2 ** ceil(log2(peak_flops_per_s / multiprocessors / highest))
    return peak_flops_per_s / multiprocessors / per_clock


def share_of_peak(
    flops_per_step: float | None, step_s: float | None, peak_flops_per_s: float | None, devices: int = 1
) -> float | None:
    """MFU or HFU, by which FLOPs are counted (Chowdhery et al. 2022, "PaLM", appendix B).

    Args:
        flops_per_step: of one step over all devices: what the model needs, forward and backward (MFU), or with them
            what activation checkpointing computes again (HFU).
        step_s: seconds per step.
        peak_flops_per_s: dense peak of one device.
        devices: devices that share the step.

    Returns:
        The share, or None where any figure is unknown.

    Raises:
        ValueError: for a peak that is not positive.
    """
    if flops_per_step is None or step_s is None or peak_flops_per_s is None:
        return None
    if not peak_flops_per_s > 0:
        raise ValueError(f"peak_flops_per_s must be positive, got {peak_flops_per_s}")
    return flops_per_step / (step_s * peak_flops_per_s * devices)


def per_second(count: float | None, step_s: float | None) -> float | None:
    """``count`` things of a step, over all devices, per second; None where either is unknown."""
    return None if count is None or step_s is None else count / step_s
