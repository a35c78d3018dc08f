"""Datasheet peaks, one row per product: TFLOP/s without sparsity, GB/s of memory, and the source of each figure.

NVIDIA's sheets since Ampere print tensor figures "with sparsity"; half of that is the dense figure, and only
that is kept here. GeForce cards run fp16 and bf16 at half rate when they accumulate in fp32, which is what
training does, so their figure is the whitepapers' "with FP32 accumulate" row. An empty field is unknown; it stays
empty until there is a source for it. Products whose name may mean two chips, such as "NVIDIA H100", are left out.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A GPU: its names as the driver reports them, its memory and rates, and where these were published.

    ``gib`` is its memory in GiB, ``gpu`` its compute capability; a rate of a dtype is in dense TFLOP/s, that of
    ``memory`` in GB/s (10^9). None means unknown. If the chip has no TF32 mode, float32 stays float32, and both columns
    have the same figure. The bandwidth is of the same source, unless ``memory_source`` names another.

    NVIDIA's capabilities are from its page "CUDA GPU Compute Capability". An AMD GPU has the one that torch derives
    from its gfx number: a run is planned with the kernels that torch would choose on the NVIDIA GPU of that number, a
    Hopper. The GiB are what the driver reports to a process (``cudaMemGetInfo``). Torch prints them when memory runs
    out ("GPU 0 has a total capacity of 14.76 GiB"), and people quote this message in public. Seen: B200
    pytorch/ao#4002, H20 Tencent-Hunyuan/Hunyuan3D-Part#9, MI355X ROCm/TheRock#2118, RTX 5090 Wan-Video/Wan2.1#465, RTX
    6000 Ada DINGYANB/MTVCrafter#21, T4 Morizeyao/GPT2-Chinese#215, A30 google/RB-Modulation#5; GB200, GB300, B300, RTX
    PRO 6000, MI300X and MI325X in other public logs. The others have no citation yet. Drivers report up to 0.2 GiB more
    or less: the table has the least of these figures, rounded down. ``nvidia-smi`` shows up to 0.7 GiB more
    (modal-labs/modal-client#2797), because it includes what the driver keeps for itself.
    """

    names: tuple[str, ...]
    gib: float | None
    gpu: tuple[int, int] | None
    source: str
    float32: float
    tf32: float | None = None
    bfloat16: float | None = None
    float16: float | None = None
    memory: float | None = None
    memory_source: str | None = None


_ADA = "NVIDIA Ada GPU Architecture whitepaper v2.1 (2023), appendix A"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper v2.1 (2021), appendix A"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet (2021)"
_H100 = "NVIDIA H100 Tensor Core GPU Architecture whitepaper (2023)"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip datasheet (2023): the GPU is an H100 SXM"
_BLACKWELL = "NVIDIA Blackwell datasheet (2025), Individual Blackwell GPU Specifications; half the sparse figure"
_RTX_BLACKWELL = (
    "NVIDIA RTX Blackwell GPU Architecture whitepaper v1.1 (2025), appendix A"
)
_RTX_PRO = "NVIDIA RTX Blackwell PRO GPU Architecture whitepaper (2025)"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet (2020)"
_MAX_Q = (
    "NVIDIA RTX PRO 6000 Blackwell Max-Q datasheet (2025): 110 TFLOP/s fp32, 3511 AI TOPS (fp4, sparse); "
    "the tensor figures from the latter by the whitepaper's ratios (bf16 an eighth)"
)
_LAPTOPS = (
    "NVIDIA GeForce RTX 40 laptops page (2024): up to 686 AI TOPS (fp8, sparse); the rest by the "
    "RTX 4090's ratios in the Ada whitepaper (bf16 an eighth, fp32 a sixteenth). Less at lower power limits"
)
_B300 = "NVIDIA HGX page (2025): 36 PFLOP/s (bf16, sparse), 18 (TF32, sparse), 0.6 (fp32) for eight B300"
_GB300 = "NVIDIA GB300 NVL72 page (2025): 360 PFLOP/s (bf16, sparse), 180 (TF32, sparse), 576 TB/s of 72; fp32: GB200"
_ULTRA = "NVIDIA technical blog, Inside NVIDIA Blackwell Ultra (2025): 8 TB/s"
_SERVER = "NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet (2025)"
_H800 = "NVIDIA H800 datasheet, as its partners quote it (2023): H100 SXM except NVLink and fp64"
_H20 = "NVIDIA H20 datasheet, as its partners quote it (2023)"
_TURING = "NVIDIA Turing GPU Architecture whitepaper (2018), reference board; fp16 with fp32 accumulate"
_CDNA4 = "AMD CDNA 4 Architecture white paper (2025)"
_A100_40 = (
    "NVIDIA A100 Tensor Core GPU Architecture whitepaper (2020): 1555 GB/s with 40 GB"
)
_H100_SHEET = "NVIDIA H100 datasheet (2023): 3.35 TB/s (SXM), 2 TB/s (PCIe)"
_DGX_B200 = "NVIDIA DGX B200 datasheet (2024): 64 TB/s for eight"
_T4_BRIEF = "NVIDIA T4 product brief (PB-09256-001): up to 320 GB/s"
_KEYNOTE = "Apple keynote, 18 October 2021"
_M1_PRO = "Apple press release, 18 October 2021: 200 GB/s (M1 Pro), 400 GB/s (M1 Max)"
_M2 = "Apple press release, 6 June 2022: 100 GB/s"

