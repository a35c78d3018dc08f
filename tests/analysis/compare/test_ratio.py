"""FASTER and SLOWER must be earned; what does not differ must not be called different."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.simulation import autocorrelated, independent, spiky
from lm_profiler.analysis.compare.ratio import (
    PROCESS_SPREAD,
    RatioInterval,
    _resampled_medians,
    change,
    ratio_interval,
    repeats_interval,
)


def of_one_run(a, b, **options):
    return ratio_interval([a], [b], **options)


def test_ratio_is_that_of_the_medians_and_b_is_on_top():
    a, b = np.linspace(1.0, 1.1, 11), np.linspace(2.0, 2.2, 11)
    found = of_one_run(a, b)
    assert found.ratio == pytest.approx(2.0)
    assert found.low < 2.0 < found.high


def test_interval_is_near_scipys_bootstrap():
    rng = np.random.default_rng(5)
    a, b = independent(rng, 60).times_s, 1.1 * independent(rng, 60).times_s
    found = of_one_run(a, b, confidence=0.95, process_spread=0.0, resamples=4000)
    theirs = stats.bootstrap(
        (a, b),
        lambda x, y, axis: np.median(y, axis=axis) / np.median(x, axis=axis),
        method="percentile",
        n_resamples=4000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.003)


def test_the_same_seed_gives_the_same_interval():
    a, b = np.random.default_rng(1).lognormal(size=(2, 20))
    assert of_one_run(a, b, seed=3) == of_one_run(a, b, seed=3)
    assert of_one_run(a, b, seed=3) != of_one_run(a, b, seed=4)


@pytest.mark.parametrize(
    "interval, word",
    [
        (RatioInterval(0.90, 0.88, 0.92), "FASTER"),
        (RatioInterval(1.10, 1.08, 1.12), "SLOWER"),
        (RatioInterval(1.001, 0.995, 1.006), "SAME"),
        (RatioInterval(1.005, 1.002, 1.008), "SAME"),  # real, and too small to matter
        (RatioInterval(1.008, 1.003, 1.013), "UNCLEAR"),  # real, and perhaps more than 1 %
        (RatioInterval(1.05, 0.98, 1.12), "UNCLEAR"),
        (None, "UNCLEAR"),
    ],
)
def test_words(interval, word):
    assert change(interval) == word


@pytest.mark.parametrize("kind", [independent, spiky, autocorrelated])
@pytest.mark.parametrize("n", [10, 30])
def test_a_against_a_is_seldom_called_different(kind, n):
    rng = np.random.default_rng(11)
    words = [change(of_one_run(kind(rng, n).times_s, kind(rng, n).times_s, resamples=500, seed=i)) for i in range(400)]
    assert np.mean([word in ("FASTER", "SLOWER") for word in words]) < 0.05


def test_processes_that_differ_as_assumed_are_seldom_called_different():
    rng = np.random.default_rng(14)

    def process():
        return np.exp(PROCESS_SPREAD * rng.standard_normal()) * independent(rng, 20).times_s

    words = [change(of_one_run(process(), process(), resamples=500, seed=i)) for i in range(400)]
    assert np.mean([word in ("FASTER", "SLOWER") for word in words]) < 0.05


def test_six_percent_is_found():
    rng = np.random.default_rng(12)
    words = [
        change(of_one_run(independent(rng, 20).times_s, 1.06 * independent(rng, 20).times_s, resamples=500))
        for _ in range(100)
    ]
    assert words.count("SLOWER") >= 95


def test_repeats_are_judged_by_students_test_on_the_logarithms_of_their_medians():
    rng = np.random.default_rng(13)
    a, b = ([level * independent(rng, 9).times_s for level in levels] for levels in ((1.0, 1.05, 0.95), (1.2, 1.3)))
    logs_a, logs_b = ([np.log(np.median(run)) for run in runs] for runs in (a, b))
    theirs = stats.ttest_ind(logs_b, logs_a, equal_var=True).confidence_interval(0.9)
    found = ratio_interval(a, b, confidence=0.9)
    assert (found.low, found.high) == pytest.approx((np.exp(theirs.low), np.exp(theirs.high)))
    assert found.ratio == pytest.approx(np.exp(np.mean(logs_b) - np.mean(logs_a)))


def test_a_single_run_is_taken_to_scatter_as_the_others_do():
    others, one = [0.10, 0.11, 0.105, 0.1], [0.12]
    s = np.std(np.log(others), ddof=1)
    reach = stats.t.ppf(0.985, 3) * s * np.sqrt(1 + 1 / 4)  # the prediction interval of one more value
    ratio = 0.12 / stats.gmean(others)
    found, turned = repeats_interval(others, one), repeats_interval(one, others)
    assert (found.low, found.high) == pytest.approx((ratio * np.exp(-reach), ratio * np.exp(reach)))
    assert (turned.low, turned.high) == pytest.approx((1 / found.high, 1 / found.low))


def test_repeats_without_any_scatter_leave_no_doubt():
    assert repeats_interval([8, 8], [10, 10, 10]) == RatioInterval(*[pytest.approx(1.25)] * 3)


@pytest.mark.parametrize("n", [7, 8])
def test_medians_are_drawn_as_if_the_steps_had_been(n):
    x = np.sort(np.random.default_rng(4).lognormal(size=n))
    drawn = np.median(np.random.default_rng(5).choice(x, size=(50_000, n)), axis=1)
    at_once = _resampled_medians(np.random.default_rng(6), x, 50_000)
    assert stats.ks_2samp(drawn, at_once).statistic < 0.012  # 1.95 sqrt(2 / 50,000): one in a thousand is larger


def test_steps_that_resemble_their_neighbours_widen_the_interval():
    level = np.repeat([1.0, 1.1, 1.0, 1.1, 1.0, 1.1], 10)  # the same values, in blocks and in turn
    turns = np.tile([1.0, 1.1], 30)
    blocks, in_turn = (of_one_run(steps, steps, process_spread=0.0) for steps in (level, turns))
    assert np.log(blocks.high) > 2.0 * np.log(in_turn.high)


def test_nothing_is_claimed_of_too_little():
    assert of_one_run([1.0] * 5, [1.0] * 50) is None
    assert of_one_run([], [1.0] * 50) is None
    assert of_one_run([0.0] * 10, [1.0] * 10) is None
    assert ratio_interval([[0.0], [1.0]], [[1.0] * 10]) is None
    assert repeats_interval([1.0], [1.0]) is None


def test_missing_readings_are_refused():
    with pytest.raises(ValueError, match="NaN"):
        of_one_run([1.0] * 9 + [np.nan], [1.0] * 10)
