"""The clock of a peak, against the boost clocks that the same sheets and whitepapers print."""

from __future__ import annotations

import pytest

from lm_profiler.analysis.hardware.clocks import sheet_clock_hz


@pytest.mark.parametrize(
    "teraflops, multiprocessors, highest_mhz, boost_mhz",
    [
        (125.0, 80, 1530, 1530),  # V100 SXM2, fp16
        (65.0, 40, 1590, 1590),  # T4, fp16
        (312.0, 108, 1410, 1410),  # A100, bf16
        (156.0, 108, 1410, 1410),  # A100, TF32
        (154.8, 84, 2100, 1800),  # RTX A6000, bf16
        (165.2, 128, 3105, 2520),  # RTX 4090, bf16
        (121.0, 58, 2040, 2040),  # L4, bf16
        (989.4, 132, 1980, 1830),  # H100 SXM, bf16: a lower clock for tensor cores
        (66.9, 132, 1980, 1980),  # H100 SXM, fp32
        (756.0, 114, 1755, 1620),  # H100 PCIe, bf16
    ],
)
def test_the_clock_of_a_peak(teraflops: float, multiprocessors: int, highest_mhz: int, boost_mhz: int) -> None:
    clock_hz = sheet_clock_hz(teraflops * 1e12, multiprocessors, highest_mhz * 1e6)
    assert clock_hz == pytest.approx(boost_mhz * 1e6, rel=0.005)


def test_what_is_unknown_has_no_clock() -> None:
    assert sheet_clock_hz(989e12, 0, 1980e6) is None
    assert sheet_clock_hz(989e12, 132, 0.0) is None
