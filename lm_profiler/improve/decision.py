"""Is B faster than A? The results of a search, and intervals from pairs of processes that hold at every look.

This module is pure.
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

    # mean seconds of a measured step, scaled to the first setting's tokens or samples, so that batches compare; None
    # if the run did not get that far
    step_s: float | None
    took_s: float  # seconds of the budget that the run took, start and end included
    failure: str | None = None  # why it failed, in a few words
    # why it was not started: what the hardware lacks, or what would not fit
    refusal: str | None = None
    peak_bytes: int | None = None
    # whether the end of the budget cut it: no fault of the setting
    was_cut: bool = False
    may_lack_memory: bool = False  # whether it may have failed for lack of memory: it reported that, or was killed


@dataclass(frozen=True)
class NumericsCheck:
    """Whether a winner still computes the same numbers."""

    # whether all errors are within the tolerance; None if that is unknown
    is_tolerated: bool | None
    took_s: float = 0.0  # seconds of the budget that it took
    # distance of the mean loss of the first steps, over the same batches and seed, as a share
    loss_error: float | None = None
    # distance of the gradients from those in float32, as a share
    gradient_error: float | None = None
    # in a few words: the tolerance that was exceeded, or why that is unknown
    reason: str | None = None


# in place of a candidate where the final setting is compared with the first
FINAL_SETTING = Candidate(name="", options={}, group="")


@dataclass(frozen=True)
class PairedComparison:
    """A comparison, ended or under way: B is A with the candidate."""

    candidate: Candidate  # what was tried; ``FINAL_SETTING`` for the last comparison
    a_options: Mapping[str, str]  # options of A, besides those of the first setting
    b_options: Mapping[str, str]  # options of B
    runs_a: tuple[TimedRun, ...] = ()  # runs of A, in the order of the pairs
    runs_b: tuple[TimedRun, ...] = ()  # runs of B
    # interval of the ratio of seconds, B over A, which holds at all looks together; None if too little is known
    interval: RatioInterval | None = None
    error: float = 0.05  # share of tries in which an interval may be wrong, at any look
    # verdict on the step's time, or why there is none; None while it runs
    verdict: TriedVerdict | None = None
    accepted: bool = False  # whether the rest is tried on top of B
    numerics: NumericsCheck | None = None  # check of the numbers; None if not requested
    reason: str | None = None  # why the verdict, in a few words, if it is not obvious

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def is_final(self) -> bool:
        """Whether it compares the final setting with the first."""
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
    if not values:
        return None
    log_sum = math.fsum(math.log(value) for value in values)
    return math.exp(log_sum / len(values))


# -- intervals ---------------------------------------------------------------------------------------------------------

# Pairs after which a comparison is checked: each further look widens the interval. One slow process must not decide,
# so the first look is after two pairs.
LOOKS = (2, 4, 8, 12, 16, 24)
FEWEST_PAIRS, MOST_PAIRS = LOOKS[0], LOOKS[-1]

# The spread of other comparisons counts like this many pairs. More would be narrower, and wrong for a change
# that increases the spread.
_PRIOR_PAIRS = 4

# standard errors by which a comparison must miss ``MARGIN`` to be given up: one in twenty real gains of twice
# the margin is given up, at all looks together
_HOPELESS_ERRORS = 1.64

# series of pairs, from which the widths of intervals are computed
_SIMULATED_SERIES = 40_000


def pooled_spread(
    settings: Sequence[Sequence[float]], machine_spread: ProcessSpread = ASSUMED_SPREAD
) -> float:
    """Return how far processes of one setting differ: the std of the logarithms of their seconds, over all settings.

    ``settings`` holds the seconds of each setting's processes. The variance is a mean, weighted by degrees of freedom,
    with the known spread of the machine; an assumed one weighs as much as one further process.
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


def repeated_interval(
    ratios: Sequence[float], error: float, spread: float, looks: tuple[int, ...] = LOOKS
) -> RatioInterval | None:
    """Return the geometric mean of pairs' ratios at the latest look, with an interval that holds at all ``looks``.

    It is equally many standard errors wide at each look, as Pocock (1977, Biometrika 64:191) has for tests and Jennison
    & Turnbull (1989, JRSS B 51:305) for intervals, but more at the first looks (``_widening``); the number
    is simulated.
    The known ``spread`` of processes counts like a few more pairs. None before the first look.

    Raises:
        ValueError: for NaN or infinite values.
    """
    past_looks = [look for look in looks if look <= len(ratios)]
    if not past_looks:
        return None
    pairs = max(past_looks)
    logs = np.log(require_finite(ratios)[:pairs])
    half_width = (
        _widths(error, looks) * _widening(pairs) * _standard_error(logs, spread)
    )
    ratio = math.exp(float(logs.mean()))
    low = ratio * math.exp(-half_width)
    high = ratio * math.exp(half_width)
    return RatioInterval(ratio, low, high, confidence=1.0 - error)


