"""Changes of level, slow steps and leaks are seen; steady steps, however correlated, and what fills up are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.signal import lfilter

from lm_profiler.analysis.watch.detectors import LevelChanges, MemorySlope, SlowSteps, confirmed
from lm_profiler.record.parts import TIMED

GIB = 2.0**30


def noise(kind: str, n: int, seed: int, scale: float) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    drawn = scale * (rng.standard_t(3, n) if kind == "heavy" else rng.standard_normal(n))
    return np.asarray(lfilter([0.8], [1.0, -0.6], drawn) if kind == "correlated" else drawn)


@pytest.mark.parametrize("kind", ["independent", "correlated", "heavy"])
def test_steady_steps_are_never_suspected(kind: str) -> None:
    step_s = 0.1 * np.exp(noise(kind, 200_000, 0, 0.02))
    levels = LevelChanges()
    assert [levels.add(some) for some in np.split(step_s, 200)] == [None] * 200


@pytest.mark.parametrize("kind", ["independent", "correlated", "heavy"])
@pytest.mark.parametrize("factor", [1.02, 0.98, 1.2])
def test_a_change_is_told_within_500_steps(kind: str, factor: float) -> None:
    at, n = 3_000, 3_500
    step_s = 0.1 * np.exp(noise(kind, n, 1, 0.01))
    step_s[at:] *= factor
    levels = LevelChanges()
    for end in range(20, n + 1, 20):
        if (ago := levels.add(step_s[end - 20 : end])) is not None:
            seconds = np.repeat(step_s[end - ago - 1000 : end, None], len(TIMED), axis=1)
            change = confirmed(end - ago - 1000, seconds, ago)
            if change is not None:
                break
            levels.doubt()
    assert change is not None
    assert abs(change.step - at) <= 100
    assert change.after_s[-1] / change.before_s[-1] == pytest.approx(factor, abs=0.01)


def first(held: Callable[[float], float], seconds: int = 20_000) -> float | None:
    slope, rng = MemorySlope(), np.random.default_rng(0)
    values = (slope.add(at, held(at) * (1.0 + 0.002 * rng.random())) for at in range(seconds))
    return next((each for each in values if each is not None), None)


def test_a_leak_is_told_with_its_size() -> None:
    assert first(lambda at: 2 * GIB + 2**20 * at) == pytest.approx(2**20, rel=0.1)


def test_what_is_no_leak_is_not_told() -> None:
    assert first(lambda at: 2 * GIB) is None
    assert first(lambda at: 2 * GIB * (2.0 - np.exp(-at / 100.0))) is None
    assert first(lambda at: (2 if at < 3000 else 3) * GIB) is None


def told(step_s: np.ndarray) -> list[int]:
    slow = SlowSteps()
    return [at for some in np.split(step_s, len(step_s) // 100) for at in slow.add(some)]


def test_each_planted_step_is_told_and_no_other() -> None:
    step_s = 0.1 * np.exp(0.02 * np.random.default_rng(0).standard_normal(10_000))
    planted = list(range(2_000, 9_500, 777))
    step_s[planted] *= 1.6
    assert told(step_s) == planted


def test_a_heavy_tail_alone_is_no_event() -> None:
    assert told(0.1 * np.exp(0.02 * np.random.default_rng(3).standard_t(3, 200_000))) == []


def test_a_new_level_is_not_many_slow_steps() -> None:
    step_s = 0.1 * np.exp(0.01 * np.random.default_rng(0).standard_normal(8_000))
    step_s[5_003:] *= 2.0
    assert told(step_s) == []


def test_an_enormous_step_is_told_early() -> None:
    step_s = np.full(500, 0.1)
    step_s[300] = 3.0
    assert told(step_s) == [300]
