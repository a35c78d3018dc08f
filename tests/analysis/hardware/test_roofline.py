"""The roofline of a phase, against figures worked out by hand."""

import pytest
from stored_texts import assert_stored

from lm_profiler.analysis.hardware.roofline import MEASURED_COPY, Work, beaten_floors, floor_of
from lm_profiler.record.run_record import Floor, FlopRate, Rates

RATES = Rates(
    flops=[
        FlopRate(dtype="float32", flops_per_s=1e12, source="a test"),
        FlopRate(dtype="bfloat16", flops_per_s=10e12, source="a test"),
    ],
    bytes_per_s=100e9,
    bytes_source="a test",
)


def figures(floor: Floor) -> tuple[float | None, str | None, float | None]:
    return floor.seconds, floor.bound, floor.times


def test_the_floor_is_the_longer_of_compute_and_memory() -> None:
    assert figures(floor_of(Work({"float32": 2 * 10**9}, 10**8), RATES, 8e-3)) == pytest.approx((2e-3, "compute", 4.0))
    assert figures(floor_of(Work({"float32": 10**8}, 4 * 10**8), RATES, 8e-3)) == pytest.approx((4e-3, "memory", 2.0))
    assert figures(floor_of(Work({}, 4 * 10**8), RATES, 8e-3)) == pytest.approx((4e-3, "memory", 2.0))
    # Products of several dtypes take their times together.
    work = Work({"float32": 10**9, "bfloat16": 10**10}, 0)
    assert figures(floor_of(work, RATES, 6e-3)) == pytest.approx((2e-3, "compute", 3.0))
    # FLOPs alone are a floor but do not show what binds.
    assert figures(floor_of(Work({"float32": 10**9}, None), RATES, 2e-3)) == pytest.approx((1e-3, None, 2.0))
    # No work is no time and has no ratio.
    assert figures(floor_of(Work({}, 0), RATES, 1e-3)) == (0.0, None, None)
    # Before the phase was measured its floor is known.
    assert figures(floor_of(Work({"float32": 10**9}, 0), RATES, None)) == (1e-3, "compute", None)
    # A floor of next to nothing has no ratio.
    assert figures(floor_of(Work({}, 264), RATES, 58e-6)) == pytest.approx((2.64e-9, "memory", None))


def test_unknown_floors() -> None:
    assert figures(floor_of(Work({"float64": 10**9}, 10**9), RATES, 1.0)) == (None, None, None)  # no rate
    assert figures(floor_of(Work(None, 10**9), RATES, 1.0)) == (None, None, None)
    assert figures(floor_of(Work({}, None), RATES, 1.0)) == (None, None, None)
    assert figures(floor_of(Work({}, 10**9), Rates(), 1.0)) == (None, None, None)
    # Bytes on the bus have no floor.
    floor = floor_of(Work({}, 10**9, on_the_bus=True), RATES, 1.0)
    assert (floor.bytes, *figures(floor)) == (10**9, None, None, None)
    # Bytes that stay in caches are no floor.
    assert figures(floor_of(Work({}, 10**8), RATES, 0.5e-3)) == (None, None, None)
    both = Work({"float32": 10**8}, 10**8)
    assert figures(floor_of(both, RATES, 0.5e-3)) == pytest.approx((0.1e-3, "compute", 5.0))
    assert figures(floor_of(both, RATES, 0.97e-3))[1] == "memory"  # noise
    # A peak that the phase beats is not the devices.
    assert figures(floor_of(Work({"float32": 10**9}, 0), RATES, 0.5e-3)) == (None, None, None)


def test_a_note_names_the_rate_of_a_beaten_floor() -> None:
    measured = RATES.model_copy(update={"bytes_per_s": 16.6e9, "bytes_source": MEASURED_COPY})
    work = {"optimizer": Work({}, 260_620_000), "forward": Work({"float32": 10**9}, 10**6)}
    (of_one,) = beaten_floors(work, measured, {"optimizer": 10.96e-3, "forward": 2e-3})
    took_s = {"optimizer": 1e-3, "clip": 5e-3, "forward": 0.5e-3}
    (of_all,) = beaten_floors({**work, "clip": Work({}, 10**9)}, RATES, took_s)
    assert_stored("analysis/notes: beaten floors", {"optimizer alone": of_one, "three phases": of_all})
