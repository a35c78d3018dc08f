"""The datasheet before the machine's own rate, and what nobody knows stays unknown."""

from __future__ import annotations

import pytest

from lm_profiler.analysis.hardware.peaks import bandwidth, peak
from lm_profiler.analysis.hardware.rates import MEASURED_COPY, MEASURED_PRODUCT, rates_of

H100 = "NVIDIA H100 80GB HBM3"


def test_the_datasheet_comes_first() -> None:
    rates = rates_of(H100, {"bfloat16": 700e12, "float32": 50e12}, 2.9e12)
    assert [rate.flops_per_s for rate in rates.flops] == pytest.approx([989.4e12, 66.9e12])
    assert rates.flops[0].source == peak(H100, "bfloat16").source  # type: ignore[union-attr]
    assert (rates.bytes_per_s, rates.bytes_source) == (3.35e12, bandwidth(H100).source)  # type: ignore[union-attr]
    assert rates.copied_bytes_per_s == 2.9e12


def test_float32_products_that_run_in_tf32_are_held_against_it() -> None:
    assert rates_of(H100, {"float32": None}, None, float32_as="tf32").flops_per_s("float32") == pytest.approx(494.7e12)
    assert rates_of(H100, {"float32": None}, None, float32_as=None).flops_per_s("float32") is None


def test_without_a_datasheet_the_machines_own_rates_count() -> None:
    rates = rates_of("cpu", {"float32": 190e9, "float64": 90e9}, 16e9)
    assert [(rate.flops_per_s, rate.source) for rate in rates.flops] == [
        (190e9, MEASURED_PRODUCT), (90e9, MEASURED_PRODUCT),
    ]  # fmt: skip
    assert (rates.bytes_per_s, rates.bytes_source) == (16e9, MEASURED_COPY)


def test_what_is_neither_printed_nor_measured_is_unknown() -> None:
    rates = rates_of("cpu", {"float32": None}, None)
    assert (rates.flops, rates.bytes_per_s, rates.bytes_source) == ([], None, None)
    assert rates_of("Tesla T4", {"bfloat16": None}, None).flops_per_s("bfloat16") is None


def test_what_the_user_says_comes_before_both() -> None:
    rates = rates_of(H100, {"bfloat16": 700e12, "float32": None}, None, given={"bfloat16": 600e12})
    assert [(rate.dtype, rate.flops_per_s) for rate in rates.flops] == [
        ("bfloat16", 600e12), ("float32", pytest.approx(66.9e12)),
    ]  # fmt: skip
