"""Dense figures for exactly the device that reports itself; nothing for any other."""

from typing import Any

import pytest

from lm_profiler.analysis.hardware.peak_table import ROWS
from lm_profiler.analysis.hardware.roofline import (
    MEASURED_COPY,
    MEASURED_PRODUCT,
    bandwidth,
    matmul_dtype,
    peak,
    per_second,
    rates_of,
    share_of_peak,
    sheet_clock_hz,
)

# (name as torch.cuda.get_device_name gives it, dense TFLOP/s by dtype, what the product page or sheet states of its
# memory, how wide that is and how fast a pin: bits, Gbit/s), from the datasheets by hand; None if none states it
DEVICES: list[tuple[str, dict[str, float], float | None, tuple[int, float] | None]] = [
    ("NVIDIA GB200", {"bfloat16": 2500.0}, 8e12, None),
    ("NVIDIA B200", {"bfloat16": 2250.0}, 8e12, None),
    ("NVIDIA H200", {"bfloat16": 989.4}, 4.8e12, None),
    ("NVIDIA H200 NVL", {"bfloat16": 835.5}, 4.8e12, None),
    ("NVIDIA H100 80GB HBM3", {"bfloat16": 989.4, "tf32": 494.7, "float32": 66.9}, 3.35e12, (5120, 5.24)),
    ("NVIDIA H100 PCIe", {"bfloat16": 756.0}, 2.0e12, (5120, 3.19)),
    ("NVIDIA H100 NVL", {"bfloat16": 835.5, "float32": 60.0}, 3.9e12, (6016, 5.2)),
    ("NVIDIA GH200 480GB", {"bfloat16": 989.4}, 4.0e12, (6144, 5.24)),
    ("NVIDIA GH200 144G HBM3e", {}, 4.9e12, (6144, 6.4)),
    ("NVIDIA A100-SXM4-40GB", {"bfloat16": 312.0}, 1.555e12, (5120, 2.43)),
    ("NVIDIA A100-PCIE-40GB", {"float32": 19.5}, 1.555e12, (5120, 2.43)),
    ("NVIDIA A100-SXM4-80GB", {"tf32": 156.0}, 2.039e12, (5120, 3.19)),
    ("NVIDIA A100 80GB PCIe", {"float16": 312.0}, 1.935e12, (5120, 3.02)),
    ("NVIDIA A30", {}, 933e9, (3072, 2.43)),
    ("NVIDIA A40", {}, 696e9, (384, 14.5)),
    ("NVIDIA A10", {"bfloat16": 125.0}, 600e9, (384, 12.5)),
    ("NVIDIA A10G", {"bfloat16": 70.0}, 600e9, (384, 12.5)),
    ("NVIDIA RTX A6000", {}, 768e9, (384, 16)),
    ("NVIDIA GeForce RTX 3090", {"bfloat16": 71.0}, 936e9, (384, 19.5)),
    ("NVIDIA GeForce RTX 3090 Ti", {}, 1008e9, (384, 21)),
    ("NVIDIA L4", {"bfloat16": 121.0}, 300e9, (192, 12.5)),
    ("NVIDIA L40", {}, 864e9, (384, 18)),
    ("NVIDIA L40S", {"bfloat16": 362.05}, 864e9, (384, 18)),
    ("NVIDIA RTX 6000 Ada Generation", {"bfloat16": 364.2}, 960e9, (384, 20)),
    ("NVIDIA GeForce RTX 4090", {"bfloat16": 165.2}, 1008e9, (384, 21)),
    ("NVIDIA GeForce RTX 5090", {"bfloat16": 209.5}, 1792e9, (512, 28)),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", {"bfloat16": 503.8}, 1792e9, (512, 28)),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", {}, 1792e9, (512, 28)),
    ("NVIDIA GB300", {"bfloat16": 2500.0}, 8e12, (8192, 7.8)),
    ("NVIDIA B300 SXM6 AC", {"tf32": 1125.0}, 8e12, (8192, 7.8)),
    ("NVIDIA H20", {"bfloat16": 148.0}, 4.0e12, (6144, 5.2)),
    ("NVIDIA H800", {"bfloat16": 989.4}, 3.35e12, (5120, 5.24)),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", {"float32": 120.0}, 1597e9, (512, 25)),
    ("NVIDIA GeForce RTX 5080", {"bfloat16": 112.6}, 960e9, (256, 30)),
    ("NVIDIA GeForce RTX 5070 Ti", {}, 896e9, (256, 28)),
    ("NVIDIA GeForce RTX 5070", {}, 672e9, (192, 28)),
    ("NVIDIA GeForce RTX 4080", {}, 717e9, (256, 22.4)),
    ("NVIDIA GeForce RTX 4070 Ti", {}, 504e9, (192, 21)),
    ("NVIDIA GeForce RTX 3080", {"float16": 59.5}, 760e9, (320, 19)),
    ("NVIDIA GeForce RTX 3070", {}, 448e9, (256, 14)),
    ("NVIDIA GeForce RTX 2080 Ti", {}, 616e9, (352, 14)),
    ("AMD Instinct MI300X", {"bfloat16": 1307.4}, 5.3e12, (8192, 5.2)),
    (
        "AMD Instinct MI300X VF",
        {"bfloat16": round(304 * 2048 * 2100000000.0 / 1000000000000.0, 1)},
        5.3e12,
        (8192, 5.2),
    ),  # as mt4g's report of one describes it
    ("AMD Instinct MI325X", {"tf32": 653.7}, 6.0e12, (8192, 6.0)),
    ("AMD Instinct MI355X", {"bfloat16": 2516.6}, 8.0e12, (8192, 8.0)),
    ("Tesla T4", {"float16": 65.0}, 320e9, (256, 10)),
    ("Tesla V100-SXM2-16GB", {"float16": 125.0}, 900e9, (4096, 1.75)),
    ("Tesla V100-SXM2-32GB", {}, 900e9, (4096, 1.75)),
    ("Tesla V100-PCIE-16GB", {}, 900e9, (4096, 1.75)),
    ("Tesla V100S-PCIE-32GB", {}, 1134e9, (4096, 2.21)),
    ("Apple M1 Pro", {}, 200e9, (256, 6.4)),
    ("Apple M1 Max", {}, 400e9, (512, 6.4)),
    ("Apple M2", {}, 100e9, (128, 6.4)),
    ("Tesla V100-PCIE-32GB", {"float16": 112.0}, None, None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", {"bfloat16": 85.8}, None, None),
    ("Apple M1", {"float32": 2.6}, None, None),
]


