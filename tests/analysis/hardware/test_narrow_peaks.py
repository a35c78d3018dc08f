"""Peaks of products in 8 and 4 bits, and the MFU of a step that multiplies in several dtypes."""

import pytest

from lm_profiler.analysis.hardware.narrow_peaks import NARROW_PEAKS
from lm_profiler.analysis.hardware.peak_table import ROWS
from lm_profiler.analysis.hardware.roofline import (
    MEASURED_PRODUCT,
    judge_utilisation,
    peak,
    rates_of,
    with_uses_by_dtype,
)
from lm_profiler.record.run_record import FlopRate, Flops, Rates

FLOPS = Flops(forward=2 * 10**12, backward=4 * 10**12, recomputation=10**12)


def test_narrower_types_are_twice_as_fast() -> None:
    half = {name: row.bfloat16 for row in ROWS for name in row.names}
    for name, peaks in NARROW_PEAKS.items():
        assert name in half
        assert peaks.source
        wide = half[name]
        assert peaks.float8 == pytest.approx(2 * wide, rel=0.025)
        assert peaks.float4 is None or peaks.float4 >= 2 * (peaks.float8 or 0.0) * 0.99


def test_the_peak_of_a_dtype_is_that_of_its_column() -> None:
    found = peak("NVIDIA B200", "float8")
    assert found.per_s == 4500e12
    assert peak("NVIDIA B200", "float4").per_s == 9000e12
    assert peak("NVIDIA A100-SXM4-80GB", "float8") is None
    rates = rates_of("NVIDIA B200", {"float8_e4m3fn": None, "bfloat16": 1e15}, None)
    assert rates.flops_per_s("float8_e4m3fn") == 4500e12
    assert rates.flops_per_s("bfloat16") == 2250e12


def test_a_measured_rate_is_no_peak() -> None:
    use = judge_utilisation(FLOPS, 1e-3, "unknown", "bfloat16", 1, None, None)
    measured = Rates(flops=[FlopRate(dtype="bfloat16", flops_per_s=1e12, source=MEASURED_PRODUCT)])
    mixed = with_uses_by_dtype(use, {"bfloat16": 1, "float32": 1}, measured, 1e-3, 1)
    assert mixed.mixed_mfu is None
    assert [part.mfu for part in mixed.by_dtype] == [None, None]
    assert with_uses_by_dtype(use, {"bfloat16": 1}, measured, 1e-3, 1) == use


def test_mfu_by_dtype_adds_up_to_the_share_of_the_time_at_their_own_peaks() -> None:
    """Three quarters in FP8 at 4,500 and a quarter in bfloat16 at 2,250 TFLOP/s, on two devices, in 4 ms."""
    step_s, devices = 4e-3, 2
    use = judge_utilisation(FLOPS, step_s, "NVIDIA B200", "float8", devices, None, None)
    rates = rates_of("NVIDIA B200", {"float8_e4m3fn": None, "bfloat16": None}, None)
    use = with_uses_by_dtype(use, {"float8_e4m3fn": 3, "bfloat16": 1}, rates, step_s, devices)
    model = 6e12
    seconds = (0.75 * model / 4500e12 + 0.25 * model / 2250e12) / devices
    assert use.mixed_mfu == pytest.approx(seconds / step_s)
    assert [part.flops for part in use.by_dtype] == [4_500_000_000_000, 1_500_000_000_000]
    assert sum(part.mfu or 0.0 for part in use.by_dtype) == pytest.approx(use.mixed_mfu)
    assert use.mfu == pytest.approx(model / (step_s * 4500e12 * devices))