_HOPPER_SXM = (66.9, 494.7, 989.4, 989.4)
_WORKSTATION = (125.0, 251.9, 503.8, 503.8)
_AT_300_W = (110.0, 219.4, 438.9, 438.9)
_CDNA3 = (163.4, 653.7, 1307.4, 1307.4)
_NVL = (60.0, 417.5, 835.5, 835.5)
_A100_TFLOPS = (19.5, 156.0, 312.0, 312.0)

ROWS: tuple[Row, ...] = (
    # Blackwell
    # Its page rounds fp32 to 6 PFLOP/s for 72: a GB200's 80 TFLOP/s.
    Row(
        ("NVIDIA GB300",), 276.5, (10, 3), _GB300, 80.0, 1250.0, 2500.0, 2500.0, 8000.0
    ),
    Row(
        ("NVIDIA B300 SXM6 AC",),
        267.6,
        (10, 3),
        _B300,
        75.0,
        1125.0,
        2250.0,
        2250.0,
        8000.0,
        _ULTRA,
    ),
    Row(
        ("NVIDIA GB200",),
        184.3,
        (10, 0),
        _BLACKWELL,
        80.0,
        1250.0,
        2500.0,
        2500.0,
        8000.0,
    ),
    # The data sheet rounds TF32 to 2.2 PFLOP/s with sparsity. NVIDIA's HGX page (2025) gives 18 PFLOP/s with sparsity
    # for eight GPUs, so that one has 18 / 8 / 2 = 1.125 PFLOP/s without.
    Row(
        ("NVIDIA B200",),
        178.3,
        (10, 0),
        _BLACKWELL,
        75.0,
        1125.0,
        2250.0,
        2250.0,
        8000.0,
        _DGX_B200,
    ),
    Row(
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",),
        94.9,
        (12, 0),
        _RTX_PRO,
        *_WORKSTATION,
        1792.0,
    ),
    Row(
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",),
        94.9,
        (12, 0),
        _MAX_Q,
        *_AT_300_W,
        1792.0,
    ),
    # The sheet rounds its tensor figures to whole PFLOP/s.
    Row(
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition",),
        94.9,
        (12, 0),
        _SERVER,
        120.0,
        memory=1597.0,
    ),
    Row(
        ("NVIDIA GeForce RTX 5090",),
        31.3,
        (12, 0),
        _RTX_BLACKWELL,
        104.8,
        104.8,
        209.5,
        209.5,
        1792.0,
    ),
    Row(
        ("NVIDIA GeForce RTX 5080",),
        15.4,
        (12, 0),
        _RTX_BLACKWELL,
        56.3,
        56.3,
        112.6,
        112.6,
        960.0,
    ),
    Row(
        ("NVIDIA GeForce RTX 5070 Ti",),
        15.4,
        (12, 0),
        _RTX_BLACKWELL,
        43.9,
        43.9,
        87.9,
        87.9,
        896.0,
    ),
    Row(
        ("NVIDIA GeForce RTX 5070",),
        11.4,
        (12, 0),
        _RTX_BLACKWELL,
        30.9,
        30.9,
        61.7,
        61.7,
        672.0,
    ),
    # Hopper
    Row(
        ("NVIDIA H100 80GB HBM3",),
        79.1,
        (9, 0),
        _H100,
        *_HOPPER_SXM,
        3350.0,
        _H100_SHEET,
    ),
    Row(
        ("NVIDIA H100 PCIe",),
        79.1,
        (9, 0),
        _H100,
        51.2,
        378.0,
        756.0,
        756.0,
        2000.0,
        _H100_SHEET,
    ),
    Row(
        ("NVIDIA H100 NVL",),
        93.0,
        (9, 0),
        "NVIDIA H100 datasheet (2024), half the sparse figure",
        *_NVL,
        3900.0,
    ),
    Row(("NVIDIA H800",), 79.1, (9, 0), _H800, *_HOPPER_SXM, 3350.0),
    Row(("NVIDIA H20",), 95.0, (9, 0), _H20, 44.0, 74.0, 148.0, 148.0, 4000.0),
    Row(
        ("NVIDIA H200",),
        139.7,
        (9, 0),
        "NVIDIA H200 datasheet (2024): H100 SXM compute, HBM3e",
        *_HOPPER_SXM,
        4800.0,
    ),
    Row(
        ("NVIDIA H200 NVL",),
        139.7,
        (9, 0),
        "NVIDIA H200 datasheet (2024), half the sparse figure",
        *_NVL,
        4800.0,
    ),
    Row(
        ("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"),
        94.5,
        (9, 0),
        _GH200,
        *_HOPPER_SXM,
        4000.0,
    ),  # 96 GB in both
    # no report found: 144 * 10^9 bytes, the least that it can be
    Row(("NVIDIA GH200 144G HBM3e",), 134.1, (9, 0), _GH200, *_HOPPER_SXM, 4900.0),
    # Ada Lovelace
    Row(
        ("NVIDIA L4",),
        22.0,
        (8, 9),
        _ADA + "; NVIDIA L4 datasheet (2023)",
        30.3,
        60.0,
        121.0,
        121.0,
        300.0,
    ),
    Row(
        ("NVIDIA L40",),
        44.3,
        (8, 9),
        "NVIDIA L40 datasheet (2023)",
        90.5,
        90.5,
        181.05,
        181.05,
        864.0,
    ),
    Row(
        ("NVIDIA L40S",),
        44.3,
        (8, 9),
        "NVIDIA L40S datasheet (2023)",
        91.6,
        183.0,
        362.05,
        362.05,
        864.0,
    ),
    # GiB with ECC; 47.5 without
    Row(
        ("NVIDIA RTX 6000 Ada Generation",),
        44.4,
        (8, 9),
        _ADA,
        91.1,
        182.1,
        364.2,
        364.2,
        960.0,
    ),
    Row(
        ("NVIDIA GeForce RTX 4090",),
        23.5,
        (8, 9),
        _ADA,
        82.6,
        82.6,
        165.2,
        165.2,
        1008.0,
    ),
    Row(
        ("NVIDIA GeForce RTX 4090 Laptop GPU",),
        15.6,
        (8, 9),
        _LAPTOPS,
        42.9,
        42.9,
        85.8,
        85.8,
    ),
    Row(
        ("NVIDIA GeForce RTX 4080",), 15.6, (8, 9), _ADA, 48.7, 48.7, 97.5, 97.5, 717.0
    ),
    Row(
        ("NVIDIA GeForce RTX 4070 Ti",),
        11.6,
        (8, 9),
        _ADA,
        40.1,
        40.1,
        80.2,
        80.2,
        504.0,
    ),
    # Ampere
    Row(
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        39.3,
        (8, 0),
        _A100,
        *_A100_TFLOPS,
        1555.0,
        _A100_40,
    ),
    Row(("NVIDIA A100-SXM4-80GB",), 79.1, (8, 0), _A100, *_A100_TFLOPS, 2039.0),
    Row(("NVIDIA A100 80GB PCIe",), 79.1, (8, 0), _A100, *_A100_TFLOPS, 1935.0),
    Row(
        ("NVIDIA A30",),
        23.5,
        (8, 0),
        "NVIDIA A30 datasheet (2022)",
        10.3,
        82.0,
        165.0,
        165.0,
        933.0,
    ),
    Row(
        ("NVIDIA A40",),
        44.3,
        (8, 6),
        "NVIDIA A40 datasheet (2021)",
        37.4,
        74.8,
        149.7,
        149.7,
        696.0,
    ),
    Row(
        ("NVIDIA A10",),
        21.9,
        (8, 6),
        "NVIDIA A10 datasheet (2021)",
        31.2,
        62.5,
        125.0,
        125.0,
        600.0,
    ),
    Row(
        ("NVIDIA A10G",),
        21.9,
        (8, 6),
        "NVIDIA A10G datasheet for AWS (2022)",
        35.0,
        35.0,
        70.0,
        70.0,
        600.0,
    ),
    Row(("NVIDIA RTX A6000",), 47.4, (8, 6), _GA102, 38.7, 77.4, 154.8, 154.8, 768.0),
    Row(
        ("NVIDIA GeForce RTX 3090",),
        23.5,
        (8, 6),
        _GA102,
        35.6,
        35.6,
        71.0,
        71.0,
        936.0,
    ),
    Row(
        ("NVIDIA GeForce RTX 3090 Ti",),
        23.5,
        (8, 6),
        _ADA,
        40.0,
        40.0,
        80.0,
        80.0,
        1008.0,
    ),
    Row(
        ("NVIDIA GeForce RTX 3080",), 9.7, (8, 6), _GA102, 29.8, 29.8, 59.5, 59.5, 760.0
    ),
    Row(
        ("NVIDIA GeForce RTX 3070",), 7.7, (8, 6), _GA102, 20.3, 20.3, 40.6, 40.6, 448.0
    ),
    # Turing and Volta: fp16 tensor cores only
    Row(
        ("Tesla T4",),
        14.7,
        (7, 5),
        "NVIDIA T4 datasheet (2019)",
        8.1,
        8.1,
        None,
        65.0,
        320.0,
        _T4_BRIEF,
    ),
    Row(
        ("NVIDIA GeForce RTX 2080 Ti",),
        10.7,
        (7, 5),
        _TURING,
        13.4,
        13.4,
        None,
        53.8,
        616.0,
    ),
    Row(("Tesla V100-SXM2-16GB",), 15.7, (7, 0), _V100, 15.7, 15.7, None, 125.0, 900.0),
    Row(("Tesla V100-SXM2-32GB",), 31.7, (7, 0), _V100, 15.7, 15.7, None, 125.0, 900.0),
    Row(("Tesla V100-PCIE-16GB",), 15.7, (7, 0), _V100, 14.0, 14.0, None, 112.0, 900.0),
    Row(("Tesla V100-PCIE-32GB",), 31.7, (7, 0), _V100, 14.0, 14.0, None, 112.0, 900.0),
    Row(
        ("Tesla V100S-PCIE-32GB",), 31.7, (7, 0), _V100, 16.4, 16.4, None, 130.0, 1134.0
    ),
    # AMD: dense matrix figures; MI355X has no TF32
    # The VF is the same card as clouds pass it on: by caps-tum/mt4g's report of one (August 2025), 304 compute units
    # at 2,100 MHz, of 2,048 FLOPs (bf16) a clock each, and 191.69 GiB behind 8,192 bits: the data sheet's figures.
    Row(
        ("AMD Instinct MI300X", "AMD Instinct MI300X VF"),
        191.6,
        (9, 4),
        "AMD Instinct MI300X data sheet (2023)",
        *_CDNA3,
        5300.0,
    ),
    Row(
        ("AMD Instinct MI325X",),
        255.6,
        (9, 4),
        "AMD Instinct MI325X data sheet (2024)",
        *_CDNA3,
        6000.0,
    ),
    Row(
        ("AMD Instinct MI355X",),
        287.9,
        (9, 5),
        _CDNA4,
        157.3,
        157.3,
        2516.6,
        2516.6,
        8000.0,
    ),
    # Apple: the GPU's fp32 where Apple named a number, for the chip with all its GPU cores (some have one or two less)
    Row(
        ("Apple M1",),
        None,
        None,
        "Apple press release, 10 November 2020: 2.6 teraflops",
        2.6,
        2.6,
    ),
    Row(
        ("Apple M1 Pro",),
        None,
        None,
        f"{_KEYNOTE}: 5.2 teraflops",
        5.2,
        5.2,
        None,
        None,
        200.0,
        _M1_PRO,
    ),
    Row(
        ("Apple M1 Max",),
        None,
        None,
        f"{_KEYNOTE}: 10.4 teraflops",
        10.4,
        10.4,
        None,
        None,
        400.0,
        _M1_PRO,
    ),
    Row(
        ("Apple M2",),
        None,
        None,
        "Apple keynote, 6 June 2022: 3.6 teraflops",
        3.6,
        3.6,
        None,
        None,
        100.0,
        _M2,
    ),
)
