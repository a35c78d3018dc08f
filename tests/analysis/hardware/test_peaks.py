"""Dense figures for exactly the device that reports itself; nothing for any other."""

import pytest

from lm_profiler.analysis.hardware.peak_table import ROWS
from lm_profiler.analysis.hardware.peaks import bandwidth, matmul_dtype, peak

# (name as torch.cuda.get_device_name gives it, dtype, dense TFLOP/s), from the datasheets by hand
KNOWN = [
    ("NVIDIA H200", "bfloat16", 989.4),
    ("NVIDIA H200 NVL", "bfloat16", 835.5),
    ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
    ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
    ("NVIDIA H100 80GB HBM3", "float32", 66.9),
    ("NVIDIA H100 PCIe", "bfloat16", 756.0),
    ("NVIDIA H100 NVL", "bfloat16", 835.5),
    ("NVIDIA H100 NVL", "float32", 60.0),
    ("NVIDIA B200", "bfloat16", 2250.0),
    ("NVIDIA GB200", "bfloat16", 2500.0),
    ("NVIDIA GH200 480GB", "bfloat16", 989.4),
    ("NVIDIA A100-SXM4-40GB", "bfloat16", 312.0),
    ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
    ("NVIDIA A100-PCIE-40GB", "float32", 19.5),
    ("NVIDIA A100 80GB PCIe", "float16", 312.0),
    ("NVIDIA L4", "bfloat16", 121.0),
    ("NVIDIA L40S", "bfloat16", 362.05),
    ("NVIDIA A10G", "bfloat16", 70.0),
    ("NVIDIA A10", "bfloat16", 125.0),
    ("Tesla T4", "float16", 65.0),
    ("Tesla V100-SXM2-16GB", "float16", 125.0),
    ("Tesla V100-PCIE-32GB", "float16", 112.0),
    ("NVIDIA RTX 6000 Ada Generation", "bfloat16", 364.2),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "bfloat16", 503.8),
    ("NVIDIA GeForce RTX 3090", "bfloat16", 71.0),
    ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", 85.8),
    ("NVIDIA GeForce RTX 5090", "bfloat16", 209.5),
    ("NVIDIA B300 SXM6 AC", "tf32", 1125.0),
    ("NVIDIA GB300", "bfloat16", 2500.0),
    ("NVIDIA H20", "bfloat16", 148.0),
    ("NVIDIA H800", "bfloat16", 989.4),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "float32", 120.0),
    ("NVIDIA GeForce RTX 5080", "bfloat16", 112.6),
    ("NVIDIA GeForce RTX 3080", "float16", 59.5),
    ("AMD Instinct MI300X", "bfloat16", 1307.4),
    ("AMD Instinct MI325X", "tf32", 653.7),
    ("AMD Instinct MI355X", "bfloat16", 2516.6),
    ("Apple M1", "float32", 2.6),
]


# (name, what the product page or sheet says, how wide its memory is and how fast a pin: bits, Gbit/s), by hand
MEMORIES = [
    ("NVIDIA GB200", 8e12, None),
    ("NVIDIA B200", 8e12, None),
    ("NVIDIA H200", 4.8e12, None),
    ("NVIDIA H200 NVL", 4.8e12, None),
    ("NVIDIA H100 80GB HBM3", 3.35e12, (5120, 5.24)),
    ("NVIDIA H100 PCIe", 2.0e12, (5120, 3.19)),
    ("NVIDIA H100 NVL", 3.9e12, (6016, 5.2)),
    ("NVIDIA GH200 480GB", 4.0e12, (6144, 5.24)),
    ("NVIDIA GH200 144G HBM3e", 4.9e12, (6144, 6.4)),
    ("NVIDIA A100-SXM4-40GB", 1.555e12, (5120, 2.43)),
    ("NVIDIA A100-PCIE-40GB", 1.555e12, (5120, 2.43)),
    ("NVIDIA A100-SXM4-80GB", 2.039e12, (5120, 3.19)),
    ("NVIDIA A100 80GB PCIe", 1.935e12, (5120, 3.02)),
    ("NVIDIA A30", 933e9, (3072, 2.43)),
    ("NVIDIA A40", 696e9, (384, 14.5)),
    ("NVIDIA A10", 600e9, (384, 12.5)),
    ("NVIDIA A10G", 600e9, (384, 12.5)),
    ("NVIDIA RTX A6000", 768e9, (384, 16)),
    ("NVIDIA GeForce RTX 3090", 936e9, (384, 19.5)),
    ("NVIDIA GeForce RTX 3090 Ti", 1008e9, (384, 21)),
    ("NVIDIA L4", 300e9, (192, 12.5)),
    ("NVIDIA L40", 864e9, (384, 18)),
    ("NVIDIA L40S", 864e9, (384, 18)),
    ("NVIDIA RTX 6000 Ada Generation", 960e9, (384, 20)),
    ("NVIDIA GeForce RTX 4090", 1008e9, (384, 21)),
    ("NVIDIA GeForce RTX 5090", 1792e9, (512, 28)),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 1792e9, (512, 28)),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 1792e9, (512, 28)),
    ("NVIDIA GB300", 8e12, (8192, 7.8)),
    ("NVIDIA B300 SXM6 AC", 8e12, (8192, 7.8)),
    ("NVIDIA H20", 4.0e12, (6144, 5.2)),
    ("NVIDIA H800", 3.35e12, (5120, 5.24)),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 1597e9, (512, 25)),
    ("NVIDIA GeForce RTX 5080", 960e9, (256, 30)),
    ("NVIDIA GeForce RTX 5070 Ti", 896e9, (256, 28)),
    ("NVIDIA GeForce RTX 5070", 672e9, (192, 28)),
    ("NVIDIA GeForce RTX 4080", 717e9, (256, 22.4)),
    ("NVIDIA GeForce RTX 4070 Ti", 504e9, (192, 21)),
    ("NVIDIA GeForce RTX 3080", 760e9, (320, 19)),
    ("NVIDIA GeForce RTX 3070", 448e9, (256, 14)),
    ("NVIDIA GeForce RTX 2080 Ti", 616e9, (352, 14)),
    ("AMD Instinct MI300X", 5.3e12, (8192, 5.2)),
    ("AMD Instinct MI325X", 6.0e12, (8192, 6.0)),
    ("AMD Instinct MI355X", 8.0e12, (8192, 8.0)),
    ("Tesla T4", 320e9, (256, 10)),
    ("Tesla V100-SXM2-16GB", 900e9, (4096, 1.75)),
    ("Tesla V100-SXM2-32GB", 900e9, (4096, 1.75)),
    ("Tesla V100-PCIE-16GB", 900e9, (4096, 1.75)),
    ("Tesla V100S-PCIE-32GB", 1134e9, (4096, 2.21)),
    ("Apple M1 Pro", 200e9, (256, 6.4)),
    ("Apple M1 Max", 400e9, (512, 6.4)),
    ("Apple M2", 100e9, (128, 6.4)),
]


