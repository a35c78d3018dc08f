"""GPUs by the names that people use."""

import random

import pytest

from lm_profiler.analysis.hardware.peak_table import ROWS
from lm_profiler.analysis.plan.planned import capacity, largest_that_fits
from lm_profiler.usage_error import UsageError

# What torch reports about the GPU, in GiB; capacities.py has the public sources.
# (given, its name, GiB, compute capability)
REPORTED = [
    ("H100 80GB", "NVIDIA H100 80GB HBM3", 79.10, (9, 0)),
    ("H100 SXM", "NVIDIA H100 80GB HBM3", 79.10, (9, 0)),
    ("A100 SXM 80GB", "NVIDIA A100-SXM4-80GB", 79.14, (8, 0)),
    ("h100 pcie", "NVIDIA H100 PCIe", 79.10, (9, 0)),
    ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB", 39.39, (8, 0)),
    ("A100 80GB", "NVIDIA A100-SXM4-80GB", 79.14, (8, 0)),
    ("A100 40GB", "NVIDIA A100-SXM4-40GB", 39.39, (8, 0)),
    ("T4", "Tesla T4", 14.74, (7, 5)),
    ("4090", "NVIDIA GeForce RTX 4090", 23.52, (8, 9)),
    ("RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, (8, 9)),
    ("rtx 5070", "NVIDIA GeForce RTX 5070", 11.48, (12, 0)),
    ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation", 44.43, (8, 9)),
    ("L40", "NVIDIA L40", 44.35, (8, 9)),
    ("H200", "NVIDIA H200", 139.72, (9, 0)),
    ("H20", "NVIDIA H20", 95.00, (9, 0)),
    ("B200", "NVIDIA B200", 178.35, (10, 0)),
    ("B300", "NVIDIA B300 SXM6 AC", 267.69, (10, 3)),
    ("GB200", "NVIDIA GB200", 184.31, (10, 0)),
    ("GB300", "NVIDIA GB300", 276.50, (10, 3)),
    ("RTX PRO 6000 Server", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.97, (12, 0)),
    ("MI300X", "AMD Instinct MI300X", 191.69, (9, 4)),
    ("MI300X VF", "AMD Instinct MI300X VF", 205822885888 / 2**30, (9, 4)),
    ("MI325X", "AMD Instinct MI325X", 255.69, (9, 4)),
    ("MI355X", "AMD Instinct MI355X", 287.98, (9, 5)),
]


@pytest.mark.parametrize("given, name, gib, gpu", REPORTED)
def test_a_name_that_people_use_has_its_memory(given: str, name: str, gib: float, gpu: tuple[int, int]) -> None:
    """No more memory than the driver reports, and 0.1 GiB less at most."""
    found = capacity(given)
    assert (found.name, found.gpu, found.is_free) == (name, gpu, False)
    assert gib - 0.1 <= found.bytes / (1 << 30) <= gib


def test_every_gpu_of_the_table_of_peaks_has_one() -> None:
    """But for Apple's, whose memory is the machine's."""
    names = {name for row in ROWS for name in row.names if not name.startswith("Apple")}
    assert {name for name in names if capacity(name).name != name} == set()


@pytest.mark.parametrize(
    "given, candidates",
    [
        ("RTX 6000", {"RTX 6000 Ada Generation", "Workstation Edition", "Max-Q", "Server Edition"}),
        ("A100", {"A100-SXM4-40GB", "A100-SXM4-80GB"}),
        ("H100", {"H100 80GB HBM3", "H100 PCIe", "H100 NVL"}),
        ("V100 32GB", {"V100-SXM2-32GB", "V100-PCIE-32GB"}),
        ("80GB", {"H100 80GB HBM3", "A100-SXM4-80GB"}),
        ("GH200", {"GH200 480GB", "GH200 144G"}),
    ],
)
def test_an_ambiguous_gpu_name_is_refused(given: str, candidates: set[str]) -> None:
    with pytest.raises(UsageError) as error:
        capacity(given)
    assert {name for name in candidates if name not in str(error.value)} == set()


def test_a_refused_gpu_name_lists_similar_names() -> None:
    with pytest.raises(UsageError, match="others") as error:
        capacity("PCIe")
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="did you mean H100"):
        capacity("H1000")


@pytest.mark.parametrize("given", ["", "NVIDIA", "potato", "RTX 4070", "RTX 2080"])  # the table has a Ti of two
def test_an_unknown_gpu_is_refused_with_an_alternative(given: str) -> None:
    with pytest.raises(UsageError, match="--memory"):
        capacity(given)


def search(needs, begin: int, room: float) -> tuple[int, list[int]]:
    steps, tried = largest_that_fits(begin, needs(begin), room), []
    try:
        n = next(steps)
        while True:
            tried.append(n)
            n = steps.send(needs(n))
    except StopIteration as found:
        return found.value, tried


@pytest.mark.parametrize("seed", range(60))
def test_the_largest_value_that_fits_is_found(seed: int) -> None:
    """Peaks of phases are lines and parabolas; the step's is the highest of them."""
    draw = random.Random(seed)
    curves = [(draw.choice((0, 0, draw.uniform(0, 3))), draw.uniform(0.5, 400), draw.uniform(0, 1e4)) for _ in range(4)]
    needs = lambda n: int(max((a * n + b) * n + c for a, b, c in curves))  # noqa: E731
    begin, room = draw.choice((1, 4, 64)), draw.uniform(1, 200_000)
    largest, tried = search(needs, begin, room)
    assert largest == max((n for n in range(1, 5000) if needs(n) <= room), default=0)
    assert len(tried) <= 12


@pytest.mark.parametrize("seed", range(60))
def test_in_blocks_of_memory_the_largest_is_found_within_one_percent(seed: int) -> None:
    """What small batches need may hide below what the step needs anyway; then lines miss it by far."""
    draw = random.Random(seed)
    block, each, flat = 20 << 20, draw.uniform(1e4, 1e6), draw.uniform(1e6, 1e9)
    square = draw.choice((0.0, 0.0, draw.uniform(0.0, 1.0)))
    needs = lambda n: int(max(-(-((square * n + each) * n + flat / 2) // block) * block, flat))  # noqa: E731
    largest, tried = search(needs, draw.choice((1, 4, 64)), room := 16e9)
    assert needs(largest) <= room < needs(int(largest * 1.01) + 1)
    assert len(tried) <= 12