def log_gain(ratios: Sequence[float], spread: float, errors: float = 0.0) -> float:
    """Return by how much B looks faster than ``MARGIN``, in logarithms, minus this many standard ``errors``."""
    logs = np.log(require_finite(ratios))
    faster_than_margin = math.log1p(-MARGIN) - float(logs.mean())
    return faster_than_margin - errors * _standard_error(logs, spread)


def is_hopeless(ratios: Sequence[float], spread: float) -> bool:
    """Return whether to give up: at a look after the first, B very likely does not save ``MARGIN``."""
    is_later_look = len(ratios) in LOOKS[1:]
    if not is_later_look:
        return False
    largest_likely_gain = log_gain(ratios, spread, errors=-_HOPELESS_ERRORS)
    return largest_likely_gain < 0.0


@lru_cache(maxsize=64)
def _widths(error: float, looks: tuple[int, ...]) -> float:
    """Return the standard errors that the mean of equal pairs exceeds at some look in a share ``error`` of series."""
    rng = np.random.default_rng(0)
    pairs = rng.standard_normal((_SIMULATED_SERIES, looks[-1]))
    prior_squares = rng.chisquare(_PRIOR_PAIRS, _SIMULATED_SERIES)
    sums = np.cumsum(pairs, axis=1)
    square_sums = np.cumsum(pairs * pairs, axis=1)
    largest_errors = np.zeros(_SIMULATED_SERIES)
    for look in looks:
        total = sums[:, look - 1]
        squares = square_sums[:, look - 1] - total**2 / look
        variance = (prior_squares + squares) / (_PRIOR_PAIRS + look - 1)
        errors = np.abs(total) / np.sqrt(look * variance)
        largest_errors = np.maximum(largest_errors, errors / _widening(look))
    return float(np.quantile(largest_errors, 1.0 - error))


def _widening(pairs: int) -> float:
    """Return the factor that widens an interval of few pairs: they hardly show whether a change adds spread."""
    return 1.0 + 2.0 / pairs


def _standard_error(logs: NDArray[np.float64], spread: float) -> float:
    """Return the standard error of the mean of the pairs' logarithms, with ``spread`` counted as a few pairs."""
    prior_squares = _PRIOR_PAIRS * 2.0 * spread**2
    variance = (prior_squares + _sum_of_squares(logs)) / (_PRIOR_PAIRS + logs.size - 1)
    return math.sqrt(variance / logs.size)


def _sum_of_squares(logs: NDArray[np.float64]) -> float:
    deviations = logs - logs.mean()
    return float((deviations**2).sum())


# -- verdicts ----------------------------------------------------------------------------------------------------------


def judge(
    comparison: PairedComparison, most_pairs: int, spread: float
) -> PairedComparison:
    """Return the comparison with its interval and, once that decides or no pair is left, its verdict."""
    comparison = with_failure(comparison)
    if comparison.verdict is not None or len(comparison.runs_a) != len(
        comparison.runs_b
    ):
        return comparison
    looks: tuple[int, ...] = LOOKS
    if comparison.is_final:
        looks = (max(comparison.pairs, FEWEST_PAIRS),)
    interval = repeated_interval(comparison.ratios, comparison.error, spread, looks)
    comparison = replace(comparison, interval=interval)

    has_pairs_left = comparison.pairs < most_pairs
    verdict = change_word(interval)
    if verdict != "UNCLEAR" and not (comparison.is_final and has_pairs_left):
        return replace(comparison, verdict=verdict)
    if not comparison.is_final and is_hopeless(comparison.ratios, spread):
        return replace(comparison, verdict="UNDECIDED", reason=UNLIKELY)
    if has_pairs_left:
        return comparison
    return replace(comparison, verdict="UNDECIDED")


def with_failure(comparison: PairedComparison) -> PairedComparison:
    """Return the comparison with a verdict if the latest run of a side failed."""
    for side, runs in (
        ("", comparison.runs_b),
        ("what it is compared with ", comparison.runs_a),
    ):
        if not runs or runs[-1].step_s is not None:
            continue
        run = runs[-1]
        if run.was_cut:  # by the end of the budget
            return replace(comparison, verdict="UNDECIDED", reason=ENDED)
        verdict: TriedVerdict = "FAILED" if run.refusal is None else "REFUSED"
        cause = run.refusal or run.failure or "has no measured step"
        return replace(comparison, verdict=verdict, reason=f"{side}{cause}")
    return comparison


def replaces(comparison: PairedComparison, former: PairedComparison) -> bool:
    """Return whether ``former`` is the same comparison, or one of the same candidate that had decided nothing."""
    if comparison.candidate != former.candidate:
        return False
    was_decided = former.verdict is not None and not may_continue(former)
    return not was_decided or comparison.a_options == former.a_options


def may_continue(comparison: PairedComparison) -> bool:
    return (
        comparison.verdict == "UNDECIDED"
        and comparison.reason is None
        and comparison.pairs < MOST_PAIRS
    )
