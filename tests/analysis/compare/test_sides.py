"""What is compared is what the run took: levels, a pattern, odd steps and changes add up to it."""

import numpy as np
import pytest
from benchmarks.simulation import HELD_OUT, jump, level
from compared import entry_of_steps

from lm_profiler.analysis.compare.comparison import compare
from lm_profiler.analysis.compare.sides import read_side
from lm_profiler.analysis.steps.step_model import fit, steadiness


def test_a_slowdown_late_in_the_run_is_slower() -> None:
    rng = np.random.default_rng(0)
    a = level(rng, 40).times_s
    b = level(rng, 40).times_s * np.where(np.arange(40) >= 24, 1.84, 1.0)
    found = compare([entry_of_steps("a", a)], [entry_of_steps("b", b, steadiness=steadiness(fit(b)))])
    assert found.verdict == "SLOWER"
    assert found.step.b_s == pytest.approx(float(b.mean()))
    [note] = [note for note in found.notes if "slowing" in note]
    assert "from step 25 on" in note
    # Twice the time from 60 percent on is slower and never faster.
    rng = np.random.default_rng(60)
    words = []
    for _ in range(20):
        a, b = level(rng, 40, 0.05).times_s, jump(rng, 40, 0.6, 1.0, 0.05).times_s
        words.append(compare([entry_of_steps("a", a)], [entry_of_steps("b", b)]).verdict)
    assert words.count("SLOWER") >= 19
    assert "FASTER" not in words


@pytest.mark.parametrize("kind", ["slow for a quarter", "stairs", "faster from 60 % on", "saw-tooth of seven"])
def test_the_mean_of_all_steps_after_the_warm_up_is_compared(kind: str) -> None:
    whole_periods = 63  # by which a pattern's steps are weighed
    times = HELD_OUT[kind](np.random.default_rng(4), whole_periods).times_s
    [run] = read_side("A", [entry_of_steps("a", times)]).runs
    assert run.mean("step").mean == pytest.approx(float(times[run.model.cut :].mean()))


@pytest.mark.parametrize("kind", ["two levels at random", "bursts of others", "stairs"])
def test_equal_runs_with_changing_levels_are_seldom_called_different(kind: str) -> None:
    rng = np.random.default_rng(39)
    words = []
    for _ in range(30):
        sides = [[entry_of_steps(name, HELD_OUT[kind](rng, 40).times_s)] for name in "ab"]
        words.append(compare(*sides).verdict)
    assert sum(word in ("FASTER", "SLOWER") for word in words) <= 2
