"""FASTER and SLOWER must be earned; what does not differ must not be called different."""

import numpy as np
import pytest
from scipy import stats

from lm_profiler.analysis import RatioInterval, change, ratio_interval
from lm_profiler.analysis.simulation import independent, spiky


def test_ratio_is_that_of_the_medians_and_b_is_on_top():
    a, b = np.linspace(1.0, 1.1, 11), np.linspace(2.0, 2.2, 11)
    found = ratio_interval(a, b)
    assert found.ratio == pytest.approx(2.0)
    assert found.low < 2.0 < found.high


def test_interval_is_near_scipys_bootstrap():
    rng = np.random.default_rng(5)
    a, b = independent(rng, 60).times_s, 1.1 * independent(rng, 60).times_s
    found = ratio_interval(a, b, resamples=4000)
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
    assert ratio_interval(a, b, seed=3) == ratio_interval(a, b, seed=3)
    assert ratio_interval(a, b, seed=3) != ratio_interval(a, b, seed=4)


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


@pytest.mark.parametrize("kind", [independent, spiky])
@pytest.mark.parametrize("n", [10, 30])
def test_a_against_a_is_seldom_called_different(kind, n):
    rng = np.random.default_rng(11)
    words = [
        change(ratio_interval(kind(rng, n).times_s, kind(rng, n).times_s, resamples=500, seed=i)) for i in range(400)
    ]
    assert np.mean([word in ("FASTER", "SLOWER") for word in words]) < 0.05


def test_five_percent_is_found():
    rng = np.random.default_rng(12)
    words = [
        change(ratio_interval(independent(rng, 20).times_s, 1.05 * independent(rng, 20).times_s, resamples=500))
        for _ in range(100)
    ]
    assert words.count("SLOWER") >= 95


def test_differences_between_processes_widen_the_interval():
    rng = np.random.default_rng(13)
    levels = [1.0, 1.05, 0.95, 1.02, 0.98]
    runs = [level * independent(rng, 20).times_s for level in levels]
    pooled = ratio_interval(np.concatenate(runs), np.concatenate(runs))
    apart = ratio_interval(runs, runs)
    assert apart.ratio == pooled.ratio == 1.0
    assert apart.high - apart.low > 1.5 * (pooled.high - pooled.low)


def test_nothing_is_claimed_of_too_little():
    assert ratio_interval([1.0] * 5, [1.0] * 50) is None
    assert ratio_interval([], [1.0] * 50) is None
    assert ratio_interval([0.0] * 10, [1.0] * 10) is None


def test_missing_readings_are_refused():
    with pytest.raises(ValueError, match="NaN"):
        ratio_interval([1.0] * 9 + [np.nan], [1.0] * 10)
