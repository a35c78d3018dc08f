"""GPUs by the names that people use."""

from __future__ import annotations

import pytest

from lm_profiler.analysis.hardware.peak_table import ROWS
from lm_profiler.analysis.plan.capacities import Capacity, UnknownDevice, capacity


@pytest.mark.parametrize(
    "given, name, gib, gpu",
    [
        ("H100", "NVIDIA H100 80GB HBM3", 80, (9, 0)),
        ("h100 pcie", "NVIDIA H100 PCIe", 80, (9, 0)),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB", 40, (8, 0)),
        ("A100 80GB", "NVIDIA A100-SXM4-80GB", 80, (8, 0)),
        ("4090", "NVIDIA GeForce RTX 4090", 24, (8, 9)),
        ("L40", "NVIDIA L40", 48, (8, 9)),
        ("H200", "NVIDIA H200", 141, (9, 0)),
    ],
)
def test_a_name_that_people_use(given: str, name: str, gib: int, gpu: tuple[int, int]) -> None:
    assert capacity(given) == Capacity(name, gib << 30, gpu=gpu)


def test_every_gpu_of_the_table_of_peaks_has_one() -> None:
    """But for Apple's, whose memory is the machine's."""
    names = {name for row in ROWS for name in row.names if not name.startswith("Apple")}
    assert {name for name in names if capacity(name).name != name} == set()


def test_an_unknown_name_has_near_ones() -> None:
    with pytest.raises(UnknownDevice) as error:
        capacity("H1000")
    assert error.value.near
    assert all("H100" in name for name in error.value.near)
    with pytest.raises(UnknownDevice) as error:
        capacity("potato")
    assert error.value.near == []
