"""The rule that decides whether a run fits."""

import pytest

from lm_profiler.analysis.hardware.roofline import Work
from lm_profiler.analysis.plan.planned import Planned, fits, planned_floors
from lm_profiler.record.run_record import MemoryCauses

CAUSES = MemoryCauses(parameters=400, gradients=0, optimizer_states=0, buffers=0, activations_and_rest=500)


@pytest.mark.parametrize("free_bytes, does_fit", [(1000, True), (999, None), (900, None), (899, False)])
def test_a_peak_between_90_and_100_percent_of_the_memory_may_fit(free_bytes: int, does_fit: bool | None) -> None:
    """None: nobody knows."""
    assert fits(Planned({"forward": 900, "optimizer": 800}, {}), free_bytes) is does_fit


@pytest.mark.parametrize("free_bytes, does_fit", [(1101, True), (1099, None), (900, None), (899, False)])
def test_what_is_reserved_has_to_be_there_for_a_run_to_fit_surely(free_bytes: int, does_fit: bool | None) -> None:
    assert fits(Planned({"forward": 900}, {}, reserved=1100), free_bytes) is does_fit


@pytest.mark.parametrize("free_bytes, does_fit", [(1000, True), (899, None), (400, None), (399, False)])
def test_a_compiled_run_may_do_without_its_500_bytes_of_activations(free_bytes: int, does_fit: bool | None) -> None:
    compiled = Planned({"forward": 900}, {"forward": CAUSES}, compiled=True)
    assert fits(compiled, free_bytes) is does_fit


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
    """A smaller peak of which more is reserved needs a larger device; a peak needs a ninth more than it is."""
    small_peak = Planned({"forward": 710}, {}, reserved=1000)
    large_peak = Planned({"forward": 800}, {}, reserved=810)
    assert small_peak.needs_bytes == 1000
    assert large_peak.needs_bytes == 889
    assert fits(small_peak, 900) is None
    assert fits(large_peak, 900) is True


def test_a_planned_floor_is_of_the_peaks_of_that_gpu() -> None:
    """An H100 has 989.4 TFLOP/s in bfloat16 and 3.35 TB/s; the optimizer moves 6.7 GB."""
    work = {"forward": Work({"bfloat16": 10**12}, 10**9), "optimizer": Work({}, 67 * 10**8), "clip": Work({}, None)}
    planned = Planned({}, {}, work=work, float32="highest")
    floors = planned_floors(planned, "NVIDIA H100 80GB HBM3")
    assert floors.by_phase["forward"].seconds == pytest.approx(1e12 / 989.4e12)
    assert floors.by_phase["optimizer"].seconds == pytest.approx(6.7e9 / 3.35e12)
    assert floors.seconds == pytest.approx(1e12 / 989.4e12 + 6.7e9 / 3.35e12)
    assert floors.unknown == ["clip"]
    assert planned_floors(planned, "a GPU").seconds is None


def test_a_planned_floor_in_float32_may_use_tensorfloat32() -> None:
    """494.7 TFLOP/s on an H100."""
    planned = Planned({}, {}, work={"forward": Work({"float32": 10**12}, 0)}, float32="high")
    assert planned_floors(planned, "NVIDIA H100 80GB HBM3").seconds == pytest.approx(1e12 / 494.7e12)
