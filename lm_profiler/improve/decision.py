"""Decide whether B is faster than A, from pairs of processes; the types of a search's results.

A *look* is a check of a comparison after a number of pairs. The intervals here hold at all looks together. This module
is pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.compare.ratio import MARGIN, RatioInterval, change_word
from lm_profiler.analysis.remedies.remedy import Candidate
from lm_profiler.analysis.steps.statistics import require_finite
from lm_profiler.record.improve_record import ENDED, UNLIKELY, TriedVerdict
from lm_profiler.record.process_spread import ASSUMED_SPREAD, ProcessSpread


@dataclass(frozen=True)
class TimedRun:
    """The outcome of a run."""

    # mean seconds of a measured step, scaled to the tokens or samples of the first setting's step, so that batches can
    # be compared; None if no step was measured
    step_s: float | None
    # seconds of the budget that the run took, including its start and end
    took_s: float
    failure: str | None = None  # why it failed, in a few words
    # why it was not started: hardware that is missing, or memory that is not enough
    refusal: str | None = None
    peak_bytes: int | None = None
    # whether it was stopped because the budget ended, which says nothing about the setting
    was_cut: bool = False
    may_lack_memory: bool = False  # whether it may have failed for lack of memory: it reported that, or was killed


@dataclass(frozen=True)
class NumericsCheck:
    """The result of checking whether a faster setting still computes the same numbers."""

    # whether all errors are within the tolerance; None if that is unknown
    is_tolerated: bool | None
    took_s: float = 0.0  # seconds of the budget that it took
    # relative error of the mean loss of the first steps, over the same batches and with the same seed
    loss_error: float | None = None
    # relative error of the gradients against float32
    gradient_error: float | None = None
    # the tolerance that was exceeded, or why this is unknown, in a few words
    reason: str | None = None


# stands for the candidate in the comparison of the final setting with the first
FINAL_SETTING = Candidate(name="", options={}, group="")


@dataclass(frozen=True)
class PairedComparison:
    """A comparison that has ended or is running. B is the setting A with the candidate."""

    # the change that is tried; ``FINAL_SETTING`` for the last comparison
    candidate: Candidate
    a_options: Mapping[str, str]  # options of A, besides those of the first setting
    b_options: Mapping[str, str]  # options of B
    runs_a: tuple[TimedRun, ...] = ()  # runs of A, in the order of the pairs
    runs_b: tuple[TimedRun, ...] = ()  # runs of B
    # interval of the ratio of seconds, B over A, which holds at all looks together; None before the first look
    interval: RatioInterval | None = None
    # the probability with which the interval may be wrong at any look
    error: float = 0.05
    # verdict on the step's time, or why there is none; None while it runs
    verdict: TriedVerdict | None = None
    accepted: bool = False  # whether the remaining candidates are tried on top of B
    numerics: NumericsCheck | None = None  # check of the numbers; None if not requested
    # the reason for the verdict in a few words, if it is not obvious
    reason: str | None = None

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def is_final(self) -> bool:
        """Whether this comparison is that of the final setting with the first."""
        return self.candidate is FINAL_SETTING

    @property
    def pairs(self) -> int:
        """The number of pairs in which both runs ended well."""
        return min(len(step_times_s(self.runs_a)), len(step_times_s(self.runs_b)))

    @property
    def ratios(self) -> list[float]:
        """Seconds of B over seconds of A, for each pair."""
        pairs = zip(step_times_s(self.runs_a), step_times_s(self.runs_b), strict=False)
        return [b_s / a_s for a_s, b_s in pairs]

    @property
    def a_s(self) -> float | None:
        """Seconds of a step of A: the geometric mean of its runs."""
        return _geometric_mean(step_times_s(self.runs_a)[: self.pairs])

    @property
    def b_s(self) -> float | None:
        return _geometric_mean(step_times_s(self.runs_b)[: self.pairs])

    @property
    def ratio(self) -> float:
        if self.a_s is None or self.b_s is None:
            return math.inf
        return self.b_s / self.a_s

    @property
    def saved_s(self) -> tuple[float, float, float] | None:
        """Seconds that B saves per step, and the least and most that the interval allows."""
        if self.interval is None or self.a_s is None:
            return None
        saved_s = self.a_s * (1.0 - self.interval.ratio)
        least_s = self.a_s * (1.0 - self.interval.high)
        most_s = self.a_s * (1.0 - self.interval.low)
        return saved_s, least_s, most_s


def step_times_s(runs: Sequence[TimedRun]) -> list[float]:
    """Return the seconds of a step of each run that ended well."""
    return [run.step_s for run in runs if run.step_s is not None]


def _geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean of ``values``; None if there are none."""
    if not values:
        return None
    log_sum = math.fsum(math.log(value) for value in values)
    return math.exp(log_sum / len(values))


