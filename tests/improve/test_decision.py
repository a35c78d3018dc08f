"""The interval of a comparison that is looked at several times, against scipy and simulated processes."""

import math

import numpy as np
import pytest
from scipy import stats

from lm_profiler.analysis.compare.ratio import MARGIN, change_word
from lm_profiler.improve.decision import LOOKS, is_hopeless, log_gain, pooled_spread, sequential_interval
from lm_profiler.record.process_spread import ProcessSpread


@pytest.mark.parametrize("pairs", [2, 5, 12])
def test_the_interval_at_a_single_look_is_students(pairs: int) -> None:
    logs = 0.03 * np.random.default_rng(3).standard_normal(pairs)
    interval = sequential_interval(np.exp(logs).tolist(), error=0.05, spread=0.02, looks=(pairs,))
    assert interval.ratio == pytest.approx(math.exp(logs.mean()))
    freedom = 4 + pairs - 1  # what is known counts like four pairs
    error = math.sqrt((4 * 2 * 0.02**2 + (pairs - 1) * logs.var(ddof=1)) / freedom / pairs)
    assert math.log(interval.high / interval.ratio) == pytest.approx(stats.t.ppf(0.975, freedom) * error, rel=0.02)


@pytest.mark.parametrize("processes", [0.01, 0.05])
@pytest.mark.parametrize("error", [0.05, 0.0125])
def test_repeated_intervals_err_no_more_often_than_promised(processes: float, error: float):
    rng, wrong, series = np.random.default_rng(11), 0, 600
    for _ in range(series):
        ratios = np.exp(processes * math.sqrt(2.0) * rng.standard_normal(LOOKS[-1])).tolist()
        shown = processes * math.sqrt(rng.chisquare(4) / 4)  # the spread that four processes beyond the first show
        intervals = [sequential_interval(ratios[:n], error, shown) for n in LOOKS]
        wrong += any(not interval.low <= 1.0 <= interval.high for interval in intervals if interval)
    assert wrong <= error * series + 2.0 * math.sqrt(error * series)


@pytest.mark.parametrize(
    "ratios, spread, word",
    [
        ([0.3, 1.0], 0.05, "UNCLEAR"),
        ([0.3, 1.0, 1.01, 0.99], 0.01, "UNCLEAR"),
        ([0.6, 0.61], 0.02, "FASTER"),
    ],
)
def test_one_slow_process_does_not_decide(ratios: list[float], spread: float, word: str) -> None:
    """A ratio of 0.3 comes of one slow process of A."""
    assert change_word(sequential_interval(ratios, error=0.05, spread=spread)) == word


def test_the_interval_is_that_of_the_last_look() -> None:
    """After two and four pairs there is a look, after one and five there is none."""
    ratios = [0.9, 0.91, 0.93, 0.88, 2.0]
    after_four = sequential_interval(ratios[:4], error=0.05, spread=0.02)
    assert sequential_interval(ratios, error=0.05, spread=0.02) == after_four
    assert sequential_interval(ratios[:1], error=0.05, spread=0.02) is None


@pytest.mark.parametrize(
    "ratios, spread, hopeless",
    [
        ([1.2, 1.2], 0.01, False),  # one slow process would do that
        ([1.2, 1.1, 1.2, 1.1], 0.05, True),
        ([1.0, 1.001, 0.999, 1.0], 0.001, True),
        ([1.0, 0.97, 1.0, 0.97], 0.02, False),
    ],
)
def test_no_gain_is_worth_no_more_pairs(ratios: list[float], spread: float, hopeless: bool) -> None:
    assert is_hopeless(ratios, spread) == hopeless


def test_a_gain_is_what_is_saved_beyond_the_margin() -> None:
    assert MARGIN == 0.01
    assert log_gain([0.9, 0.9], spread=0.01) == pytest.approx(math.log(0.99 / 0.9))


def test_the_known_spread_of_processes_counts_until_it_is_measured() -> None:
    """Four settings of eight processes each, which scatter by 1 %; without a measurement, 5 % are assumed."""
    rng = np.random.default_rng(5)
    settings = [np.exp(rng.normal(level, 0.01, 8)).tolist() for level in (0.0, 1.0, -2.0, 0.5)]
    of_machine = ProcessSpread(std=0.01, freedom=4)
    assert pooled_spread([]) == pooled_spread([[1.0]]) == 0.05
    assert pooled_spread([], of_machine) == 0.01
    assert 0.02 < pooled_spread([settings[0][:3]]) < 0.04
    one_of_29_assumed = math.sqrt((28 * 0.01**2 + 0.05**2) / 29)
    assert pooled_spread(settings) == pytest.approx(one_of_29_assumed, abs=0.002)
    assert pooled_spread(settings, of_machine) == pytest.approx(0.01, abs=0.002)


@pytest.mark.parametrize("processes, saves", [(0.05, 0.05), (0.03, 0.02), (0.05, 0.02)])
def test_few_small_real_gains_are_given_up(processes: float, saves: float) -> None:
    """Where each pair was asked, 6 to 34 % were."""
    rng, given_up, series = np.random.default_rng(7), 0, 400
    for _ in range(series):
        pairs = (1.0 - saves) * np.exp(processes * math.sqrt(2.0) * rng.standard_normal(LOOKS[-1]))
        given_up += any(is_hopeless(pairs[:n].tolist(), processes) for n in LOOKS)
    assert given_up / series <= 0.07
