"""Datasheet peaks of products in 8 and 4 bits: dense TFLOP/s by product, with the source of each figure.

Where a sheet prints figures "with sparsity", half of that is the dense figure. GeForce cards run FP8 at half rate when
they accumulate in FP32, which is what training does. MXFP8 runs at the rate of FP8, NVFP4 and MXFP4 at that of FP4.
An empty field is unknown. Never compared with a measurement on these devices.

Compared in November 2026 with what others quote of these sheets: H100, B200, GB200 (glennklockwood.com), B300 (NVIDIA's
HGX page: 144 PFLOP/s sparse, 108 dense in FP4), GB300 (verda.com), L40, L40S, L4, H20 and RTX 4090 (hmc-tech.com:
FP8 with FP32 accumulate is twice bf16, and FP4 eight times on the RTX PRO 5000, as here on RTX 50). AMD's figures are
compute units times FLOPs of a clock times clock: MI300X 304 x 4096 x 2.1 GHz, MI355X 256 x 8192 x 2.4 GHz.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class NarrowPeaks(NamedTuple):
    """Dense TFLOP/s; None means unknown, or that the device has no such products."""

    float8: float | None
    float4: float | None
    source: str


# The names of torch's dtypes, by the column that has their peak.
COLUMN_OF_DTYPE: dict[str, Literal["float8", "float4"]] = {
    "float8_e4m3fn": "float8",
    "float8_e5m2": "float8",
    "float8_e4m3fnuz": "float8",
    "float8_e5m2fnuz": "float8",
    "float4_e2m1fn_x2": "float4",
}

_H100 = "NVIDIA H100 Tensor Core GPU Architecture whitepaper (2023)"
_H200 = "NVIDIA H200 datasheet (2024), half the sparse figure"
_BLACKWELL = "NVIDIA Blackwell datasheet (2025), Individual Blackwell GPU Specifications; half the sparse figure"
_HGX = (
    "NVIDIA HGX page (2025), for eight B300: 72 PFLOP/s (FP8, sparse), 108 (FP4, dense)"
)
_GB300 = "NVIDIA GB300 NVL72 page (2025), for 72: 720 PFLOP/s (FP8, sparse), 1,080 (FP4, dense)"
_ADA = "NVIDIA Ada GPU Architecture whitepaper v2.1 (2023), appendix A; FP8 with FP32 accumulate"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip datasheet (2023), half the sparse figure: the GPU is an H100 SXM"
_RTX_BLACKWELL = (
    "NVIDIA RTX Blackwell GPU Architecture whitepaper v1.1 (2025), appendix A; FP8 with FP32 accumulate, "
    "FP4 half the sparse figure (AI TOPS)"
)
_H800 = "NVIDIA H800 datasheet, as its partners quote it (2023): H100 SXM except NVLink and fp64"
_H20 = "NVIDIA H20 datasheet, as the press quotes it (2023): 296 in FP8 and INT8, 148 in bf16"
_SXM = NarrowPeaks(1978.9, None, _H100)
_OF_GH200 = NarrowPeaks(1978.9, None, _GH200)

_MI300X = NarrowPeaks(2614.9, None, "AMD Instinct MI300X data sheet (2023)")

# By the name that the driver reports.
NARROW_PEAKS: dict[str, NarrowPeaks] = {
    "NVIDIA H100 80GB HBM3": _SXM,
    "NVIDIA H100 PCIe": NarrowPeaks(1513.0, None, _H100),
    "NVIDIA H100 NVL": NarrowPeaks(
        1670.5, None, "NVIDIA H100 datasheet (2024), half the sparse figure"
    ),
    "NVIDIA H200": NarrowPeaks(1978.9, None, _H200),
    "NVIDIA H200 NVL": NarrowPeaks(1670.5, None, _H200),
    "NVIDIA GH200 480GB": _OF_GH200,
    "NVIDIA GH200 120GB": _OF_GH200,
    "NVIDIA GH200 144G HBM3e": _OF_GH200,
    "NVIDIA B200": NarrowPeaks(4500.0, 9000.0, _BLACKWELL),
    "NVIDIA GB200": NarrowPeaks(5000.0, 10000.0, _BLACKWELL),
    "NVIDIA B300 SXM6 AC": NarrowPeaks(4500.0, 13500.0, _HGX),
    "NVIDIA GB300": NarrowPeaks(5000.0, 15000.0, _GB300),
    "NVIDIA L4": NarrowPeaks(
        242.5, None, "NVIDIA L4 datasheet (2023), half the sparse figure"
    ),
    "NVIDIA L40": NarrowPeaks(362.0, None, "NVIDIA L40 datasheet (2023)"),
    "NVIDIA L40S": NarrowPeaks(733.0, None, "NVIDIA L40S datasheet (2023)"),
    "NVIDIA H800": NarrowPeaks(1978.9, None, _H800),
    "NVIDIA H20": NarrowPeaks(296.0, None, _H20),
    "NVIDIA RTX 6000 Ada Generation": NarrowPeaks(728.5, None, _ADA),
    "NVIDIA GeForce RTX 4090": NarrowPeaks(330.3, None, _ADA),
    "NVIDIA GeForce RTX 5090": NarrowPeaks(419.0, 1676.0, _RTX_BLACKWELL),
    "NVIDIA GeForce RTX 5080": NarrowPeaks(225.1, 900.5, _RTX_BLACKWELL),
    "NVIDIA GeForce RTX 5070 Ti": NarrowPeaks(175.8, 703.0, _RTX_BLACKWELL),
    "NVIDIA GeForce RTX 5070": NarrowPeaks(123.5, 494.0, _RTX_BLACKWELL),
    "AMD Instinct MI300X": _MI300X,
    "AMD Instinct MI300X VF": _MI300X,
    "AMD Instinct MI325X": NarrowPeaks(
        2614.9, None, "AMD Instinct MI325X data sheet (2024)"
    ),
    "AMD Instinct MI355X": NarrowPeaks(
        5033.2, 10066.3, "AMD CDNA 4 Architecture white paper (2025)"
    ),
}
