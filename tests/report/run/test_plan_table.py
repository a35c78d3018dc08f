from stored_texts import assert_stored

from lm_profiler.analysis.plan.planned import Capacity, Planned, planned_floors
from lm_profiler.record.memory_timeline import Allocation
from lm_profiler.report.run.plan_table import origin_text, plan_table

CASES = {
    "it fits": (Planned({"forward": 9 << 30}, {}), False),
    "it fits into what is free, which is not all that the device has": (Planned({"forward": 9 << 30}, {}), True),
    "it does not fit": (Planned({"forward": 90 << 30}, {}), False),
    "what the allocator reserves fits": (Planned({"forward": 70 << 30}, {}, reserved=79 << 30), False),
    "what the allocator reserves may not fit": (Planned({"forward": 70 << 30}, {}, reserved=81 << 30), False),
}


def test_printed_plans() -> None:
    texts = {}
    for case, (planned, is_free) in CASES.items():
        device = Capacity("NVIDIA H100", 80 << 30, is_free)
        texts[case] = plan_table(planned, None, device, planned_floors(planned, device.name)).below[0]
    assert_stored("report/plan", texts)


def test_an_unknown_allocation_has_its_phase() -> None:
    unknown = Allocation(bytes=1, cause="rest", phase="backward")
    assert origin_text(unknown) == "unknown, in backward"
    assert origin_text(unknown.model_copy(update={"name": "aten.mm.default", "line": "a.py:1"})) == "mm, a.py:1"


def lines_below(planned: Planned) -> str:
    device = Capacity("NVIDIA H100", 80 << 30, False)
    return "\n".join(plan_table(planned, None, device, planned_floors(planned, device.name)).below)


def test_a_note_reports_steps_that_differ() -> None:
    largest, alike, least = (round(gib * 2**30) for gib in (2.4401, 2.4399, 2.4301))
    note = "steps need different amounts of memory: the table shows the largest of 2; the smallest is 2.43 GiB"
    assert "steps differ" not in lines_below(Planned({"forward": largest}, {}, steps=[largest, alike]))
    assert note in lines_below(Planned({"forward": largest}, {}, steps=[largest, least])).splitlines()
    uncounted = ["mine::mm", "npdot (a.py:8)"]
    assert "mine::mm" not in lines_below(Planned({"forward": 1 << 30}, {}))
    assert lines_below(Planned({"forward": 1 << 30}, {}, uncounted=uncounted)).count("mine::mm, npdot (a.py:8)") == 1
