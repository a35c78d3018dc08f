"""Memory that grows is reported, in seconds if it grows fast; caches that fill up and jumps are not."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest

from lm_profiler.analysis.watch.memory_growth import MemoryGrowth, MemoryWatch

MIB = 2.0**20
GIB = 2.0**30
HOUR_S = 3600.0

Held = Callable[[float], float]


class Report(NamedTuple):
    at_s: float  # when it was reported
    growth: MemoryGrowth


def reports_of(held: Held, seconds: float, every_s: float = 10.0, seed: int = 0) -> list[Report]:
    """Return all reports of growth, for readings every ``every_s``. The steps take a tenth of a second."""
    memory = MemoryWatch()
    rng = np.random.default_rng(seed)
    reports = []
    for at_s in np.arange(0.0, seconds, every_s).tolist():
        growth = memory.add(at_s, held(at_s) * (1.0 + 0.002 * rng.random()), round(10 * at_s))
        if growth is not None:
            reports.append(Report(at_s, growth))
    return reports


def standing(reports: Sequence[Report]) -> list[Report]:
    """Return the first report of each growth that is not withdrawn at the end."""
    first_reports: dict[int, Report] = {}
    for report in reports:
        if not report.growth.is_withdrawn:
            first_reports.setdefault(id(report.growth), report)
    return [*first_reports.values()]


@pytest.mark.parametrize("begins_h", [0, 1, 8, 24])
def test_a_leak_is_reported_within_an_hour_with_its_size(begins_h: int) -> None:
    reports = reports_of(lambda at_s: 2 * GIB + GIB * max(at_s / HOUR_S - begins_h, 0.0), (begins_h + 2) * HOUR_S)
    ((at_s, growth),) = standing(reports)
    assert at_s / HOUR_S - begins_h < 1.0
    assert growth.bytes_per_s * HOUR_S == pytest.approx(GIB, rel=0.1)


def with_checkpoints(at_s: float) -> float:
    """Return 200 MiB for the two seconds after each tenth second."""
    return 200 * MIB if at_s % 10.0 < 2.0 else 0.0


def with_a_jump(at_s: float) -> float:
    return 200 * MIB if at_s >= 17.0 else 0.0


def with_a_short_sawtooth(at_s: float) -> float:
    """Return up to 40 MiB, which a garbage collection gives back every three seconds."""
    return 40 * MIB * (at_s % 3.0) / 3.0


@pytest.mark.parametrize(
    "mib_per_s, others, within_s",
    [
        (33 * 1024 / HOUR_S, None, 25.0),
        (20.0, None, 16.0),
        (12.0, None, 16.0),
        (7.0, None, 16.0),
        (97 / 22, None, 18.0),
        (5.0, None, 18.0),
        (5.0, with_checkpoints, 24.0),
        (5.0, with_a_jump, 18.0),
        (8.0, with_a_short_sawtooth, 46.0),
    ],
)
@pytest.mark.parametrize("begin_s", [0.0, 8.0, 60.0])
def test_a_leak_in_a_run_of_seconds_is_reported(
    mib_per_s: float, others: Held | None, within_s: float, begin_s: float
) -> None:
    leak = mib_per_s * MIB

    def held(at_s: float) -> float:
        other_bytes = 0.0 if others is None else others(at_s)
        return 600 * MIB + leak * max(at_s - begin_s, 0.0) + other_bytes

    end_s = begin_s + within_s + 8.0
    ((at_s, growth),) = standing(reports_of(held, end_s, every_s=1.0))
    assert at_s - begin_s <= within_s
    assert growth.bytes_per_s == pytest.approx(leak, rel=0.1)
    assert growth.since_step / 10 == pytest.approx(begin_s, abs=within_s - 10.0)
    assert growth.until_step is None


def cache(seconds: float, grows_by: float) -> Held:
    """Return memory that a cache fills at a constant rate within ``seconds``."""
    return lambda at_s: 600 * MIB + grows_by * min(at_s / seconds, 1.0)


def slowing_cache(fills_s: float) -> Held:
    return lambda at_s: 2 * GIB * (2.0 - np.exp(-at_s / fills_s))


@pytest.mark.parametrize("seconds", [5.0, 15.0, 60.0, 200.0])
@pytest.mark.parametrize("mib", [60.0, 300.0, 1200.0])
def test_no_growth_stands_once_a_cache_is_full(seconds: float, mib: float) -> None:
    assert standing(reports_of(cache(seconds, mib * MIB), 3.0 * seconds + 30.0, every_s=1.0)) == []


@pytest.mark.parametrize("every_s", [1.0, 10.0])
@pytest.mark.parametrize("fills_s", [3.0, 10.0, 30.0, 100.0])
def test_no_growth_stands_once_a_cache_has_slowed_down(fills_s: float, every_s: float) -> None:
    assert standing(reports_of(slowing_cache(fills_s), HOUR_S, every_s)) == []


@pytest.mark.parametrize("tenfold_s", [3.0, 20.0])
def test_memory_that_grows_with_the_logarithm_of_time_is_not_reported(tenfold_s: float) -> None:
    assert standing(reports_of(lambda at_s: GIB * (0.5 + 0.1 * np.log1p(at_s / tenfold_s)), HOUR_S, 1.0)) == []


@pytest.mark.parametrize("every_s", [1.0, 10.0])
def test_steady_memory_and_a_jump_are_not_reported(every_s: float) -> None:
    assert reports_of(lambda _: 2 * GIB, 6 * HOUR_S, every_s) == []
    assert reports_of(lambda at_s: (2 if at_s < 3000 else 3) * GIB, 2 * HOUR_S, every_s) == []
    assert reports_of(lambda at_s: 600 * MIB + with_checkpoints(at_s), HOUR_S, every_s) == []


@pytest.mark.parametrize("epoch_s", [5.0, 20.0, 60.0, 300.0])
def test_memory_that_rises_in_each_epoch_and_falls_again_is_withdrawn(epoch_s: float) -> None:
    reports = reports_of(lambda at_s: (1.0 + 0.8 * (at_s % epoch_s) / epoch_s) * GIB, HOUR_S, every_s=1.0)
    assert standing(reports) == []
    assert len({id(growth) for _, growth in reports}) <= 2


def test_growth_that_ends_after_many_minutes_is_reported_as_ended() -> None:
    reports = reports_of(lambda at_s: 2 * GIB + 2 * GIB * min(at_s / HOUR_S, 1.0), 4 * HOUR_S)
    growth = reports[-1].growth
    assert growth.until_step == pytest.approx(10 * HOUR_S, rel=0.1)
    assert growth.grew_bytes == pytest.approx(2 * GIB, rel=0.05)


def test_growth_that_becomes_faster_is_reported_again() -> None:
    def held(at_s: float) -> float:
        return GIB + 10 * MIB * at_s + 40 * MIB * max(at_s - 60.0, 0.0)

    growth = reports_of(held, 120.0, every_s=1.0)[-1].growth
    assert growth.bytes_per_s == pytest.approx(50 * MIB, rel=0.1)
    assert growth.since_step == pytest.approx(0, abs=30)


def test_a_leak_of_each_step_is_found_while_the_machine_gets_slower() -> None:
    """From step 400 on each step keeps 0.4 MiB; every second a step takes 5 % longer than in the second before."""
    watch = MemoryWatch()
    steps = 0
    found = None
    for second in range(60):
        steps += round(200 / 1.05**second)
        held_mib = 600.0 + 0.4 * max(steps - 400, 0)
        found = found or watch.add(float(second), round(held_mib * 2**20), steps)
    assert found is not None
    assert found.since_step == pytest.approx(400, abs=100)
