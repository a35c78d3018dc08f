"""The detector cuts every known warm-up, names real slowdowns, and does not cry wolf."""

import numpy as np
import pytest
from scipy import stats

from benchmarks import simulation as sim
from lm_profiler.analysis.steps.rank_tests import change_point, lag1_autocorrelation, prefix_differs, ranks
from lm_profiler.analysis.steps.statistics import relative_half_width
from lm_profiler.analysis.steps.steadiness import known_to, mser_cut, steadiness, steady_from

SERIES = 300


def series(kind, n, count=SERIES, seed=1):
    rng = np.random.default_rng(seed)
    return [kind(rng, n) for _ in range(count)]


def share(kind, n, word):
    """Of the runs that are said to be `word`, first or beside `noisy`."""
    judged = (steadiness(run.times_s) for run in series(kind, n))
    return np.mean([word in (found.word, found.also) for found in judged])


def test_mser_is_its_definition():
    for run in series(sim.exponential, 41, count=20) + series(sim.independent, 30, count=20):
        x = run.times_s
        n = len(x)
        by_hand = [np.var(x[d:]) / (n - d) for d in range(n // 2 + 1)]
        assert mser_cut(x) == int(np.argmin(by_hand))


def test_mser_of_a_worked_example():
    assert mser_cut([9.0, 9.0, 1.0, 1.0, 1.0, 1.0]) == 2
    assert mser_cut([1.0, 1.0, 1.0, 1.0]) == 0
    assert mser_cut([5.0]) == mser_cut([]) == 0


def test_ranks_are_scipys():
    x = np.array([3.0, 1.0, 3.0, 2.0, 2.0, 2.0])
    assert ranks(x).tolist() == stats.rankdata(x).tolist()


def test_rank_test_is_mann_whitneys_where_steps_are_independent():
    rng = np.random.default_rng(2)
    for shift in (0.0, 0.5, 1.0, 2.0):
        before, after = rng.permutation(10.0 + rng.random(12)) + shift, 10.0 + rng.random(30)
        theirs = stats.mannwhitneyu(before, after, method="asymptotic", use_continuity=False).pvalue
        if not 0.0005 < theirs < 0.1:  # close to the threshold the allowance for autocorrelation may decide
            assert prefix_differs(before, after, 0.0) == (theirs <= 0.01)


def test_change_point_is_found_where_it_is():
    x = np.r_[np.full(20, 1.0), np.full(20, 1.2)] + 0.01 * np.random.default_rng(3).standard_normal(40)
    found = change_point(x, 0.01)
    assert found.at == 20
    assert found.change == pytest.approx(0.2, abs=0.02)
    assert change_point(x, 0.5) is None
    assert change_point(x[:20], 0.01) is None


def test_lag1_of_a_worked_example():
    assert lag1_autocorrelation(np.array([1.0, 2.0, 3.0])) == 0.0  # deviations -1, 0, 1
    assert lag1_autocorrelation(np.array([1.0, -1.0, 1.0, -1.0])) == pytest.approx(-0.75)
    assert lag1_autocorrelation(np.ones(9)) is None


@pytest.mark.parametrize("n", [15, 30, 100])
@pytest.mark.parametrize("kind", [sim.independent, sim.spiky, sim.autocorrelated, sim.late_recompile])
def test_level_times_are_not_called_anything_else(kind, n):
    assert share(kind, n, "steady") >= 0.95


@pytest.mark.parametrize("n", [15, 30, 100])
@pytest.mark.parametrize("kind", [sim.heavy_noise, sim.strongly_autocorrelated])
def test_noise_is_no_change_of_level(kind, n):
    assert share(kind, n, "slowing") + share(kind, n, "unsettled") <= 0.05


def test_a_median_that_is_not_known_is_noisy_and_never_steady():
    # 23.98 [1.40, 105.48] ms: the interval of ten steps is the second smallest to the second largest of them.
    garbage = [1.2, 1.4, 3.0, 9.0, 20.0, 27.96, 45.0, 80.0, 105.48, 400.0]
    found = steadiness(np.array(garbage)[[3, 5, 1, 8, 6, 0, 7, 2, 9, 4]] * 1e-3)
    assert (found.word, found.also) == ("noisy", None)
    assert found.known_to >= (105.48 - 1.40) / 2 / 23.98
    assert found.evidence.startswith(f"the median of 10 steps is known to ±{found.known_to:.1%} only; noise hides")


@pytest.mark.parametrize("noise, steps", [(0.15, 15), (0.3, 30), (1.0, 60), (4.0, 200)])
def test_noise_that_hides_the_median_is_never_steady(noise, steps):
    runs = series(lambda rng, n: sim.independent(rng, n, noise), steps)
    assert np.mean([steadiness(run.times_s).word == "noisy" for run in runs]) >= 0.9


@pytest.mark.parametrize("rho", [0.0, 0.6])
@pytest.mark.parametrize("noise", [0.05, 0.1, 0.15])
@pytest.mark.parametrize("steps", [10, 20])
def test_a_run_that_is_called_steady_is_within_5_percent_of_the_truth(steps, noise, rho):
    runs = series(lambda rng, n: sim.autocorrelated(rng, n, rho, noise), steps)
    wrong = [
        found.word == "steady" and abs(np.median(run.times_s[found.cut :]) / run.median_s - 1) > 0.05
        for run, found in ((run, steadiness(run.times_s)) for run in runs)
    ]
    assert np.mean(wrong) <= 0.05


@pytest.mark.parametrize("kind", [sim.independent, sim.autocorrelated, sim.spiky, sim.late_recompile, sim.eager])
def test_quiet_runs_are_not_noisy(kind):
    assert share(kind, 20, "noisy") <= 0.05


def test_neighbours_that_resemble_each_other_tell_less():
    x = np.tile([1.0, 1.1], 20)
    assert known_to(x) == relative_half_width(x)  # they alternate: that earns no credit either
    in_blocks = np.repeat(x, 8)[:40]
    assert known_to(in_blocks) > 2 * relative_half_width(in_blocks)


@pytest.mark.parametrize("n, word", [(1, "noisy"), (5, "noisy"), (6, None), (9, None), (10, "steady")])
def test_a_median_without_an_interval_is_not_known(n, word):
    found = steadiness([0.1] * n)
    assert found.word == word
    assert (found.known_to is None) == (n < 6)


def test_slowing_is_said_beside_noisy():
    found = steadiness(np.repeat([0.1, 0.2], 20) * np.exp(0.2 * np.random.default_rng(8).standard_normal(40)))
    assert (found.word, found.also) == ("noisy", "slowing")
    assert "slower than" in found.evidence


def test_a_machine_that_others_use_now_and_then_is_hardly_ever_steady():
    for steps in (10, 20, 60):
        assert share(sim.shared_machine, steps, "steady") <= 0.25


@pytest.mark.parametrize("kind", [sim.independent, sim.spiky, sim.late_recompile])
def test_noise_is_hardly_cut(kind):
    assert np.mean([steady_from(run.times_s) for run in series(kind, 40)]) < 0.5


@pytest.mark.parametrize("n", [15, 40, 150])
@pytest.mark.parametrize("kind", [sim.eager, sim.compiled, sim.allocator])
def test_warm_up_is_cut_to_the_step(kind, n):
    runs = series(kind, n)
    cuts = np.array([steady_from(run.times_s) for run in runs])
    assert np.mean(cuts == runs[0].warmup) >= 0.9
    assert np.mean(cuts >= runs[0].warmup) >= 0.99
    assert share(kind, n, "steady") >= 0.95


def test_decay_is_cut_until_it_is_lost_in_the_noise():
    runs = series(sim.exponential, 60)
    cuts = [steady_from(run.times_s) for run in runs]
    assert 7 <= np.median(cuts) <= 12  # an excess of 50 %, e-folding in 3 steps, passes the 2 % noise at step 10
    left = [np.mean(run.times_s[cut:]) / run.median_s - 1.0 for run, cut in zip(runs, cuts, strict=True)]
    assert abs(np.mean(left)) < 0.005


def test_a_recompile_after_one_normal_step_belongs_to_the_warm_up():
    x = sim.independent(np.random.default_rng(4), 30).times_s.copy()
    x[0] *= 100.0
    x[2] *= 60.0
    assert steady_from(x) == 3


@pytest.mark.parametrize("n", [30, 100])
def test_throttling_is_slowing(n):
    assert share(sim.throttled, n, "slowing") >= 0.95


def test_throttling_late_in_a_long_run_is_slowing():
    x = sim.independent(np.random.default_rng(5), 100).times_s.copy()
    x[80:] *= 1.1
    found = steadiness(x)
    assert "slowing" in (found.word, found.also)
    assert "slower" in found.evidence


def test_what_never_settles_is_unsettled():
    assert share(sim.never_settles, 60, "unsettled") >= 0.95


def test_a_change_under_one_percent_is_not_worth_a_word():
    x = 0.1 * np.exp(1e-4 * np.random.default_rng(6).standard_normal(100))
    x[50:] *= 1.005
    assert steadiness(x).word == "steady"
    x[50:] *= 1.02
    assert steadiness(x).word == "slowing"


def test_constant_times_are_steady():
    found = steadiness([0.1] * 20)
    assert (found.word, found.cut, found.drift, found.lag1, found.bias_of_mean) == (
        "steady",
        0,
        0.0,
        None,
        0.0,
    )


@pytest.mark.parametrize("n", range(10))
def test_few_steps_say_nothing_of_the_level(n):
    found = steadiness([0.1] * n)
    assert found.word == (None if n >= 6 else "noisy")
    assert found.also is None
    assert found.cut == 0
    assert "too few" in found.evidence


def test_a_compile_step_is_cut_even_from_five_steps():
    assert steady_from([10.0, 0.1, 0.11, 0.1, 0.1]) == 1


def test_bias_and_drift_of_a_worked_example():
    found = steadiness([11.0, *[1.0] * 9, *[1.1, 0.9] * 5])
    assert found.cut == 1
    assert found.bias_of_mean == pytest.approx(1.5 / 1.0 - 1.0)  # (11 + 19) / 20 against 19 / 19
    assert found.drift == pytest.approx(0.0)


def test_evidence_names_steps_drift_and_autocorrelation():
    x = np.r_[np.full(30, 0.1), np.full(30, 0.12)] * (1 + 0.001 * np.random.default_rng(8).standard_normal(60))
    found = steadiness(x)
    assert found.word == "slowing"
    assert found.drift == pytest.approx(0.2, abs=0.01)
    assert found.evidence.startswith("steps 31 to 60 are 20.0% slower")
    assert "lag-1 autocorrelation" in found.evidence


def test_missing_readings_are_refused():
    with pytest.raises(ValueError, match="NaN"):
        steadiness([0.1] * 20 + [np.nan])