@pytest.mark.parametrize("name, peaks, bytes_per_s, memory", DEVICES)
def test_peaks_of_a_known_device(name, peaks, bytes_per_s, memory):
    for dtype, tera in peaks.items():
        figure = peak(name, dtype)
        assert figure.per_s == pytest.approx(tera * 1e12)
        assert figure.source
    figure = bandwidth(name)
    if bytes_per_s is not None:
        assert figure.per_s == pytest.approx(bytes_per_s)
        assert figure.source
    if memory is not None:  # sheets round
        assert figure.per_s == pytest.approx(memory[0] / 8 * memory[1] * 1e9, rel=0.03)


def test_figures_that_no_datasheet_has_are_unknown():
    for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "Apple M1", "NVIDIA H100", "NVIDIA A100-SXM4-80GB MIG 3g.40gb"):
        assert bandwidth(name) is None
    assert peak("Tesla T4", "bfloat16") is None
    assert peak("Apple M1", "bfloat16") is None
    assert peak("Apple M4", "float32") is None  # Apple names none
    for name in ("Tesla T4", "AMD Instinct MI355X"):
        assert peak(name, "tf32").per_s == peak(name, "float32").per_s
    assert peak("NVIDIA RTX PRO 6000 Blackwell Server Edition", "tf32") is None  # unknown is not the same


def test_the_spelling_of_old_drivers_does_not_matter():
    near = ["H800 PCIe", "B300", "A100", "A100-SXM4-80GB MIG 3g.40gb", "L4 Something", "GeForce RTX 4090 D"]
    near += ["H100", "GeForce RTX 3090 Laptop GPU"]  # the first is the name of two chips
    for name in (*(f"NVIDIA {spelling}" for spelling in near), "H100", "Tesla V100", "cpu", ""):
        assert peak(name, "bfloat16") is None, name
    for name in ("A100-SXM4-40GB", " nvidia  a100-sxm4-40gb "):
        assert peak(name, "tf32") == peak("NVIDIA A100-SXM4-40GB", "tf32") is not None, name


def test_the_table_is_consistent():
    names = [name for row in ROWS for name in row.names]
    assert len(names) == len(set(names))
    for row in ROWS:
        assert row.source, row.names
        for name in row.names:
            peaks = [peak(name, dtype) for dtype in ("float32", "tf32", "bfloat16")]
            known = [figure.per_s for figure in peaks if figure is not None]
            assert known == sorted(known), name
            assert known, name  # a row without any figure is no row
            assert all(1e12 < figure < 1e16 for figure in known), name
            # Dense ratios of tensor cores: bf16 is twice TF32 (and sparse would be four times).
            if row.bfloat16 and name != "AMD Instinct MI355X":  # which has no TF32
                assert row.bfloat16 / row.tf32 == pytest.approx(2.0, rel=0.02), name


