"""The clock that a datasheet's peak is stated for, which no driver tells."""

from __future__ import annotations

from math import ceil, log2

_ROUNDED = 1.02
"""Sheets round their figures: the clock that follows may lie this far above the highest."""


def sheet_clock_hz(peak_flops_per_s: float, multiprocessors: int, max_clock_hz: float) -> float | None:
    """At which a device of so many multiprocessors has its datasheet's dense peak; None where no clock fits.

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
