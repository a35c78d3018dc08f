"""Is a rank slower, or was it chance? By simulation, with a fixed seed."""

from typing import Any

import numpy as np
import pytest

from lm_profiler.analysis.ranks.slowness import fast_ranks, slow_ranks

STEP_S = 0.06
PARTS_S = np.array([0.005, 0.02, 0.03, 0.005])


def simulated_own_work(rng: Any, ranks: int, steps: int, phi: float = 0.0, noise: float = 0.02) -> Any:
    """[rank, step, part], with AR(1) noise."""
    drawn = rng.standard_normal((ranks, steps, PARTS_S.size))
    for step in range(1, steps):
        drawn[:, step] = phi * drawn[:, step - 1] + np.sqrt(1.0 - phi**2) * drawn[:, step]
    return PARTS_S * np.maximum(1.0 + noise * drawn, 0.05)


@pytest.mark.parametrize("ranks, steps", [(2, 5), (2, 20), (4, 10), (8, 20)])
def test_equal_ranks_with_autocorrelated_steps(ranks: int, steps: int) -> None:
    """AR(1) of 0.6: certain in 5 of 100 at most, of all ranks and parts together."""
    rng = np.random.default_rng(5)
    wrong = 0
    for _ in range(60):
        slow = slow_ranks(simulated_own_work(rng, ranks, steps, phi=0.6), STEP_S)
        wrong += any(excess.is_certain for excess in slow)
    assert wrong <= 3


STRETCHES = {
    "always": slice(None),
    "second half": slice(10, None),
    "first half": slice(10),
    "last quarter": slice(15, None),
    "every fifth": slice(None, None, 5),
}
SLOWER_S = {"always": 0.012, "second half": 0.006, "first half": 0.006, "last quarter": 0.003, "every fifth": 0.012}
"""In the mean step."""


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("where", list(STRETCHES))
def test_a_rank_that_is_slower_in_some_steps(where: str, ranks: int) -> None:
    """In 20 of 20 runs it is certain, and nothing else is."""
    rng = np.random.default_rng(7)
    for _ in range(20):
        own_s = simulated_own_work(rng, ranks, 20)
        own_s[1, STRETCHES[where], 1] += STEP_S / (1 if "every" in where else 5)
        found = [excess for excess in slow_ranks(own_s, STEP_S) if excess.is_certain]
        assert [(excess.rank, excess.part) for excess in found] == [(1, 1)]
        assert found[0].seconds == pytest.approx(SLOWER_S[where], rel=0.1)
        if where.endswith(("half", "always")):
            assert (found[0].begin, found[0].end) == STRETCHES[where].indices(20)[:2]


def test_the_interval_holds_the_excess() -> None:
    rng, held = np.random.default_rng(3), 0
    for _ in range(60):
        own_s = simulated_own_work(rng, 3, 20, phi=0.4, noise=0.05)
        own_s[2, :, 1] += 0.01
        (slow,) = (excess for excess in slow_ranks(own_s, STEP_S) if (excess.rank, excess.part) == (2, 1))
        held += abs(slow.seconds - 0.01) <= slow.half_interval_s
    assert held >= 54  # 95 % of 60 are 57


def test_a_single_delay_is_not_certain() -> None:
    own_s = simulated_own_work(np.random.default_rng(0), 2, 20)
    own_s[1, 7, 0] += 0.5
    assert not slow_ranks(own_s, STEP_S)[0].is_certain


def test_what_all_ranks_have_in_a_step_hides_no_slow_one() -> None:
    """Steps of 10 to 100 ms, in which rank 1 always takes 3 ms longer."""
    rng = np.random.default_rng(0)
    own_s = rng.uniform(0.01, 0.1, (1, 20, 1)) * (1.0 + 0.01 * rng.standard_normal((2, 20, 1)))
    own_s[1] += 0.003
    assert slow_ranks(own_s, STEP_S)[0].is_certain


@pytest.mark.parametrize(
    "means_ms, fast",
    [
        ([45, 5, 46, 44], (1,)),  # even where the fewer are fast
        ([5, 45, 6], (0, 2)),
        ([10, 20, 30, 40], (0, 1, 2, 3)),  # no gap is clear, so nobody is set apart
        ([10, 10, 10], (0, 1, 2)),
    ],
)
def test_a_clear_gap_divides_fast_ranks_from_slow_ones(means_ms: list[float], fast: tuple[int, ...]) -> None:
    assert fast_ranks(np.array(means_ms) * 1e-3) == fast


@pytest.mark.parametrize("shape", [(1, 20, 3), (4, 2, 3)])
def test_one_rank_or_two_steps_have_no_slowness(shape: tuple[int, ...]) -> None:
    assert slow_ranks(np.ones(shape), STEP_S) == []


def simulated_validations(rng: Any, ranks: int, steps: int, every: int) -> Any:
    """[rank, step, part]: equal ranks, whose last part is 20 ms of validation each ``every`` steps, else 0.1 ms."""
    own_s = simulated_own_work(rng, ranks, steps)
    own_s[:, :, 3] = 1e-4
    own_s[:, every - 1 :: every, 3] = 0.02 * (1.0 + 0.05 * rng.standard_normal((ranks, steps // every)))
    return own_s


def test_a_longer_validation_on_one_rank_is_certain() -> None:
    """In each fifth step by 60 ms: 12 ms of the mean step."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        own_s = simulated_validations(rng, ranks=2, steps=25, every=5)
        own_s[1, 4::5, 3] += 0.06
        (slow,) = [slow for slow in slow_ranks(own_s, STEP_S) if slow.is_certain]
        assert (slow.rank, slow.part) == (1, 3)
        assert slow.seconds == pytest.approx(0.06 / 5, rel=0.1)


def test_equal_validations_are_seldom_certain() -> None:
    rng = np.random.default_rng(4)
    wrong = 0
    for _ in range(100):
        slow = slow_ranks(simulated_validations(rng, ranks=2, steps=25, every=5), STEP_S)
        wrong += any(rank.is_certain for rank in slow)
    assert wrong <= 3


def test_a_shorter_validation_does_not_hide_that_a_rank_is_slow() -> None:
    """Each step takes 4 ms longer, and each fifth 5 ms less: 3 ms of the mean step."""
    own_s = simulated_validations(np.random.default_rng(6), ranks=2, steps=25, every=5)
    own_s[1, :, 3] += 0.004
    own_s[1, 4::5, 3] -= 0.005
    (slow,) = [slow for slow in slow_ranks(own_s, STEP_S) if slow.is_certain]
    assert (slow.rank, slow.part) == (1, 3)
    assert slow.seconds == pytest.approx(0.004 - 0.005 / 5, rel=0.1)
