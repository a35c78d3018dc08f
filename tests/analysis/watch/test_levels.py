"""Changes of level, drifts and levels that wander are found with where and how much; steady steps have none."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.signal import lfilter

from lm_profiler.analysis.watch.level_change import LevelChange
from lm_profiler.analysis.watch.levels import LevelFollower
from lm_profiler.record.parts import PARTS

SHARES = np.array([0.02, 0.01, 0.3, 0.01, 0.5, 0.01, 0.1, 0.05])
FORWARD = PARTS.index("forward")


@dataclass
class Followed:
    """The changes that were reported, and those that are left at the end."""

    reported: list[LevelChange]
    changes: list[LevelChange]


def step_rows(
    factor: NDArray[np.float64], forward_s: NDArray[np.float64] | float = 0.0, seed: int = 0
) -> NDArray[np.float64]:
    """Return rows of steps of 5 ms that vary by 2 %, times ``factor``, with more seconds in forward."""
    rng = np.random.default_rng(seed)
    step_s = 0.005 * factor * np.exp(0.02 * rng.standard_normal(len(factor)))
    parts_s = step_s[:, None] * SHARES
    parts_s[:, FORWARD] += forward_s
    return np.column_stack([parts_s, parts_s.sum(axis=1)])


def follow(seconds: NDArray[np.float64], steps_together: int = 317) -> Followed:
    follower = LevelFollower()
    reported: list[LevelChange] = []
    numbers = np.arange(1, len(seconds) + 1)
    for first in range(0, len(seconds), steps_together):
        chunk = slice(first, first + steps_together)
        follower.add(numbers[chunk], seconds[chunk])
        reported += [change for change in follower.take_changed() if change not in reported]
    follower.finish()
    reported += [change for change in follower.take_changed() if change not in reported]
    return Followed(reported, [change for change in reported if not change.is_withdrawn])


def noise(kind: str, steps: int, seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    drawn = rng.standard_t(3, steps) if kind == "heavy" else rng.standard_normal(steps)
    if kind == "correlated":
        drawn = np.asarray(lfilter([0.8], [1.0, -0.6], drawn))
    return np.asarray(np.exp(0.02 * drawn))


@pytest.mark.parametrize("by", [0.02, 0.05, 0.2, -0.02])
def test_a_change_is_reported_within_500_steps_with_its_size_and_phase(by: float) -> None:
    late = np.arange(6000) >= 3000
    (change,) = follow(step_rows(np.ones(6000), 0.005 * by * late), steps_together=20).changes
    assert change.found_step - 3000 <= 500
    assert change.since_step == pytest.approx(3001, abs=3)
    assert change.size_s == pytest.approx(0.005 * by, rel=0.1)
    assert change.part == "forward"


@pytest.mark.parametrize("steps_together", [20, 173, 499])
def test_a_change_does_not_depend_on_where_the_hand_over_falls(steps_together: int) -> None:
    late = np.arange(6000) >= 1499
    (change,) = follow(step_rows(np.ones(6000), 0.003 * late), steps_together).reported
    assert (change.since_step, change.part) == (1500, "forward")
    assert change.size_s == pytest.approx(0.003, rel=0.02)


def test_a_level_that_goes_back_is_one_event() -> None:
    number = np.arange(8000)
    (change,) = follow(step_rows(1.0 + 0.05 * ((number >= 3000) & (number < 4500)))).reported
    assert change.since_step == pytest.approx(3001, abs=5)
    assert change.until_step == pytest.approx(4500, abs=5)


def test_a_burst_does_not_hide_the_change_after_it() -> None:
    number = np.arange(6000)
    burst, change = follow(step_rows(1.0 + 0.9 * ((number >= 535) & (number < 600)) + 0.55 * (number >= 865))).changes
    assert (burst.since_step, burst.until_step) == (536, 600)
    assert (change.since_step, change.until_step) == (866, None)
    assert change.size_s == pytest.approx(0.55 * 0.005, rel=0.02)


@pytest.mark.parametrize("shape", ["line", "square", "stairs"])
def test_a_drift_is_one_event_with_its_size_at_the_end(shape: str) -> None:
    number = np.arange(12_000)
    by = {"line": number / 12_000, "square": (number / 12_000) ** 2, "stairs": np.floor(number / 400) / 29}[shape]
    (change,) = follow(step_rows(np.ones(12_000), 0.004 * by)).changes
    assert (change.course, change.part) == ("drift", "forward")
    assert change.size_s == pytest.approx(0.004, rel=0.1)


def test_a_few_stairs_are_reported_one_by_one() -> None:
    number = np.arange(4000)
    changes = follow(step_rows(np.ones(4000), 0.0007 * np.minimum(number // 600, 5))).changes
    assert [change.since_step for change in changes] == pytest.approx([601, 1201, 1801, 2401, 3001], abs=3)
    assert [change.size_s for change in changes] == pytest.approx([0.0007] * 5, rel=0.1)


@pytest.mark.parametrize("by, steps", [(0.05, 20_000), (0.10, 10_000)])
def test_a_slow_drift_is_reported_with_its_whole_size(by: float, steps: int) -> None:
    number = np.arange(2 * steps)
    (change,) = follow(step_rows(1.0 + by * np.minimum(number / steps, 1.0))).changes
    assert change.course == "drift"
    assert change.size_s == pytest.approx(by * 0.005, rel=0.1)


@pytest.mark.parametrize("memory_steps", [200, 1000, 4000])
def test_a_level_that_wanders_is_one_event(memory_steps: int) -> None:
    rng = np.random.default_rng(3)
    keeps = np.exp(-1.0 / memory_steps)
    level = lfilter([0.03 * np.sqrt(1.0 - keeps**2)], [1.0, -keeps], rng.standard_normal(100_000))
    (change,) = follow(step_rows(np.exp(level))).changes
    assert change.course == "wanders"
    assert change.times > 10


@pytest.mark.parametrize("seed", range(4))
def test_a_jump_between_two_levels_that_wander_stays_an_event(seed: int) -> None:
    """The loader takes three times as long since step 1,500; before and after, the machine wanders by a tenth."""
    rng = np.random.default_rng(seed)
    machine = np.repeat(rng.choice([1.0, 1.1], 12_000 // 600), 600)
    forward_s = np.where(np.arange(12_000) >= 1499, 0.01, 0.0)
    seconds = step_rows(machine, seed=seed)
    seconds[:, [FORWARD, -1]] += forward_s[:, None] * machine[:, None]
    (jump,) = [change for change in follow(seconds).changes if abs(change.size_s) > 0.005]
    assert jump.course is None
    assert jump.since_step == pytest.approx(1500, abs=3)
    assert jump.size_s == pytest.approx(0.01, rel=0.15)
    assert jump.until_step is None


@pytest.mark.parametrize("seed", range(4))
def test_an_episode_on_a_machine_that_wanders_is_an_event(seed: int) -> None:
    """Forward takes half a step more from step 3,001 to 4,500; all the time the machine wanders by 4 %."""
    rng = np.random.default_rng(seed)
    machine = np.repeat(rng.choice([0.98, 1.0, 1.02], 12_000 // 400), 400)
    number = np.arange(12_000)
    forward_s = 0.0025 * ((number >= 3000) & (number < 4500))
    seconds = step_rows(machine, forward_s * machine, seed=seed)
    changes = follow(seconds).changes
    (episode,) = [change for change in changes if abs(change.size_s) > 0.0015]
    assert (episode.part, episode.course) == ("forward", None)
    assert episode.since_step == pytest.approx(3001, abs=3)
    assert episode.until_step == pytest.approx(4500, abs=5)


@pytest.mark.parametrize("seed", range(4))
def test_a_change_after_which_the_level_wanders_stays_an_event(seed: int) -> None:
    """Texts get longer at step 4,401, and the machine computes at a speed that wanders from then on."""
    rng = np.random.default_rng(seed)
    forward_s = np.zeros(9000)
    forward_s[4400:] = np.repeat(rng.uniform(0.0003, 0.0012, 46), 100)
    changes = follow(step_rows(np.ones(9000), forward_s, seed=seed)).changes
    first = changes[0]
    assert first.since_step == pytest.approx(4401, abs=3)
    assert (first.course, first.part, first.until_step) == (None, "forward", None)
    assert 0.0002 < first.size_s < 0.0013


@pytest.mark.parametrize("seed", range(6))
def test_a_machine_whose_speed_moves_is_one_event(seed: int) -> None:
    """All phases are 2 to 5 % slower at times, each time for some hundred steps."""
    rng = np.random.default_rng(seed)
    machine = np.ones(12_000)
    for first in range(1500, 12_000, 3000):
        machine[first : first + int(rng.integers(400, 900))] = rng.uniform(1.02, 1.05)
    (change,) = follow(step_rows(machine, seed=seed)).changes
    assert change.course in ("wanders", "alternates")


def test_a_machine_that_gets_ever_slower_is_not_taken_for_one_that_wanders() -> None:
    """All phases get 4 % slower every 2,000 steps, and once a little faster in between."""
    machine = np.repeat([1.0, 1.04, 1.02, 1.08, 1.12, 1.17, 1.22], 2000)
    changes = follow(step_rows(machine)).changes
    lowest_s = min(float(change.before_s[-1]) for change in changes)
    last_s = float(changes[-1].after_s[-1])
    assert changes[-1].course != "wanders"
    assert last_s / lowest_s == pytest.approx(1.22, rel=0.03)


def test_a_drift_after_a_jump_is_no_part_of_it() -> None:
    steps = np.arange(12_000)
    forward_s = np.where(steps >= 1500, 0.01, 0.0) + 0.003 * np.clip((steps - 5000) / 4000, 0.0, 1.0)
    changes = follow(step_rows(np.ones(12_000), forward_s)).changes
    jump, drift = changes
    assert (jump.course, drift.course) == (None, "drift")
    assert jump.since_step == pytest.approx(1501, abs=3)
    assert drift.size_s == pytest.approx(0.003, rel=0.15)


def test_two_levels_that_alternate_by_chance_are_one_event() -> None:
    rng = np.random.default_rng(4)
    is_high = np.cumsum(rng.random(150_000) < 1 / 5000) % 2
    (change,) = follow(step_rows(1.0 + 0.3 * is_high)).changes
    assert change.course == "alternates"
    assert [change.before_s[-1], change.after_s[-1]] == pytest.approx([0.005, 0.0065], rel=0.01)


def bursts(steps: int, seed: int) -> NDArray[np.float64]:
    """Return factors of steps beside a neighbour on the machine: about every 3,000 steps 5 to 60 take longer."""
    rng = np.random.default_rng(seed)
    factors = np.ones(steps)
    begin = int(rng.exponential(3000))
    while begin < steps:
        factors[begin : begin + int(rng.integers(5, 60))] *= rng.uniform(1.05, 1.35)
        begin += int(rng.exponential(3000))
    return factors


def two_kinds(share: float, factor: float) -> NDArray[np.float64]:
    """Return factors of steps of which each is longer by chance, with a probability of ``share``."""
    is_long = np.random.default_rng(5).random(50_000) < share
    return np.asarray(np.where(is_long, factor, 1.0))


NO_CHANGE = {
    **{f"{kind} noise": noise(kind, 100_000, seed=7) for kind in ("independent", "correlated", "heavy")},
    **{f"bursts {seed}": noise("correlated", 40_000, seed) * bursts(40_000, seed) for seed in range(3)},
    **{
        f"two kinds, one {factor} as long": two_kinds(share, factor)
        for share, factor in ((0.1, 3), (0.2, 2), (0.4, 1.5))
    },
    "a warm-up": 1.0 + 0.5 * np.exp(-np.arange(3000) / 60),
}


@pytest.mark.parametrize("case", NO_CHANGE)
def test_noise_and_bursts_are_no_change(case: str) -> None:
    assert follow(step_rows(NO_CHANGE[case])).reported == []


@pytest.mark.parametrize("by, steps", [(0.05, 20_000), (0.10, 10_000), (1.3, 12_000)])
def test_a_drift_among_bursts_is_one_event_with_its_whole_size(by: float, steps: int) -> None:
    course = 1.0 + by * np.arange(steps) / steps
    (change,) = follow(step_rows(course * noise("correlated", steps, 8) * bursts(steps, seed=8), seed=8)).changes
    assert (change.course, change.part) == ("drift", None)  # all parts grow by the same ratio
    assert change.size_s == pytest.approx(by * 0.005, rel=0.1)


def test_a_burst_that_costs_much_is_one_event_with_its_end() -> None:
    number = np.arange(8000)
    late_s = 0.012 * ((number >= 5000) & (number < 5100))  # 1.2 s, where the run took 25 s
    (change,) = follow(step_rows(np.ones(8000), late_s)).changes
    assert (change.since_step, change.until_step, change.part) == (5001, 5100, "forward")


@pytest.mark.parametrize("last_late_step, until_step", [(176, 176), (345, None)])
def test_a_large_change_is_reported_within_the_first_400_steps(last_late_step: int, until_step: int | None) -> None:
    number = np.arange(1, 346)
    late_s = 0.006 * ((number >= 137) & (number <= last_late_step))
    (change,) = follow(step_rows(np.ones(345), late_s), steps_together=60).changes
    assert (change.since_step, change.until_step, change.part) == (137, until_step, "forward")
    assert change.size_s == pytest.approx(0.006, rel=0.1)


def test_a_small_change_within_the_first_400_steps_is_reported_after_them() -> None:
    late_s = 0.0002 * (np.arange(2000) >= 300)
    (change,) = follow(step_rows(np.ones(2000), late_s)).changes
    assert change.found_step > 400
    assert change.since_step == pytest.approx(301, abs=5)
