"""A change of level of two percent is told within 500 steps; steady steps, however correlated, tell nothing."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.signal import lfilter

from lm_profiler.analysis.watch.level_changes import LevelChanges, confirmed
from lm_profiler.record.parts import TIMED


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