@pytest.mark.parametrize("name, bytes_per_s, memory", MEMORIES)
def test_bandwidth_of_a_known_device(name, bytes_per_s, memory):
    figure = bandwidth(name)
    assert figure.bytes_per_s == pytest.approx(bytes_per_s)
    assert figure.source
    if memory is not None:  # sheets round
        assert figure.bytes_per_s == pytest.approx(memory[0] / 8 * memory[1] * 1e9, rel=0.03)


def test_bandwidth_is_unknown_where_no_sheet_says_it():
    for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "Apple M1", "NVIDIA H100", "NVIDIA A100-SXM4-80GB MIG 3g.40gb"):
        assert bandwidth(name) is None


@pytest.mark.parametrize("name, dtype, tera", KNOWN)
def test_dense_peak_of_a_known_device(name, dtype, tera):
    figure = peak(name, dtype)
    assert figure.flops_per_s == pytest.approx(tera * 1e12)
    assert figure.source


def test_the_two_names_that_lightnings_table_gets_wrong():
    """Lightning 2.6 has no figure for the one, and the sparse figure of another product for the other."""
    assert peak("NVIDIA H200", "bfloat16").flops_per_s < 1e15
    assert peak("NVIDIA H100 NVL", "bfloat16").flops_per_s < 0.9e15


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100",  # the name of two chips
        "NVIDIA H800 PCIe",
        "NVIDIA B300",
        "NVIDIA A100",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Laptop GPU",
        "NVIDIA L4 Something",
        "H100",
        "Tesla V100",
        "cpu",
        "",
    ],
)
def test_near_misses_are_unknown(name):
    assert peak(name, "bfloat16") is None


@pytest.mark.parametrize("name", ["A100-SXM4-40GB", " nvidia  a100-sxm4-40gb ", "NVIDIA A100-SXM4-40GB"])
def test_spelling_of_old_drivers_does_not_matter(name):
    assert peak(name, "tf32") == peak("NVIDIA A100-SXM4-40GB", "tf32") is not None


def test_no_figure_where_the_hardware_has_none():
    assert peak("Tesla T4", "bfloat16") is None
    assert peak("Apple M1", "bfloat16") is None
    assert peak("Apple M4", "float32") is None  # Apple names none


def test_tf32_is_float32_where_the_chip_has_no_such_mode():
    for name in ("Tesla T4", "AMD Instinct MI355X"):
        assert peak(name, "tf32").flops_per_s == peak(name, "float32").flops_per_s
    assert peak("NVIDIA RTX PRO 6000 Blackwell Server Edition", "tf32") is None  # unknown is not the same


def test_the_table_is_consistent():
    names = [name for row in ROWS for name in row.names]
    assert len(names) == len(set(names))
    for row in ROWS:
        assert row.source, row.names
        for name in row.names:
            peaks = [peak(name, dtype) for dtype in ("float32", "tf32", "bfloat16")]
            known = [figure.flops_per_s for figure in peaks if figure is not None]
            assert known == sorted(known), name
            assert known, name  # a row that can only say unknown is no row
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
