import pytest

from lm_profiler.analysis.plan.capacities import Capacity
from lm_profiler.analysis.plan.floors import planned_floors
from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.report.run.plan import plan_table


@pytest.mark.parametrize(
    "peak_gib, is_free, told",
    [
        (10, False, "fits into 72.0 GiB, 90% of NVIDIA H100's 80.0 GiB"),
        (10, True, "fits into 72.0 GiB, 90% of the 80.0 GiB that NVIDIA H100 has free"),
        (90, False, "does not fit into 80.0 GiB, all that NVIDIA H100 has"),
        (90, True, "does not fit into 80.0 GiB, all that NVIDIA H100 has free"),
    ],
)
def test_what_a_device_has_free_is_not_called_all_that_it_has(peak_gib: int, is_free: bool, told: str) -> None:
    planned, device = Planned({"forward": peak_gib << 30}, {}), Capacity("NVIDIA H100", 80 << 30, is_free)
    lines = plan_table(planned, None, device, planned_floors(planned, device.name)).below
    assert lines[0] == f"peak {peak_gib}.0 GiB, in forward: {told}"


@pytest.mark.parametrize(
    "reserved_gib, told",
    [
        (79, "fits into 72.0 GiB, 90% of NVIDIA H100's 80.0 GiB"),
        (81, "may not fit: more is reserved than 80.0 GiB, all that NVIDIA H100 has"),
    ],
)
def test_what_an_allocator_reserves_stands_beside_the_peak(reserved_gib: int, told: str) -> None:
    planned, device = Planned({"forward": 70 << 30}, {}, reserved=reserved_gib << 30), Capacity("NVIDIA H100", 80 << 30)
    lines = plan_table(planned, None, device, planned_floors(planned, device.name)).below
    assert lines[0] == f"peak 70.0 GiB, in forward, {reserved_gib}.0 GiB reserved: {told}"