@pytest.mark.parametrize(
    "precision, setting, dtype",
    [
        ("32-true", "highest", "float32"),
        ("32-true", "high", "tf32"),
        ("32", "medium", "tf32"),
        ("bf16-mixed", "highest", "bfloat16"),
        ("bf16-true", "highest", "bfloat16"),
        ("16-mixed", "highest", "float16"),
        ("64-true", "highest", None),
        ("transformer-engine", "highest", None),
    ],
)
def test_precision_names_the_dtype_of_the_products(precision, setting, dtype):
    assert matmul_dtype(precision, setting) == dtype


H100 = "NVIDIA H100 80GB HBM3"


def test_the_datasheet_precedes_a_measured_rate() -> None:
    rates = rates_of(H100, {"bfloat16": 700e12, "float32": 50e12}, 2.9e12)
    assert rates.flops_per_s("bfloat16") == pytest.approx(989.4e12)
    assert rates.flops_per_s("float32") == pytest.approx(66.9e12)
    assert rates.flops[0].source == peak(H100, "bfloat16").source
    assert (rates.bytes_per_s, rates.bytes_source) == (3.35e12, bandwidth(H100).source)
    assert rates.copied_bytes_per_s == 2.9e12


def test_a_given_peak_precedes_the_datasheet() -> None:
    rates = rates_of(H100, {"bfloat16": 700e12, "float32": None}, None, given={"bfloat16": 600e12})
    assert rates.flops_per_s("bfloat16") == 600e12
    assert rates.flops_per_s("float32") == pytest.approx(66.9e12)


def test_a_measured_rate_counts_without_a_datasheet() -> None:
    rates = rates_of("cpu", {"float32": 190e9, "float64": 90e9}, 16e9)
    assert [(rate.flops_per_s, rate.source) for rate in rates.flops] == [
        (190e9, MEASURED_PRODUCT), (90e9, MEASURED_PRODUCT),
    ]  # fmt: skip
    assert (rates.bytes_per_s, rates.bytes_source) == (16e9, MEASURED_COPY)


def test_what_was_neither_given_nor_measured_is_unknown() -> None:
    rates = rates_of("cpu", {"float32": None}, None)
    assert (rates.flops, rates.bytes_per_s, rates.bytes_source) == ([], None, None)
    assert rates_of("Tesla T4", {"bfloat16": None}, None).flops_per_s("bfloat16") is None


@pytest.mark.parametrize("float32_as, flops_per_s", [("tf32", pytest.approx(494.7e12)), (None, None)])
def test_the_rate_of_float32_is_that_of_its_products(float32_as: str | None, flops_per_s: Any) -> None:
    assert rates_of(H100, {"float32": None}, None, float32_as=float32_as).flops_per_s("float32") == flops_per_s


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


def test_the_share_of_a_peak() -> None:
    """156 TFLOP in half a second is 312 TFLOP/s: all of one A100, a quarter of four."""
    assert share_of_peak(156e12, 0.5, 312e12) == pytest.approx(1.0)
    assert share_of_peak(156e12, 0.5, 312e12, devices=4) == pytest.approx(0.25)
    assert share_of_peak(208e12, 1.0, 312e12) == pytest.approx(2 / 3)
    for flops, seconds, peak_rate in ((None, 0.1, 1e14), (1e12, None, 1e14), (1e12, 0.1, None)):
        assert share_of_peak(flops, seconds, peak_rate) is None


def test_mfu_of_palm() -> None:
    """Table 3 and appendix B: 238.3k tokens/s on 6144 TPU v4 (275 TFLOP/s) is an MFU of 46.2 %."""
    parameters, layers, heads, width_of_head, tokens = 540_350_000_000, 118, 48, 256, 2048
    flops_per_token = 6 * parameters + 12 * layers * heads * width_of_head * tokens
    share = share_of_peak(flops_per_token * 238_300, 1.0, 275e12, devices=6144)
    assert share == pytest.approx(0.462, abs=0.001)


def test_rates_of_what_is_unknown_are_unknown() -> None:
    assert per_second(2048, 0.5) == 4096
    assert per_second(None, 0.5) is None
    assert per_second(2048, None) is None
    assert sheet_clock_hz(989e12, 0, 1980e6) is None
    assert sheet_clock_hz(989e12, 132, 0.0) is None