# -- intervals ---------------------------------------------------------------------------------------------------------

# The looks: the numbers of pairs after which a comparison is checked. More looks would widen the interval. The first
# look is after two pairs, so that one slow process does not decide.
LOOKS = (2, 4, 8, 12, 16, 24)
FEWEST_PAIRS, MOST_PAIRS = LOOKS[0], LOOKS[-1]

# The spread of other comparisons has the weight of this many pairs. More weight would make intervals narrower, but they
# would be wrong for a change that increases the spread.
_PRIOR_PAIRS = 4

# A comparison is given up if it misses ``MARGIN`` by this many standard errors. Then one in twenty real gains of twice
# the margin is given up, over all looks together.
_HOPELESS_ERRORS = 1.64

# simulated series of pairs, from which the widths of intervals are computed
_SIMULATED_SERIES = 40_000


def pooled_spread(
    settings: Sequence[Sequence[float]], machine_spread: ProcessSpread = ASSUMED_SPREAD
) -> float:
    """Return how far processes of one setting differ: the std of the logarithms of their seconds, over all settings.

    ``settings`` has the seconds of each setting's processes. Their variance is averaged with that of the
    ``machine_spread``, weighted by degrees of freedom. A spread that is only assumed has the weight of one process.
    """
    log_times = []
    for processes_s in settings:
        if len(processes_s):
            log_times.append(np.log(require_finite(processes_s)))
    freedom = sum(logs.size - 1 for logs in log_times)
    squares = sum(_sum_of_squares(logs) for logs in log_times)
    machine_freedom = 1.0
    if machine_spread.is_learned:
        machine_freedom = min(machine_spread.freedom, float(_PRIOR_PAIRS))
    machine_squares = machine_freedom * machine_spread.std**2
    variance = (machine_squares + squares) / (machine_freedom + freedom)
    return math.sqrt(variance)


def sequential_interval(
    ratios: Sequence[float], error: float, spread: float, looks: tuple[int, ...] = LOOKS
) -> RatioInterval | None:
    """Return the geometric mean of pairs' ratios at the latest look, with an interval that holds at all ``looks``.

    After n pairs the interval is exp(mean of log ratios ± c * w(n) * standard error). The critical value c is the same
    at each look, as in Pocock (1977, Biometrika 64:191) for tests and Jennison & Turnbull (1989, JRSS B 51:305) for
    intervals; it is found by simulation (``_critical_value``). The factor w(n) = 1 + 2 / n widens the interval at the
    first looks. The known ``spread`` of processes has the weight of a few pairs in the standard error.

    Return None before the first look.

    Raises:
        ValueError: for NaN or infinite values.
    """
    past_looks = [look for look in looks if look <= len(ratios)]
    if not past_looks:
        return None
    pairs = max(past_looks)
    logs = np.log(require_finite(ratios)[:pairs])
    standard_errors = _critical_value(error, looks) * _widening_factor(pairs)
    half_width = standard_errors * _standard_error(logs, spread)
    ratio = math.exp(float(logs.mean()))
    low = ratio * math.exp(-half_width)
    high = ratio * math.exp(half_width)
    return RatioInterval(ratio, low, high, confidence=1.0 - error)


def log_gain(ratios: Sequence[float], spread: float, errors: float = 0.0) -> float:
    """Return how far the saving of B exceeds ``MARGIN``, as a logarithm, less ``errors`` times its standard error.

    It is negative if B saves less than the margin.
    """
    logs = np.log(require_finite(ratios))
    mean_log_ratio = float(logs.mean())
    # B saves exactly the margin if its ratio to A is 1 - MARGIN.
    gain_over_margin = math.log1p(-MARGIN) - mean_log_ratio
    standard_error = _standard_error(logs, spread)
    return gain_over_margin - errors * standard_error


def is_hopeless(ratios: Sequence[float], spread: float) -> bool:
    """Return whether to give up: after the first look, whether B very likely does not save ``MARGIN``."""
    is_later_look = len(ratios) in LOOKS[1:]
    if not is_later_look:
        return False
    largest_likely_gain = log_gain(ratios, spread, errors=-_HOPELESS_ERRORS)
    return largest_likely_gain < 0.0


