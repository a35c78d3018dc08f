import pytest

from lm_profiler.analysis.plan.capacities import Capacity
from lm_profiler.analysis.plan.planned import Planned, planned_floors
from lm_profiler.record.quantities import bytes_text
from lm_profiler.report.run.plan_table import plan_table


@pytest.mark.parametrize(
    "peak_gib, is_free, told",
    [
        (9, False, "needs 10.0 GiB, fits into the 80.0 GiB that NVIDIA H100 has"),
        (9, True, "needs 10.0 GiB, fits into the 80.0 GiB that NVIDIA H100 has free"),
        (90, False, "needs 100 GiB, does not fit into the 80.0 GiB that NVIDIA H100 has"),
    ],
)
def test_what_a_device_has_free_is_not_called_all_that_it_has(peak_gib: int, is_free: bool, told: str) -> None:
    planned, device = Planned({"forward": peak_gib << 30}, {}), Capacity("NVIDIA H100", 80 << 30, is_free)
    lines = plan_table(planned, None, device, planned_floors(planned, device.name)).below
    assert lines[0] == f"peak {bytes_text(peak_gib << 30)}, in forward: {told}"


@pytest.mark.parametrize(
    "reserved_gib, told",
    [
        (79, "needs 79.0 GiB, fits into the 80.0 GiB that NVIDIA H100 has"),
        (81, "needs 81.0 GiB, may not fit into the 80.0 GiB that NVIDIA H100 has"),
    ],
)
def test_what_an_allocator_reserves_stands_beside_the_peak(reserved_gib: int, told: str) -> None:
    planned, device = Planned({"forward": 70 << 30}, {}, reserved=reserved_gib << 30), Capacity("NVIDIA H100", 80 << 30)
    lines = plan_table(planned, None, device, planned_floors(planned, device.name)).below
    assert lines[0] == f"peak 70.0 GiB, in forward, {reserved_gib}.0 GiB reserved: {told}"
