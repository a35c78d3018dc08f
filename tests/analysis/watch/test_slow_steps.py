"""A step that is slow beyond the tail is told; steady steps are not, nor is a new level."""

from __future__ import annotations

import numpy as np

from lm_profiler.analysis.watch.slow_steps import SlowSteps


def told(step_s: np.ndarray) -> list[int]:
    slow = SlowSteps()
    return [at for some in np.split(step_s, len(step_s) // 100) for at, _ in slow.add(some)]


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
