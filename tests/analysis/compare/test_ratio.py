"""FASTER and SLOWER must be earned; what does not differ must not be called different."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from benchmarks.simulation import Times, level, spiky
from scipy import stats

from lm_profiler.analysis.compare.ratio import (
    RatioInterval,
    change_word,
    detectable,
    minimum_detectable_effect,
    repeats_interval,
    single_interval,
)
from lm_profiler.analysis.steps.statistics import Interval, mean_interval
from lm_profiler.analysis.steps.step_model import fit
from lm_profiler.record.process_spread import ASSUMED_SPREAD, ProcessSpread, spread_of

ALIKE = ProcessSpread(std=0.0)
Of = Callable[[Times], Interval]


def mean_of(steps: Sequence[float] | Times) -> Interval:
    return fit(steps).interval_of(np.asarray(steps))


def ratio_of_single_runs(a: Times, b: Times, spread: ProcessSpread = ASSUMED_SPREAD, of: Of = mean_of) -> RatioInterval:
    return single_interval(of(a), of(b), spread=spread)


def of_a_level(steps: Times) -> Interval:
    """What a model of steps of one level finds, in a hundredth of its time."""
    return mean_interval(steps)


def test_the_ratio_of_means_has_an_interval_near_students() -> None:
    a, b = np.linspace(1.0, 1.1, 9), np.linspace(2.0, 2.2, 9)
    found = ratio_of_single_runs(a, b)
    assert found.ratio == pytest.approx(2.0)
    assert found.low < 2.0 < found.high
    rng = np.random.default_rng(5)
    a, b = level(rng, 60).times_s, 1.1 * level(rng, 60).times_s
    known = [mean_interval(x) for x in (a, b)]
    found = single_interval(known[0], known[1], 0.95, ALIKE)
    theirs = stats.ttest_ind(np.log(b), np.log(a)).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((math.exp(theirs.low), math.exp(theirs.high)), abs=0.003)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 40])
def test_the_spread_of_few_processes_is_used_with_students_t(freedom: int) -> None:
    exact = Interval(1.0, 1.0, 1.0)
    found = single_interval(exact, exact, 0.9, ProcessSpread(std=0.01, freedom=freedom))
    assert math.log(found.high) == pytest.approx(stats.t.ppf(0.95, freedom) * math.sqrt(2.0) * 0.01)


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
def test_words(interval: RatioInterval | None, word: str) -> None:
    assert change_word(interval) == word


def process_times(rng: np.random.Generator, spread: float, scale: float = 1.0) -> Times:
    return scale * math.exp(spread * rng.standard_normal()) * level(rng, 20).times_s


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("spread", [0.01, 0.03])
def test_one_run_against_an_equal_one_is_called_different_in_less_than_one_in_twenty(spread: float, learned: bool):
    rng, words = np.random.default_rng(14), []
    for _ in range(300):
        selftest = [float(process_times(rng, spread).mean()) for _ in range(5)] if learned else []
        known = spread_of(selftest) or ASSUMED_SPREAD
        words.append(
            change_word(ratio_of_single_runs(process_times(rng, spread), process_times(rng, spread), known, of_a_level))
        )
    assert np.mean([word in ("FASTER", "SLOWER") for word in words]) <= 0.05


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_repeats_of_an_equal_program_are_called_different_in_less_than_one_in_twenty(repeats: int) -> None:
    rng, words = np.random.default_rng(20), []
    for _ in range(400):
        a, b = ([float(process_times(rng, 0.02).mean()) for _ in range(repeats)] for _side in "ab")
        words.append(change_word(repeats_interval(a, b)))
    assert np.mean([word in ("FASTER", "SLOWER") for word in words]) <= 0.05


def test_before_a_selftest_single_runs_show_no_change_below_15_percent() -> None:
    rng = np.random.default_rng(12)

    def share_slower(more: float, spread: ProcessSpread) -> float:
        pairs = [(process_times(rng, 0.01), process_times(rng, 0.01, 1.0 + more)) for _ in range(60)]
        words = [change_word(ratio_of_single_runs(*pair, spread, of_a_level)) for pair in pairs]
        return words.count("SLOWER") / 60

    assert share_slower(0.10, ASSUMED_SPREAD) == 0.0
    assert share_slower(0.25, ASSUMED_SPREAD) > 0.95
    assert share_slower(0.10, ProcessSpread(std=0.01, freedom=4)) > 0.95


@pytest.mark.parametrize("runs", [1, 3])
def test_the_smallest_promised_change_is_found_in_four_of_five_tries(runs: int) -> None:
    rng, spread = np.random.default_rng(5), ProcessSpread(std=0.02)
    more, words = detectable(spread, runs), []
    for _ in range(400):
        noise = [np.exp(0.02 * rng.standard_normal(runs)) for _ in range(2)]
        a, b = (
            [Interval(x, x, x) for x in scale * factors]
            for scale, factors in zip((1.0, 1.0 + more), noise, strict=True)
        )
        means = [[interval.mean for interval in side] for side in (a, b)]
        words.append(change_word(single_interval(a[0], b[0], spread=spread) if runs == 1 else repeats_interval(*means)))
    assert words.count("SLOWER") / 400 == pytest.approx(0.8, abs=0.08)
    assert "FASTER" not in words


def test_repeats_of_two_programs_have_the_interval_of_a_t_test() -> None:
    rng = np.random.default_rng(13)
    a, b = ([scale * spiky(rng, 9).times_s.mean() for scale in scales] for scales in ((1.0, 1.05, 0.95), (1.2, 1.3)))
    theirs = stats.ttest_ind(np.log(b), np.log(a), equal_var=True).confidence_interval(0.9)
    found = repeats_interval(a, b, confidence=0.9)
    assert (found.low, found.high) == pytest.approx((np.exp(theirs.low), np.exp(theirs.high)))
    assert found.ratio == pytest.approx(np.exp(np.mean(np.log(b)) - np.mean(np.log(a))))


def test_a_single_run_is_assumed_to_scatter_as_repeats_do() -> None:
    """The interval is that of the prediction of one more value from four."""
    repeats, single_run = [0.10, 0.11, 0.105, 0.1], [0.12]
    scatter = np.std(np.log(repeats), ddof=1)
    reach = stats.t.ppf(0.985, 3) * scatter * np.sqrt(1 + 1 / 4)
    ratio = 0.12 / stats.gmean(repeats)
    found = repeats_interval(repeats, single_run)
    assert (found.low, found.high) == pytest.approx((ratio * np.exp(-reach), ratio * np.exp(reach)))
    turned = repeats_interval(single_run, repeats)
    assert (turned.low, turned.high) == pytest.approx((1 / found.high, 1 / found.low))


def test_repeats_without_scatter_leave_no_doubt() -> None:
    assert repeats_interval([8, 8], [10, 10, 10]) == RatioInterval(*[pytest.approx(1.25)] * 3)
    assert single_interval(Interval(0.0, 0.0, 0.0), Interval(1.0, 1.0, 1.0)) is None
    assert single_interval(Interval(1.0, -math.inf, math.inf), Interval(1.0, 1.0, 1.0)) is None
    assert repeats_interval([0.0, 1.0], [1.0]) is None
    assert repeats_interval([1.0], [1.0]) is None
    with pytest.raises(ValueError, match="NaN"):
        repeats_interval([1.0, np.nan], [1.0] * 10)


@pytest.mark.parametrize(
    "interval,effect",
    [
        (RatioInterval(1.0, 0.98, 1.02, 0.95), 0.02 * 2.801585 / 1.959964),
        (RatioInterval(1.0, 0.9999, 1.0001), 0.01),
        (RatioInterval(0.93, 0.92, 0.94), 0.07),
    ],
)
def test_a_detectable_change_is_the_largest_of_power_margin_and_effect(interval: RatioInterval, effect: float) -> None:
    assert minimum_detectable_effect(interval) == pytest.approx(effect, rel=1e-5)
