"""Is a rank slower, or was it chance?"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import t

from lm_profiler.analysis.ranks.excess import excesses, student


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 19, 199])
@pytest.mark.parametrize("tail", [0.025, 0.01, 1e-4, 1e-6])
def test_students_quantile_is_scipys(freedom: int, tail: float) -> None:
    assert student(tail, freedom) == pytest.approx(t.isf(tail, freedom), rel=2e-3)


def test_the_slower_rank_stands_first_and_is_certain() -> None:
    rng = np.random.default_rng(0)
    own_s = 0.02 * (1.0 + 0.02 * rng.standard_normal((4, 20, 3)))
    own_s[2, :, 1] += 0.01
    first, *rest = excesses(own_s)
    assert (first.group, first.part, first.certain) == (2, 1, True)
    assert first.seconds == pytest.approx(0.01, rel=0.05)
    assert not any(one.certain for one in rest)


def test_what_happened_once_is_not_certain() -> None:
    own_s = 0.02 * (1.0 + 0.02 * np.random.default_rng(0).standard_normal((2, 20, 2)))
    own_s[1, 7, 0] += 0.5
    assert not excesses(own_s)[0].certain


def test_steps_that_are_long_for_all_ranks_do_no_harm() -> None:
    rng = np.random.default_rng(0)
    own_s = rng.uniform(0.01, 0.1, (1, 20, 1)) * (1.0 + 0.01 * rng.standard_normal((2, 20, 1)))
    own_s[1] += 0.003
    assert excesses(own_s)[0].certain


@pytest.mark.parametrize("shape", [(1, 20, 3), (4, 1, 3)])
def test_of_one_rank_or_one_step_nothing_is_said(shape: tuple[int, ...]) -> None:
    assert excesses(np.ones(shape)) == []