@lru_cache(maxsize=64)
def _critical_value(error: float, looks: tuple[int, ...]) -> float:
    """Return c, the half width of ``sequential_interval`` in standard errors before it is widened.

    In simulated series of equal pairs, an interval of this width misses 0 at one or more of the ``looks`` with the
    probability ``error``.
    """
    rng = np.random.default_rng(0)
    # one row per series, one column per pair: the logarithm of the pair's ratio
    log_ratios = rng.standard_normal((_SIMULATED_SERIES, looks[-1]))
    prior_squares = rng.chisquare(_PRIOR_PAIRS, _SIMULATED_SERIES)
    # sums over the first pairs of each series
    sums = np.cumsum(log_ratios, axis=1)
    sums_of_squares = np.cumsum(log_ratios * log_ratios, axis=1)
    # the largest distance of the mean from 0 at any look, in standard errors, for each series
    largest_distances = np.zeros(_SIMULATED_SERIES)
    for look in looks:
        total = sums[:, look - 1]
        squared_deviations = sums_of_squares[:, look - 1] - total**2 / look
        freedom = _PRIOR_PAIRS + look - 1
        variance = (prior_squares + squared_deviations) / freedom
        distances = np.abs(total) / np.sqrt(look * variance)
        widened_distances = distances / _widening_factor(look)
        largest_distances = np.maximum(largest_distances, widened_distances)
    return float(np.quantile(largest_distances, 1.0 - error))


def _widening_factor(pairs: int) -> float:
    """Return the factor that widens an interval of few pairs, which hardly show whether a change adds spread."""
    return 1.0 + 2.0 / pairs


def _standard_error(logs: NDArray[np.float64], spread: float) -> float:
    """Return the standard error of the mean of the pairs' logarithms; ``spread`` has the weight of a few pairs."""
    # The logarithm of a ratio has the variances of both processes.
    pair_variance = 2.0 * spread**2
    prior_squares = _PRIOR_PAIRS * pair_variance
    freedom = _PRIOR_PAIRS + logs.size - 1
    variance = (prior_squares + _sum_of_squares(logs)) / freedom
    return math.sqrt(variance / logs.size)


def _sum_of_squares(logs: NDArray[np.float64]) -> float:
    deviations = logs - logs.mean()
    return float((deviations**2).sum())


# -- verdicts ----------------------------------------------------------------------------------------------------------


def judge(
    comparison: PairedComparison, most_pairs: int, spread: float
) -> PairedComparison:
    """Return the comparison with its interval, and with a verdict if the interval decides or no pair is left."""
    comparison = with_failure(comparison)
    has_whole_pairs = len(comparison.runs_a) == len(comparison.runs_b)
    if comparison.verdict is not None or not has_whole_pairs:
        return comparison
    looks: tuple[int, ...] = LOOKS
    if comparison.is_final:
        looks = (max(comparison.pairs, FEWEST_PAIRS),)
    interval = sequential_interval(comparison.ratios, comparison.error, spread, looks)
    comparison = replace(comparison, interval=interval)

    has_pairs_left = comparison.pairs < most_pairs
    verdict = change_word(interval)
    # The final comparison uses all of its pairs, because it reports the total.
    must_continue = comparison.is_final and has_pairs_left
    if verdict != "UNCLEAR" and not must_continue:
        return replace(comparison, verdict=verdict)
    if not comparison.is_final and is_hopeless(comparison.ratios, spread):
        return replace(comparison, verdict="UNDECIDED", reason=UNLIKELY)
    if has_pairs_left:
        return comparison
    return replace(comparison, verdict="UNDECIDED")


def with_failure(comparison: PairedComparison) -> PairedComparison:
    """Return the comparison, with a verdict if the latest run of B, or of A, failed."""
    # The reason is printed beside the candidate, which is B; only A needs a subject.
    sides = (
        (comparison.runs_b, ""),
        (comparison.runs_a, "the setting that it is compared with "),
    )
    for runs, subject in sides:
        if not runs:
            continue
        latest_run = runs[-1]
        ended_well = latest_run.step_s is not None
        if ended_well:
            continue
        if latest_run.was_cut:  # by the end of the budget
            return replace(comparison, verdict="UNDECIDED", reason=ENDED)
        verdict: TriedVerdict = "FAILED" if latest_run.refusal is None else "REFUSED"
        cause = latest_run.refusal or latest_run.failure or "has no measured step"
        return replace(comparison, verdict=verdict, reason=f"{subject}{cause}")
    return comparison


def replaces(comparison: PairedComparison, former: PairedComparison) -> bool:
    """Return whether ``former`` is an earlier state of this comparison, or an undecided one of the same candidate."""
    if comparison.candidate != former.candidate:
        return False
    was_decided = former.verdict is not None and not may_continue(former)
    return not was_decided or comparison.a_options == former.a_options


def may_continue(comparison: PairedComparison) -> bool:
    """Return whether further pairs may still decide the comparison."""
    return (
        comparison.verdict == "UNDECIDED"
        and comparison.reason is None
        and comparison.pairs < MOST_PAIRS
    )
