from stored_texts import assert_stored

from lm_profiler.analysis.plan.planned import Capacity, Planned, planned_floors
from lm_profiler.report.run.plan_table import plan_table

CASES = {
    "it fits": (Planned({"forward": 9 << 30}, {}), False),
    "it fits into what is free, which is not all that the device has": (Planned({"forward": 9 << 30}, {}), True),
    "it does not fit": (Planned({"forward": 90 << 30}, {}), False),
    "what the allocator reserves fits": (Planned({"forward": 70 << 30}, {}, reserved=79 << 30), False),
    "what the allocator reserves may not fit": (Planned({"forward": 70 << 30}, {}, reserved=81 << 30), False),
}


def test_what_is_planned_stands_beside_what_the_device_has_as_stored() -> None:
    said = {}
    for case, (planned, is_free) in CASES.items():
        device = Capacity("NVIDIA H100", 80 << 30, is_free)
        said[case] = plan_table(planned, None, device, planned_floors(planned, device.name)).below[0]
    assert_stored("report/plan", said)
