"""Steps after the measured ones that differ from the level are noted: known answers by simulation."""

import numpy as np
import pytest
from made_environment import made_step
from numpy.typing import NDArray

from lm_profiler.analysis.steps.level_check import level_check_note
from lm_profiler.analysis.steps.step_model import fit
from lm_profiler.record.steps import StepRow

MEASURED, LATER = 40, 3


def rows(times_s: NDArray[np.float64], first: int, stage: str) -> list[StepRow]:
    return [made_step(step, {"forward": seconds}, stage) for step, seconds in enumerate(times_s.tolist(), first)]


def level_notes(times_s: NDArray[np.float64]) -> list[str]:
    measured, later = times_s[:MEASURED], times_s[MEASURED:]
    return level_check_note(fit(measured), rows(measured, 6, "measure"), rows(later, 6 + MEASURED, "actions"))


def noisy_times(rng: np.random.Generator, spread: float, rho: float = 0.0) -> NDArray[np.float64]:
    logs = rng.standard_normal(MEASURED + LATER)
    for index in range(1, logs.size):
        logs[index] = rho * logs[index - 1] + np.sqrt(1 - rho**2) * logs[index]
    return np.asarray(0.5 * np.exp(spread * logs))


@pytest.mark.parametrize("spread, rho", [(0.02, 0.0), (0.05, 0.0), (0.05, 0.6)])
def test_steps_that_go_on_as_before_leave_no_note(spread: float, rho: float) -> None:
    rng = np.random.default_rng(1)
    assert sum(bool(level_notes(noisy_times(rng, spread, rho))) for _ in range(60)) <= 1


@pytest.mark.parametrize("factor, word", [(1.12, "slower"), (0.88, "faster")])
def test_later_steps_that_differ_are_noted_with_their_size(factor: float, word: str) -> None:
    rng = np.random.default_rng(2)
    found = 0
    for _ in range(40):
        times_s = noisy_times(rng, 0.02)
        times_s[MEASURED:] *= factor
        found += any(f"% {word}" in note for note in level_notes(times_s))
    assert found >= 38


def test_a_pattern_goes_on_after_the_measured_steps() -> None:
    """Every fourth step takes twice as long; two of the three later steps are such."""
    times_s = noisy_times(np.random.default_rng(3), 0.01)
    times_s[3::4] *= 2.0
    assert not level_notes(times_s)
    times_s[MEASURED:] *= 1.2
    assert level_notes(times_s)


def test_two_later_steps_are_too_few() -> None:
    times_s = noisy_times(np.random.default_rng(4), 0.01)
    times_s[MEASURED:] *= 1.5
    assert level_notes(times_s)
    assert not level_notes(times_s[:-1])


def test_the_cost_of_timing_actions_is_no_difference() -> None:
    """A thousand later steps of 2 ms: 0.2 ms more are ours, 1 ms more is not."""
    noise_logs = 0.01 * np.random.default_rng(5).standard_normal(MEASURED + 1000)
    times_s = np.asarray(0.002 * np.exp(noise_logs))
    times_s[MEASURED:] += 2e-4
    assert not level_notes(times_s)
    times_s[MEASURED:] += 8e-4
    assert level_notes(times_s)


def test_a_pause_of_the_process_is_no_difference() -> None:
    """Steps of 50 ms: the process pauses after the measured steps, and the later steps lie in that."""
    times_s = noisy_times(np.random.default_rng(6), 0.01) / 10.0
    times_s[MEASURED:] += 0.16
    assert not level_notes(times_s)
