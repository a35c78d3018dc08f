"""Waiting for a CPU, which other programs cause in single parts of steps, is removed from the parts that waited."""

import numpy as np
import pytest
from numpy.typing import NDArray

from lm_profiler.analysis.watch.cpu_waits import CpuWaits
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run_record import StepCounters

STEPS = 1_000
OWN_S = np.array([0.0005, 0.0001, 0.0012, 0.0001, 0.0016, 0.0001, 0.0005, 0.0003])
DATA = PARTS.index("data")
STEPS_PER_READING = 3

Seconds = NDArray[np.float64]


def own_steps(rng: np.random.Generator) -> Seconds:
    """Return (steps, parts) of which data takes 1 ms longer from step 501 on."""
    parts_s = OWN_S * np.exp(0.02 * rng.standard_normal((STEPS, len(OWN_S))))
    parts_s[500:, DATA] += 0.001
    return parts_s


def waits(rng: np.random.Generator, share_of_steps: float) -> Seconds:
    """Return (steps, parts) slices of 4 ms that other programs take, in a part by its length."""
    parts = rng.choice(len(OWN_S), size=STEPS, p=OWN_S / OWN_S.sum())
    waited_s = np.zeros((STEPS, len(OWN_S)))
    waited_s[np.arange(STEPS), parts] = np.where(rng.random(STEPS) < share_of_steps, 0.004, 0.0)
    return waited_s


def without_waits(own_s: Seconds, waited_s: Seconds) -> Seconds:
    """Return the parts without waiting, from calls of 70 steps with readings of three steps each."""
    parts_s = own_s + waited_s
    seconds = np.column_stack([parts_s, parts_s.sum(axis=1)])
    numbers = np.arange(1, STEPS + 1)
    remover, parts = CpuWaits(), []
    for begin in range(0, STEPS, 70):
        steps = numbers[begin : begin + 70]
        read_after = steps[steps % STEPS_PER_READING == 0]
        counters = [
            StepCounters(step=step, cpu_wait_s=waited_s[step - STEPS_PER_READING : step].sum()) for step in read_after
        ]
        parts.append(remover.remove(steps, seconds[begin : begin + 70], counters))
    return np.concatenate(parts)


@pytest.mark.parametrize("share_of_steps", [0.1, 0.5, 0.9])
def test_what_waited_is_removed_where_it_waited(share_of_steps: float) -> None:
    rng = np.random.default_rng(5)
    own_s = own_steps(rng)
    left_s = without_waits(own_s, waits(rng, share_of_steps))
    for steps in (slice(100, 500), slice(600, STEPS - 100)):
        expected_s = own_s[steps].mean(axis=0)
        assert left_s[steps, :-1].mean(axis=0) == pytest.approx(expected_s, rel=0.05, abs=3e-5)
        assert left_s[steps, -1].mean() == pytest.approx(expected_s.sum(), rel=0.03)


def test_steps_that_did_not_wait_stay_as_they_are() -> None:
    own_s = own_steps(np.random.default_rng(6))
    assert without_waits(own_s, np.zeros_like(own_s))[:, :-1] == pytest.approx(own_s)


def test_counters_without_waiting_change_nothing() -> None:
    """Not every operating system counts it."""
    seconds = np.full((10, len(PARTS) + 1), 0.001)
    seconds[:, -1] = seconds[:, :-1].sum(axis=1)
    left_s = CpuWaits().remove(np.arange(1, 11), seconds, [StepCounters(step=5), StepCounters(step=10)])
    assert left_s == pytest.approx(seconds)
