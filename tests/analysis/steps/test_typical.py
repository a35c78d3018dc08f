"""Odd steps are named, and left out of shares only while they are rare."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulation import independent, spiky
from lm_profiler.analysis.steps.typical import agree, odd_steps, resamples, typical
from lm_profiler.record.quantities import TIMED
from lm_profiler.record.steps import StepRow

LEVEL = [1.0, 1.02, 0.98, 1.01, 0.99] * 8


def typical_steps(step_s: list[float]) -> list[int]:
    """Which of steps that took ``step_s`` are typical."""
    rows = [StepRow(at, "measure", (taken,) * len(TIMED), ()) for at, taken in enumerate(step_s)]
    return [row.step for row in typical(rows)]


def with_odd(count: int) -> list[float]:
    steps = list(LEVEL)
    for n in range(count):
        steps[5 * n + 2] = 3.0 + n
    return steps


def test_odd_steps_come_the_farthest_first() -> None:
    assert odd_steps(with_odd(3)) == [12, 7, 2]
    assert odd_steps([*LEVEL, 0.1]) == [40]


@pytest.mark.parametrize("count, left_out", [(0, 0), (1, 1), (2, 2), (3, 0), (8, 0)])
def test_only_rare_ones_are_left_out(count: int, left_out: int) -> None:
    """One in twenty of forty is two."""
    kept = typical_steps(with_odd(count))
    assert len(kept) == 40 - left_out
    assert left_out == 0 or not set(kept) & set(odd_steps(with_odd(count)))


@pytest.mark.parametrize("steps", [[], [1.0], [1.0, 9.0], [1.0, 1.0, 9.0], [0.0] * 9 + [1.0]])
def test_too_few_steps_and_a_clock_that_stands_still_have_none(steps: list[float]) -> None:
    assert odd_steps(steps) == []
    assert typical_steps(steps) == list(range(len(steps)))


def test_a_deviation_too_small_to_move_a_share_is_none() -> None:
    assert odd_steps([1.0] * 20 + [1.09]) == []
    assert odd_steps([1.0] * 20 + [1.11]) == [20]


def test_noise_is_hardly_ever_odd_and_spikes_are() -> None:
    rng = np.random.default_rng(3)
    assert np.mean([len(odd_steps(independent(rng, 30).times_s)) for _ in range(200)]) < 0.01
    found = [len(odd_steps(spiky(rng, 100).times_s)) for _ in range(200)]
    assert np.mean(found) == pytest.approx(5.0, abs=0.5)


def test_resamples_are_the_same_each_time() -> None:
    first, again = list(resamples(7)), list(resamples(7))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert {len(drawn) for drawn in first} == {7}
    assert set(np.concatenate(first)) == set(range(7))


def test_nineteen_in_twenty_agree() -> None:
    assert agree(["a"] * 19 + ["b"], "a")
    assert not agree(["a"] * 18 + ["b"] * 2, "a")
    assert not agree([], "a")
