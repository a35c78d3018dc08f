import pytest
from stored_texts import assert_stored

from lm_profiler.analysis.plan.planned import Capacity, Planned, planned_floors
from lm_profiler.record.memory_timeline import Allocation
from lm_profiler.report.run.plan_table import made_by, plan_table

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


def test_an_allocation_of_which_nothing_else_is_known_has_its_phase() -> None:
    unknown = Allocation(bytes=1, cause="rest", phase="backward")
    assert made_by(unknown) == "unknown, in backward"
    assert made_by(unknown.model_copy(update={"name": "aten.mm.default", "line": "a.py:1"})) == "mm, a.py:1"


@pytest.mark.parametrize(
    "least_gib, expected",
    [(2.4399, None), (2.4301, "steps differ: the table shows the largest of 2; the smallest needs 2.43 GiB")],
)
def test_steps_differ_only_if_their_figures_do(least_gib: float, expected: str | None) -> None:
    steps = [round(2.4401 * 2**30), round(least_gib * 2**30)]
    planned = Planned({"forward": steps[0]}, {}, steps=steps)
    device = Capacity("NVIDIA H100", 80 << 30, False)
    below = plan_table(planned, None, device, planned_floors(planned, device.name)).below
    assert [line for line in below if line.startswith("steps differ")] == ([] if expected is None else [expected])


@pytest.mark.parametrize("uncounted, expected", [([], 0), (["mine::mm", "npdot (a.py:8)"], 1)])
def test_what_the_floor_lacks_is_named(uncounted: list[str], expected: int) -> None:
    planned = Planned({"forward": 1 << 30}, {}, uncounted=uncounted)
    device = Capacity("NVIDIA H100", 80 << 30, False)
    below = plan_table(planned, None, device, planned_floors(planned, device.name)).below
    assert len([line for line in below if "mine::mm, npdot (a.py:8)" in line]) == expected
