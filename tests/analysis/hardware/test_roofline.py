"""The roofline of a phase, against figures worked out by hand."""

import pytest
from stored_texts import assert_stored

from lm_profiler.analysis.hardware.roofline import MEASURED_COPY, Work, beaten_floors, floor_of
from lm_profiler.record.run_record import FlopRate, Rates

RATES = Rates(
    flops=[
        FlopRate(dtype="float32", flops_per_s=1e12, source="a test"),
        FlopRate(dtype="bfloat16", flops_per_s=10e12, source="a test"),
    ],
    bytes_per_s=100e9,
    bytes_source="a test",
)


# Rates are 1 TFLOP/s in float32, 10 in bfloat16, and 100 GB/s.
@pytest.mark.parametrize(
    "work, phase_s, floor_s, bound, times",
    [
        (Work({"float32": 2 * 10**9}, 10**8), 8e-3, 2e-3, "compute", 4.0),
        (Work({"float32": 10**8}, 4 * 10**8), 8e-3, 4e-3, "memory", 2.0),
        (Work({}, 4 * 10**8), 8e-3, 4e-3, "memory", 2.0),
        # Products of several dtypes take their times together.
        (Work({"float32": 10**9, "bfloat16": 10**10}, 0), 6e-3, 2e-3, "compute", 3.0),
        # FLOPs alone are a floor but do not show what binds.
        (Work({"float32": 10**9}, None), 2e-3, 1e-3, None, 2.0),
        # No work is no time and has no ratio.
        (Work({}, 0), 1e-3, 0.0, None, None),
        # Before the phase was measured its floor is known.
        (Work({"float32": 10**9}, 0), None, 1e-3, "compute", None),
        # A floor of next to nothing has no ratio.
        (Work({}, 264), 58e-6, 2.64e-9, "memory", None),
        # Of bytes that stay in caches there is no floor, but one of compute.
        (Work({"float32": 10**8}, 10**8), 0.5e-3, 0.1e-3, "compute", 5.0),
    ],
)
def test_the_floor_is_the_longer_of_compute_and_memory(
    work: Work, phase_s: float | None, floor_s: float, bound: str | None, times: float | None
) -> None:
    floor = floor_of(work, RATES, phase_s)
    assert floor.seconds == pytest.approx(floor_s)
    assert floor.bound == bound
    assert floor.times == (None if times is None else pytest.approx(times))


def test_a_phase_that_beats_its_floor_by_noise_keeps_it() -> None:
    """By 3 % of 1 ms."""
    assert floor_of(Work({"float32": 10**8}, 10**8), RATES, 0.97e-3).bound == "memory"


@pytest.mark.parametrize(
    "work, rates, phase_s",
    [
        (Work({"float64": 10**9}, 10**9), RATES, 1.0),  # no rate of the dtype
        (Work(None, 10**9), RATES, 1.0),
        (Work({}, None), RATES, 1.0),
        (Work({}, 10**9), Rates(), 1.0),
        (Work({}, 10**9, on_the_bus=True), RATES, 1.0),
        (Work({}, 10**8), RATES, 0.5e-3),  # the bytes stay in caches
        (Work({"float32": 10**9}, 0), RATES, 0.5e-3),  # a peak that the phase beats is not the device's
    ],
)
def test_unknown_floors(work: Work, rates: Rates, phase_s: float) -> None:
    floor = floor_of(work, rates, phase_s)
    assert (floor.seconds, floor.bound, floor.times) == (None, None, None)


def test_bytes_on_the_bus_are_known_without_a_floor() -> None:
    assert floor_of(Work({}, 10**9, on_the_bus=True), RATES, 1.0).bytes == 10**9


def test_a_note_names_the_rate_of_a_beaten_floor() -> None:
    measured = RATES.model_copy(update={"bytes_per_s": 16.6e9, "bytes_source": MEASURED_COPY})
    work = {"optimizer": Work({}, 260_620_000), "forward": Work({"float32": 10**9}, 10**6)}
    (of_one,) = beaten_floors(work, measured, {"optimizer": 10.96e-3, "forward": 2e-3})
    took_s = {"optimizer": 1e-3, "clip": 5e-3, "forward": 0.5e-3}
    (of_all,) = beaten_floors({**work, "clip": Work({}, 10**9)}, RATES, took_s)
    assert_stored("analysis/notes: beaten floors", {"optimizer alone": of_one, "three phases": of_all})
