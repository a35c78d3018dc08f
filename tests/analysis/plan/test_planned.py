"""The rule that decides whether a run fits."""

import pytest

from lm_profiler.analysis.hardware.roofline import Work
from lm_profiler.analysis.plan.planned import Planned, fits, planned_floors
from lm_profiler.record.run_record import MemoryCauses

CAUSES = MemoryCauses(parameters=400, gradients=0, optimizer_states=0, buffers=0, activations_and_rest=500)


def test_a_peak_between_90_and_100_percent_of_the_memory_may_fit() -> None:
    expected = [True, None, None, False]
    assert [fits(Planned({"forward": 900, "optimizer": 800}, {}), has) for has in (1000, 999, 900, 899)] == expected
    # What is reserved has to be there for a run to fit surely; a compiled one may do with fewer activations.
    assert [fits(Planned({"forward": 900}, {}, reserved=1100), has) for has in (1101, 1099, 900, 899)] == expected
    compiled = Planned({"forward": 900}, {"forward": CAUSES}, compiled=True)
    assert [fits(compiled, has) for has in (1000, 899, 400, 399)] == expected


@pytest.mark.parametrize(
    "steps, growth",
    [
        ([10, 12, 14, 16], 2),
        ([10, 12, 13, 15], 1),
        ([10, 12, 14, 14], None),
        ([10, 12, 11, 13], None),
        ([10, 12, 14], None),
        ([10, 90, 91, 92], None),  # it takes most at the beginning
        ([10], None),
    ],
)
def test_steps_grow_that_need_more_each_time(steps: list[int], growth: int | None) -> None:
    planned = Planned({"forward": max(steps)}, {}, steps=steps)
    assert planned.growth == growth
    assert fits(planned, 1000) is (True if growth is None else None)


def test_runs_are_compared_by_the_figure_that_decides() -> None:
    """A smaller peak of which more is reserved needs a larger device."""
    small, large = Planned({"forward": 710}, {}, reserved=1000), Planned({"forward": 800}, {}, reserved=810)
    assert (small.needs_bytes, large.needs_bytes) == (1000, 889)
    assert [fits(small, 900), fits(large, 900)] == [None, True]


def test_a_planned_floor_is_of_the_peaks_of_that_gpu() -> None:
    work = {"forward": Work({"bfloat16": 10**12}, 10**9), "optimizer": Work({}, 67 * 10**8), "clip": Work({}, None)}
    planned = Planned({}, {}, work=work, float32="highest")
    floors = planned_floors(planned, "NVIDIA H100 80GB HBM3")
    assert floors.by_phase["forward"].seconds == pytest.approx(1e12 / 989.4e12)
    assert floors.by_phase["optimizer"].seconds == pytest.approx(2e-3)  # 3.35 TB/s
    assert floors.seconds == pytest.approx(1e12 / 989.4e12 + 2e-3)
    assert floors.unknown == ["clip"]
    assert planned_floors(planned, "a GPU").seconds is None
    planned = Planned({}, {}, work={"forward": Work({"float32": 10**12}, 0)}, float32="high")
    assert planned_floors(planned, "NVIDIA H100 80GB HBM3").seconds == pytest.approx(1e12 / 494.7e12)
