"""Memory that grows is reported within the hour, whenever it begins; caches that fill up and jumps are not."""

from collections.abc import Callable

import numpy as np
import pytest

from lm_profiler.analysis.watch.memory_growth import MemoryGrowth, MemoryWatch

GIB = 2.0**30
HOUR_S = 3600.0


def growth_of(held: Callable[[float], float], hours: float, every_s: float = 10.0) -> list[tuple[float, MemoryGrowth]]:
    """Return each reported growth with the hours after which it was reported, for readings every ``every_s``."""
    memory = MemoryWatch()
    rng = np.random.default_rng(0)
    reported = []
    for at_s in np.arange(0.0, hours * HOUR_S, every_s).tolist():
        growth = memory.add(at_s, held(at_s) * (1.0 + 0.002 * rng.random()), round(at_s))
        if growth is not None:
            reported.append((at_s / HOUR_S, growth))
    return reported


@pytest.mark.parametrize("begins_h", [0, 1, 8, 24])
def test_a_leak_is_reported_within_an_hour_with_its_size(begins_h: int) -> None:
    reported = growth_of(lambda at_s: 2 * GIB + GIB * max(at_s / HOUR_S - begins_h, 0.0), hours=begins_h + 2)
    at_h, growth = reported[0]
    assert at_h - begins_h < 1.0
    assert growth.bytes_per_s * HOUR_S == pytest.approx(GIB, rel=0.1)


def test_a_steep_leak_is_reported_within_a_minute() -> None:
    at_h, growth = growth_of(lambda at_s: 0.6 * GIB + 33 * GIB * at_s / HOUR_S, hours=0.02, every_s=1.0)[0]
    assert at_h * HOUR_S < 60.0
    assert growth.bytes_per_s * HOUR_S == pytest.approx(33 * GIB, rel=0.05)


def test_a_leak_that_doubles_the_memory_is_reported_within_half_a_minute() -> None:
    at_h, growth = growth_of(lambda at_s: 0.5 * GIB * (1.0 + at_s / 15.0), hours=0.01, every_s=1.0)[0]
    assert at_h * HOUR_S < 25.0
    assert growth.bytes_per_s == pytest.approx(0.5 * GIB / 15.0, rel=0.05)


@pytest.mark.parametrize("mib_per_s, within_s", [(20.0, 16.0), (12.0, 22.0), (7.0, 31.0)])
def test_a_leak_in_a_run_of_seconds_is_reported(mib_per_s: float, within_s: float) -> None:
    leak = mib_per_s * 2.0**20
    at_h, growth = growth_of(lambda at_s: 0.45 * GIB + leak * at_s, hours=0.01, every_s=1.0)[0]
    assert at_h * HOUR_S <= within_s
    assert growth.bytes_per_s == pytest.approx(leak, rel=0.1)


@pytest.mark.parametrize("tenfold_s", [3.0, 20.0])
def test_memory_that_grows_with_the_logarithm_of_time_is_not_reported(tenfold_s: float) -> None:
    assert growth_of(lambda at_s: GIB * (0.5 + 0.1 * np.log1p(at_s / tenfold_s)), hours=1, every_s=1.0) == []


@pytest.mark.parametrize("every_s", [1.0, 10.0])
@pytest.mark.parametrize("fills_s", [3.0, 10.0, 30.0, 100.0, 300.0, 600.0, 3600.0])
def test_a_cache_that_fills_up_is_not_reported(fills_s: float, every_s: float) -> None:
    assert growth_of(lambda at_s: 2 * GIB * (2.0 - np.exp(-at_s / fills_s)), hours=6, every_s=every_s) == []


def test_steady_memory_and_a_jump_are_not_reported() -> None:
    assert growth_of(lambda _: 2 * GIB, hours=6) == []
    assert growth_of(lambda at_s: (2 if at_s < 3000 else 3) * GIB, hours=6) == []


def test_memory_that_rises_in_each_epoch_and_falls_again_is_reported_once() -> None:
    reported = growth_of(lambda at_s: (1.0 + 0.8 * (at_s % 60.0) / 60.0) * GIB, hours=1, every_s=1.0)
    assert len({id(growth) for _, growth in reported}) <= 1
    assert len(reported) <= 2


def test_growth_that_ends_is_reported_as_ended() -> None:
    reported = growth_of(lambda at_s: 2 * GIB + 2 * GIB * min(at_s / HOUR_S, 1.0), hours=4)
    growth = reported[-1][1]
    assert growth.until_step is not None
    assert growth.grew_bytes == pytest.approx(2 * GIB, rel=0.05)
